//! Why a store could not do what it was asked.

use crate::damage::Loss;
use crate::schema;
use sinew_types::{EpisodeId, TraceError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// Errors of a trace store. After any of them the store is as it was before the call.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("trace refused: {0}")]
    Invalid(#[from] TraceError),
    #[error("trace {episode}: {field} is {value}, allowed: up to {limit}")]
    TooLarge {
        episode: EpisodeId,
        field: &'static str,
        value: u64,
        limit: u64,
    },
    #[error(
        "the store holds {used} of {limit} bytes and {needed} more do not fit; \
         remove trained episodes with `sinew gc`, or begin another store"
    )]
    Full { used: u64, needed: u64, limit: u64 },
    #[error("no space left on the device of {path}; free some and try again")]
    DiskFull { path: PathBuf },
    #[error("batch {batch} was marked before with other contents (step {step})")]
    BatchConflict { batch: String, step: u64 },
    #[error("episode {episode} was trained in batch {trained_in}, batch {batch} cannot train it")]
    TrainedTwice {
        episode: EpisodeId,
        trained_in: String,
        batch: String,
    },
    #[error("episode {episode} is not in the store")]
    UnknownEpisode { episode: EpisodeId },
    #[error("{field} is {value}, allowed: {allowed}")]
    Argument {
        field: &'static str,
        value: u64,
        allowed: String,
    },
    #[error(
        "{path} at byte {offset}: {reason}; what lies there cannot be read, everything else can; put the \
         file back from a copy, or go on without what cannot be read with --accept-loss"
    )]
    Corrupt {
        path: PathBuf,
        offset: u64,
        reason: String,
    },
    #[error("{0}")]
    Damaged(Box<Loss>),
    #[error("{path} holds no store")]
    Missing { path: PathBuf },
    #[error("{path} is in use by another process; stop it, or choose another directory")]
    Locked { path: PathBuf },
    #[error("{path} has format {actual}, this program reads up to {expected}; use a newer one")]
    Format {
        path: PathBuf,
        actual: i64,
        expected: i64,
    },
    #[error("cannot encode trace {episode}: {reason}")]
    Encode { episode: EpisodeId, reason: String },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error("index: {0}")]
    Index(rusqlite::Error),
    #[error("{path} cannot be read as an index: {source}")]
    BadIndex {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(
        "{path} is damaged: {reason}; it is made anew from the segments when the store is next opened for \
         writing (`sinew train --resume`, `sinew serve --store`, `sinew gc`)"
    )]
    DamagedIndex { path: PathBuf, reason: String },
    #[error(
        "{path} is damaged: {reason}; the rows of the store's queues lie nowhere else; put the file back \
         from a copy, or go on without them with --accept-loss"
    )]
    LostQueues { path: PathBuf, reason: String },
    #[error("queue: {0}")]
    Queue(#[from] crate::queue::QueueError),
    #[error("an earlier call panicked inside the store; open it anew")]
    Poisoned,
}

impl StoreError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::DiskFull { path },
            _ => Self::Io { path, source },
        }
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull) {
            return Self::DiskFull {
                path: PathBuf::from(schema::FILE_NAME),
            };
        }
        Self::Index(error)
    }
}

/// Locks a part of a store. After a panic under the lock the part may be half changed, so that every later
/// call is refused.
///
/// # Errors
/// [`StoreError::Poisoned`].
pub(crate) fn guard<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>, StoreError> {
    mutex.lock().map_err(|_| StoreError::Poisoned)
}
