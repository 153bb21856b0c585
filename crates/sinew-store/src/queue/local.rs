//! A queue in this process: the core behind a lock, with a backing that stores values.

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
use std::time::Duration;

/// Storage of values, which also makes changes durable.
pub(super) trait Backing: Send + Debug {
    /// Makes changes of the state `core` durable: all or none.
    fn write(&mut self, core: &QueueCore, changes: &[Change]) -> Result<(), StoreError>;

    /// Reads values of a row by field number, in that order; missing ones are left out.
    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<Vec<(usize, Bytes)>, StoreError>;
}

/// A queue in this process, whose values are stored in `B`.
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

/// Plans an operation, makes its changes durable, and applies them. On failure the state stays unchanged.
fn change<B: Backing, T>(
    queue: &Local<B>,
    plan: impl FnOnce(&QueueCore) -> Result<(Vec<Change>, T), QueueError>,
) -> Result<T, StoreError> {
    let mut state = guard(&queue.state)?;
    let (changes, value) = plan(&state.core)?;
    if state.persist(changes)? {
        queue.changed.notify_all();
    }
    Ok(value)
}

/// Like [`change`], and returns the number of changes.
fn count<B: Backing>(
    queue: &Local<B>,
    plan: impl FnOnce(&QueueCore) -> Result<Vec<Change>, QueueError>,
) -> Result<usize, StoreError> {
    change(queue, |core| {
        let changes = plan(core)?;
        let count = changes.len();
        Ok((changes, count))
    })
}

impl<B: Backing> State<B> {
    /// Makes changes durable and applies them. Returns whether there were any.
    fn persist(&mut self, changes: Vec<Change>) -> Result<bool, StoreError> {
        if changes.is_empty() {
            return Ok(false);
        }
        self.backing.write(&self.core, &changes)?;
        self.core.apply(changes);
        self.change += 1;
        Ok(true)
    }

    /// Returns the rows of a lease with the values that its consumer needs.
    fn loan(&mut self, consumer: &str, given: PlannedLease) -> Result<LeaseBatch, StoreError> {
        let reader = self.core.known_reader(consumer)?;
        let needs = &self.core.readers[reader].spec.needs;
        let numbers: Vec<usize> = needs.iter().filter_map(|n| self.core.field(n)).collect();
        let mut rows = Vec::with_capacity(given.rows.len());
        for (seq, part) in given.rows {
            let row = &self.core.rows[&seq];
            let values = self.backing.read(seq, &numbers)?;
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
        change(self, |core| core.plan_put(rows))
    }

    fn fill(&self, rows: &[AckedRow]) -> Result<usize, StoreError> {
        change(self, |core| core.plan_fill(rows))
    }

    fn join(&self, consumer: &Consumer) -> Result<(), StoreError> {
        change(self, |core| Ok((core.plan_join(consumer)?, ())))
    }

    fn lease(&self, ask: &RowRequest, now_ms: u64) -> Result<LeaseBatch, StoreError> {
        let mut state = guard(&self.state)?;
        let ended = state.core.plan_expire(now_ms);
        if state.persist(ended)? {
            self.changed.notify_all();
        }
        let Some((changes, given)) = state.core.plan_lease(ask, now_ms)? else {
            return Ok(LeaseBatch::default());
        };
        state.persist(changes)?;
        self.changed.notify_all();
        state.loan(&ask.consumer, given)
    }

    fn ack(
        &self,
        consumer: &str,
        lease: LeaseId,
        rows: &[AckedRow],
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, |core| core.plan_ack(consumer, lease, rows))
    }

    fn release(
        &self,
        consumer: &str,
        lease: LeaseId,
        keys: &[String],
    ) -> Result<ReturnOutcome, StoreError> {
        change(self, |core| {
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
        change(self, |core| {
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
        let until = ReturnKind::Renewed(now_ms.saturating_add(ttl_ms));
        change(self, |core| core.plan_back(consumer, lease, keys, until))
    }

    fn revive(&self, consumer: &str, keys: &[String]) -> Result<usize, StoreError> {
        count(self, |core| core.plan_revive(consumer, keys))
    }

    fn remove(&self, keys: &[String]) -> Result<usize, StoreError> {
        count(self, |core| core.plan_remove(keys))
    }

    fn sweep(&self, keep: usize, now_ms: u64) -> Result<usize, StoreError> {
        change(self, |core| {
            let mut changes = core.plan_expire(now_ms);
            let forgotten = core.plan_forget(keep);
            let count = forgotten.len();
            changes.extend(forgotten);
            Ok((changes, count))
        })
    }

    fn read(&self, key: &str, field: &str) -> Result<Option<Bytes>, StoreError> {
        let state = &mut *guard(&self.state)?;
        let (Some(&seq), Some(field)) = (state.core.by_key.get(key), state.core.field(field))
        else {
            return Ok(None);
        };
        let values = state.backing.read(seq, &[field])?;
        Ok(values.into_iter().next().map(|(_, value)| value))
    }

    fn state(&self, consumer: &str, key: &str) -> Result<Option<RowState>, StoreError> {
        let core = &guard(&self.state)?.core;
        let reader = core.known_reader(consumer)?;
        let row = core.by_key.get(key).and_then(|seq| core.rows.get(seq));
        Ok(row.map(|row| core.state(row, reader)))
    }

    fn rows(&self, after: Option<u64>, limit: usize) -> Result<Vec<RowView>, StoreError> {
        let core = &guard(&self.state)?.core;
        let from = after.map_or(0, |seq| seq.saturating_add(1));
        let rows = core.rows.range(from..).take(limit);
        Ok(rows.map(|(seq, row)| core.view(*seq, row)).collect())
    }

    fn stats(&self) -> Result<QueueStats, StoreError> {
        Ok(guard(&self.state)?.core.stats())
    }

    fn wait(&self, seen: u64, at_most: Duration) -> Result<u64, StoreError> {
        let state = guard(&self.state)?;
        let same = |state: &mut State<B>| state.change == seen;
        let waited = self.changed.wait_timeout_while(state, at_most, same);
        let (state, _) = waited.map_err(|_| StoreError::Poisoned)?;
        Ok(state.change)
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
    fn write(&mut self, _: &QueueCore, changes: &[Change]) -> Result<(), StoreError> {
        for change in changes {
            match change {
                Change::Insert { seq, values, .. } => {
                    self.0.insert(*seq, values.clone());
                }
                Change::Write { seq, field, value } => {
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
        Ok(())
    }

    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<Vec<(usize, Bytes)>, StoreError> {
        let values = self.0.get(&seq);
        let value = |field: &usize| {
            let mut values = values?.iter();
            values.find(|(number, _)| number == field).cloned()
        };
        Ok(fields.iter().filter_map(value).collect())
    }
}
