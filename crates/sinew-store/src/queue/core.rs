//! The states of all rows, without their values: readiness for each consumer, and leases with their ends.
//!
//! Only [`QueueCore::apply`] changes it. A backing makes its [`Change`]s durable, and loads it from them.

use super::rows::{Consumer, ConsumerStats, QueueLimits, QueueStats, RowState, RowView};
use bytes::Bytes;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// One transition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A new row with its values, by the number of their names. Rows that are loaded come without.
    Insert {
        seq: u64,
        row: Row,
        values: Vec<(usize, Bytes)>,
    },
    /// A row's new state for the consumer of a number.
    Claim {
        seq: u64,
        reader: usize,
        claim: Claim,
    },
    /// A consumer's field of a row.
    Write {
        seq: u64,
        field: usize,
        value: Bytes,
    },
    /// The values of a row go.
    Finish { seq: u64 },
    /// The row and its key go.
    Forget { seq: u64 },
    /// The next lease's number.
    NextLease(u64),
    /// A consumer; its number is that of those before it.
    Join(Consumer),
    /// The name of a field; its number is that of those before it.
    Name(String),
}

/// A row without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    /// Fields as put: `key`, `size`, `priority`, `tokens`, `version`.
    pub(super) key: Arc<str>,
    /// Its own key if it has no group.
    pub(super) group: Arc<str>,
    /// Number of the group: the place of its first row. A name can have several, one after the other.
    pub(super) unit: u64,
    pub(super) size: u32,
    pub(super) priority: i32,
    pub(super) tokens: u64,
    pub(super) version: u64,
    /// A bit for each field that it has.
    pub(super) fields: u64,
    /// Bytes of all fields; 0 once the row is done.
    pub(super) bytes: u64,
    pub(super) done: bool,
    /// Claims by number of the consumer; consumers that joined later and never had the row are missing.
    pub(super) claims: Vec<Claim>,
}

/// A row's state for one consumer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) hold: Hold,
    /// The last lease that held it; none after a release.
    pub(super) lease: Option<u64>,
    /// Deliveries so far, without those that were released.
    pub(super) attempts: u32,
}

/// Holder of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Hold {
    /// The queue: it is ready as soon as it has what is needed.
    #[default]
    Open,
    /// A holder, until a time.
    Leased { until_ms: u64, holder: Arc<str> },
    /// Done by this consumer.
    Acked,
    /// Delivered too often.
    Dead { reason: Arc<str> },
}

/// A consumer and its cursor.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) spec: Consumer,
    /// Bits of its fields.
    pub(super) needs: u64,
    pub(super) writes: u64,
    /// Ready rows: the highest priority first, then the oldest.
    pub(super) ready: BTreeSet<(Reverse<i32>, u64)>,
    /// End of the lease and row, so that those that end first are first.
    pub(super) leased: BTreeSet<(u64, u64)>,
    /// Rows that are known.
    acked: usize,
    dead: usize,
}

impl Reader {
    /// Whether a row has all that it needs, and lacks something that it writes.
    pub(super) fn wants(&self, fields: u64) -> bool {
        let complete = self.writes != 0 && fields & self.writes == self.writes;
        fields & self.needs == self.needs && !complete
    }
}

/// Rows that belong together.
#[derive(Clone, Debug, Default)]
pub(super) struct Group {
    /// Rows that make it whole.
    pub(super) size: u32,
    /// Rows that it was given, done ones too.
    pub(super) put: u32,
    /// Those that are not done.
    pub(super) live: BTreeSet<u64>,
    /// Those that are done.
    pub(super) done: BTreeSet<u64>,
}

impl Group {
    /// Whether all of its rows were put.
    pub(super) fn whole(&self) -> bool {
        self.put >= self.size
    }
}

/// The states of all rows. See the module.
#[derive(Clone, Debug)]
pub(super) struct QueueCore {
    pub(super) limits: QueueLimits,
    /// Rows by number, which is the order of the puts.
    pub(super) rows: BTreeMap<u64, Row>,
    pub(super) by_key: HashMap<Arc<str>, u64>,
    pub(super) groups: BTreeMap<u64, Group>,
    /// Groups all of whose rows are done.
    pub(super) finished: BTreeSet<u64>,
    /// The last group of each name.
    pub(super) latest: HashMap<Arc<str>, u64>,
    pub(super) readers: Vec<Reader>,
    pub(super) names: Vec<String>,
    /// Rows that are done and known.
    pub(super) done: usize,
    /// Bytes of the rows that are not done.
    pub(super) bytes: u64,
    /// Rises for ever, also over restarts.
    pub(super) next_lease: u64,
}

impl QueueCore {
    /// An empty queue.
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

    /// Number of a field's name, if a row or a consumer has it.
    pub(super) fn field(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|n| n == name)
    }

    /// Number of a consumer.
    pub(super) fn reader(&self, name: &str) -> Option<usize> {
        self.readers.iter().position(|r| r.spec.name == name)
    }

    /// A row's claim for one consumer.
    pub(super) fn claim(&self, row: &Row, reader: usize) -> Claim {
        row.claims.get(reader).cloned().unwrap_or_default()
    }

    /// Rows that are not done.
    pub(super) fn live(&self) -> usize {
        self.rows.len() - self.done
    }

    /// A row's state for one consumer, as callers see it.
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

    /// A row for people and other processes.
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

    /// Applies what was planned. The changes must be of the state as it is now.
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
                Change::Write { seq, field, value } => self.write(seq, field, value.len() as u64),
                Change::Finish { seq } => self.finish(seq),
                Change::Forget { seq } => self.forget(seq),
                Change::NextLease(next) => self.next_lease = next,
                Change::Join(spec) => self.join(spec),
                Change::Name(name) => self.names.push(name),
            }
        }
    }

    /// Runs `work` on a row and what takes it out of a consumer's indexes, or puts it in.
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

    /// A consumer that joins sees every row.
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

/// Keeps the set of groups that have no row left.
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
