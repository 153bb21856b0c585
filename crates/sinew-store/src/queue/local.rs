//! A queue of this process: the core behind a lock, with a backing that stores values.

use super::Queue;
use super::core::{Change, QueueCore};
use super::plan::{PlannedLease, ReturnKind};
use super::rows::{
    AckedRow, Consumer, Field, LeaseBatch, LeaseId, LeasedRow, NewRow, PutOutcome, QueueError,
    QueueLimits, QueueStats, ReturnOutcome, RowRequest, RowState, RowView,
};
use crate::error::{StoreError, guard};
use bytes::Bytes;
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Values of a row by field number; missing ones are left out.
pub(super) type RowValues = Vec<(usize, Bytes)>;

/// Storage of values, which also makes changes durable.
pub(super) trait Backing: Send + Debug {
    /// Brings `core` up to date with the changes of other processes. Returns whether there were any.
    fn catch_up(&mut self, core: &mut QueueCore) -> Result<bool, StoreError> {
        let _ = core;
        Ok(false)
    }

    /// Makes changes of the state `core` durable: all or none. Returns `false`, and writes nothing, if
    /// another process has changed the queue since the last [`Backing::catch_up`].
    fn write(&mut self, core: &QueueCore, changes: &[Change]) -> Result<bool, StoreError>;

    /// Reads values of a row, in the order of `fields`.
    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<RowValues, StoreError>;

    /// Reads values of several rows.
    fn read_all(&mut self, rows: &[u64], fields: &[usize]) -> Result<Vec<RowValues>, StoreError> {
        rows.iter().map(|seq| self.read(*seq, fields)).collect()
    }

    /// Returns the time of the last [`Backing::catch_up`] by the clock of leases, in milliseconds. A queue
    /// without a clock follows its caller's.
    fn now_ms(&self, caller_ms: u64) -> u64 {
        caller_ms
    }

    /// Interval at which a waiting call looks for changes of other processes; `None` if there are none.
    fn looks_every(&self) -> Option<Duration> {
        None
    }
}

/// A queue of this process, whose values are stored in `B`.
#[derive(Debug)]
pub struct Local<B> {
    state: Mutex<State<B>>,
    /// Notified of every change.
    changed: Condvar,
}

#[derive(Debug)]
struct State<B> {
    core: QueueCore,
    backing: B,
    /// Number of the last change, from 1.
    change: u64,
}

/// Creates a queue from the restored state and its backing.
pub(super) fn local<B>(core: QueueCore, backing: B) -> Local<B> {
    Local {
        state: Mutex::new(State {
            core,
            backing,
            change: 1,
        }),
        changed: Condvar::new(),
    }
}

/// Plans an operation at a time, makes its changes durable, and applies them. On failure the state stays
/// unchanged. If another process was faster, the operation is planned again for the new state.
fn change<B: Backing, T>(
    queue: &Local<B>,
    caller_ms: u64,
    plan: impl Fn(&QueueCore, u64) -> Result<(Vec<Change>, T), QueueError>,
) -> Result<T, StoreError> {
    let mut state = guard(&queue.state)?;
    loop {
        state.catch_up(&queue.changed)?;
        let now_ms = state.backing.now_ms(caller_ms);
        let (changes, value) = plan(&state.core, now_ms)?;
        if state.persist(changes, &queue.changed)? {
            return Ok(value);
        }
    }
}

/// Like [`change`], and returns the number of changes.
fn count<B: Backing>(
    queue: &Local<B>,
    plan: impl Fn(&QueueCore) -> Result<Vec<Change>, QueueError>,
) -> Result<usize, StoreError> {
    change(queue, 0, |core, _| {
        let changes = plan(core)?;
        let count = changes.len();
        Ok((changes, count))
    })
}

/// Result of an attempt to lease rows.
enum LeaseResult {
    Given(PlannedLease),
    /// No row is ready.
    NoneReady,
    /// Another process was faster, so that the lease has to be planned again.
    Outrun,
}

impl<B: Backing> State<B> {
    /// Applies the changes of other processes, and wakes those who wait for a change.
    fn catch_up(&mut self, changed: &Condvar) -> Result<(), StoreError> {
        if self.backing.catch_up(&mut self.core)? {
            self.change += 1;
            changed.notify_all();
        }
        Ok(())
    }

    /// Makes changes durable, applies them, and wakes those who wait for one. Returns `false` if another
    /// process was faster, so that they have to be planned again.
    fn persist(&mut self, changes: Vec<Change>, changed: &Condvar) -> Result<bool, StoreError> {
        if changes.is_empty() {
            return Ok(true);
        }
        if !self.backing.write(&self.core, &changes)? {
            return Ok(false);
        }
        self.core.apply(changes);
        self.change += 1;
        changed.notify_all();
        Ok(true)
    }

    /// Takes back expired leases, then leases rows.
    fn lease(
        &mut self,
        ask: &RowRequest,
        caller_ms: u64,
        changed: &Condvar,
    ) -> Result<LeaseResult, StoreError> {
        self.catch_up(changed)?;
        let now_ms = self.backing.now_ms(caller_ms);
        let ended = self.core.plan_expire(now_ms);
        if !self.persist(ended, changed)? {
            return Ok(LeaseResult::Outrun);
        }
        let Some((changes, given)) = self.core.plan_lease(ask, now_ms)? else {
            return Ok(LeaseResult::NoneReady);
        };
        if self.persist(changes, changed)? {
            Ok(LeaseResult::Given(given))
        } else {
            Ok(LeaseResult::Outrun)
        }
    }

    /// Returns the rows of a lease with the values that its consumer needs.
    fn loan(&mut self, consumer: &str, given: PlannedLease) -> Result<LeaseBatch, StoreError> {
        let reader = self.core.known_reader(consumer)?;
        let needs = &self.core.readers[reader].spec.needs;
        let numbers: Vec<usize> = needs.iter().filter_map(|n| self.core.field(n)).collect();
        let mut rows = Vec::with_capacity(given.rows.len());
        let chosen: Vec<u64> = given.rows.iter().map(|(seq, _)| *seq).collect();
        let values = self.backing.read_all(&chosen, &numbers)?;
        for ((seq, part), values) in given.rows.into_iter().zip(values) {
            let row = &self.core.rows[&seq];
            let named = |(number, value): (usize, Bytes)| Field {
                name: self.core.names[number].clone(),
                value,
            };
            rows.push(LeasedRow {
                key: row.key.to_string(),
                group: row.group.to_string(),
                attempt: row.claims[reader].attempts,
                tokens: row.tokens,
                version: row.version,
                part,
                fields: values.into_iter().map(named).collect(),
            });
        }
        Ok(LeaseBatch {
            lease: Some(given.lease),
            until_ms: given.until_ms,
            rows,
        })
    }
}

impl<B: Backing> Queue for Local<B> {
    fn put(&self, rows: &[NewRow]) -> Result<Vec<PutOutcome>, StoreError> {
        change(self, 0, |core, _| core.plan_put(rows))
    }

    fn fill(&self, rows: &[AckedRow]) -> Result<usize, StoreError> {
        change(self, 0, |core, _| core.plan_fill(rows))
    }

    fn join(&self, consumer: &Consumer) -> Result<(), StoreError> {
        change(self, 0, |core, _| Ok((core.plan_join(consumer)?, ())))
    }

    fn lease(&self, ask: &RowRequest, now_ms: u64) -> Result<LeaseBatch, StoreError> {
        let mut state = guard(&self.state)?;
        loop {
            match state.lease(ask, now_ms, &self.changed)? {
                LeaseResult::Given(given) => return state.loan(&ask.consumer, given),
                LeaseResult::NoneReady => return Ok(LeaseBatch::default()),
                LeaseResult::Outrun => {}
            }
        }
    }

    fn ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, 0, |core, _| core.plan_ack(consumer, lease, rows))
    }

    fn release(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, 0, |core, _| {
            core.plan_back(consumer, lease, keys, ReturnKind::Released)
        })
    }

    fn fail(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        reason: &str,
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, 0, |core, _| {
            core.plan_back(consumer, lease, keys, ReturnKind::Failed(reason))
        })
    }

    fn renew(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, now_ms, |core, now_ms| {
            let until = ReturnKind::Renewed(now_ms.saturating_add(ttl_ms));
            core.plan_back(consumer, lease, keys, until)
        })
    }

    fn revive(&self, consumer: &str, keys: &[String]) -> Result<usize, StoreError> {
        count(self, |core| core.plan_revive(consumer, keys))
    }

    fn remove(&self, keys: &[String]) -> Result<usize, StoreError> {
        count(self, |core| core.plan_remove(keys))
    }

    fn sweep(&self, keep: usize, now_ms: u64) -> Result<usize, StoreError> {
        change(self, now_ms, |core, now_ms| {
            let mut changes = core.plan_expire(now_ms);
            let forgotten = core.plan_forget(keep);
            let count = forgotten.len();
            changes.extend(forgotten);
            Ok((changes, count))
        })
    }

    fn read(&self, key: &str, field: &str) -> Result<Option<Bytes>, StoreError> {
        let state = &mut *guard(&self.state)?;
        state.catch_up(&self.changed)?;
        let (Some(&seq), Some(field)) = (state.core.by_key.get(key), state.core.field(field))
        else {
            return Ok(None);
        };
        let values = state.backing.read(seq, &[field])?;
        Ok(values.into_iter().next().map(|(_, value)| value))
    }

    fn state(&self, consumer: &str, key: &str) -> Result<Option<RowState>, StoreError> {
        let mut state = guard(&self.state)?;
        state.catch_up(&self.changed)?;
        let core = &state.core;
        let reader = core.known_reader(consumer)?;
        let row = core.by_key.get(key).and_then(|seq| core.rows.get(seq));
        Ok(row.map(|row| core.state(row, reader)))
    }

    fn rows(&self, after: Option<u64>, limit: usize) -> Result<Vec<RowView>, StoreError> {
        let mut state = guard(&self.state)?;
        state.catch_up(&self.changed)?;
        let core = &state.core;
        let from = after.map_or(0, |seq| seq.saturating_add(1));
        let rows = core.rows.range(from..).take(limit);
        Ok(rows.map(|(seq, row)| core.view(*seq, row)).collect())
    }

    fn stats(&self) -> Result<QueueStats, StoreError> {
        let mut state = guard(&self.state)?;
        state.catch_up(&self.changed)?;
        Ok(state.core.stats())
    }

    fn wait(&self, seen: u64, at_most: Duration) -> Result<u64, StoreError> {
        let began = Instant::now();
        let mut state = guard(&self.state)?;
        loop {
            state.catch_up(&self.changed)?;
            let left = at_most.saturating_sub(began.elapsed());
            if state.change != seen || left.is_zero() {
                return Ok(state.change);
            }
            let every = state.backing.looks_every();
            let pause = every.map_or(left, |every| every.min(left));
            let waited = self.changed.wait_timeout(state, pause);
            state = waited.map_err(|_| StoreError::Poisoned)?.0;
        }
    }
}

/// A queue in memory. Producers and holders share its values without copies.
pub type MemoryQueue = Local<Values>;

impl MemoryQueue {
    /// An empty queue.
    pub fn in_memory(limits: QueueLimits) -> Self {
        local(QueueCore::new(limits), Values::default())
    }
}

/// Values in memory, by row.
#[derive(Debug, Default)]
pub struct Values(HashMap<u64, Vec<(usize, Bytes)>>);

impl Backing for Values {
    fn write(&mut self, _: &QueueCore, changes: &[Change]) -> Result<bool, StoreError> {
        for change in changes {
            match change {
                Change::Insert { seq, values, .. } => {
                    self.0.insert(*seq, values.clone());
                }
                Change::Write {
                    seq, field, value, ..
                } => {
                    self.0
                        .entry(*seq)
                        .or_default()
                        .push((*field, value.clone()));
                }
                Change::Finish { seq } | Change::Forget { seq } => {
                    self.0.remove(seq);
                }
                Change::Claim { .. } | Change::NextLease(_) | Change::Join(_) | Change::Name(_) => {
                }
            }
        }
        Ok(true)
    }

    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<RowValues, StoreError> {
        let values = self.0.get(&seq);
        let value = |field: &usize| {
            let mut values = values?.iter();
            values.find(|(number, _)| number == field).cloned()
        };
        Ok(fields.iter().filter_map(value).collect())
    }
}
