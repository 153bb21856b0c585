//! Puts damaged SQLite files aside, so that a person can look at them. New ones have another name until they
//! are whole, so that an unfinished file is never taken for one without rows.

use crate::error::StoreError;
use std::path::{Path, PathBuf};

/// SQLite's side files of a database, then the database itself. They are moved in this order: a log is
/// useless without its file, but a log next to a new file would be played into that file.
fn files(path: &Path) -> [PathBuf; 3] {
    ["-wal", "-shm", ""].map(|suffix| with_suffix(path, suffix))
}

/// The path with something after its file name, as SQLite names its own files.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a file and those kept for it; one that is not there is not an error.
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

/// The name of a file that is not whole yet.
pub(crate) fn part(path: &Path) -> PathBuf {
    with_suffix(path, ".part")
}

/// Gives a file its name, once everything in it is on the medium and nobody has it open.
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

/// Whether a file is there without a byte in it.
pub(crate) fn is_hollow(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() == 0)
}

/// Renames a damaged file to `FILE.damaged`, in the place of one that was put aside before.
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
