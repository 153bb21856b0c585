//! Episodes that are over: the store, the queue, scorers and the trainer's leases.
//!
//! An episode becomes durable first. Then its row enters the queue, a scorer leases it and brings the reward;
//! the trainer leases the rows of an update and acks them once the update is committed.

use super::episodes::EpisodeState;
use super::{At, Happening, World};
use crate::check::{Bug, Violation};
use crate::measure::tokens_of;
use sinew_orchestrator::{Draw, EpisodeResult, Event};
use sinew_store::queue::{
    AckedRow, Consumer, Field, LeaseId, NewRow, Queue, RowRequest, RowSelection, RowState, Sample,
    fields,
};
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The consumers of the queue.
const SCORE: &str = "score";
const TRAIN: &str = "train";
/// Milliseconds for which the trainer leases the rows of an update; it renews the lease while it works.
const TRAIN_LEASE_MS: u64 = 60_000;
/// Rows that are done and whose keys stay known.
const KNOWN: usize = 4096;

/// A stored episode, as far as the loop needs it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredEpisode {
    /// Draw of the core.
    pub(super) draw: u64,
    /// Group of episodes that it is compared with.
    pub(super) group: GroupId,
    /// The system failed it.
    pub(super) failed: bool,
    /// Score of the row.
    pub(super) reward: f64,
    /// Whether the task was solved.
    pub(super) success: bool,
    /// Weights of its oldest and newest tokens.
    pub(super) oldest: Option<u64>,
    pub(super) newest: Option<u64>,
    /// All its tokens, in ids, and those of them that were sampled.
    pub(super) tokens: usize,
    pub(super) sampled: usize,
    /// Type of its task.
    pub(super) kind: String,
}

/// Data that outlive the process of the run.
#[derive(Debug, Default)]
pub(super) struct DurableState {
    /// Episodes that no update of a checkpoint names.
    pub(super) stored: HashMap<EpisodeId, Arc<StoredEpisode>>,
    /// Updates since the last checkpoint: groups in order, and the curriculum.
    pub(super) orders: BTreeMap<u64, Order>,
    /// Draws of updates that a checkpoint holds, and the first that none began.
    pub(super) named: std::collections::BTreeSet<u64>,
    /// Number of the last one.
    pub(super) next: u64,
    pub(super) checkpoint: u64,
    /// Curriculum of the checkpoint.
    pub(super) curriculum: sinew_orchestrator::Curriculum,
    /// Rows that are to leave the queue, and could not yet.
    pub(super) leaving: Vec<String>,
}

/// Content of a committed update.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// The groups of the update.
    pub(super) groups: Vec<Vec<EpisodeId>>,
    /// Curriculum after the update.
    pub(super) curriculum: sinew_orchestrator::Curriculum,
    /// Episodes that the commit names.
    pub(super) named: Vec<EpisodeId>,
}

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
    pub(super) fn new(all: usize) -> Self {
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

    /// Loses what scorers hold; leases run out by themselves.
    pub(super) fn crash(&mut self) {
        self.jobs.clear();
        self.idle = self.all;
    }
}

/// Returns the key of an episode's row.
fn key_of(episode: &EpisodeId) -> String {
    episode.as_str().to_owned()
}

/// The stored part of a trace.
fn stored(trace: &Trace) -> StoredEpisode {
    let versions = || {
        trace
            .nodes
            .iter()
            .flat_map(|n| &n.versions)
            .map(|s| s.version.0)
    };
    StoredEpisode {
        draw: trace.origin.draw,
        group: trace.group.clone(),
        failed: matches!(trace.end, EpisodeEnd::Failed { .. }),
        reward: trace.outcome.reward,
        success: trace.outcome.success,
        oldest: versions().min(),
        newest: versions().max(),
        tokens: tokens_of(trace),
        sampled: trace.sampled_tokens(),
        kind: trace.task_kind.clone(),
    }
}

impl World {
    /// The queue's consumers join.
    pub(super) fn join(&mut self) {
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
            let joined = self.queue.join(&consumer);
            self.expect(joined);
        }
    }

    /// A queue in memory refuses nothing that is right.
    fn expect<T>(&mut self, result: Result<T, sinew_store::StoreError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.ledger
                    .note("leases", format!("the queue refused: {error}"));
                None
            }
        }
    }

    /// Seconds until what is written now is durable.
    pub(super) fn commit_s(&self) -> f64 {
        let s = &self.scorers;
        let slow = if self.now < s.slow.1 { s.slow.0 } else { 1.0 };
        let pause = s.paused_until.saturating_sub(self.now);
        crate::agenda::seconds(pause) + self.plan.store.commit_s * slow
    }

    /// A trace is durable.
    pub(super) fn stored(&mut self, at: At) {
        let episode = &mut self.episodes[at.slot as usize];
        if episode.round != at.round || episode.doing != EpisodeState::Stores {
            return;
        }
        let Some(trace) = episode.trace.take() else {
            return;
        };
        let id = trace.episode.clone();
        let record = Arc::new(stored(&trace));
        self.kept.stored.insert(id.clone(), Arc::clone(&record));
        self.ledger.stored(&id);
        self.updates.ended.insert(id.clone(), Arc::clone(&record));
        if record.failed {
            return self.tell_end(at.slot, &record, false);
        }
        self.episodes[at.slot as usize].doing = EpisodeState::Scores;
        self.put(&id, &record);
        self.score_some();
    }

    /// An earlier session stored the episode: it is scored if it was not.
    pub(super) fn recover(&mut self, draw: Draw, record: Arc<StoredEpisode>) {
        let id = draw.episode.clone();
        let slot = self.place(draw);
        self.updates.ended.insert(id.clone(), Arc::clone(&record));
        let key = key_of(&id);
        let known = self.queue.state(TRAIN, &key);
        let scored = matches!(
            self.expect(known).flatten(),
            Some(RowState::Ready | RowState::Leased { .. } | RowState::Acked)
        );
        if record.failed || scored {
            return self.tell_end(slot, &record, true);
        }
        self.episodes[slot as usize].doing = EpisodeState::Scores;
        self.put(&id, &record);
    }

    /// Keeps something.
    fn put(&mut self, id: &EpisodeId, record: &StoredEpisode) {
        let row = NewRow {
            group: record.group.as_str().to_owned(),
            group_size: self.plan.rollout.group_size as u32,
            tokens: record.tokens as u64,
            version: record.oldest.unwrap_or(0),
            ..NewRow::new(key_of(id), Field::new(fields::TRACE, &b"x"[..]))
        };
        self.measure.inputs += 1;
        let put = self.queue.put(std::slice::from_ref(&row));
        self.expect(put);
        self.scorers.open += 1;
    }

    /// Assigns rows to idle scorers.
    pub(super) fn score_some(&mut self) {
        if self.scorers.idle == 0 || self.scorers.open == 0 {
            return;
        }
        let ask = RowRequest {
            consumer: SCORE.into(),
            holder: "scorer".into(),
            ttl_ms: (self.plan.scoring.lease_s * 1e3).max(1.0) as u64,
            take: RowSelection::Sample(Sample::rows(self.scorers.idle.min(self.scorers.open))),
        };
        let wall_ms = self.wall_ms();
        self.measure.inputs += 1;
        let leased = self.queue.lease(&ask, wall_ms);
        let Some(loan) = self.expect(leased) else {
            return;
        };
        let Some(lease) = loan.lease else {
            return;
        };
        for row in loan.rows {
            self.scorers.next += 1;
            let job = self.scorers.next;
            self.scorers.idle -= 1;
            let score_s = self
                .plan
                .scoring
                .score_s
                .draw(sinew_types::mix_seed(self.plan.seed ^ 0x5c0e, job));
            self.scorers.jobs.insert(job, (lease, row.key));
            self.after(score_s, Happening::Scored(job));
            if self.scorers.idle == 0 {
                break;
            }
        }
    }

    /// A scorer has its score.
    pub(super) fn scored(&mut self, job: u64) {
        let Some((lease, key)) = self.scorers.jobs.remove(&job) else {
            return;
        };
        self.scorers.idle += 1;
        let id = EpisodeId::new(key.clone());
        let done = AckedRow {
            key,
            fields: vec![Field::new(fields::REWARD, &b"1"[..])],
        };
        self.measure.inputs += 1;
        let acked = self.queue.ack(SCORE, lease, &[done]);
        let changed = self.expect(acked).map_or(0, |s| s.changed);
        if changed > 0 {
            self.scorers.open = self.scorers.open.saturating_sub(1);
            let slot = self.by_id.get(&id).copied();
            let slot = slot.filter(|s| self.episodes[*s as usize].doing == EpisodeState::Scores);
            let record = self.updates.ended.get(&id).cloned();
            if let (Some(slot), Some(record)) = (slot, record) {
                self.tell_end(slot, &record, false);
            }
        }
        self.score_some();
    }

    /// The loop hears of an episode's end.
    fn tell_end(&mut self, slot: u32, record: &StoredEpisode, before: bool) {
        let episode = self.episodes[slot as usize].draw.episode.clone();
        self.leave(slot);
        let outcome = (record.kind.clone(), record.success, record.reward);
        self.tell(Event::EpisodeEnded(EpisodeResult {
            episode,
            failed: record.failed,
            stored: before,
            outcome: (!record.failed).then_some(outcome),
            waits_for_group: false,
            changed: None,
        }));
    }

    /// The trainer leases the rows of an update; those that it acked in an earlier session are done.
    pub(super) fn lease_rows(&mut self, keys: Vec<String>) {
        let mut ready = Vec::new();
        for key in keys {
            let state = self.queue.state(TRAIN, &key);
            if matches!(self.expect(state).flatten(), Some(RowState::Ready)) {
                ready.push(key);
            }
        }
        if ready.is_empty() {
            return;
        }
        let ask = RowRequest {
            consumer: TRAIN.into(),
            holder: "trainer".into(),
            ttl_ms: TRAIN_LEASE_MS,
            take: RowSelection::Keys(ready.clone()),
        };
        let wall_ms = self.wall_ms();
        self.measure.inputs += 1;
        let leased = self.queue.lease(&ask, wall_ms);
        let lease = self.expect(leased).and_then(|loan| loan.lease);
        self.updates.renewed = self.now;
        self.updates.lease = lease.map(|lease| (lease, ready));
    }

    /// The trainer keeps what it leased: it renews after a third of the lease's time, as that of a run does.
    pub(super) fn renew_rows(&mut self) {
        if self.now < self.updates.renewed + TRAIN_LEASE_MS * 1000 / 3 {
            return;
        }
        let Some((lease, keys)) = self.updates.lease.take() else {
            return;
        };
        self.updates.renewed = self.now;
        let wall_ms = self.wall_ms();
        self.measure.inputs += 1;
        let renewed = self
            .queue
            .renew(TRAIN, lease, &keys, TRAIN_LEASE_MS, wall_ms);
        self.expect(renewed);
        self.updates.lease = Some((lease, keys));
    }

    /// An update is committed: its rows are done, and those that it names and that the trainer does not hold
    /// leave the queue.
    pub(super) fn ack_rows(&mut self, named: impl Iterator<Item = EpisodeId>) {
        let mut held = Vec::new();
        if let Some((lease, keys)) = self.updates.lease.take()
            && self.bug != Some(Bug::SkipAck)
        {
            let done: Vec<AckedRow> = keys.iter().cloned().map(AckedRow::of).collect();
            self.measure.inputs += 1;
            let acked = self.queue.ack(TRAIN, lease, &done);
            let lost = self.expect(acked).map_or(0, |s| s.lost.len());
            if lost > 0 {
                let why = format!("{lost} rows of an update went to another holder");
                self.ledger.note("leases", why);
            }
            held = keys;
        }
        let held: HashSet<String> = held.into_iter().collect();
        let skips = self.bug == Some(Bug::SkipAck);
        let others = named
            .map(|id| key_of(&id))
            .filter(|key| !held.contains(key) && !skips);
        self.kept.leaving.extend(others);
        self.forget_rows();
        let wall_ms = self.wall_ms();
        let swept = self.queue.sweep(KNOWN, wall_ms);
        self.expect(swept);
        if self.ledger.checks {
            self.check_committed();
        }
    }

    /// Rows of committed updates must be done, or be about to leave.
    fn check_committed(&mut self) {
        let rows = self.queue.rows(None, 1 << 20);
        let rows = self.expect(rows).unwrap_or_default();
        for row in rows.into_iter().filter(|r| !r.done) {
            let named = self.ledger.is_named(&EpisodeId::new(row.key.clone()));
            if named && !self.kept.leaving.contains(&row.key) {
                let why = format!(
                    "the row of {} is of a committed update and not done",
                    row.key
                );
                self.ledger.note("leases", why);
            }
        }
    }

    /// Takes rows out of the queue that nobody will train, once nobody holds them.
    pub(super) fn forget_rows(&mut self) {
        for key in std::mem::take(&mut self.kept.leaving) {
            let (score, train) = (self.queue.state(SCORE, &key), self.queue.state(TRAIN, &key));
            let states = (self.expect(score).flatten(), self.expect(train).flatten());
            let (Some(score), Some(train)) = states else {
                continue;
            };
            if train == RowState::Acked {
                continue;
            }
            let held = |s: &RowState| matches!(s, RowState::Leased { .. });
            let free = !held(&score) && !held(&train);
            if !free || self.queue.remove(std::slice::from_ref(&key)).is_err() {
                self.kept.leaving.push(key);
            } else if score == RowState::Ready {
                self.scorers.open = self.scorers.open.saturating_sub(1);
            }
        }
    }

    /// The queue's fault, if there is one.
    pub(super) fn check_rows(&mut self) -> Option<Violation> {
        let stats = self.queue.stats();
        let score = self.expect(stats)?.of(SCORE);
        let (leased, held) = (score.leased, self.scorers.jobs.len());
        if held > self.scorers.all || (held > 0 && leased == 0 && !self.wall_was_set) {
            let why = format!("{held} scorers work, {leased} rows are leased to them");
            return Some(Violation::new("leases", why));
        }
        (score.dead > 0)
            .then(|| Violation::new("leases", "a row is dead: no score came of eight leases"))
    }
}
