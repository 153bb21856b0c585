//! Queue between all producers and all consumers of episodes.
//!
//! A row has a key, a group and named fields. A consumer states the fields that it needs and those that it
//! writes; a row is *ready* for it when the needed ones are there, then *leased* to a holder until a time,
//! then *acked*. When a lease expires, its rows become ready again. A row that was leased too often without
//! an ack is *dead* for that consumer, with the reason. A row is *done* when every consumer with the mark
//! [`Consumer::last`] has acked it: its fields are deleted, but its key stays known, to detect duplicates.
//!
//! | part | purpose |
//! |---|---|
//! | [`Queue`] | what every queue does |
//! | `rows` | rows, consumers, leases as plain data |
//! | `core`, `plan`, `sample` | the states of all rows, pure: operations are planned, made durable, applied |
//! | `local` | [`MemoryQueue`] and [`DiskQueue`]: the core behind a lock, with values in a map or in SQLite |
//! | `disk` | the SQLite file |
//! | `shared` | [`SharedQueue`]: the core in each of many processes, over a [`Log`] in a server |
//! | `episode` | episodes as rows, and the consumers that score and train them |
//!
//! Every lease call first takes back expired leases, so that no timer is needed.

mod core;
mod disk;
mod episode;
mod local;
mod payload;
mod plan;
mod rows;
mod sample;
mod shared;

pub(crate) use disk::file;
pub use disk::{DiskQueue, Table};
pub use episode::{episode, episode_row, reward_field, scored, scorer_consumer, trainer_consumer};
pub use local::{Local, MemoryQueue, Values};
pub use payload::{pack, unpack};
pub use rows::{
    AckedRow, Consumer, ConsumerStats, Field, LeaseBatch, LeaseId, LeasedRow, MAX_CALL_ROWS,
    MAX_CONSUMERS, MAX_FIELDS, MAX_KEY, MAX_NAME, MAX_REASON, NewRow, Order, PutOutcome,
    QueueError, QueueLimits, QueueStats, ReturnOutcome, RowRequest, RowSelection, RowState,
    RowView, Sample, field, fields,
};

pub use shared::{
    LeaseClock, Log, LogEntry, LogMark, LogPage, LogSnapshot, LogWrite, Shared, SharedQueue,
};

use crate::error::StoreError;
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// A queue. Calls block on locks, disk or network and can be made from any thread, but not from async
/// tasks.
///
/// `now_ms` is the caller's clock. A queue in another process uses the clock of that process instead, since
/// the leases of several machines need a single clock. In a durable queue, a call's changes are on disk when
/// the call returns.
pub trait Queue: Send + Sync + Debug {
    /// Adds all rows or none, and returns a result for each. Putting a known row again has no effect.
    ///
    /// # Errors
    /// [`QueueError::Full`] if they do not fit now, [`QueueError::TooLarge`] if they never will.
    fn put(&self, rows: &[NewRow]) -> Result<Vec<PutOutcome>, StoreError>;

    /// Adds fields to rows that lack them, all or none, and returns the number of new fields. Existing fields
    /// and finished rows stay unchanged.
    ///
    /// # Errors
    /// [`QueueError::UnknownRow`].
    fn fill(&self, rows: &[AckedRow]) -> Result<usize, StoreError>;

    /// Registers a consumer; its cursor starts at the oldest row. Joining again has no effect.
    ///
    /// # Errors
    /// If it is known with other fields, or another consumer writes one of its fields.
    fn join(&self, consumer: &Consumer) -> Result<(), StoreError>;

    /// Leases ready rows to a holder for a limited time. Expired leases are taken back first.
    ///
    /// # Errors
    /// [`QueueError::NotReady`] for requested keys that are not ready. A sample without ready rows is empty
    /// instead.
    fn lease(&self, ask: &RowRequest, now_ms: u64) -> Result<LeaseBatch, StoreError>;

    /// Acknowledges rows that the holder has processed. An expired lease is still accepted as long as no
    /// other holder has leased the row.
    ///
    /// # Errors
    /// [`QueueError::WrongFields`]; nothing is acked then.
    fn ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<ReturnOutcome, StoreError>;

    /// Returns unused rows; the delivery does not count as an attempt.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn release(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<ReturnOutcome, StoreError>;

    /// Returns rows that the holder failed to process, with the reason. The delivery counts as an attempt.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn fail(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        reason: &str,
    ) -> Result<ReturnOutcome, StoreError>;

    /// Extends a lease to `now_ms + ttl_ms`.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn renew(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<ReturnOutcome, StoreError>;

    /// Makes dead rows of a consumer ready again, as if they were never delivered. Returns their number.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn revive(&self, consumer: &str, keys: &[String]) -> Result<usize, StoreError>;

    /// Forgets rows that are not done and not leased, all or none. Their keys can then be put as new rows.
    ///
    /// # Errors
    /// [`QueueError::UnknownRow`], [`QueueError::NotReady`].
    fn remove(&self, keys: &[String]) -> Result<usize, StoreError>;

    /// Takes back the rows of leases that ended, and forgets the oldest rows that are done beyond `keep`, a
    /// group at a time. Returns the number of forgotten rows: their keys can then be put as new rows.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn sweep(&self, keep: usize, now_ms: u64) -> Result<usize, StoreError>;

    /// The value of a field; `None` if the row is not known, is done, or has no such field.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn read(&self, key: &str, field: &str) -> Result<Option<bytes::Bytes>, StoreError>;

    /// A row's state for one consumer; `None` if the key is not known. A row that is done counts as acked, or
    /// as waiting permanently.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn state(&self, consumer: &str, key: &str) -> Result<Option<RowState>, StoreError>;

    /// Returns up to `limit` rows in the order of their puts, starting after number `after`.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn rows(&self, after: Option<u64>, limit: usize) -> Result<Vec<RowView>, StoreError>;

    /// Counts of rows by state.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn stats(&self) -> Result<QueueStats, StoreError>;

    /// Waits until the queue has a change after `seen`, at most for the given time, and returns the number of
    /// the last change. `seen` is an earlier result of this call; 0 returns at once.
    ///
    /// # Errors
    /// If the queue cannot be reached or written.
    fn wait(&self, seen: u64, at_most: Duration) -> Result<u64, StoreError>;
}

/// Puts rows as soon as they fit, which gives producers back-pressure.
///
/// # Errors
/// [`QueueError::Full`] if they do not fit in the given time.
pub fn put_within(
    queue: &dyn Queue,
    rows: &[NewRow],
    at_most: Duration,
) -> Result<Vec<PutOutcome>, StoreError> {
    let end = Instant::now() + at_most;
    loop {
        let seen = queue.wait(0, Duration::ZERO)?;
        match queue.put(rows) {
            Err(StoreError::Queue(QueueError::Full { .. })) if Instant::now() < end => {
                queue.wait(seen, end.saturating_duration_since(Instant::now()))?;
            }
            done => return done,
        }
    }
}
