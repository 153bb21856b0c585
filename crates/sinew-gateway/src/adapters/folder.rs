//! Folder of uploaded adapters: `NAME/vN` has the files of version N.
//!
//! A version appears complete or not at all, and is on disk before the engine gets it. The files of earlier
//! versions are removed once the engine has the new one.

use super::peft::{CONFIG, WEIGHTS};
use sinew_types::{AdapterName, PolicyVersion};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Name of a folder while its files are written.
const STAGING: &str = ".staging";

/// A stored version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) path: PathBuf,
    /// Whether it was not there before.
    pub(super) is_new: bool,
}

fn version_path(root: &Path, name: &AdapterName, version: PolicyVersion) -> PathBuf {
    root.join(name.as_str()).join(format!("v{}", version.0))
}

/// Stores a version. The same content again has no effect.
///
/// # Errors
/// If the version is there with other content (`AlreadyExists`), or the file system refuses.
pub(super) fn put(
    root: &Path,
    name: &AdapterName,
    version: PolicyVersion,
    config: &[u8],
    weights: &[u8],
) -> io::Result<Stored> {
    let path = version_path(root, name, version);
    let files = [(CONFIG, config), (WEIGHTS, weights)];
    if path.exists() {
        for (file, content) in files {
            if fs::read(path.join(file))? != content {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
        }
        return Ok(Stored {
            path,
            is_new: false,
        });
    }
    let own = root.join(name.as_str());
    let staging = own.join(STAGING);
    remove(&staging)?;
    fs::create_dir_all(&staging)?;
    for (file, content) in files {
        let mut file = File::create_new(staging.join(file))?;
        file.write_all(content)?;
        file.sync_all()?;
    }
    File::open(&staging)?.sync_all()?;
    fs::rename(&staging, &path)?;
    File::open(&own)?.sync_all()?;
    File::open(root)?.sync_all()?;
    Ok(Stored { path, is_new: true })
}

/// Removes a folder with its content; one that is not there counts as removed.
///
/// # Errors
/// If the file system refuses.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes all versions of a name except one.
///
/// # Errors
/// If the file system refuses.
pub(super) fn keep_only(root: &Path, name: &AdapterName, version: PolicyVersion) -> io::Result<()> {
    let kept = version_path(root, name, version);
    for entry in fs::read_dir(root.join(name.as_str()))? {
        let path = entry?.path();
        if path != kept {
            remove(&path)?;
        }
    }
    Ok(())
}

/// The newest version of each name, in the order of the names. A root that is not there has none.
///
/// # Errors
/// If the file system refuses.
pub(super) fn newest(root: &Path) -> io::Result<Vec<(AdapterName, PolicyVersion, PathBuf)>> {
    let names = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names?,
    };
    let mut found = Vec::new();
    for entry in names {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|n| AdapterName::new(n).ok()) else {
            continue;
        };
        if !entry.file_type()?.is_dir() {
            continue;
        }
        let mut versions = Vec::new();
        for version in fs::read_dir(entry.path())? {
            let version = version?.file_name();
            let number: Option<u64> = version
                .to_str()
                .and_then(|v| v.strip_prefix('v')?.parse::<u64>().ok());
            versions.extend(number);
        }
        if let Some(version) = versions.into_iter().max().map(PolicyVersion) {
            let path = version_path(root, &name, version);
            found.push((name, version, path));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_of_each_name_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("adapters");
        assert!(newest(&root).unwrap().is_empty());
        let name = |text: &str| AdapterName::new(text).unwrap();
        let put = |text: &str, version, content: &[u8]| {
            super::put(&root, &name(text), PolicyVersion(version), b"{}", content)
        };
        let first = put("a", 1, b"1").unwrap();
        assert!(first.is_new && first.path.is_dir());
        assert_eq!(fs::read(first.path.join(WEIGHTS)).unwrap(), b"1");
        assert!(!put("a", 1, b"1").unwrap().is_new);
        let other = put("a", 1, b"2").unwrap_err();
        assert_eq!(other.kind(), io::ErrorKind::AlreadyExists);
        put("a", 10, b"2").unwrap();
        put("b:c", 2, b"3").unwrap();
        fs::write(root.join("README"), "").unwrap();
        fs::create_dir(root.join("empty")).unwrap();
        let found: Vec<_> = newest(&root)
            .unwrap()
            .into_iter()
            .map(|(name, version, _)| format!("{name} v{}", version.0))
            .collect();
        assert_eq!(found, ["a v10", "b:c v2"]);
        keep_only(&root, &name("a"), PolicyVersion(1)).unwrap();
        assert_eq!(newest(&root).unwrap()[0].1, PolicyVersion(1));
        remove(&root.join("a")).unwrap();
        remove(&root.join("a")).unwrap();
        assert_eq!(newest(&root).unwrap().len(), 1);
    }
}
