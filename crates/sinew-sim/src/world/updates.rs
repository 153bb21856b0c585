//! The commands of the loop's core: groups, updates, weights, commits.
//!
//! Updates number the weights: update `n` made version `n`.

use super::World;
use super::clock::Happening;
use super::durable::{Order, StoredEpisode};
use crate::agenda::{Micros, micros, seconds};
use crate::check::Bug;
use crate::plan::{Mode, Plan};
use sinew_orchestrator::{
    Command, CoreConfig, EvalConfig, Event, Goal, Overlap, SampleKind, StepRecord, TaskSampling,
    UpdateCommit,
};
use sinew_types::{EpisodeId, GroupId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Reason for leaving out an episode without a signal.
const NO_SIGNAL: &str = "no difference within the group";
/// Reason for leaving out a failed episode.
const FAILED: &str = "failed";

/// The update at work, and episodes that wait for theirs.
#[derive(Debug, Default)]
pub(super) struct Updates {
    /// Episodes that ended and that no update named yet.
    pub(super) ended: HashMap<EpisodeId, Arc<StoredEpisode>>,
    /// Weights that sample.
    pub(super) version: u64,
    pub(super) version_to_come: u64,
    /// Weights wait for requests that run; engines load.
    pub(super) drains: bool,
    pub(super) loads: bool,
    /// An update waits for its weights to be in use.
    pub(super) publishes: bool,
    /// The trainer computes.
    pub(super) trains: bool,
    /// Step that the trainer computes, its seconds, and the time of its end.
    pub(super) train_step: u64,
    pub(super) train_s: f64,
    pub(super) trained_at: Micros,
    /// Time from which a trainer that was lost computes again.
    pub(super) trainer_ready: Micros,
    /// Seconds of updates since the last checkpoint.
    pub(super) since_checkpoint_s: f64,
    /// The groups of the update.
    groups: Vec<Vec<EpisodeId>>,
    /// Episodes that are trained.
    trained: Vec<EpisodeId>,
    /// An update before, for a fault of the harness.
    last_trained: Vec<EpisodeId>,
}

/// The core's configuration of a plan.
pub(super) fn config(plan: &Plan) -> CoreConfig {
    let (run, r) = (&plan.run, &plan.rollout);
    let overlap = |max_staleness, in_order| Overlap {
        max_staleness,
        updates_per_step: 1,
        in_order,
        late: None,
    };
    CoreConfig {
        goal: Goal::Train,
        seed: plan.seed,
        steps: run.updates,
        max_wall_s: None,
        checkpoint_every: run.checkpoint_every,
        samples: SampleKind::Run,
        tasks_per_step: r.groups_per_update,
        over_sample: r.over_sample,
        stop_decided: None,
        group_size: r.group_size,
        retries: r.retries,
        refill: r.refill,
        late_rounds: None,
        overlap: match run.mode {
            Mode::Sync => None,
            Mode::OneStepOff => Some(overlap(1, true)),
            Mode::Async => Some(overlap(run.max_staleness, false)),
        },
        tasks: TaskSampling::Uniform,
        train_tasks: r.tasks,
        held_out_tasks: 0,
        eval: EvalConfig {
            tasks: 0,
            episodes_per_task: 1,
            every: 0,
            temperature: 1.0,
            greedy: false,
        },
    }
}

impl Updates {
    /// Whether an update is under way that brings the run on.
    pub(super) fn is_busy(&self) -> bool {
        self.trains || self.publishes || self.drains || self.loads
    }

    /// Whether rewards of a group differ.
    fn has_signal(&self, group: &[EpisodeId]) -> bool {
        let ended = group.iter().filter_map(|id| self.ended.get(id));
        let rewards = ended.filter(|e| !e.failed).map(|e| e.reward.to_bits());
        rewards.collect::<BTreeSet<_>>().len() > 1
    }

    /// The oldest weights that sampled a token of a group.
    fn oldest(&self, group: &[EpisodeId]) -> Option<u64> {
        let ended = group.iter().filter_map(|id| self.ended.get(id));
        ended.filter_map(|e| e.oldest).min()
    }
}

impl World {
    /// Carries out a command of the core.
    pub(super) fn carry_out(&mut self, command: Command) {
        match command {
            Command::FindFirstEval(_) => self.tell(Event::FirstEvalFound),
            Command::Start { draws, .. } => self.start(draws),
            Command::Abandon { episodes } => {
                for id in episodes {
                    self.abandon_one(&id);
                }
            }
            Command::CountSpentGroups { groups } => {
                let spent = groups
                    .iter()
                    .filter(|g| !self.updates.has_signal(g))
                    .count();
                self.tell(Event::SpentGroupsCounted { spent });
            }
            // Groups begin whole here: none of their episodes is held back.
            Command::InspectGroup {
                group, episodes, ..
            } => self.weigh(group, &episodes),
            Command::LoadCommitted { step } => {
                let order = self.kept.orders.get(&step).map(|o| o.groups.clone());
                for id in order.iter().flatten().flatten() {
                    if let Some(record) = self.kept.stored.get(id) {
                        self.updates.ended.insert(id.clone(), Arc::clone(record));
                    }
                }
                self.tell(Event::CommittedLoaded(order));
            }
            Command::Score { groups, .. } => self.make_rows(groups),
            Command::Train { step, .. } => self.train(step),
            Command::Publish { step } => self.publish(step),
            Command::Commit(commit) => self.commit(commit),
            Command::Checkpoint { step } => {
                let curriculum = Arc::clone(self.core.curriculum());
                self.kept.checkpoint(step, curriculum);
                self.updates.since_checkpoint_s = 0.0;
            }
            Command::Record { step, .. } => self.record(step),
            Command::Measure { .. } => self.tell(Event::EvaluationDone),
            Command::Stop(stop) => {
                let now = self.clock.now;
                self.measure.end(now);
                self.stopped = Some(stop);
            }
            // Groups score themselves, and nothing comes from outside.
            Command::ScoreGroup { .. }
            | Command::Fetch { .. }
            | Command::CollectLateRewards { .. }
            | Command::SourceDry { .. } => {}
        }
    }

    /// One that became durable is named by the commit, and goes with it.
    fn abandon_one(&mut self, id: &EpisodeId) {
        if let Some(slot) = self.episodes.find(id) {
            self.abandon(slot);
        }
        if let Some(record) = self.kept.stored.get(id) {
            self.updates.ended.insert(id.clone(), Arc::clone(record));
        }
    }

    /// Says what a group is worth.
    fn weigh(&mut self, group: GroupId, episodes: &[EpisodeId]) {
        let oldest = self.updates.oldest(episodes);
        let hides = self.bug == Some(Bug::Stale);
        let signal = self.updates.has_signal(episodes);
        self.tell(Event::GroupInspected {
            group,
            signal,
            oldest: if hides { None } else { oldest },
            stored: Vec::new(),
            alone: None,
        });
    }

    /// Rows of groups with a signal; the rest is left out with its reason.
    fn make_rows(&mut self, groups: Vec<Vec<EpisodeId>>) {
        let (mut trained, mut dropped) = (Vec::new(), BTreeMap::new());
        for group in &groups {
            let signal = self.updates.has_signal(group);
            for id in group {
                let failed = self.updates.ended.get(id).is_none_or(|e| e.failed);
                match (failed, signal) {
                    (false, true) => trained.push(id.clone()),
                    (true, _) => drop(dropped.insert(id.clone(), FAILED.to_owned())),
                    (false, false) => drop(dropped.insert(id.clone(), NO_SIGNAL.to_owned())),
                }
            }
        }
        let keys = trained.iter().map(|id| id.as_str().to_owned()).collect();
        self.lease_rows(keys);
        self.updates.groups = groups;
        self.updates.trained.clone_from(&trained);
        self.tell(Event::RowsReady {
            rows: trained.len(),
            trained,
            dropped,
            sightings: Vec::new(),
        });
    }

    /// The trainer begins an update.
    fn train(&mut self, step: u64) {
        let version = self.updates.version;
        let (mut tokens, mut sampled, mut behind) = (0, 0, Vec::new());
        for id in &self.updates.trained {
            let Some(record) = self.updates.ended.get(id) else {
                continue;
            };
            tokens += record.tokens;
            sampled += record.sampled;
            let age = version.saturating_sub(record.oldest.unwrap_or(version));
            behind.push(age);
            self.ledger.trains(id, age);
        }
        let [tokens, sampled] = [tokens, sampled].map(|n| (n * self.speed.grain) as f64);
        let train_s = if behind.is_empty() {
            0.0
        } else {
            self.plan.trainer.fixed_s + tokens / self.plan.trainer.tokens_per_s
        };
        self.measure.update((tokens, sampled), train_s, &behind);
        self.updates.trains = true;
        let waits_s = seconds(self.updates.trainer_ready.saturating_sub(self.clock.now));
        let until_s = waits_s + train_s;
        (self.updates.train_step, self.updates.train_s) = (step, train_s);
        self.updates.trained_at = self.clock.now + micros(until_s);
        self.clock.after(until_s, Happening::Trained(step));
    }

    /// An update is computed.
    pub(super) fn trained(&mut self, step: u64) {
        // The trainer was lost since, and computes it again.
        if self.clock.now < self.updates.trained_at {
            return;
        }
        self.updates.since_checkpoint_s += self.updates.train_s;
        self.updates.trains = false;
        let rows = self.updates.trained.len();
        self.tell(Event::UpdateDone(Box::new(StepRecord {
            step,
            rows: rows.max(1),
            trained_tokens: rows.max(1),
            updates_applied: 1,
            grad_norm: 1.0,
            ..StepRecord::default()
        })));
    }

    /// New weights are on their way.
    fn publish(&mut self, step: u64) {
        self.updates.version_to_come = step;
        self.updates.publishes = true;
        let w = &self.plan.weights;
        let way_s = self.units.transfer_s(w.gigabytes * 1e9);
        let transfer_s = w.transfer_s + way_s + self.plan.hops.weights_s;
        self.clock.after(transfer_s, Happening::Transferred);
    }

    /// The new weights sample from now on.
    pub(super) fn live(&mut self, version: u64) {
        self.updates.version = version;
        self.updates.publishes = false;
        self.tell(Event::WeightsLive { version });
    }

    /// An update is committed.
    fn commit(&mut self, mut commit: UpdateCommit) {
        if self.bug == Some(Bug::TrainTwice) && commit.step == 2 {
            commit
                .trained
                .extend(self.updates.last_trained.first().cloned());
        }
        if self.bug == Some(Bug::SkipCommit) && commit.step == 2 {
            return;
        }
        self.updates.last_trained.clone_from(&commit.trained);
        self.ledger.commit(&commit);
        let named = || commit.trained.iter().chain(commit.dropped.keys());
        let order = Order {
            groups: std::mem::take(&mut self.updates.groups),
            curriculum: commit.curriculum.clone(),
            named: named().cloned().collect(),
        };
        self.kept.orders.insert(commit.step, order);
        for id in named() {
            self.updates.ended.remove(id);
        }
        self.measure.trained += commit.trained.len() as u64;
        self.measure.dropped += commit.dropped.len() as u64;
        self.ack_rows(named().cloned());
    }

    /// An update is over.
    fn record(&mut self, step: u64) {
        let busy_s = self.busy_s();
        let now = self.clock.now;
        self.ledger.progress(now);
        self.measure.step(step, now, busy_s);
    }
}
