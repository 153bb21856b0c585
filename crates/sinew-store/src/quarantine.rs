//! Moves damaged SQLite files aside, so that the user can examine them. New files have a temporary name until
//! they are complete, so that an unfinished file is never mistaken for an empty one.

use crate::error::StoreError;
use std::path::{Path, PathBuf};

/// Returns SQLite's side files of a database, then the database itself. They are moved in this order: a log
/// is useless without its database, but an old log next to a new database would be replayed into it.
fn files(path: &Path) -> [PathBuf; 3] {
    ["-wal", "-shm", ""].map(|suffix| with_suffix(path, suffix))
}

/// Appends a suffix to a file name, as SQLite names its side files.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a file and its side files; a missing file is not an error.
pub(crate) fn remove(path: &Path) -> Result<(), StoreError> {
    for file in files(path) {
        match std::fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(StoreError::io(&file, e));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Returns the temporary name of an incomplete file.
pub(crate) fn part(path: &Path) -> PathBuf {
    with_suffix(path, ".part")
}

/// Renames a file to its final name, after it is durable and closed.
pub(crate) fn name(path: &Path) -> Result<(), StoreError> {
    let part = part(path);
    let named = std::fs::File::open(&part).and_then(|file| {
        file.sync_all()?;
        std::fs::rename(&part, path)?;
        // The name is in the folder.
        path.parent()
            .map_or(Ok(()), |folder| std::fs::File::open(folder)?.sync_all())
    });
    named.map_err(|e| StoreError::io(path, e))?;
    // The side files are useless without the file.
    remove(&part)
}

/// Whether a file exists and is empty.
pub(crate) fn is_hollow(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0)
}

/// Renames a damaged file to `FILE.damaged`; this replaces an earlier one.
pub(crate) fn put_aside(path: &Path) -> Result<(), StoreError> {
    let aside = with_suffix(path, ".damaged");
    remove(&aside)?;
    for (from, to) in files(path).iter().zip(files(&aside)) {
        match std::fs::rename(from, &to) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(StoreError::io(from, e));
            }
            _ => {}
        }
    }
    Ok(())
}
