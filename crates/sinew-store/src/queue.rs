//! The transfer queue as a pure state machine: rows, leases, acknowledgements.
//!
//! A row is *ready*, then *leased* until a time, then *acked*. A lease that runs out makes its
//! rows ready again; a row that was leased too often without an ack is *dead* and kept for a
//! human. Time is an argument. Every operation is planned first, as a list of [`Change`]s, and
//! applied afterwards, so that a backing can make the changes durable in between.
//!
//! Rows are ordered by their first put. Expired leases are taken back by every lease, so that no timer is
//! needed. Acked rows stay known for duplicates until [`TransferQueue::forget_acked`] forgets them.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One lease: what a consumer was given in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseId(pub u64);

/// Bounds of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueLimits {
    /// Rows that are not acked.
    /// Default 65,536. Above it puts are refused, which holds the producer back.
    pub max_rows: usize,
    /// Their payloads.
    /// Default 1 GiB.
    pub max_bytes: u64,
    /// Leases of one row before it is dead.
    /// Default 8. A row that no consumer survives is dead, and does not stop the others.
    pub max_attempts: u32,
}

impl Default for QueueLimits {
    fn default() -> Self {
        Self {
            max_rows: 65_536,
            max_bytes: 1 << 30,
            max_attempts: 8,
        }
    }
}

/// A row to be put. The same key is the same row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRow {
    /// Unique in the queue, chosen by the producer.
    pub key: String,
    /// Opaque to the queue.
    pub payload: Vec<u8>,
}

/// What became of a row that was put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It was added, ready.
    New,
    /// The key is known, in whatever state; the row was not changed.
    Duplicate,
}

/// Where a row stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowState {
    /// It may be leased.
    Ready,
    /// A consumer has it.
    Leased { until_ms: u64, consumer: String },
    /// Done; the payload is gone and the key stays known.
    Acked,
    /// Leased [`QueueLimits::max_attempts`] times without an ack.
    Dead,
}

/// A row as it was given to a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    pub key: String,
    /// Names the delivery in acks, releases and renewals.
    pub lease: LeaseId,
    /// When it is given to another, on the clock of the caller's `now_ms`.
    pub until_ms: u64,
    /// 1 for the first delivery.
    pub attempt: u32,
    /// Of the payload.
    pub bytes: u64,
}

/// Why a queue refuses.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    #[error(
        "the queue is full: {rows} rows of {max_rows}, {bytes} bytes of {max_bytes}; \
         wait until rows are acked"
    )]
    /// Rows that are not acked would exceed a limit; none of the call was put.
    Full {
        rows: usize,
        max_rows: usize,
        bytes: u64,
        max_bytes: u64,
    },
    /// One row alone exceeds the limit of bytes.
    #[error("row {key} has {bytes} bytes, the queue holds {max_bytes}; raise its limit")]
    TooLarge {
        key: String,
        bytes: u64,
        max_bytes: u64,
    },
    /// The row went to another consumer, or was acked by one.
    #[error("row {key} is not held by lease {}: it ran out and the row went to another", lease.0)]
    LeaseLost { key: String, lease: LeaseId },
    /// No row has this key, or it was forgotten.
    #[error("row {key} is not in the queue")]
    UnknownRow { key: String },
    /// A lease of no rows.
    #[error("no rows asked for; max_rows must be 1 or more")]
    NothingAsked,
    /// A consumer chose a row that it cannot have.
    #[error("row {key} is not ready: it is leased, acked or dead")]
    NotReady { key: String },
}

/// How many rows stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStats {
    /// Rows that may be leased.
    pub ready: usize,
    /// Rows that consumers hold.
    pub leased: usize,
    /// Rows that are done and still known.
    pub acked: usize,
    /// Rows that are left to a person.
    pub dead: usize,
    /// Payloads of rows that are not acked.
    pub bytes: u64,
}

/// One row's transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A new row.
    Insert { seq: u64, row: Row },
    /// Another state of a row.
    Set { seq: u64, row: Row },
    /// The row and its key go.
    Forget { seq: u64 },
    /// The next lease's number.
    NextLease(u64),
}

/// A row without its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// As put.
    pub(crate) key: String,
    pub(crate) bytes: u64,
    /// Where it stands.
    pub(crate) state: RowState,
    /// Deliveries so far, without those that were released.
    pub(crate) attempts: u32,
    /// The last lease that held it.
    pub(crate) lease: Option<LeaseId>,
}

/// The states of all rows. See the module.
#[derive(Clone, Debug)]
pub struct TransferQueue {
    /// As the queue was made.
    limits: QueueLimits,
    /// By sequence number, which is the order of the first put.
    rows: BTreeMap<u64, Row>,
    /// Sequence numbers.
    by_key: HashMap<String, u64>,
    /// Sequence numbers, so that the oldest is first.
    ready: BTreeSet<u64>,
    /// End of the lease and sequence number, so that those that end first are first.
    leased: BTreeSet<(u64, u64)>,
    /// Sequence numbers.
    acked: BTreeSet<u64>,
    bytes: u64,
    /// Rises for ever, also over restarts.
    next_lease: u64,
}

impl TransferQueue {
    /// An empty queue.
    pub fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            rows: BTreeMap::new(),
            by_key: HashMap::new(),
            ready: BTreeSet::new(),
            leased: BTreeSet::new(),
            acked: BTreeSet::new(),
            bytes: 0,
            next_lease: 0,
        }
    }

    /// Adds rows of the given sizes, all or none. Order is that of the first put.
    pub fn put(&mut self, rows: &[(String, u64)]) -> Result<Vec<Put>, QueueError> {
        let (changes, put) = self.plan_put(rows)?;
        self.apply(changes);
        Ok(put)
    }

    /// Gives up to `max_rows` rows of together up to `max_bytes` (but at least one) to
    /// `consumer` for `ttl_ms`, oldest first. Expired leases are taken back before.
    pub fn lease(
        &mut self,
        consumer: &str,
        max_rows: usize,
        max_bytes: u64,
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Leased>, QueueError> {
        self.expire(now_ms);
        let (changes, leased) = self.plan_lease(consumer, max_rows, max_bytes, ttl_ms, now_ms)?;
        self.apply(changes);
        Ok(leased)
    }

    /// As [`TransferQueue::lease`], for rows that the consumer chose: all of `keys` or none.
    pub fn lease_keys(
        &mut self,
        consumer: &str,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Leased>, QueueError> {
        self.expire(now_ms);
        let (changes, leased) = self.plan_lease_keys(consumer, keys, ttl_ms, now_ms)?;
        self.apply(changes);
        Ok(leased)
    }

    /// Forgets rows that nobody holds and nobody acked, all or none: their keys would be new again.
    pub fn remove(&mut self, keys: &[String]) -> Result<usize, QueueError> {
        let changes = self.plan_remove(keys)?;
        let removed = changes.len();
        self.apply(changes);
        Ok(removed)
    }

    /// Takes rows out of the queue for good, all or none. Acking again is nothing new. A lease
    /// that ran out is honoured as long as nobody else was given the row.
    pub fn ack(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        let changes = self.plan_ack(lease, keys)?;
        let acked = changes.len();
        self.apply(changes);
        Ok(acked)
    }

    /// Gives rows back unused; the delivery does not count as an attempt.
    pub fn release(&mut self, lease: LeaseId, keys: &[String]) -> Result<usize, QueueError> {
        let changes = self.plan_release(lease, keys)?;
        let released = changes.len();
        self.apply(changes);
        Ok(released)
    }

    /// Extends a lease to `now_ms + ttl_ms`. All or none of `keys`.
    pub fn renew(
        &mut self,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<(), QueueError> {
        let changes = self.plan_renew(lease, keys, ttl_ms, now_ms)?;
        self.apply(changes);
        Ok(())
    }

    /// Takes back what leases that ended at or before `now_ms` hold; returns how many rows.
    pub fn expire(&mut self, now_ms: u64) -> usize {
        let changes = self.plan_expire(now_ms);
        let expired = changes.len();
        self.apply(changes);
        expired
    }

    /// Forgets the oldest acked rows beyond `keep`. A key that is forgotten would be new again.
    pub fn forget_acked(&mut self, keep: usize) -> usize {
        let changes = self.plan_forget(keep);
        let forgotten = changes.len();
        self.apply(changes);
        forgotten
    }

    /// Where a row stands; `None` if it is not known.
    pub fn state(&self, key: &str) -> Option<&RowState> {
        let seq = self.by_key.get(key)?;
        self.rows.get(seq).map(|r| &r.state)
    }

    /// Every row that is known, oldest first.
    pub fn rows(&self) -> impl Iterator<Item = (&str, &RowState)> {
        self.rows.values().map(|r| (r.key.as_str(), &r.state))
    }

    /// Keys of dead rows, oldest first.
    pub fn dead(&self) -> impl Iterator<Item = &str> {
        let dead = self.rows.values().filter(|r| r.state == RowState::Dead);
        dead.map(|r| r.key.as_str())
    }

    /// How many rows stand where.
    pub fn stats(&self) -> QueueStats {
        let (ready, leased, acked) = (self.ready.len(), self.leased.len(), self.acked.len());
        QueueStats {
            ready,
            leased,
            acked,
            dead: self.rows.len() - ready - leased - acked,
            bytes: self.bytes,
        }
    }

    /// The changes of [`TransferQueue::put`], without applying them; so with the other plans.
    pub(crate) fn plan_put(
        &self,
        rows: &[(String, u64)],
    ) -> Result<(Vec<Change>, Vec<Put>), QueueError> {
        let mut changes = Vec::new();
        let mut put = Vec::with_capacity(rows.len());
        let mut new_keys = BTreeSet::new();
        let mut bytes = self.bytes;
        let live = self.rows.len() - self.acked.len();
        let first = self.rows.last_key_value().map_or(0, |(seq, _)| seq + 1);
        for (key, size) in rows {
            if self.by_key.contains_key(key) || !new_keys.insert(key) {
                put.push(Put::Duplicate);
                continue;
            }
            if *size > self.limits.max_bytes {
                return Err(QueueError::TooLarge {
                    key: key.clone(),
                    bytes: *size,
                    max_bytes: self.limits.max_bytes,
                });
            }
            bytes += size;
            let row = Row {
                key: key.clone(),
                bytes: *size,
                state: RowState::Ready,
                attempts: 0,
                lease: None,
            };
            let seq = first + changes.len() as u64;
            changes.push(Change::Insert { seq, row });
            put.push(Put::New);
        }
        let count = live + changes.len();
        let over = count > self.limits.max_rows || bytes > self.limits.max_bytes;
        if over && !changes.is_empty() {
            return Err(QueueError::Full {
                rows: live,
                max_rows: self.limits.max_rows,
                bytes: self.bytes,
                max_bytes: self.limits.max_bytes,
            });
        }
        Ok((changes, put))
    }

    /// Expired leases must have been taken back.
    pub(crate) fn plan_lease(
        &self,
        consumer: &str,
        max_rows: usize,
        max_bytes: u64,
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<(Vec<Change>, Vec<Leased>), QueueError> {
        if max_rows == 0 {
            return Err(QueueError::NothingAsked);
        }
        let mut bytes = 0u64;
        let mut first = true;
        let fits = |seq: &&u64| {
            bytes = bytes.saturating_add(self.rows[*seq].bytes);
            std::mem::take(&mut first) || bytes <= max_bytes
        };
        let chosen: Vec<u64> = self
            .ready
            .iter()
            .take(max_rows)
            .take_while(fits)
            .copied()
            .collect();
        Ok(self.give(consumer, &chosen, ttl_ms, now_ms))
    }

    /// Expired leases must have been taken back.
    pub(crate) fn plan_lease_keys(
        &self,
        consumer: &str,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<(Vec<Change>, Vec<Leased>), QueueError> {
        let chosen = self.idle(keys, |state| *state == RowState::Ready)?;
        Ok(self.give(consumer, &chosen, ttl_ms, now_ms))
    }

    /// Changes of [`TransferQueue::remove`].
    pub(crate) fn plan_remove(&self, keys: &[String]) -> Result<Vec<Change>, QueueError> {
        let idle = |state: &RowState| matches!(state, RowState::Ready | RowState::Dead);
        let chosen = self.idle(keys, idle)?;
        Ok(chosen.iter().map(|&seq| Change::Forget { seq }).collect())
    }

    /// The rows of `keys`, each once, if `fits` holds for all of them.
    fn idle(
        &self,
        keys: &[String],
        fits: impl Fn(&RowState) -> bool,
    ) -> Result<Vec<u64>, QueueError> {
        let mut chosen = BTreeSet::new();
        for key in keys {
            let unknown = || QueueError::UnknownRow { key: key.clone() };
            let &seq = self.by_key.get(key).ok_or_else(unknown)?;
            if !fits(&self.rows[&seq].state) {
                return Err(QueueError::NotReady { key: key.clone() });
            }
            chosen.insert(seq);
        }
        Ok(chosen.into_iter().collect())
    }

    /// One lease on ready rows.
    fn give(
        &self,
        consumer: &str,
        chosen: &[u64],
        ttl_ms: u64,
        now_ms: u64,
    ) -> (Vec<Change>, Vec<Leased>) {
        let lease = LeaseId(self.next_lease);
        let until_ms = now_ms.saturating_add(ttl_ms);
        let mut changes = Vec::new();
        let mut leased: Vec<Leased> = Vec::new();
        for &seq in chosen {
            let mut row = self.rows[&seq].clone();
            row.attempts += 1;
            row.lease = Some(lease);
            row.state = RowState::Leased {
                until_ms,
                consumer: consumer.to_owned(),
            };
            leased.push(Leased {
                key: row.key.clone(),
                lease,
                until_ms,
                attempt: row.attempts,
                bytes: row.bytes,
            });
            changes.push(Change::Set { seq, row });
        }
        if !leased.is_empty() {
            changes.push(Change::NextLease(self.next_lease + 1));
        }
        (changes, leased)
    }

    /// Changes of [`TransferQueue::ack`].
    pub(crate) fn plan_ack(
        &self,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<Vec<Change>, QueueError> {
        let to_acked = |row: &mut Row| {
            let again = row.state == RowState::Acked;
            row.state = RowState::Acked;
            !again
        };
        self.plan_held(lease, keys, to_acked)
    }

    /// Changes of [`TransferQueue::release`].
    pub(crate) fn plan_release(
        &self,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<Vec<Change>, QueueError> {
        let to_ready = |row: &mut Row| {
            let held = matches!(row.state, RowState::Leased { .. });
            if held {
                row.state = RowState::Ready;
                row.attempts -= 1;
                row.lease = None;
            }
            held
        };
        self.plan_held(lease, keys, to_ready)
    }

    /// Changes of [`TransferQueue::renew`].
    pub(crate) fn plan_renew(
        &self,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Change>, QueueError> {
        let end = now_ms.saturating_add(ttl_ms);
        let extend = |row: &mut Row| match &mut row.state {
            RowState::Leased { until_ms, .. } => {
                *until_ms = end;
                true
            }
            _ => false,
        };
        let changes = self.plan_held(lease, keys, extend)?;
        // A row that expiry took back can be acked, but no longer kept from others.
        let lost = keys
            .iter()
            .find(|k| !matches!(self.state(k), Some(RowState::Leased { .. })));
        match lost {
            Some(key) => Err(QueueError::LeaseLost {
                key: key.clone(),
                lease,
            }),
            None => Ok(changes),
        }
    }

    /// Changes rows whose last lease is `lease`; those that `change` declines stay.
    fn plan_held(
        &self,
        lease: LeaseId,
        keys: &[String],
        change: impl Fn(&mut Row) -> bool,
    ) -> Result<Vec<Change>, QueueError> {
        let mut changes = Vec::new();
        let mut seen = BTreeSet::new();
        for key in keys {
            let unknown = || QueueError::UnknownRow { key: key.clone() };
            let &seq = self.by_key.get(key).ok_or_else(unknown)?;
            let mut row = self.rows[&seq].clone();
            if row.lease != Some(lease) {
                return Err(QueueError::LeaseLost {
                    key: key.clone(),
                    lease,
                });
            }
            if seen.insert(seq) && change(&mut row) {
                changes.push(Change::Set { seq, row });
            }
        }
        Ok(changes)
    }

    /// Changes of [`TransferQueue::expire`].
    pub(crate) fn plan_expire(&self, now_ms: u64) -> Vec<Change> {
        let ended = self.leased.range(..=(now_ms, u64::MAX));
        let take_back = |&(_, seq): &(u64, u64)| {
            let mut row = self.rows[&seq].clone();
            row.state = if row.attempts >= self.limits.max_attempts {
                RowState::Dead
            } else {
                RowState::Ready
            };
            Change::Set { seq, row }
        };
        ended.map(take_back).collect()
    }

    /// Changes of [`TransferQueue::forget_acked`].
    pub(crate) fn plan_forget(&self, keep: usize) -> Vec<Change> {
        let surplus = self.acked.len().saturating_sub(keep);
        // The newest row stays known, as its number bounds the next one's.
        let newest = self.rows.last_key_value().map(|(seq, _)| *seq);
        let old = self.acked.iter().take(surplus).copied();
        old.filter(|seq| Some(*seq) != newest)
            .map(|seq| Change::Forget { seq })
            .collect()
    }

    /// Applies what was planned. The changes must be of the state as it is now.
    pub(crate) fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Insert { seq, row } | Change::Set { seq, row } => {
                    self.unlink(seq);
                    self.link(seq, row);
                }
                Change::Forget { seq } => self.unlink(seq),
                Change::NextLease(next) => self.next_lease = next,
            }
        }
    }

    /// Takes a row out of the indexes of its state.
    fn unlink(&mut self, seq: u64) {
        let Some(row) = self.rows.remove(&seq) else {
            return;
        };
        self.by_key.remove(&row.key);
        match &row.state {
            RowState::Ready => {
                self.ready.remove(&seq);
            }
            RowState::Leased { until_ms, .. } => {
                self.leased.remove(&(*until_ms, seq));
            }
            RowState::Acked => {
                self.acked.remove(&seq);
            }
            RowState::Dead => {}
        }
        if row.state != RowState::Acked {
            self.bytes -= row.bytes;
        }
    }

    /// Puts a row into the indexes of its state.
    fn link(&mut self, seq: u64, row: Row) {
        match &row.state {
            RowState::Ready => {
                self.ready.insert(seq);
            }
            RowState::Leased { until_ms, .. } => {
                self.leased.insert((*until_ms, seq));
            }
            RowState::Acked => {
                self.acked.insert(seq);
            }
            RowState::Dead => {}
        }
        if row.state != RowState::Acked {
            self.bytes += row.bytes;
        }
        self.by_key.insert(row.key.clone(), seq);
        self.rows.insert(seq, row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(max_rows: usize, max_bytes: u64) -> TransferQueue {
        TransferQueue::new(QueueLimits {
            max_rows,
            max_bytes,
            max_attempts: 2,
        })
    }

    fn row(key: &str, bytes: u64) -> (String, u64) {
        (key.to_owned(), bytes)
    }

    fn keys(leased: &[Leased]) -> Vec<String> {
        leased.iter().map(|l| l.key.clone()).collect()
    }

    #[test]
    fn leases_run_out_and_late_acks_count_until_redelivery() {
        let mut q = queue(10, 100);
        q.put(&[row("a", 1), row("b", 1)]).unwrap();
        let first = q.lease("t", 1, 100, 10, 0).unwrap();
        assert_eq!(keys(&first), ["a"]);
        assert_eq!(q.expire(9), 0);
        assert_eq!(q.expire(10), 1);
        let late = first[0].lease;
        let second = q.lease("t", 1, 100, 10, 11).unwrap();
        assert_eq!((second[0].key.as_str(), second[0].attempt), ("a", 2));
        assert!(matches!(
            q.ack(late, &keys(&first)),
            Err(QueueError::LeaseLost { .. })
        ));
        q.expire(100);
        assert_eq!(q.state("a"), Some(&RowState::Dead));
        assert_eq!(q.ack(second[0].lease, &keys(&second)), Ok(1));
        assert_eq!(q.ack(second[0].lease, &keys(&second)), Ok(0));
        assert_eq!(q.put(&[row("a", 1)]).unwrap(), [Put::Duplicate]);
    }

    #[test]
    fn limits_push_back_and_nothing_is_half_put() {
        let mut q = queue(2, 10);
        assert!(matches!(
            q.put(&[row("a", 1), row("big", 11)]),
            Err(QueueError::TooLarge { .. })
        ));
        assert_eq!(q.stats(), QueueStats::default());
        q.put(&[row("a", 6)]).unwrap();
        for rows in [vec![row("b", 5)], vec![row("b", 1), row("c", 1)]] {
            assert!(matches!(q.put(&rows), Err(QueueError::Full { .. })));
        }
        assert_eq!(q.put(&[row("a", 6)]).unwrap(), [Put::Duplicate]);
        let leased = q.lease("t", 1, 1, 10, 0).unwrap();
        assert_eq!(leased.len(), 1, "one row, even if it is larger than asked");
        q.ack(leased[0].lease, &keys(&leased)).unwrap();
        assert_eq!(q.put(&[row("b", 5), row("c", 5)]).unwrap().len(), 2);
    }

    #[test]
    fn released_rows_come_first_again_and_do_not_wear_out() {
        let mut q = queue(10, 100);
        q.put(&[row("a", 1), row("b", 1)]).unwrap();
        for _ in 0..5 {
            let leased = q.lease("t", 1, 100, 10, 0).unwrap();
            assert_eq!((keys(&leased), leased[0].attempt), (vec!["a".into()], 1));
            q.release(leased[0].lease, &keys(&leased)).unwrap();
        }
        assert!(matches!(
            q.lease("t", 0, 100, 10, 0),
            Err(QueueError::NothingAsked)
        ));
    }

    #[test]
    fn renewed_leases_last_longer() {
        let mut q = queue(10, 100);
        q.put(&[row("a", 1)]).unwrap();
        let leased = q.lease("t", 1, 100, 10, 0).unwrap();
        q.renew(leased[0].lease, &keys(&leased), 10, 5).unwrap();
        assert_eq!(q.expire(10), 0);
        assert_eq!(q.expire(15), 1);
        assert!(q.renew(leased[0].lease, &keys(&leased), 10, 15).is_err());
    }

    #[test]
    fn forgetting_is_bounded_and_keeps_order() {
        let mut q = queue(10, 100);
        q.put(&[row("a", 1), row("b", 1), row("c", 1)]).unwrap();
        let leased = q.lease("t", 3, 100, 10, 0).unwrap();
        q.ack(leased[0].lease, &keys(&leased)).unwrap();
        assert_eq!(q.forget_acked(0), 2, "the newest stays");
        assert_eq!(
            q.put(&[row("a", 1), row("c", 1)]).unwrap(),
            [Put::New, Put::Duplicate]
        );
    }
}
