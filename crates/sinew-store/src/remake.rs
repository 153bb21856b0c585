//! A damaged index is put aside and begun anew; recovery then fills it from the segments.

use crate::error::StoreError;
use crate::index;
use crate::schema;
use rusqlite::Connection;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Its presence says that the index holds rows of queues, which the segments do not have.
const QUEUES: &str = "queues";

/// Opens the index of a store. With the reason, if it had to be begun anew.
pub(crate) fn open(
    directory: &Path,
    accept_loss: bool,
) -> Result<(Connection, Option<String>), StoreError> {
    let path = directory.join(schema::FILE_NAME);
    let queues = directory.join(QUEUES);
    let (reason, held) = match index::open(&path) {
        Ok((connection, true)) if queues.exists() && !accept_loss => {
            // Nothing may be left that looks like an index: the next opening must refuse as well.
            drop(connection);
            remove(&path)?;
            ("it is gone".to_owned(), true)
        }
        Ok((connection, _)) => return Ok((connection, None)),
        Err(StoreError::DamagedIndex { reason, .. }) => {
            let held = queues.exists() || index::holds_queue_rows(&path);
            (reason, held)
        }
        Err(other) => return Err(other),
    };
    if held && !accept_loss {
        return Err(StoreError::LostQueues { path, reason });
    }
    put_aside(&path)?;
    Ok((index::open(&path)?.0, Some(reason)))
}

/// Notes that the store has queues.
pub(crate) fn has_queues(directory: &Path) -> Result<(), StoreError> {
    let path = directory.join(QUEUES);
    if path.exists() {
        return Ok(());
    }
    let made = File::create(&path).and_then(|file| file.sync_all());
    let made = made.and_then(|()| File::open(directory)?.sync_all());
    made.map_err(|e| StoreError::io(&path, e))
}

/// The files that SQLite keeps beside an index, and the index. In this order they are moved: a log
/// without its index is nothing, but one beside a new index would be played into that.
fn files(path: &Path) -> [PathBuf; 3] {
    ["-wal", "-shm", ""].map(|suffix| with_suffix(path, suffix))
}

/// The path with something after its file name, as SQLite names its own files.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Removes a file; one that is not there is no error.
fn remove(path: &Path) -> Result<(), StoreError> {
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

/// Renames a damaged index, in the place of one that was put aside before.
fn put_aside(path: &Path) -> Result<(), StoreError> {
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
