//! Reads a data set's description of its files: the YAML at the top of `README.md`, and `dataset_infos.json`,
//! where older data sets list their configurations.
//!
//! A configuration is a variant of a data set, such as `main` and `socratic` of `openai/gsm8k`. Only names of
//! configurations, patterns of files and the default are used of the description.

use crate::error::HubError;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::collections::BTreeMap;

/// Maximum bytes of a description.
pub(super) const MAX_CARD_BYTES: u64 = 4 << 20;
/// Maximum configurations of a data set, and maximum patterns of one.
const MAX_ENTRIES: usize = 10_000;

/// The description of a data set.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Card {
    /// Configurations with their files, in the order of the description.
    pub(super) configs: Vec<Config>,
    /// Names of configurations whose files the description does not list, sorted.
    pub(super) names: Vec<String>,
}

/// One configuration.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Config {
    pub(super) name: String,
    /// The one to take if none is named.
    pub(super) default: bool,
    /// Folder of its files; empty for the whole data set.
    pub(super) folder: String,
    /// Patterns of files by split; empty if files are found by their names.
    pub(super) files: Vec<(String, Vec<String>)>,
}

#[derive(Deserialize, Default)]
struct Header {
    #[serde(default)]
    configs: Vec<RawConfig>,
    #[serde(default)]
    dataset_info: Option<OneOrMany<Info>>,
}

#[derive(Deserialize)]
struct RawConfig {
    #[serde(default = "default_name")]
    config_name: String,
    #[serde(default)]
    default: bool,
    #[serde(default)]
    data_dir: Option<String>,
    #[serde(default)]
    data_files: Option<OneOrMany<DataFiles>>,
}

#[derive(Deserialize)]
struct Info {
    #[serde(default)]
    config_name: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    Many(Vec<T>),
    One(T),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DataFiles {
    Pattern(String),
    Split {
        split: String,
        path: OneOrMany<String>,
    },
}

impl<T> OneOrMany<T> {
    /// One or several, as a list.
    fn list(self) -> Vec<T> {
        match self {
            Self::Many(list) => list,
            Self::One(one) => vec![one],
        }
    }
}

/// Name that the hub gives a configuration without one.
fn default_name() -> String {
    "default".to_owned()
}

impl Card {
    /// Reads the description: the text of `README.md`, and of `dataset_infos.json`.
    ///
    /// # Errors
    /// The file and the reason, if one of them is damaged: without it the wrong files could be taken.
    pub(super) fn read(readme: Option<&str>, infos: Option<&str>) -> Result<Self, HubError> {
        let wrong = |file, why: String| HubError::Repository(format!("{file}: {why}"));
        let header = match readme.and_then(yaml) {
            None => Header::default(),
            Some(yaml) => serde_saphyr::from_str(yaml)
                .map_err(|e| wrong("the YAML at the top of README.md", first_line(&e)))?,
        };
        let infos: BTreeMap<String, IgnoredAny> = match infos {
            None => BTreeMap::new(),
            Some(json) => serde_json::from_str(json)
                .map_err(|e| wrong("dataset_infos.json", e.to_string()))?,
        };
        let named = header.dataset_info.map(OneOrMany::list).unwrap_or_default();
        let named = named.into_iter().filter_map(|info| info.config_name);
        let mut names: Vec<String> = named.chain(infos.into_keys()).collect();
        names.sort();
        names.dedup();
        let configs: Vec<Config> = header.configs.into_iter().map(Config::of).collect();
        let patterns = |c: &Config| c.files.iter().map(|(_, list)| list.len()).sum::<usize>();
        let sizes = configs.iter().map(patterns);
        if sizes
            .chain([configs.len(), names.len()])
            .any(|n| n > MAX_ENTRIES)
        {
            let why = format!("more than {MAX_ENTRIES} configurations or patterns");
            return Err(HubError::Repository(why));
        }
        Ok(Self { configs, names })
    }
}

impl Config {
    /// Normalizes a configuration from any form that a card may use.
    fn of(raw: RawConfig) -> Self {
        let mut files: Vec<(String, Vec<String>)> = Vec::new();
        for entry in raw.data_files.map(OneOrMany::list).unwrap_or_default() {
            let (split, paths) = match entry {
                DataFiles::Pattern(path) => ("train".to_owned(), vec![path]),
                DataFiles::Split { split, path } => (split, path.list()),
            };
            files.push((split, paths));
        }
        let folder = raw.data_dir.unwrap_or_default();
        Self {
            default: raw.default || raw.config_name == "default",
            name: raw.config_name,
            folder: folder.trim_start_matches("./").trim_matches('/').to_owned(),
            files,
        }
    }
}

/// The part between two lines of `---` at the top of a text.
fn yaml(text: &str) -> Option<&str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let rest = text.strip_prefix("---")?;
    let rest = rest
        .strip_prefix("\r\n")
        .or_else(|| rest.strip_prefix('\n'))?;
    let end = rest.find("\n---")?;
    Some(&rest[..end])
}

/// The first line of an error: the others quote the card.
fn first_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    text.lines().next().unwrap_or_default().to_owned()
}

/// Whether a path fits a pattern of the hub: `*` and `?` within a name, `**` across folders, `[ab]` one of
/// these characters.
pub(super) fn fits(pattern: &str, path: &str) -> bool {
    let pattern = pattern.trim_start_matches("./");
    let parts: Vec<&str> = pattern.split('/').collect();
    let names: Vec<&str> = path.split('/').collect();
    // `reached[n]`: the parts so far fit the first `n` names. No recursion, so that no pattern is slow.
    let mut reached = vec![false; names.len() + 1];
    reached[0] = true;
    for part in parts {
        let mut next = vec![false; names.len() + 1];
        for n in 0..=names.len() {
            next[n] = match part {
                "**" => reached[..=n].iter().any(|&r| r),
                _ => n > 0 && reached[n - 1] && name_fits(part, names[n - 1]),
            };
        }
        reached = next;
    }
    reached[names.len()]
}

/// Whether one name fits one part of a pattern.
fn name_fits(part: &str, name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    let mut reached = vec![false; name.len() + 1];
    reached[0] = true;
    let mut rest = part.chars();
    while let Some(c) = rest.next() {
        let class = match c {
            '[' => rest.as_str().split_once(']').map(|(class, after)| {
                rest = after.chars();
                class
            }),
            _ => None,
        };
        let one = |found: char| match class {
            Some(class) => in_class(class, found),
            None => c == '?' || c == found,
        };
        let mut next = vec![false; name.len() + 1];
        for n in 0..=name.len() {
            next[n] = match c {
                '*' => reached[..=n].iter().any(|&r| r),
                _ => n > 0 && reached[n - 1] && one(name[n - 1]),
            };
        }
        reached = next;
    }
    reached[name.len()]
}

/// Whether `[class]` has a character: `abc`, `0-9`, or `!` before what it has not.
fn in_class(class: &str, found: char) -> bool {
    let (class, not) = match class.strip_prefix('!') {
        Some(class) => (class, true),
        None => (class, false),
    };
    let list: Vec<char> = class.chars().collect();
    let mut has = list.contains(&found);
    for range in list.windows(3).filter(|w| w[1] == '-') {
        has |= range[0] <= found && found <= range[2];
    }
    has != not
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn patterns_fit_as_on_the_hub() {
        for (pattern, path) in [
            ("main/train-*", "main/train-00000-of-00001.parquet"),
            ("**/*.csv", "a/b/c.csv"),
            ("**/*.csv", "c.csv"),
            ("data/*/x?.jsonl", "data/en/x1.jsonl"),
            ("./x[0-9].csv", "x7.csv"),
            ("**", "a/b"),
        ] {
            assert!(fits(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [
            ("main/train-*", "socratic/train-0.parquet"),
            ("*.csv", "a/b.csv"),
            ("x[!0-9].csv", "x7.csv"),
            ("train", "train.csv"),
        ] {
            assert!(!fits(pattern, path), "{pattern} {path}");
        }
    }

    #[test]
    fn descriptions_give_configurations_or_an_error() {
        let readme = "---\nlicense: mit\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n\
                      \x20 - split: train\n    path: main/train-*\n  - split: test\n    path: [a, b]\n\
                      - config_name: raw\n  data_dir: ./raw/\n- data_files: '*.csv'\n\
                      dataset_info:\n  config_name: old\n---\n# Hi";
        let card = Card::read(Some(readme), Some(r#"{"older": {"x": 1}}"#)).unwrap();
        assert_eq!(card.names, ["old", "older"]);
        let names: Vec<_> = card.configs.iter().map(|c| c.name.as_str()).collect();
        assert_eq!(names, ["main", "raw", "default"]);
        assert!(card.configs[0].default && card.configs[2].default);
        assert_eq!(
            card.configs[0].files[1],
            ("test".into(), vec!["a".into(), "b".into()])
        );
        assert_eq!(card.configs[1].folder, "raw");
        assert_eq!(
            card.configs[2].files,
            [("train".to_owned(), vec!["*.csv".to_owned()])]
        );
        assert_eq!(
            Card::read(Some("# No header"), None).unwrap(),
            Card::default()
        );
        let error = Card::read(Some("---\nconfigs: [{data_files: 3}]\n---\n"), None).unwrap_err();
        assert!(error.to_string().contains("README.md"), "{error}");
        assert!(
            Card::read(None, Some("[]"))
                .unwrap_err()
                .to_string()
                .contains("dataset_infos.json")
        );
        // Aliases that multiply are refused, not followed.
        let mut bomb = "---\na0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
        for i in 1..12 {
            let list = vec![format!("*a{}", i - 1); 9].join(", ");
            bomb += &format!("a{i}: &a{i} [{list}]\n");
        }
        bomb += "dataset_info: *a11\n---\n";
        assert!(Card::read(Some(&bomb), None).is_err());
    }

    proptest! {
        #[test]
        fn no_pattern_panics(pattern in "[a*?\\[\\]!/.-]{0,20}", path in "[a/.]{1,20}") {
            let _ = fits(&pattern, &path);
            prop_assert!(fits(&path.replace("[", ""), &path) || path.starts_with("./"));
        }
    }
}
