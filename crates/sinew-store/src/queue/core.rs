//! States of all rows without their values: their state for each consumer, and the ends of leases.
//!
//! Only [`QueueCore::apply`] changes the state. A backing stores its [`Change`]s durably, and restores the
//! state from them. The same changes in the same order make the same state in every process.

use super::rows::{Consumer, ConsumerStats, QueueLimits, QueueStats, RowState, RowView};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// A state change. Its encoded form has no values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Change {
    /// A new row with its values, by field number. Rows that are restored have no values.
    Insert {
        seq: u64,
        row: Row,
        #[serde(skip)]
        values: Vec<(usize, Bytes)>,
    },
    /// Sets a row's state for a consumer, by consumer number.
    Claim {
        seq: u64,
        reader: usize,
        claim: Claim,
    },
    /// A consumer writes a field of a row, of so many bytes.
    Write {
        seq: u64,
        field: usize,
        bytes: u64,
        #[serde(skip)]
        value: Bytes,
    },
    /// Deletes the values of a row.
    Finish { seq: u64 },
    /// Deletes the row and its key.
    Forget { seq: u64 },
    /// Sets the number of the next lease.
    NextLease(u64),
    /// Adds a consumer; its number is the count of earlier consumers.
    Join(Consumer),
    /// Adds a field name; its number is the count of earlier names.
    Name(String),
}

/// A row without its values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Row {
    /// Key as put; `size`, `priority`, `tokens` and `version` are as put, too.
    pub(super) key: Arc<str>,
    /// Group name; the row's own key if it has no group.
    pub(super) group: Arc<str>,
    /// Number of the group: the sequence number of its first row. Several groups can use a name one after the
    /// other.
    pub(super) unit: u64,
    pub(super) size: u32,
    pub(super) priority: i32,
    pub(super) tokens: u64,
    pub(super) version: u64,
    /// Bit set of the fields that the row has.
    pub(super) fields: u64,
    /// Bytes of all fields; 0 after the row is done.
    pub(super) bytes: u64,
    pub(super) done: bool,
    /// States by consumer number. Consumers that joined later and never had the row are missing.
    pub(super) claims: Vec<Claim>,
}

/// A row's state for one consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) hold: Hold,
    /// The last lease of the row; `None` after a release or a failure.
    pub(super) lease: Option<u64>,
    /// Number of deliveries, without released ones.
    pub(super) attempts: u32,
}

/// State of a row for one consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Hold {
    /// Not leased: the row is ready as soon as it has the needed fields.
    #[default]
    Open,
    /// Leased by a holder until a time.
    Leased { until_ms: u64, holder: Arc<str> },
    /// Acknowledged by the consumer.
    Acked,
    /// Not delivered any more, after too many deliveries.
    Dead { reason: Arc<str> },
}

/// A consumer with its indexes over rows.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) spec: Consumer,
    /// Bit set of the fields that it needs.
    pub(super) needs: u64,
    pub(super) writes: u64,
    /// Ready rows, the highest priority first, then the oldest.
    pub(super) ready: BTreeSet<(Reverse<i32>, u64)>,
    /// Leased rows, sorted by the end of the lease.
    pub(super) leased: BTreeSet<(u64, u64)>,
    /// Number of known rows that it has acknowledged.
    acked: usize,
    dead: usize,
}

impl Reader {
    /// Whether a row has all needed fields, and lacks one that the consumer writes.
    pub(super) fn wants(&self, fields: u64) -> bool {
        let complete = self.writes != 0 && fields & self.writes == self.writes;
        fields & self.needs == self.needs && !complete
    }
}

/// A group of rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Number of rows in the complete group.
    pub(super) size: u32,
    /// Number of rows put so far, including finished ones.
    pub(super) put: u32,
    /// Rows that are not done.
    pub(super) live: BTreeSet<u64>,
    /// Rows that are done.
    pub(super) done: BTreeSet<u64>,
}

impl Group {
    /// Whether all rows of the group were put.
    pub(super) fn whole(&self) -> bool {
        self.put >= self.size
    }
}

/// States of all rows, see the module's description.
#[derive(Clone, Debug)]
pub(super) struct QueueCore {
    pub(super) limits: QueueLimits,
    /// Rows by sequence number, in the order of the puts.
    pub(super) rows: BTreeMap<u64, Row>,
    pub(super) by_key: HashMap<Arc<str>, u64>,
    pub(super) groups: BTreeMap<u64, Group>,
    /// Groups whose rows are all done.
    pub(super) finished: BTreeSet<u64>,
    /// The newest group of each name.
    pub(super) latest: HashMap<Arc<str>, u64>,
    pub(super) readers: Vec<Reader>,
    pub(super) names: Vec<String>,
    /// Number of rows that are done but still known.
    pub(super) done: usize,
    /// Total bytes of the rows that are not done.
    pub(super) bytes: u64,
    /// Number of the next lease. It always increases, also over restarts.
    pub(super) next_lease: u64,
}

impl QueueCore {
    /// Creates an empty queue.
    pub(super) fn new(limits: QueueLimits) -> Self {
        Self {
            limits,
            rows: BTreeMap::new(),
            by_key: HashMap::new(),
            groups: BTreeMap::new(),
            finished: BTreeSet::new(),
            latest: HashMap::new(),
            readers: Vec::new(),
            names: Vec::new(),
            done: 0,
            bytes: 0,
            next_lease: 0,
        }
    }

    /// Returns the number of a field name, if it is known.
    pub(super) fn field(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|n| n == name)
    }

    /// Returns the number of a consumer.
    pub(super) fn reader(&self, name: &str) -> Option<usize> {
        self.readers.iter().position(|r| r.spec.name == name)
    }

    /// Returns a row's state for one consumer.
    pub(super) fn claim(&self, row: &Row, reader: usize) -> Claim {
        row.claims.get(reader).cloned().unwrap_or_default()
    }

    /// Rows that are not done.
    pub(super) fn live(&self) -> usize {
        self.rows.len() - self.done
    }

    /// Returns a row's state for one consumer, in the form for callers.
    pub(super) fn state(&self, row: &Row, reader: usize) -> RowState {
        match row.claims.get(reader).map_or(&Hold::Open, |c| &c.hold) {
            Hold::Open if row.done || !self.readers[reader].wants(row.fields) => RowState::Waiting,
            Hold::Open => RowState::Ready,
            Hold::Leased { until_ms, holder } => RowState::Leased {
                until_ms: *until_ms,
                holder: holder.to_string(),
            },
            Hold::Acked => RowState::Acked,
            Hold::Dead { reason } => RowState::Dead {
                reason: reason.to_string(),
            },
        }
    }

    /// Returns a row in the form for callers and other processes.
    pub(super) fn view(&self, seq: u64, row: &Row) -> RowView {
        let has = self.names.iter().enumerate();
        let has = has.filter(|(n, _)| !row.done && row.fields >> n & 1 == 1);
        let state = |(n, reader): (usize, &Reader)| (reader.spec.name.clone(), self.state(row, n));
        RowView {
            seq,
            key: row.key.to_string(),
            group: row.group.to_string(),
            fields: has.map(|(_, name)| name.clone()).collect(),
            done: row.done,
            states: self.readers.iter().enumerate().map(state).collect(),
        }
    }

    /// Counts of rows by state.
    pub(super) fn stats(&self) -> QueueStats {
        let of = |r: &Reader| {
            let (ready, leased) = (r.ready.len(), r.leased.len());
            ConsumerStats {
                name: r.spec.name.clone(),
                waiting: self.rows.len() - ready - leased - r.acked - r.dead,
                ready,
                leased,
                acked: r.acked,
                dead: r.dead,
            }
        };
        QueueStats {
            rows: self.live(),
            done: self.done,
            bytes: self.bytes,
            consumers: self.readers.iter().map(of).collect(),
        }
    }

    /// Returns the changes that make this state from an empty queue.
    pub(super) fn snapshot(&self) -> Vec<Change> {
        let names = self.names.iter().cloned().map(Change::Name);
        let readers = self.readers.iter().map(|r| Change::Join(r.spec.clone()));
        let rows = self.rows.iter().map(|(seq, row)| Change::Insert {
            seq: *seq,
            row: row.clone(),
            values: Vec::new(),
        });
        let next = Change::NextLease(self.next_lease);
        names.chain(readers).chain(rows).chain([next]).collect()
    }

    /// Applies planned changes. They must have been planned for the present state.
    pub(super) fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Insert { seq, row, .. } => self.insert(seq, row),
                Change::Claim { seq, reader, claim } => self.with_row(seq, |row, readers| {
                    readers(reader, row, false);
                    if row.claims.len() <= reader {
                        row.claims.resize(reader + 1, Claim::default());
                    }
                    row.claims[reader] = claim;
                    readers(reader, row, true);
                }),
                Change::Write {
                    seq, field, bytes, ..
                } => self.write(seq, field, bytes),
                Change::Finish { seq } => self.finish(seq),
                Change::Forget { seq } => self.forget(seq),
                Change::NextLease(next) => self.next_lease = next,
                Change::Join(spec) => self.join(spec),
                Change::Name(name) => self.names.push(name),
            }
        }
    }

    /// Runs `work` on a row. `work` also gets a function that removes the row from a consumer's indexes
    /// (`false`) or adds it (`true`), and has to call it before and after its change.
    fn with_row(
        &mut self,
        seq: u64,
        work: impl FnOnce(&mut Row, &mut dyn FnMut(usize, &Row, bool)),
    ) {
        if let Some(row) = self.rows.get_mut(&seq) {
            let readers = &mut self.readers;
            work(row, &mut |reader, row, link| {
                index(&mut readers[reader], reader, seq, row, link);
            });
        }
    }

    fn insert(&mut self, seq: u64, row: Row) {
        for (n, reader) in self.readers.iter_mut().enumerate() {
            index(reader, n, seq, &row, true);
        }
        let group = self.groups.entry(row.unit).or_default();
        group.size = group.size.max(row.size);
        group.put += 1;
        if row.done {
            self.done += 1;
            group.done.insert(seq);
        } else {
            self.bytes += row.bytes;
            group.live.insert(seq);
        }
        track(&mut self.finished, row.unit, group);
        self.latest.insert(Arc::clone(&row.group), row.unit);
        self.by_key.insert(Arc::clone(&row.key), seq);
        self.rows.insert(seq, row);
    }

    fn write(&mut self, seq: u64, field: usize, bytes: u64) {
        let count = self.readers.len();
        self.bytes += bytes;
        self.with_row(seq, |row, readers| {
            (0..count).for_each(|n| readers(n, row, false));
            row.fields |= 1 << field;
            row.bytes += bytes;
            (0..count).for_each(|n| readers(n, row, true));
        });
    }

    fn finish(&mut self, seq: u64) {
        let count = self.readers.len();
        let (mut bytes, mut unit) = (0, 0);
        self.with_row(seq, |row, readers| {
            (0..count).for_each(|n| readers(n, row, false));
            row.done = true;
            (bytes, unit) = (std::mem::take(&mut row.bytes), row.unit);
            (0..count).for_each(|n| readers(n, row, true));
        });
        self.bytes -= bytes;
        self.done += 1;
        if let Some(group) = self.groups.get_mut(&unit) {
            group.live.remove(&seq);
            group.done.insert(seq);
            track(&mut self.finished, unit, group);
        }
    }

    fn forget(&mut self, seq: u64) {
        let Some(row) = self.rows.remove(&seq) else {
            return;
        };
        for (n, reader) in self.readers.iter_mut().enumerate() {
            index(reader, n, seq, &row, false);
        }
        self.by_key.remove(&row.key);
        self.done -= usize::from(row.done);
        self.bytes -= row.bytes;
        let Some(group) = self.groups.get_mut(&row.unit) else {
            return;
        };
        group.put -= 1;
        group.live.remove(&seq);
        group.done.remove(&seq);
        track(&mut self.finished, row.unit, group);
        if group.put == 0 {
            self.finished.remove(&row.unit);
            self.groups.remove(&row.unit);
            if self.latest.get(&row.group) == Some(&row.unit) {
                self.latest.remove(&row.group);
            }
        }
    }

    /// Adds a consumer, for which every known row counts.
    fn join(&mut self, spec: Consumer) {
        let mask = |names: &[String]| {
            let numbers = names.iter().filter_map(|n| self.field(n));
            numbers.fold(0u64, |mask, n| mask | 1 << n)
        };
        let number = self.readers.len();
        let mut reader = Reader {
            needs: mask(&spec.needs),
            writes: mask(&spec.writes),
            spec,
            ready: BTreeSet::new(),
            leased: BTreeSet::new(),
            acked: 0,
            dead: 0,
        };
        for (seq, row) in &self.rows {
            index(&mut reader, number, *seq, row, true);
        }
        self.readers.push(reader);
    }
}

/// Adds or removes a group from the set of finished groups.
fn track(finished: &mut BTreeSet<u64>, unit: u64, group: &Group) {
    if group.live.is_empty() {
        finished.insert(unit)
    } else {
        finished.remove(&unit)
    };
}

/// Takes a row out of the indexes of a consumer, or puts it in, as it stands now.
fn index(reader: &mut Reader, number: usize, seq: u64, row: &Row, link: bool) {
    let open = Hold::Open;
    let hold = row.claims.get(number).map_or(&open, |c| &c.hold);
    let count = |n: &mut usize| if link { *n += 1 } else { *n -= 1 };
    match hold {
        Hold::Acked => count(&mut reader.acked),
        Hold::Dead { .. } => count(&mut reader.dead),
        Hold::Open if row.done || !reader.wants(row.fields) => {}
        Hold::Open => {
            let place = (Reverse(row.priority), seq);
            if link {
                reader.ready.insert(place)
            } else {
                reader.ready.remove(&place)
            };
        }
        Hold::Leased { until_ms, .. } => {
            let place = (*until_ms, seq);
            if link {
                reader.leased.insert(place)
            } else {
                reader.leased.remove(&place)
            };
        }
    }
}
