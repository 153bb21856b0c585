//! Builds of a cache: one file `KEY.build.json` for each.

use super::{BuildError, io_error};
use crate::cache::{self, Image};
use crate::documents;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// End of the name of a record.
const SUFFIX: &str = ".build.json";
/// Shortest part of a key that names a build.
const MIN_KEY: usize = 8;

/// A build in a cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildRecord {
    /// Hash of the folder, of the arguments and of the base images.
    pub key: String,
    /// Name of the result.
    pub tag: Option<String>,
    /// Hexadecimal SHA-256 of the image's configuration.
    pub image_id: String,
    /// Name of the builder.
    pub builder: String,
    /// Folder that was built.
    pub context: String,
    /// Bytes of the image's files.
    pub bytes: u64,
    /// Seconds since 1970 at which it was built.
    pub made_s: u64,
}

/// Seconds since 1970.
pub(super) fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |t| t.as_secs())
}

fn path_of(cache: &Path, key: &str) -> PathBuf {
    cache.join(format!("{key}{SUFFIX}"))
}

/// Reads a record; `None` if it is missing or no record.
fn read(path: &Path) -> Option<BuildRecord> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Writes a record, which replaces one with the same key. A tag moves to the newest build.
pub(super) fn write(cache: &Path, record: &BuildRecord) -> Result<(), BuildError> {
    if let Some(tag) = &record.tag {
        for mut other in list(cache)? {
            if other.tag.as_ref() == Some(tag) && other.key != record.key {
                other.tag = None;
                store(cache, &other)?;
            }
        }
    }
    store(cache, record)
}

/// Writes one record: it is complete or absent.
fn store(cache: &Path, record: &BuildRecord) -> Result<(), BuildError> {
    let failed = |e: &dyn std::fmt::Display| io_error("write a record of a build", e);
    let text = serde_json::to_vec_pretty(record).map_err(|e| failed(&e))?;
    let new = tempfile::NamedTempFile::new_in(cache).map_err(|e| failed(&e))?;
    fs::write(new.path(), text).map_err(|e| failed(&e))?;
    let stored = new.persist(path_of(cache, &record.key));
    stored.map_err(|e| failed(&e.error))?;
    Ok(())
}

/// The image of a build, if its root is still there.
pub(super) fn known(cache: &Path, key: &str) -> Option<Image> {
    image(cache, &read(&path_of(cache, key))?)
}

/// The image of a record. An id that is none leads nowhere.
fn image(cache: &Path, record: &BuildRecord) -> Option<Image> {
    documents::sha256(&format!("sha256:{}", record.image_id)).ok()?;
    cache::get(cache, &record.image_id)
}

/// Gives a build another name.
pub(super) fn rename(cache: &Path, key: &str, tag: &str) -> Result<(), BuildError> {
    match read(&path_of(cache, key)) {
        Some(record) if record.tag.as_deref() != Some(tag) => {
            let tag = Some(tag.to_owned());
            write(cache, &BuildRecord { tag, ..record })
        }
        _ => Ok(()),
    }
}

/// Builds of a cache, the newest first. A cache that is missing has none.
///
/// # Errors
/// If the cache cannot be read.
pub fn list(cache: &Path) -> Result<Vec<BuildRecord>, BuildError> {
    let entries = match fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(io_error(format!("read {}", cache.display()), e)),
    };
    let named = |path: &PathBuf| {
        let name = path.file_name().and_then(|n| n.to_str());
        name.is_some_and(|n| n.ends_with(SUFFIX))
    };
    let paths = entries.flatten().map(|e| e.path()).filter(named);
    let mut records: Vec<_> = paths.filter_map(|path| read(&path)).collect();
    records.sort_by(|a, b| (b.made_s, &a.key).cmp(&(a.made_s, &b.key)));
    Ok(records)
}

/// The record that a tag, or at least 8 characters of a key, name.
fn named(cache: &Path, name: &str) -> Result<Option<BuildRecord>, BuildError> {
    let records = list(cache)?;
    if let Some(record) = records.iter().find(|r| r.tag.as_deref() == Some(name)) {
        return Ok(Some(record.clone()));
    }
    let long = name.len() >= MIN_KEY;
    let mut found = records.iter().filter(|r| long && r.key.starts_with(name));
    // Two builds with the same start have no name in common.
    Ok(match (found.next(), found.next()) {
        (Some(record), None) => Some(record.clone()),
        _ => None,
    })
}

/// The image of a build by its tag, or by at least 8 characters of its key.
///
/// # Errors
/// If the cache cannot be read.
pub fn find(cache: &Path, name: &str) -> Result<Option<Image>, BuildError> {
    let Ok(cache) = cache.canonicalize() else {
        return Ok(None);
    };
    let record = named(&cache, name)?;
    Ok(record.and_then(|record| image(&cache, &record)))
}

/// Removes a build by its tag, or by at least 8 characters of its key, and its root if no other build has it.
/// False if there is none. No sandbox may use it any more. The storage of the builder keeps its own copy.
///
/// # Errors
/// If the files cannot be removed.
pub fn remove(cache: &Path, name: &str) -> Result<bool, BuildError> {
    let Some(record) = named(cache, name)? else {
        return Ok(false);
    };
    let failed = |e: std::io::Error| io_error(format!("remove build {name}"), e);
    fs::remove_file(path_of(cache, &record.key)).map_err(failed)?;
    let shared = list(cache)?.iter().any(|r| r.image_id == record.image_id);
    if let Some(image) = image(cache, &record).filter(|_| !shared) {
        cache::remove(cache, &image.id)?;
    }
    Ok(true)
}
