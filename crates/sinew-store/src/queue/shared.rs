//! [`SharedQueue`]: one queue of many processes, over a log that a server stores.
//!
//! Every process has the states of all rows in memory. A call reads the entries that others have appended,
//! applies them, plans its changes, and appends them as one entry with their values. The server accepts an
//! entry only directly after the newest one, so that all processes apply the same changes in the same order;
//! a process that was too slow plans again. An entry has a random id: a call that got no answer finds out by
//! it whether its entry was stored, so that it takes effect once.
//!
//! The log begins with a snapshot of the states, which a process renews when the entries after it have become
//! long. Entries name the one before them by position and id: after a server has lost its newest entries, a
//! process that knows them starts again from the snapshot.
//!
//! [`Log`] is all that a server has to offer. The crate `sinew-database` implements it.

use super::core::{Change, QueueCore};
use super::local::{Backing, Local, RowValues, local};
use super::payload::{pack, unpack};
use super::rows::QueueLimits;
use crate::error::StoreError;
use bytes::Bytes;
use std::collections::HashMap;
use std::fmt::Debug;
use std::time::Duration;

/// Interval at which a waiting call looks for entries of other processes.
const LOOK: Duration = Duration::from_millis(100);
/// Minimum bytes of entries after a snapshot before it is renewed.
const MIN_LOG_BYTES: usize = 1 << 20;
/// Number of entries before the newest snapshot that stay: a call without an answer finds its entry there.
const KEPT_ENTRIES: u64 = 1_000;
/// Attempts to read a snapshot with the entries after it, while other processes renew it.
const LOADS: usize = 16;

/// A place in the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogMark {
    /// Number of the entry, from 0.
    pub position: u64,
    /// Random id of the entry.
    pub id: String,
}

/// One entry of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Its place.
    pub mark: LogMark,
    /// Encoded changes.
    pub changes: Bytes,
}

/// Entries from a position on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPage {
    /// Time of the server in milliseconds since 1970.
    pub now_ms: u64,
    /// Position of the newest snapshot.
    pub snapshot: u64,
    /// Entries in order; empty if the log does not reach the position.
    pub entries: Vec<LogEntry>,
    /// Whether there are more entries.
    pub more: bool,
}

/// States of all rows after an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSnapshot {
    /// Position of that entry.
    pub position: u64,
    /// Encoded states.
    pub state: Bytes,
}

impl LogSnapshot {
    /// The first snapshot of a log: an empty queue.
    ///
    /// # Errors
    /// If it cannot be encoded.
    pub fn empty() -> Result<Self, StoreError> {
        Ok(Self {
            position: 0,
            state: encode(&[])?,
        })
    }
}

/// An entry to append, with the values that belong to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogWrite {
    pub entry: LogEntry,
    /// New values: row, field number, value.
    pub values: Vec<(u64, usize, Bytes)>,
    /// Rows whose values are deleted.
    pub finished: Vec<u64>,
}

/// The log of one queue in a server. A new log has an entry without changes at position 0, and
/// [`LogSnapshot::empty`]. Calls that get no answer are repeated for a limited time.
pub trait Log: Send + Debug {
    /// Returns entries from position `from` on, a limited number of them.
    ///
    /// # Errors
    /// If the server cannot be reached.
    fn read(&mut self, from: u64) -> Result<LogPage, StoreError>;

    /// Returns the newest snapshot.
    ///
    /// # Errors
    /// If the server cannot be reached.
    fn snapshot(&mut self) -> Result<LogSnapshot, StoreError>;

    /// Stores an entry with its values, all or nothing, if `after` is the newest one. Returns whether the
    /// entry is stored; a repeated call finds its entry by the id.
    ///
    /// # Errors
    /// If the server cannot be reached; whether the entry is stored is unknown then.
    fn append(&mut self, after: &LogMark, write: &LogWrite) -> Result<bool, StoreError>;

    /// Replaces the snapshot, unless a newer one is stored, and deletes the entries before `keep_from`.
    ///
    /// # Errors
    /// If the server cannot be reached.
    fn compact(&mut self, snapshot: &LogSnapshot, keep_from: u64) -> Result<(), StoreError>;

    /// Reads values: row, field number, value. Missing ones are left out.
    ///
    /// # Errors
    /// If the server cannot be reached.
    fn values(
        &mut self,
        rows: &[u64],
        fields: &[usize],
    ) -> Result<Vec<(u64, usize, Bytes)>, StoreError>;
}

/// Clock of the leases of a shared queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaseClock {
    /// The server's, so that processes with different clocks agree.
    #[default]
    Server,
    /// That of the caller of each call, for tests and simulations that set the time.
    Caller,
}

/// A queue of many processes.
pub type SharedQueue = Local<Shared>;

impl SharedQueue {
    /// Opens the queue of a log. `session` is a random name that no other process has. All processes should
    /// give the same limits.
    ///
    /// # Errors
    /// If the server cannot be reached, or its log cannot be read.
    pub fn open(
        log: Box<dyn Log>,
        limits: QueueLimits,
        session: &str,
        clock: LeaseClock,
    ) -> Result<Self, StoreError> {
        let mut core = QueueCore::new(limits);
        let mut shared = Shared {
            log,
            clock,
            session: session.to_owned(),
            written: 0,
            at: LogMark::default(),
            now_ms: 0,
            snapshot: 0,
            log_bytes: 0,
            snapshot_bytes: 0,
            wrote: false,
            changed: false,
        };
        shared.load(&mut core)?;
        Ok(local(core, shared))
    }
}

/// The log of a queue, and how far this process has read it.
#[derive(Debug)]
pub struct Shared {
    log: Box<dyn Log>,
    clock: LeaseClock,
    /// Beginning of the ids of this process.
    session: String,
    /// Number of entries that this process has tried to append.
    written: u64,
    /// The last applied entry.
    at: LogMark,
    /// Time of the server when the log was last read.
    now_ms: u64,
    /// Position of the newest snapshot that is known, and the bytes of entries read since.
    snapshot: u64,
    log_bytes: usize,
    /// Bytes of the last snapshot that this process has read or written.
    snapshot_bytes: usize,
    /// Whether this process has appended since it last renewed the snapshot. Others leave it to the writers.
    wrote: bool,
    /// Whether entries were applied that no call has reported yet.
    changed: bool,
}

fn encode(changes: &[Change]) -> Result<Bytes, StoreError> {
    pack("log", &changes).map_err(|e| broken(e.to_string()))
}

fn decode(bytes: &[u8]) -> Result<Vec<Change>, StoreError> {
    unpack("log", bytes).map_err(|e| broken(e.to_string()))
}

fn broken(reason: String) -> StoreError {
    StoreError::QueueLog { reason }
}

impl Shared {
    /// Reads the snapshot and the entry that it follows.
    fn load(&mut self, core: &mut QueueCore) -> Result<(), StoreError> {
        for _ in 0..LOADS {
            let snapshot = self.log.snapshot()?;
            let page = self.log.read(snapshot.position)?;
            let first = page.entries.into_iter().next();
            let Some(first) = first.filter(|e| e.mark.position == snapshot.position) else {
                // Another process has renewed it meanwhile, and its entry is deleted.
                continue;
            };
            *core = QueueCore::new(core.limits);
            core.apply(decode(&snapshot.state)?);
            self.at = first.mark;
            (self.snapshot, self.log_bytes) = (snapshot.position, 0);
            self.snapshot_bytes = snapshot.state.len();
            self.now_ms = page.now_ms;
            return Ok(());
        }
        Err(broken(format!(
            "the entry of the snapshot is missing, looked for it {LOADS} times"
        )))
    }

    /// Applies one page; `None` if the log does not continue from the last applied entry, otherwise whether
    /// there are more entries.
    fn page(&mut self, core: &mut QueueCore) -> Result<Option<bool>, StoreError> {
        let page = self.log.read(self.at.position)?;
        self.now_ms = page.now_ms;
        if page.snapshot != self.snapshot {
            (self.snapshot, self.log_bytes) = (page.snapshot, 0);
        }
        let mut entries = page.entries.into_iter();
        if entries.next().is_none_or(|first| first.mark != self.at) {
            return Ok(None);
        }
        for entry in entries {
            if entry.mark.position != self.at.position + 1 {
                return Ok(None);
            }
            core.apply(decode(&entry.changes)?);
            self.log_bytes += entry.changes.len();
            self.at = entry.mark;
            self.changed = true;
        }
        Ok(Some(page.more))
    }

    /// Renews the snapshot if the entries after it are longer than it.
    fn compact(&mut self, core: &QueueCore) -> Result<(), StoreError> {
        let limit = MIN_LOG_BYTES.max(2 * self.snapshot_bytes);
        if !self.wrote || self.log_bytes < limit {
            return Ok(());
        }
        let snapshot = LogSnapshot {
            position: self.at.position,
            state: encode(&core.snapshot())?,
        };
        let keep_from = snapshot.position.saturating_sub(KEPT_ENTRIES);
        self.log.compact(&snapshot, keep_from)?;
        (self.snapshot, self.log_bytes) = (snapshot.position, 0);
        self.snapshot_bytes = snapshot.state.len();
        self.wrote = false;
        Ok(())
    }
}

impl Backing for Shared {
    fn catch_up(&mut self, core: &mut QueueCore) -> Result<bool, StoreError> {
        let mut loads = 0;
        loop {
            match self.page(core)? {
                Some(true) => {}
                Some(false) => break,
                None if loads < LOADS => {
                    loads += 1;
                    self.load(core)?;
                    self.changed = true;
                }
                None => {
                    let at = self.at.position;
                    return Err(broken(format!("no entry follows number {at}")));
                }
            }
        }
        self.compact(core)?;
        Ok(std::mem::take(&mut self.changed))
    }

    fn write(&mut self, _: &QueueCore, changes: &[Change]) -> Result<bool, StoreError> {
        self.written += 1;
        let mark = LogMark {
            position: self.at.position + 1,
            id: format!("{}-{}", self.session, self.written),
        };
        let (mut values, mut finished) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                Change::Insert {
                    seq, values: new, ..
                } => {
                    let new = new.iter();
                    values.extend(new.map(|(field, value)| (*seq, *field, value.clone())));
                }
                Change::Write {
                    seq, field, value, ..
                } => values.push((*seq, *field, value.clone())),
                Change::Finish { seq } | Change::Forget { seq } => finished.push(*seq),
                Change::Claim { .. } | Change::NextLease(_) | Change::Join(_) | Change::Name(_) => {
                }
            }
        }
        let write = LogWrite {
            entry: LogEntry {
                mark,
                changes: encode(changes)?,
            },
            values,
            finished,
        };
        if !self.log.append(&self.at, &write)? {
            return Ok(false);
        }
        self.log_bytes += write.entry.changes.len();
        self.at = write.entry.mark;
        self.wrote = true;
        Ok(true)
    }

    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<RowValues, StoreError> {
        let rows = self.read_all(&[seq], fields)?;
        Ok(rows.into_iter().next().unwrap_or_default())
    }

    fn read_all(&mut self, rows: &[u64], fields: &[usize]) -> Result<Vec<RowValues>, StoreError> {
        if rows.is_empty() || fields.is_empty() {
            return Ok(vec![Vec::new(); rows.len()]);
        }
        let found = self.log.values(rows, fields)?;
        let found = found
            .into_iter()
            .map(|(row, field, value)| ((row, field), value));
        let found: HashMap<(u64, usize), Bytes> = found.collect();
        let of = |row: &u64| {
            let value = |field: &usize| Some((*field, found.get(&(*row, *field))?.clone()));
            fields.iter().filter_map(value).collect()
        };
        Ok(rows.iter().map(of).collect())
    }

    fn now_ms(&self, caller_ms: u64) -> u64 {
        match self.clock {
            LeaseClock::Server => self.now_ms,
            LeaseClock::Caller => caller_ms,
        }
    }

    fn looks_every(&self) -> Option<Duration> {
        Some(LOOK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::queue::{Field, NewRow, Queue};
    use std::sync::{Arc, Mutex};

    /// A log in memory that several queues share.
    #[derive(Debug, Default)]
    struct Shelf {
        entries: Vec<LogEntry>,
        snapshot: Option<LogSnapshot>,
        values: HashMap<(u64, usize), Bytes>,
        compactions: usize,
    }

    #[derive(Clone, Debug)]
    struct OnShelf(Arc<Mutex<Shelf>>);

    impl OnShelf {
        fn new() -> Self {
            let entry = LogEntry {
                mark: LogMark::default(),
                changes: encode(&[]).unwrap(),
            };
            Self(Arc::new(Mutex::new(Shelf {
                entries: vec![entry],
                snapshot: Some(LogSnapshot::empty().unwrap()),
                ..Shelf::default()
            })))
        }

        fn open(&self, session: &str) -> SharedQueue {
            let limits = QueueLimits::default();
            let log = Box::new(self.clone());
            SharedQueue::open(log, limits, session, LeaseClock::Caller).unwrap()
        }
    }

    impl Log for OnShelf {
        fn read(&mut self, from: u64) -> Result<LogPage, StoreError> {
            let shelf = self.0.lock().unwrap();
            let later = shelf.entries.iter().filter(|e| e.mark.position >= from);
            let mut entries: Vec<LogEntry> = later.take(4).cloned().collect();
            let more = entries.len() == 4;
            entries.truncate(3);
            Ok(LogPage {
                now_ms: 0,
                snapshot: shelf.snapshot.as_ref().unwrap().position,
                entries,
                more,
            })
        }

        fn snapshot(&mut self) -> Result<LogSnapshot, StoreError> {
            Ok(self.0.lock().unwrap().snapshot.clone().unwrap())
        }

        fn append(&mut self, after: &LogMark, write: &LogWrite) -> Result<bool, StoreError> {
            let mut shelf = self.0.lock().unwrap();
            if shelf.entries.last().unwrap().mark != *after {
                return Ok(false);
            }
            shelf.entries.push(write.entry.clone());
            for (row, field, value) in &write.values {
                shelf.values.insert((*row, *field), value.clone());
            }
            shelf
                .values
                .retain(|(row, _), _| !write.finished.contains(row));
            Ok(true)
        }

        fn compact(&mut self, snapshot: &LogSnapshot, keep_from: u64) -> Result<(), StoreError> {
            let mut shelf = self.0.lock().unwrap();
            shelf.snapshot = Some(snapshot.clone());
            shelf.entries.retain(|e| e.mark.position >= keep_from);
            shelf.compactions += 1;
            Ok(())
        }

        fn values(
            &mut self,
            rows: &[u64],
            fields: &[usize],
        ) -> Result<Vec<(u64, usize, Bytes)>, StoreError> {
            let shelf = self.0.lock().unwrap();
            let all = shelf
                .values
                .iter()
                .map(|((row, field), v)| (*row, *field, v.clone()));
            Ok(all
                .filter(|(row, field, _)| rows.contains(row) && fields.contains(field))
                .collect())
        }
    }

    fn row(key: &str) -> NewRow {
        NewRow::new(key, Field::new("trace", "value"))
    }

    #[test]
    fn each_sees_what_the_other_did() {
        let shelf = OnShelf::new();
        let (a, b) = (shelf.open("a"), shelf.open("b"));
        for n in 0..9 {
            a.put(&[row(&format!("a{n}"))]).unwrap();
        }
        assert_eq!(b.stats().unwrap().rows, 9);
        b.put(&[row("b")]).unwrap();
        assert_eq!(a.stats().unwrap(), b.stats().unwrap());
        assert_eq!(a.read("b", "trace").unwrap().unwrap(), "value");
        let seen = a.wait(0, Duration::ZERO).unwrap();
        b.remove(&["b".to_owned()]).unwrap();
        assert_ne!(a.wait(seen, Duration::from_secs(300)).unwrap(), seen);
        assert_eq!(a.read("b", "trace").unwrap(), None);
    }

    #[test]
    fn a_log_that_lost_its_end_is_read_again() {
        let shelf = OnShelf::new();
        let (a, b) = (shelf.open("a"), shelf.open("b"));
        a.put(&[row("kept")]).unwrap();
        a.put(&[row("lost")]).unwrap();
        assert_eq!(b.stats().unwrap().rows, 2);
        shelf.0.lock().unwrap().entries.pop();
        b.put(&[row("other")]).unwrap();
        for queue in [&a, &b] {
            assert_eq!(queue.read("lost", "trace").unwrap(), None);
            let keys: Vec<String> = queue
                .rows(None, 9)
                .unwrap()
                .into_iter()
                .map(|r| r.key)
                .collect();
            assert_eq!(keys, ["kept", "other"]);
        }
    }

    #[test]
    fn a_long_log_becomes_a_snapshot() {
        let shelf = OnShelf::new();
        let (a, b) = (shelf.open("a"), shelf.open("b"));
        // Keys that do not compress, so that few calls make a long log.
        let key = |n: usize| {
            let text = |part: usize| blake3::hash(format!("{n} {part}").as_bytes()).to_hex();
            (0..12)
                .map(|part| text(part).to_string())
                .collect::<String>()
        };
        let keys: Vec<String> = (0..6_000).map(key).collect();
        for part in keys.chunks(1_000) {
            a.put(&part.iter().map(|k| row(k)).collect::<Vec<_>>())
                .unwrap();
        }
        a.stats().unwrap();
        let shelved = shelf.0.lock().unwrap().compactions;
        assert!(shelved > 0);
        assert_eq!(b.stats().unwrap().rows, 6_000);
        let late = shelf.open("c");
        assert_eq!(
            late.rows(None, 9_000).unwrap(),
            a.rows(None, 9_000).unwrap()
        );
    }
}
