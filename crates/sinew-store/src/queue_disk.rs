//! [`DiskQueue`]: the transfer queue with its rows in the store's index file.
//!
//! A call plans its changes on the state in memory, writes them in one synchronized transaction, and applies
//! them to the state afterwards. If the write fails the state is as before, and the call is an error.

use crate::codec;
use crate::disk::DiskStore;
use crate::error::{StoreError, guard};
use crate::index;
use crate::queue::{
    Change, LeaseId, Leased, Put, QueueError, QueueLimits, QueueRow, QueueStats, Row, RowState,
    TransferQueue,
};
use crate::remake;
use crate::schema;
use crate::sums;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};

/// Column `state` of a row.
const READY: i64 = 0;
/// With `until_ms` and `consumer`.
const LEASED: i64 = 1;
/// Without a payload.
pub(crate) const ACKED: i64 = 2;
/// With its payload, for a person to look at.
const DEAD: i64 = 3;

/// A row with its payload, as it was given to a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// Key, lease and attempt.
    pub row: Leased,
    /// As it was put.
    pub payload: Vec<u8>,
}

impl Delivery {
    /// The payload of a row made by [`QueueRow::of`].
    pub fn decode<T: DeserializeOwned>(&self) -> Result<T, StoreError> {
        decode(&self.row.key, &self.payload)
    }
}

/// Decodes a payload: codec, length before compression (4 bytes, little-endian), bytes.
fn decode<T: DeserializeOwned>(key: &str, payload: &[u8]) -> Result<T, StoreError> {
    let corrupt = |reason: String| StoreError::Corrupt {
        path: schema::FILE_NAME.into(),
        offset: 0,
        reason: format!("row {key}: {reason}"),
    };
    let [codec, a, b, c, d, bytes @ ..] = payload else {
        return Err(corrupt("shorter than its header".into()));
    };
    let raw_len = u32::from_le_bytes([*a, *b, *c, *d]);
    codec::decode(*codec, raw_len, bytes).map_err(corrupt)
}

impl QueueRow {
    /// A row that holds `value`, encoded and compressed.
    pub fn of<T: Serialize>(key: impl Into<String>, value: &T) -> Result<Self, StoreError> {
        let key = key.into();
        let encoded = codec::encode(value, true).map_err(|reason| StoreError::Encode {
            episode: sinew_types::EpisodeId::new(key.clone()),
            reason,
        })?;
        let mut payload = vec![encoded.codec as u8];
        payload.extend(encoded.raw_len.to_le_bytes());
        payload.extend(encoded.bytes);
        Ok(Self { key, payload })
    }
}

/// A [`TransferQueue`] whose every change is on the medium before a call returns. States are
/// kept in memory, payloads are not.
#[derive(Debug)]
pub struct DiskQueue {
    /// Queues of one store are told apart by it.
    name: String,
    /// Taken before the store's locks.
    state: Mutex<TransferQueue>,
    /// The store's index.
    connection: Arc<Mutex<Connection>>,
}

impl DiskStore {
    /// Opens the queue `name` in this store, or makes one. Leases of before are still valid
    /// until they run out. A queue is opened once at a time.
    pub fn queue(&self, name: &str, limits: QueueLimits) -> Result<DiskQueue, StoreError> {
        remake::has_queues(&self.directory)?;
        DiskQueue::open(name, limits, Arc::clone(&self.connection))
    }
}

impl DiskQueue {
    /// A queue that dies with the process.
    pub fn in_memory(limits: QueueLimits) -> Result<Self, StoreError> {
        let connection = Arc::new(Mutex::new(index::in_memory()?));
        Self::open("memory", limits, connection)
    }

    /// Loads the states of all rows; payloads stay on the medium.
    fn open(
        name: &str,
        limits: QueueLimits,
        connection: Arc<Mutex<Connection>>,
    ) -> Result<Self, StoreError> {
        let mut state = TransferQueue::new(limits);
        state.apply(load(&*guard(&connection)?, name)?);
        Ok(Self {
            name: name.to_owned(),
            state: Mutex::new(state),
            connection,
        })
    }

    /// See [`TransferQueue::put`].
    pub fn put(&self, rows: &[QueueRow]) -> Result<Vec<Put>, StoreError> {
        let sizes = rows.iter().map(|r| (r.key.clone(), r.payload.len() as u64));
        let mut state = guard(&self.state)?;
        let (changes, put) = state.plan_put(&sizes.collect::<Vec<_>>())?;
        let mut payloads = HashMap::new();
        for row in rows {
            payloads.entry(row.key.as_str()).or_insert(&row.payload[..]);
        }
        self.persist(&mut state, changes, &payloads)?;
        Ok(put)
    }

    /// See [`TransferQueue::lease`].
    pub fn lease(
        &self,
        consumer: &str,
        max_rows: usize,
        max_bytes: u64,
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Delivery>, StoreError> {
        let mut state = guard(&self.state)?;
        let expired = state.plan_expire(now_ms);
        self.persist(&mut state, expired, &HashMap::new())?;
        let (changes, leased) = state.plan_lease(consumer, max_rows, max_bytes, ttl_ms, now_ms)?;
        self.persist(&mut state, changes, &HashMap::new())?;
        drop(state);
        self.deliver(leased)
    }

    /// See [`TransferQueue::lease_keys`].
    pub fn lease_keys(
        &self,
        consumer: &str,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<Vec<Delivery>, StoreError> {
        let mut state = guard(&self.state)?;
        let expired = state.plan_expire(now_ms);
        self.persist(&mut state, expired, &HashMap::new())?;
        let (changes, leased) = state.plan_lease_keys(consumer, keys, ttl_ms, now_ms)?;
        self.persist(&mut state, changes, &HashMap::new())?;
        drop(state);
        self.deliver(leased)
    }

    /// See [`TransferQueue::remove`].
    pub fn remove(&self, keys: &[String]) -> Result<usize, StoreError> {
        self.change(|state| state.plan_remove(keys))
    }

    /// Every row that is known, oldest first.
    pub fn rows(&self) -> Result<Vec<(String, RowState)>, StoreError> {
        let state = guard(&self.state)?;
        Ok(state
            .rows()
            .map(|(k, s)| (k.to_owned(), s.clone()))
            .collect())
    }

    /// The payload of a row made by [`QueueRow::of`]; `None` if it is not known or was acked.
    pub fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, StoreError> {
        let connection = guard(&self.connection)?;
        let mut query = connection
            .prepare_cached("SELECT payload FROM queue_rows WHERE queue = ?1 AND key = ?2")?;
        let found: Option<Option<Vec<u8>>> = query
            .query_row(params![self.name, key], |r| r.get(0))
            .optional()?;
        found
            .flatten()
            .map(|payload| decode(key, &payload))
            .transpose()
    }

    /// Reads the payloads of rows that were just leased.
    fn deliver(&self, leased: Vec<Leased>) -> Result<Vec<Delivery>, StoreError> {
        let connection = guard(&self.connection)?;
        let mut query = connection
            .prepare_cached("SELECT payload FROM queue_rows WHERE queue = ?1 AND key = ?2")?;
        let mut deliver = |row: Leased| {
            let payload = query.query_row(params![self.name, row.key], |r| r.get(0))?;
            Ok(Delivery { row, payload })
        };
        leased.into_iter().map(&mut deliver).collect()
    }

    /// See [`TransferQueue::ack`].
    pub fn ack(&self, lease: LeaseId, keys: &[String]) -> Result<usize, StoreError> {
        self.change(|state| state.plan_ack(lease, keys))
    }

    /// See [`TransferQueue::release`].
    pub fn release(&self, lease: LeaseId, keys: &[String]) -> Result<usize, StoreError> {
        self.change(|state| state.plan_release(lease, keys))
    }

    /// See [`TransferQueue::renew`].
    pub fn renew(
        &self,
        lease: LeaseId,
        keys: &[String],
        ttl_ms: u64,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        self.change(|state| state.plan_renew(lease, keys, ttl_ms, now_ms))?;
        Ok(())
    }

    /// See [`TransferQueue::expire`].
    pub fn expire(&self, now_ms: u64) -> Result<usize, StoreError> {
        self.change(|state| Ok(state.plan_expire(now_ms)))
    }

    /// See [`TransferQueue::forget_acked`].
    pub fn forget_acked(&self, keep: usize) -> Result<usize, StoreError> {
        self.change(|state| Ok(state.plan_forget(keep)))
    }

    /// Whether a lease still holds a row.
    pub fn holds(&self, lease: LeaseId, key: &str) -> Result<bool, StoreError> {
        let state = guard(&self.state)?;
        Ok(state.plan_release(lease, &[key.to_owned()]).is_ok())
    }

    /// Where a row stands; `None` if it is not known.
    pub fn state(&self, key: &str) -> Result<Option<RowState>, StoreError> {
        Ok(guard(&self.state)?.state(key).cloned())
    }

    /// How many rows stand where.
    pub fn stats(&self) -> Result<QueueStats, StoreError> {
        Ok(guard(&self.state)?.stats())
    }

    /// Plans, persists and applies one operation. Returns the number of changed rows.
    fn change(
        &self,
        plan: impl FnOnce(&TransferQueue) -> Result<Vec<Change>, QueueError>,
    ) -> Result<usize, StoreError> {
        let mut state = guard(&self.state)?;
        let changes = plan(&state)?;
        let count = changes.len();
        self.persist(&mut state, changes, &HashMap::new())?;
        Ok(count)
    }

    /// Writes changes durably, then applies them. `payloads` holds those of new rows, by key.
    fn persist(
        &self,
        state: &mut TransferQueue,
        changes: Vec<Change>,
        payloads: &HashMap<&str, &[u8]>,
    ) -> Result<(), StoreError> {
        if changes.is_empty() {
            return Ok(());
        }
        index::durably(&mut *guard(&self.connection)?, |tx| {
            let mut each = changes.iter();
            each.try_for_each(|change| write(tx, &self.name, change, payloads))
        })?;
        state.apply(changes);
        Ok(())
    }
}

/// Writes one change within a transaction.
fn write(
    tx: &Transaction<'_>,
    queue: &str,
    change: &Change,
    payloads: &HashMap<&str, &[u8]>,
) -> Result<(), StoreError> {
    match change {
        Change::Insert { seq, row } => {
            let payload = payloads.get(row.key.as_str()).copied().unwrap_or_default();
            let mut insert = tx.prepare_cached(
                "INSERT INTO queue_rows (queue, seq, key, bytes, state, until_ms, consumer,
                    attempts, payload) VALUES (?1, ?2, ?3, ?4, ?5, 0, '', 0, ?6)",
            )?;
            let bytes = crate::signed::signed("bytes", row.bytes)?;
            let seq = crate::signed::signed("seq", *seq)?;
            insert.execute(params![queue, seq, row.key, bytes, READY, payload])?;
            seal_row(tx, queue, seq)?;
        }
        Change::Set { seq, row } => {
            let (state, until_ms, consumer) = match &row.state {
                RowState::Ready => (READY, 0, ""),
                RowState::Leased { until_ms, consumer } => (LEASED, *until_ms, &consumer[..]),
                RowState::Acked => (ACKED, 0, ""),
                RowState::Dead => (DEAD, 0, ""),
            };
            let mut update = tx.prepare_cached(
                "UPDATE queue_rows SET state = ?3, until_ms = ?4, consumer = ?5, attempts = ?6,
                    lease = ?7, payload = CASE WHEN ?3 = 2 THEN NULL ELSE payload END
                 WHERE queue = ?1 AND seq = ?2",
            )?;
            update.execute(params![
                queue,
                crate::signed::signed("seq", *seq)?,
                state,
                // A lease "for ever" ends when SQLite's integers do.
                i64::try_from(until_ms).unwrap_or(i64::MAX),
                consumer,
                row.attempts,
                row.lease
                    .map(|l| crate::signed::signed("lease", l.0))
                    .transpose()?,
            ])?;
            seal_row(tx, queue, crate::signed::signed("seq", *seq)?)?;
        }
        Change::Forget { seq } => {
            tx.execute(
                "DELETE FROM queue_rows WHERE queue = ?1 AND seq = ?2",
                params![queue, crate::signed::signed("seq", *seq)?],
            )?;
        }
        Change::NextLease(next) => {
            tx.execute(
                "INSERT INTO queues (queue, next_lease) VALUES (?1, ?2)
                 ON CONFLICT (queue) DO UPDATE SET next_lease = excluded.next_lease",
                params![queue, crate::signed::signed("lease", *next)?],
            )?;
            sums::seal(tx, "queues", "queue = ?1", &[&queue])?;
        }
    }
    Ok(())
}

/// Renews the checksum of a row.
fn seal_row(tx: &Transaction<'_>, queue: &str, seq: i64) -> Result<(), StoreError> {
    sums::seal(tx, "queue_rows", "queue = ?1 AND seq = ?2", &[&queue, &seq])
}

/// The rows of a queue as changes of an empty one.
fn load(connection: &Connection, queue: &str) -> Result<Vec<Change>, StoreError> {
    let next: Option<i64> = connection
        .query_row(
            "SELECT next_lease FROM queues WHERE queue = ?1",
            [queue],
            |r| r.get(0),
        )
        .optional()?;
    let mut query = connection.prepare(
        "SELECT seq, key, bytes, state, until_ms, consumer, attempts, lease
         FROM queue_rows WHERE queue = ?1 ORDER BY seq",
    )?;
    let rows = query.query_map([queue], |r| {
        let number = |column| r.get::<_, i64>(column).map(|v| v.max(0) as u64);
        let state = match r.get("state")? {
            LEASED => RowState::Leased {
                until_ms: number("until_ms")?,
                consumer: r.get("consumer")?,
            },
            ACKED => RowState::Acked,
            DEAD => RowState::Dead,
            _ => RowState::Ready,
        };
        let lease: Option<i64> = r.get("lease")?;
        Ok(Change::Insert {
            seq: number("seq")?,
            row: Row {
                key: r.get("key")?,
                bytes: number("bytes")?,
                state,
                attempts: r.get("attempts")?,
                lease: lease.map(|l| LeaseId(l.max(0) as u64)),
            },
        })
    })?;
    let mut changes: Vec<Change> = rows.collect::<Result<_, _>>()?;
    changes.push(Change::NextLease(next.unwrap_or(0).max(0) as u64));
    Ok(changes)
}
