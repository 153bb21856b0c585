//! Errors of a store.
//!
//! Callers should distinguish two kinds. After a refusal (full, conflict, unknown episode) the store can
//! still be used. After damage (`Corrupt`, `Damaged`, `LostQueue`, `LostFence`, `QueueLog`, `Payload`) the
//! user has to decide.

use crate::damage::Loss;
use crate::schema;
use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, TraceError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// Errors of a trace store. A call that fails leaves the store unchanged.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A trace breaks an invariant of [`sinew_types::Trace`].
    #[error("trace refused: {0}")]
    Invalid(#[from] TraceError),
    /// One trace exceeds a limit of the store.
    #[error("trace {episode}: {field} is {value}, allowed: up to {limit}")]
    TooLarge {
        /// The refused trace.
        episode: EpisodeId,
        /// Name of the limited quantity.
        field: &'static str,
        value: u64,
        /// Inclusive limit.
        limit: u64,
    },
    #[error(
        "the store holds {used} of {limit} bytes and {needed} more do not fit; \
         remove trained episodes with `sinew gc`, or begin another store"
    )]
    /// The store's byte limit is reached; nothing was written.
    Full { used: u64, needed: u64, limit: u64 },
    /// The disk is full; no part of the call was stored.
    #[error("no space left on the device of {path}; free some and try again")]
    DiskFull { path: PathBuf },
    /// The process has reached its limit on memory or address space.
    #[error(
        "no memory for {path}: the process or its control group is at its limit; raise it, or run fewer \
         episodes at once"
    )]
    NoMemory { path: PathBuf },
    /// An update with this name but other contents was already recorded. Recording the same contents again is
    /// not an error.
    #[error("batch {batch} was marked before with other contents (step {step})")]
    BatchConflict { batch: String, step: u64 },
    /// The update contains an episode that another update has trained; an episode is trained only once.
    #[error("episode {episode} was trained in batch {trained_in}, batch {batch} cannot train it")]
    TrainedTwice {
        episode: EpisodeId,
        trained_in: String,
        batch: String,
    },
    /// A newer owner of the store exists; see [`crate::TraceStore::take_fence`].
    #[error(
        "owner {newest} has taken over this store, owner {own} cannot commit to it any more; end this process"
    )]
    Fenced {
        /// Number of the refused owner.
        own: u64,
        /// Number of the newest owner.
        newest: u64,
    },
    /// The file with the number of the newest owner is damaged.
    #[error(
        "{path} is damaged: {reason}; it holds the number of the newest owner; make sure that no other process \
         trains this run, then remove the file: the next number is then counted from the newest commit"
    )]
    LostFence { path: PathBuf, reason: String },
    /// An update names an episode that was never committed or is lost.
    #[error("episode {episode} is not in the store")]
    UnknownEpisode { episode: EpisodeId },
    /// An argument is outside its range.
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
    /// A record does not match its checksum or cannot be decoded. Other records are not affected.
    Corrupt {
        path: PathBuf,
        offset: u64,
        reason: RecordError,
    },
    /// Opening found damage that the options do not accept; nothing was changed.
    #[error("{0}")]
    Damaged(Box<Loss>),
    /// The directory to read has no index.
    #[error("{path} holds no store")]
    Missing { path: PathBuf },
    /// Another process has opened this store for writing.
    #[error("{path} is in use by another process; stop it, or choose another directory")]
    Locked { path: PathBuf },
    /// The file was written in another format.
    #[error(
        "{path} has format {actual}, this program reads {expected}; use the version of Sinew that wrote it"
    )]
    Format {
        path: PathBuf,
        actual: i64,
        expected: i64,
    },
    /// A value cannot be encoded.
    #[error("cannot encode trace {episode}: {reason}")]
    Encode {
        episode: EpisodeId,
        reason: RecordError,
    },
    /// Any other file error.
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    /// Any other SQLite error.
    #[error("index: {0}")]
    Index(rusqlite::Error),
    /// SQLite cannot open the file.
    #[error("{path} cannot be read as an index: {source}")]
    BadIndex {
        path: PathBuf,
        source: rusqlite::Error,
    },
    #[error(
        "{path} is damaged: {reason}; it is made anew from the segments when the store is next opened for \
         writing (`sinew train --resume`, `sinew serve --store`, `sinew gc`)"
    )]
    /// The index can be opened but has wrong contents. No data is lost, since it can be rebuilt from the
    /// segments.
    DamagedIndex { path: PathBuf, reason: String },
    #[error(
        "{path} is damaged: {reason}; the rows of a queue lie nowhere else; put the file back \
         from a copy, or go on without them with --accept-loss"
    )]
    /// A file of a queue is damaged.
    LostQueue { path: PathBuf, reason: String },
    #[error("row {key} of a queue cannot be read: {reason}")]
    /// A field does not contain the value that its reader expects.
    Row { key: String, reason: String },
    #[error("the queue at {url}: {reason}")]
    /// A queue in another process does not respond, or its response is invalid.
    Remote { url: String, reason: String },
    /// The log of a queue in a server has contents that no version of this program writes.
    #[error("the log of a queue cannot be read: {reason}; begin another queue")]
    QueueLog { reason: String },
    /// The server of a store does not respond, or refuses. The name contains no password.
    #[error("the store at {server}: {reason}")]
    Server { server: String, reason: String },
    /// The payload of an episode in a server or an object store is missing or damaged. Other episodes are
    /// not affected.
    #[error("the trace of episode {episode} cannot be read: {reason}")]
    Payload { episode: EpisodeId, reason: String },
    /// A queue refused the call.
    #[error("queue: {0}")]
    Queue(#[from] QueueError),
    /// A thread panicked while it held a lock, so the state behind it may be inconsistent.
    #[error("an earlier call panicked inside the store; open it anew")]
    Poisoned,
}

/// Errors of encoding or decoding a record.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error(transparent)]
    Encode(#[from] rmp_serde::encode::Error),
    #[error(transparent)]
    Decode(#[from] rmp_serde::decode::Error),
    /// The compressor failed.
    #[error(transparent)]
    Zstd(#[from] io::Error),
    #[error("unknown codec {0}")]
    Codec(u8),
    #[error("unknown record kind {0}")]
    Kind(u8),
    #[error("holds {found} bytes, expected {expected}")]
    Length { found: usize, expected: usize },
    /// The bytes are truncated or changed, or the value does not fit into a record.
    #[error("{0}")]
    Bytes(&'static str),
    #[error("{0} bytes follow its columns")]
    Trailing(usize),
    #[error("holds episode {0}")]
    OtherEpisode(EpisodeId),
}

impl StoreError {
    /// Converts an error of the file at `path`. A full disk and an exhausted quota have a separate variant.
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
        use rusqlite::ErrorCode::{DiskFull, OutOfMemory};
        use rusqlite::ffi;
        let path = PathBuf::from(schema::FILE_NAME);
        let cause = error.sqlite_error();
        // SQLite reports "disk I/O error" for these: the log's index is a file that is mapped.
        match cause.map(|e| (e.code, e.extended_code)) {
            Some((DiskFull, _) | (_, ffi::SQLITE_IOERR_SHMSIZE)) => Self::DiskFull { path },
            Some((OutOfMemory, _) | (_, ffi::SQLITE_IOERR_NOMEM | ffi::SQLITE_IOERR_SHMMAP)) => {
                Self::NoMemory { path }
            }
            _ => Self::Index(error),
        }
    }
}

/// Locks a part of a store. A panic under the lock may leave the part in an inconsistent state, so every
/// later call is refused.
///
/// # Errors
/// [`StoreError::Poisoned`].
pub(crate) fn guard<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>, StoreError> {
    mutex.lock().map_err(|_| StoreError::Poisoned)
}

/// Reason for which a queue refuses a call. A refused call leaves the queue unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum QueueError {
    #[error(
        "the queue is full: {rows} rows of {max_rows}, {bytes} bytes of {max_bytes}; \
         wait until rows are acked"
    )]
    /// The unfinished rows would exceed a limit; no row of the call was added.
    Full {
        rows: usize,
        max_rows: usize,
        bytes: u64,
        max_bytes: u64,
    },
    /// The rows of this call exceed the limits even in an empty queue.
    #[error(
        "{rows} rows of {bytes} bytes cannot be put at once, the queue holds {max_rows} rows and \
         {max_bytes} bytes; put fewer, or raise its limits"
    )]
    TooLarge {
        rows: usize,
        max_rows: usize,
        bytes: u64,
        max_bytes: u64,
    },
    /// No row has this key, or the row was forgotten.
    #[error("row {key} is not in the queue")]
    UnknownRow { key: String },
    /// The consumer requested a row that is not ready for it.
    #[error("row {key} is not ready: it lacks a field, or is leased, acked or dead")]
    NotReady { key: String },
    /// The consumer has not joined.
    #[error("no consumer {name:?} has joined; join with what it needs and writes")]
    UnknownConsumer { name: String },
    /// The consumer has joined with other fields, or another consumer writes one of its fields.
    #[error("consumer {name:?} cannot join: {reason}")]
    Refused { name: String, reason: String },
    /// The acknowledgement lacks fields that the consumer writes, or has others.
    #[error("row {key}: consumer {consumer:?} writes the fields {writes:?}, this ack has {has:?}")]
    WrongFields {
        key: String,
        consumer: String,
        writes: Vec<String>,
        has: Vec<String>,
    },
    /// An argument is outside its range.
    #[error("{field} is {value}, allowed: {allowed}")]
    Argument {
        field: String,
        value: String,
        allowed: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use rusqlite::ffi;

    #[test]
    fn what_the_system_lacks_is_said_by_its_name() {
        for (code, said) in [
            (ffi::SQLITE_FULL, "no space left"),
            (ffi::SQLITE_IOERR_SHMSIZE, "no space left"),
            (ffi::SQLITE_NOMEM, "no memory"),
            (ffi::SQLITE_IOERR_NOMEM, "no memory"),
            (ffi::SQLITE_IOERR_SHMMAP, "no memory"),
            (ffi::SQLITE_IOERR_READ, "index: "),
        ] {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            let told = StoreError::from(error).to_string();
            assert!(told.starts_with(said), "{code}: {told}");
        }
    }
}
