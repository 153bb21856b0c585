//! The queue of rows: scorers and the trainer, which lease rows of it.

use super::clock::Clock;
use super::durable::StoredEpisode;
use crate::agenda::{Micros, seconds};
use crate::check::{Ledger, Violation};
use sinew_store::StoreError;
use sinew_store::queue::{
    AckedRow, Consumer, Field, LeaseId, MemoryQueue, NewRow, Queue, QueueLimits, RowRequest,
    RowSelection, RowState, Sample, fields,
};
use sinew_types::EpisodeId;
use std::collections::{HashMap, HashSet};

/// The consumers of the queue.
const SCORE: &str = "score";
const TRAIN: &str = "train";
/// Milliseconds for which the trainer leases the rows of an update; it renews the lease while it works.
const TRAIN_LEASE_MS: u64 = 60_000;
/// Rows that are done and whose keys stay known.
const KNOWN: usize = 4096;

/// Scorers and what they hold.
#[derive(Debug)]
pub(super) struct Scorers {
    /// Scorers without work.
    idle: usize,
    /// All scorers.
    all: usize,
    /// Lease and row of each score that is being made.
    jobs: HashMap<u64, (LeaseId, String)>,
    /// Number of the last one.
    next: u64,
    /// Rows that wait for a score or are being scored.
    open: usize,
    /// No commit is durable before then, and how much slower they are until when.
    pub(super) paused_until: u64,
    pub(super) slow: (f64, u64),
}

impl Scorers {
    fn new(all: usize) -> Self {
        Self {
            idle: all,
            all,
            jobs: HashMap::new(),
            next: 0,
            open: 0,
            paused_until: 0,
            slow: (1.0, 0),
        }
    }

    /// Another session begins, which gives out no score that the last one did. The store's pauses stay.
    fn begin_session(&mut self) {
        *self = Self {
            paused_until: self.paused_until,
            slow: self.slow,
            ..Self::new(self.all)
        };
    }

    /// Seconds until what is written now is durable, if a commit takes `commit_s`.
    pub(super) fn commit_s(&self, now: Micros, commit_s: f64) -> f64 {
        let slow = if now < self.slow.1 { self.slow.0 } else { 1.0 };
        let pause = self.paused_until.saturating_sub(now);
        seconds(pause) + commit_s * slow
    }

    /// Loses what scorers hold; leases run out by themselves.
    pub(super) fn crash(&mut self) {
        self.jobs.clear();
        self.idle = self.all;
    }
}

/// The queue and its consumers.
#[derive(Debug)]
pub(super) struct Rows {
    /// The real queue, in memory.
    queue: MemoryQueue,
    /// Those that score, and the state of the store.
    pub(super) scorers: Scorers,
    /// The trainer's lease and its rows.
    lease: Option<(LeaseId, Vec<String>)>,
    /// Time at which the lease was last made or renewed.
    renewed: Micros,
    /// Rows that are to leave the queue, and could not yet. They outlive the process of the run.
    leaving: Vec<String>,
}

/// Key of an episode's row.
fn key_of(episode: &EpisodeId) -> String {
    episode.as_str().to_owned()
}

/// A queue in memory refuses nothing that is right.
fn expect<T>(result: Result<T, StoreError>, ledger: &mut Ledger) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            ledger.note("leases", format!("the queue refused: {error}"));
            None
        }
    }
}

impl Rows {
    /// An empty queue with its consumers.
    pub(super) fn new(scorers: usize, ledger: &mut Ledger) -> Self {
        let rows = Self {
            queue: MemoryQueue::in_memory(QueueLimits {
                max_rows: 1 << 22,
                ..QueueLimits::default()
            }),
            scorers: Scorers::new(scorers),
            lease: None,
            renewed: 0,
            leaving: Vec::new(),
        };
        rows.join(ledger);
        rows
    }

    /// The queue's consumers join.
    fn join(&self, ledger: &mut Ledger) {
        let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect();
        for (name, needs, writes, last) in [
            (
                SCORE,
                names(&[fields::TRACE]),
                names(&[fields::REWARD]),
                false,
            ),
            (
                TRAIN,
                names(&[fields::TRACE, fields::REWARD]),
                Vec::new(),
                true,
            ),
        ] {
            let consumer = Consumer {
                name: name.into(),
                needs,
                writes,
                last,
            };
            expect(self.queue.join(&consumer), ledger);
        }
    }

    /// Another session begins, which holds no lease.
    pub(super) fn begin_session(&mut self) {
        self.scorers.begin_session();
        (self.lease, self.renewed) = (None, 0);
    }

    /// Puts the row of a stored episode in.
    pub(super) fn put(
        &mut self,
        id: &EpisodeId,
        record: &StoredEpisode,
        group_size: u32,
        ledger: &mut Ledger,
    ) {
        let row = NewRow {
            group: record.group.as_str().to_owned(),
            group_size,
            tokens: record.tokens as u64,
            version: record.oldest.unwrap_or(0),
            ..NewRow::new(key_of(id), Field::new(fields::TRACE, &b"x"[..]))
        };
        expect(self.queue.put(std::slice::from_ref(&row)), ledger);
        self.scorers.open += 1;
    }

    /// Whether an episode's row has its reward.
    pub(super) fn is_scored(&self, id: &EpisodeId, ledger: &mut Ledger) -> bool {
        matches!(
            expect(self.queue.state(TRAIN, &key_of(id)), ledger).flatten(),
            Some(RowState::Ready | RowState::Leased { .. } | RowState::Acked)
        )
    }

    /// Whether a scorer has nothing to do though rows wait.
    pub(super) fn may_score(&self) -> bool {
        self.scorers.idle > 0 && self.scorers.open > 0
    }

    /// Leases rows to scorers that have nothing to do, and returns the numbers of their scores.
    pub(super) fn begin_scores(
        &mut self,
        ttl_ms: u64,
        wall_ms: u64,
        ledger: &mut Ledger,
    ) -> Vec<u64> {
        let scorers = &mut self.scorers;
        let ask = RowRequest {
            consumer: SCORE.into(),
            holder: "scorer".into(),
            ttl_ms,
            take: RowSelection::Sample(Sample::rows(scorers.idle.min(scorers.open))),
        };
        let Some(loan) = expect(self.queue.lease(&ask, wall_ms), ledger) else {
            return Vec::new();
        };
        let Some(lease) = loan.lease else {
            return Vec::new();
        };
        let mut jobs = Vec::new();
        for row in loan.rows {
            scorers.next += 1;
            scorers.idle -= 1;
            scorers.jobs.insert(scorers.next, (lease, row.key));
            jobs.push(scorers.next);
            if scorers.idle == 0 {
                break;
            }
        }
        jobs
    }

    /// A scorer is done with a score, and has nothing to do. Gives the lease and the row, unless it lost
    /// them.
    pub(super) fn end_score(&mut self, job: u64) -> Option<(LeaseId, String)> {
        let held = self.scorers.jobs.remove(&job)?;
        self.scorers.idle += 1;
        Some(held)
    }

    /// Brings the reward of a row, and returns its episode if the row had none before.
    pub(super) fn bring_reward(
        &mut self,
        lease: LeaseId,
        key: String,
        ledger: &mut Ledger,
    ) -> Option<EpisodeId> {
        let id = EpisodeId::new(key.clone());
        let done = AckedRow {
            key,
            fields: vec![Field::new(fields::REWARD, &b"1"[..])],
        };
        let acked = expect(self.queue.ack(SCORE, lease, &[done]), ledger);
        if acked.map_or(0, |s| s.changed) == 0 {
            return None;
        }
        self.scorers.open = self.scorers.open.saturating_sub(1);
        Some(id)
    }

    /// Those of some rows that the trainer can lease.
    pub(super) fn ready(&self, keys: Vec<String>, ledger: &mut Ledger) -> Vec<String> {
        let mut ready = Vec::new();
        for key in keys {
            let state = expect(self.queue.state(TRAIN, &key), ledger);
            if matches!(state.flatten(), Some(RowState::Ready)) {
                ready.push(key);
            }
        }
        ready
    }

    /// The trainer leases these rows.
    pub(super) fn lease(&mut self, ready: Vec<String>, clock: &Clock, ledger: &mut Ledger) {
        let ask = RowRequest {
            consumer: TRAIN.into(),
            holder: "trainer".into(),
            ttl_ms: TRAIN_LEASE_MS,
            take: RowSelection::Keys(ready.clone()),
        };
        let leased = expect(self.queue.lease(&ask, clock.wall_ms()), ledger);
        let lease = leased.and_then(|loan| loan.lease);
        self.renewed = clock.now;
        self.lease = lease.map(|lease| (lease, ready));
    }

    /// Whether the trainer has to renew its lease: it does after a third of the lease's time, as that of a
    /// run does.
    pub(super) fn is_renewal_due(&self, now: Micros) -> bool {
        now >= self.renewed + TRAIN_LEASE_MS * 1000 / 3 && self.lease.is_some()
    }

    /// The trainer renews its lease.
    pub(super) fn renew(&mut self, clock: &Clock, ledger: &mut Ledger) {
        let Some((lease, keys)) = &self.lease else {
            return;
        };
        self.renewed = clock.now;
        let renewed = self
            .queue
            .renew(TRAIN, *lease, keys, TRAIN_LEASE_MS, clock.wall_ms());
        expect(renewed, ledger);
    }

    /// An update is committed: its rows are done, and those that it names and that the trainer does not hold
    /// leave the queue. `skips` forgets all of that. Returns whether the trainer acked rows.
    pub(super) fn ack(
        &mut self,
        named: impl Iterator<Item = EpisodeId>,
        skips: bool,
        wall_ms: u64,
        ledger: &mut Ledger,
    ) -> bool {
        let lease = self.lease.take().filter(|_| !skips);
        let acked = lease.is_some();
        let mut held = Vec::new();
        if let Some((lease, keys)) = lease {
            let done: Vec<AckedRow> = keys.iter().cloned().map(AckedRow::of).collect();
            let acked = expect(self.queue.ack(TRAIN, lease, &done), ledger);
            let lost = acked.map_or(0, |s| s.lost.len());
            if lost > 0 {
                let why = format!("{lost} rows of an update went to another holder");
                ledger.note("leases", why);
            }
            held = keys;
        }
        let held: HashSet<String> = held.into_iter().collect();
        let others = named
            .map(|id| key_of(&id))
            .filter(|key| !held.contains(key) && !skips);
        self.leaving.extend(others);
        self.forget(ledger);
        expect(self.queue.sweep(KNOWN, wall_ms), ledger);
        if ledger.checks {
            self.check_committed(ledger);
        }
        acked
    }

    /// Rows of committed updates must be done, or be about to leave.
    fn check_committed(&self, ledger: &mut Ledger) {
        let rows = expect(self.queue.rows(None, 1 << 20), ledger).unwrap_or_default();
        for row in rows.into_iter().filter(|r| !r.done) {
            let named = ledger.is_named(&EpisodeId::new(row.key.clone()));
            if named && !self.leaving.contains(&row.key) {
                let why = format!(
                    "the row of {} is of a committed update and not done",
                    row.key
                );
                ledger.note("leases", why);
            }
        }
    }

    /// Takes rows out of the queue that nobody will train, once nobody holds them.
    pub(super) fn forget(&mut self, ledger: &mut Ledger) {
        for key in std::mem::take(&mut self.leaving) {
            let (score, train) = (self.queue.state(SCORE, &key), self.queue.state(TRAIN, &key));
            let states = (
                expect(score, ledger).flatten(),
                expect(train, ledger).flatten(),
            );
            let (Some(score), Some(train)) = states else {
                continue;
            };
            if train == RowState::Acked {
                continue;
            }
            let held = |s: &RowState| matches!(s, RowState::Leased { .. });
            let free = !held(&score) && !held(&train);
            if !free || self.queue.remove(std::slice::from_ref(&key)).is_err() {
                self.leaving.push(key);
            } else if score == RowState::Ready {
                self.scorers.open = self.scorers.open.saturating_sub(1);
            }
        }
    }

    /// The queue's fault, if there is one. Leases may run out early if the wall clock was set.
    pub(super) fn check(&self, wall_was_set: bool, ledger: &mut Ledger) -> Option<Violation> {
        let score = expect(self.queue.stats(), ledger)?.of(SCORE);
        let (leased, held) = (score.leased, self.scorers.jobs.len());
        if held > self.scorers.all || (held > 0 && leased == 0 && !wall_was_set) {
            let why = format!("{held} scorers work, {leased} rows are leased to them");
            return Some(Violation::new("leases", why));
        }
        (score.dead > 0)
            .then(|| Violation::new("leases", "a row is dead: no score came of eight leases"))
    }
}
