//! Chooses the files of a data set that are rows, by configuration and split. Pure: names in, names out.
//!
//! The sources of configurations are tried in this order: those that the description lists with their files;
//! folders that are named as its other configurations; files at the top or in `data`, or in folders named by
//! splits; else each folder is a configuration.

use super::card::{Card, Config, fits};
use crate::error::HubError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Endings of files of rows.
const DATA_FILES: [&str; 6] = [".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv"];
/// Names of files with such an ending that only describe a data set or one of its folders.
const DESCRIPTIONS: [&str; 5] = [
    "dataset_infos.json",
    "dataset_info.json",
    "dataset_dict.json",
    "state.json",
    "croissant.json",
];
/// Words of held-out splits.
const HELD_OUT: [&str; 8] = [
    "test",
    "testing",
    "eval",
    "evaluation",
    "valid",
    "validation",
    "dev",
    "held",
];
/// Words of splits to train on.
const TRAIN: [&str; 2] = ["train", "training"];
/// Maximum files of a configuration.
const MAX_FILES: usize = 10_000;
/// Names that a message lists.
const SHOWN: usize = 20;

/// Files of one configuration, as names in the data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Selection {
    /// Files to train on.
    pub(super) train: Vec<String>,
    /// Files that are held out; empty if the data set has one split.
    pub(super) held_out: Vec<String>,
    /// Parts that are left out, with the reason, for users.
    pub(super) notes: Vec<String>,
}

impl Selection {
    /// All files.
    pub(super) fn files(&self) -> impl Iterator<Item = &str> {
        self.train.iter().chain(&self.held_out).map(String::as_str)
    }
}

/// Whether a file of a data set has rows. Names with parts that leave the folder have none.
pub(super) fn is_rows(name: &str) -> bool {
    let inside = name
        .split('/')
        .all(|part| !part.is_empty() && !part.starts_with('.'));
    let last = name.rsplit('/').next().unwrap_or(name);
    let lower = last.to_ascii_lowercase();
    inside && !DESCRIPTIONS.contains(&last) && DATA_FILES.iter().any(|e| lower.ends_with(e))
}

/// The files of a configuration, or of the only one.
///
/// # Errors
/// If there are no rows, no such configuration, or several and none is chosen: the text lists them.
pub(super) fn select(
    names: &[String],
    card: &Card,
    wanted: Option<&str>,
) -> Result<Selection, HubError> {
    let rows: Vec<&str> = names
        .iter()
        .map(String::as_str)
        .filter(|n| is_rows(n))
        .collect();
    if rows.is_empty() {
        let endings = DATA_FILES.join(", ");
        let why = format!("the data set has no files that end in {endings}");
        return Err(HubError::Repository(why));
    }
    let configs = configs(&rows, card);
    let (config, files) = choose(configs, wanted)?;
    let selection = if config.files.is_empty() {
        by_name(&config, &files)
    } else {
        by_pattern(&config, &files)
    };
    let count = selection.files().count();
    match count {
        0 => Err(HubError::Repository(format!(
            "the configuration `{}` has no files of rows",
            config.name
        ))),
        n if n > MAX_FILES => Err(HubError::Repository(format!(
            "{n} files of rows; allowed: up to {MAX_FILES}. Name a configuration, or convert the data set \
             to fewer files"
        ))),
        _ => Ok(selection),
    }
}

/// Configurations, each with the files that it may use.
type Configs<'a> = Vec<(Config, Vec<&'a str>)>;

/// All configurations of a data set; never empty.
fn configs<'a>(rows: &[&'a str], card: &Card) -> Configs<'a> {
    let within = |folder: &str| -> Vec<&'a str> {
        let inside = |name: &&&str| folder.is_empty() || under(folder, name).is_some();
        rows.iter().filter(inside).copied().collect()
    };
    if !card.configs.is_empty() {
        let listed = card.configs.iter();
        return listed
            .map(|c| {
                let files = within(&c.folder);
                let config = Config {
                    name: c.name.clone(),
                    default: c.default,
                    folder: c.folder.clone(),
                    files: c.files.clone(),
                };
                (config, files)
            })
            .collect();
    }
    let of_folder = |name: &str, folder: String| {
        let files = within(&folder);
        let config = Config {
            name: name.to_owned(),
            default: name == "default",
            folder,
            files: Vec::new(),
        };
        (config, files)
    };
    // Folders that the description names, at the top or in `data`.
    let mut found: Configs<'a> = Vec::new();
    for name in &card.names {
        let folders = [name.clone(), format!("data/{name}")];
        let known = folders.into_iter().map(|folder| of_folder(name, folder));
        found.extend(known.filter(|(_, files)| !files.is_empty()).take(1));
    }
    if !found.is_empty() {
        return found;
    }
    // Files at the top or in `data`, and folders named by splits, belong together if there is no description.
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    let mut loose = 0_usize;
    for name in rows {
        let short = under("data", name).unwrap_or(name);
        match short.split_once('/') {
            Some((folder, _)) if split_of(folder).is_none() => {
                *folders.entry(folder).or_default() += 1;
            }
            _ => loose += 1,
        }
    }
    if loose > 0 || folders.len() < 2 {
        return vec![of_folder("default", String::new())];
    }
    folders
        .into_keys()
        .map(|name| {
            let (config, files) = of_folder(name, name.to_owned());
            if files.is_empty() {
                of_folder(name, format!("data/{name}"))
            } else {
                (config, files)
            }
        })
        .collect()
}

/// The path of a file in a folder, `None` if it is not there.
fn under<'a>(folder: &str, name: &'a str) -> Option<&'a str> {
    name.strip_prefix(folder)?.strip_prefix('/')
}

/// The wanted configuration, the only one, or the default.
fn choose<'a>(
    configs: Configs<'a>,
    wanted: Option<&str>,
) -> Result<(Config, Vec<&'a str>), HubError> {
    let names: Vec<String> = configs.iter().map(|(c, _)| c.name.clone()).collect();
    let listed = || {
        let more = names.len().saturating_sub(SHOWN);
        let mut list = names[..names.len().min(SHOWN)].join(", ");
        if more > 0 {
            list.push_str(&format!(" and {more} more"));
        }
        list
    };
    let mut fitting = configs.into_iter().filter(|(c, _)| match wanted {
        Some(wanted) => c.name == wanted,
        None => names.len() == 1 || c.default,
    });
    match (fitting.next(), wanted) {
        (Some(found), _) => Ok(found),
        (None, Some(wanted)) => Err(HubError::Repository(format!(
            "no configuration `{wanted}`; allowed: {}",
            listed()
        ))),
        (None, None) => Err(HubError::Repository(format!(
            "the data set has {} configurations: {}; name one as hf:ORG/NAME/CONFIGURATION",
            names.len(),
            listed()
        ))),
    }
}

/// Files by the patterns of a configuration.
fn by_pattern(config: &Config, files: &[&str]) -> Selection {
    let mut selection = Selection::default();
    for (split, patterns) in &config.files {
        let mut named: Vec<String> = Vec::new();
        for file in files {
            let short = if config.folder.is_empty() {
                file
            } else {
                under(&config.folder, file).unwrap_or(file)
            };
            if patterns.iter().any(|p| fits(p, file) || fits(p, short)) {
                named.push((*file).to_owned());
            }
        }
        match split_of(split) {
            Some(Split::Train) => selection.train.extend(named),
            Some(Split::HeldOut) => selection.held_out.extend(named),
            // The only split of a configuration is what there is to train on.
            None if config.files.len() == 1 => selection.train.extend(named),
            None => selection.notes.push(format!(
                "the split `{split}` ({} files) is neither to train on nor held out: it is left out",
                named.len()
            )),
        }
    }
    finish(selection)
}

/// Files by the splits in their names, or in the names of their folders.
fn by_name(config: &Config, files: &[&str]) -> Selection {
    let mut selection = Selection::default();
    let mut others = Vec::new();
    for file in files {
        let short = if config.folder.is_empty() {
            file
        } else {
            under(&config.folder, file).unwrap_or(file)
        };
        match short.rsplit('/').find_map(split_of) {
            Some(Split::Train) => selection.train.push((*file).to_owned()),
            Some(Split::HeldOut) => selection.held_out.push((*file).to_owned()),
            None => others.push((*file).to_owned()),
        }
    }
    if selection.train.is_empty() {
        selection.train = others;
    } else if !others.is_empty() {
        let shown = others[..others.len().min(SHOWN)].join(", ");
        selection.notes.push(format!(
            "{} files belong to no split and are left out: {shown}",
            others.len()
        ));
    }
    finish(selection)
}

/// A data set with only held-out splits is trained on.
fn finish(mut selection: Selection) -> Selection {
    if selection.train.is_empty() {
        selection.train = std::mem::take(&mut selection.held_out);
    }
    for list in [&mut selection.train, &mut selection.held_out] {
        list.sort();
        list.dedup();
    }
    selection
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Split {
    Train,
    HeldOut,
}

/// The split that a name has as one of its words: `train-00000-of-00001.parquet`, `my_test.csv`.
fn split_of(name: &str) -> Option<Split> {
    let lower = name.to_ascii_lowercase();
    let mut words = lower.split(|c: char| !c.is_ascii_alphabetic());
    words.find_map(|word| match word {
        word if TRAIN.contains(&word) => Some(Split::Train),
        word if HELD_OUT.contains(&word) => Some(Split::HeldOut),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], readme: &str, wanted: Option<&str>) -> Result<Selection, HubError> {
        let names: Vec<String> = names.iter().map(|&n| n.to_owned()).collect();
        let card = Card::read(Some(readme), None)?;
        select(&names, &card, wanted)
    }

    const FOLDERS: [&str; 5] = [
        "README.md",
        "main/train-00000-of-00001.parquet",
        "main/test-00000-of-00001.parquet",
        "socratic/train-00000-of-00001.parquet",
        "socratic/test-00000-of-00001.parquet",
    ];

    #[test]
    fn several_configurations_need_a_choice() {
        let info = "---\ndataset_info:\n- config_name: main\n- config_name: socratic\n---\n";
        for readme in ["", info] {
            let error = chosen(&FOLDERS, readme, None).unwrap_err();
            assert!(error.to_string().contains("main, socratic"), "{error}");
            let error = chosen(&FOLDERS, readme, Some("mian")).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("`mian`; allowed: main, socratic"), "{error}");
            let main = chosen(&FOLDERS, readme, Some("main")).unwrap();
            assert_eq!(main.train, ["main/train-00000-of-00001.parquet"]);
            assert_eq!(main.held_out, ["main/test-00000-of-00001.parquet"]);
        }
        let default = "---\nconfigs:\n- config_name: socratic\n  default: true\n  data_files:\n  - split: \
                       train\n    path: socratic/train-*\n- config_name: main\n---\n";
        let found = chosen(&FOLDERS, default, None).unwrap();
        assert_eq!(found.train, ["socratic/train-00000-of-00001.parquet"]);
        assert!(found.held_out.is_empty());
    }

    #[test]
    fn splits_are_found_in_names_and_folders() {
        let found = chosen(
            &[
                "data/my_train.csv",
                "data/dev.csv",
                "data/extra.csv",
                "dataset_infos.json",
            ],
            "",
            None,
        );
        let found = found.unwrap();
        assert_eq!(found.train, ["data/my_train.csv"]);
        assert_eq!(found.held_out, ["data/dev.csv"]);
        assert!(
            found.notes[0].contains("data/extra.csv"),
            "{:?}",
            found.notes
        );
        let found = chosen(&["train/a.jsonl", "test/a.jsonl"], "", None).unwrap();
        assert_eq!(
            (found.train, found.held_out),
            (vec!["train/a.jsonl".into()], vec!["test/a.jsonl".into()])
        );
        // One folder is not a choice, a single held-out file becomes the training split, `latest` is not a
        // test.
        let found = chosen(&["all/test.csv"], "", None).unwrap();
        assert_eq!(found.train, ["all/test.csv"]);
        let found = chosen(&["latest.csv", "contest.csv"], "", None).unwrap();
        assert_eq!(found.train, ["contest.csv", "latest.csv"]);
    }

    #[test]
    fn other_splits_are_named_and_left_out() {
        let readme = "---\nconfigs:\n- config_name: x\n  data_files:\n  - split: train\n    path: a.csv\n  \
                      - split: unsupervised\n    path: b.csv\n---\n";
        let found = chosen(&["a.csv", "b.csv"], readme, None).unwrap();
        assert_eq!(found.train, ["a.csv"]);
        assert!(
            found.notes[0].contains("`unsupervised` (1 files)"),
            "{:?}",
            found.notes
        );
        let error = chosen(&["c.csv"], readme, None).unwrap_err();
        assert!(error.to_string().contains("no files of rows"), "{error}");
    }

    #[test]
    fn names_that_leave_the_folder_are_no_rows() {
        for name in [
            "../x.csv",
            "a/../x.csv",
            "/x.csv",
            ".x/y.csv",
            "x.bin",
            "a//x.csv",
        ] {
            assert!(!is_rows(name), "{name}");
        }
        assert!(is_rows("a b/ü+%20.JSONL"));
    }
}
