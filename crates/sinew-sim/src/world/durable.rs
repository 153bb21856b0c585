//! Data of the simulated run that outlive its process.
//!
//! A session that begins after a kill gets what the store of a real run would return: the checkpoint, the
//! commits after it, and the draws that no commit names.

use crate::check::Ledger;
use crate::measure::tokens_of;
use crate::plan::Mode;
use sinew_orchestrator::{CoreState, Curriculum, OpenDraws};
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// A stored episode, as far as the loop needs it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StoredEpisode {
    /// Draw of the core.
    pub(super) draw: u64,
    /// Those that it is compared with.
    pub(super) group: GroupId,
    /// The system failed it.
    pub(super) failed: bool,
    /// Its score.
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
    pub(super) named: BTreeSet<u64>,
    /// Number of the last one.
    pub(super) next: u64,
    pub(super) checkpoint: u64,
    /// Curriculum of the checkpoint.
    pub(super) curriculum: Arc<Curriculum>,
}

/// Content of a committed update.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    /// The groups of the update.
    pub(super) groups: Vec<Vec<EpisodeId>>,
    /// Curriculum after the update.
    pub(super) curriculum: Arc<Curriculum>,
    /// Episodes that the commit names.
    pub(super) named: Vec<EpisodeId>,
}

impl StoredEpisode {
    /// The stored part of a trace.
    pub(super) fn of(trace: &Trace) -> Self {
        let versions = || {
            trace
                .nodes
                .iter()
                .flat_map(|n| &n.versions)
                .map(|s| s.version.0)
        };
        Self {
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
}

impl DurableState {
    /// Forgets the episodes that the checkpoint covers: the core does not ask for them again.
    pub(super) fn checkpoint(&mut self, step: u64, curriculum: Arc<Curriculum>) {
        self.checkpoint = step;
        self.curriculum = curriculum;
        let later = self.orders.split_off(&(step + 1));
        for (_, order) in std::mem::replace(&mut self.orders, later) {
            for id in order.named {
                if let Some(record) = self.stored.remove(&id) {
                    self.named.insert(record.draw);
                    self.next = self.next.max(record.draw + 1);
                }
            }
        }
    }

    /// State from which the next session continues.
    pub(super) fn core_state(&self, mode: Mode, ledger: &Ledger) -> CoreState {
        let checkpoint = self.checkpoint;
        let later = self.orders.range(checkpoint + 1..);
        CoreState {
            step: checkpoint,
            curriculum: self.curriculum.clone(),
            version: checkpoint,
            committed: later.map(|(s, o)| (*s, o.curriculum.clone())).collect(),
            draws: match mode {
                Mode::Sync => OpenDraws::default(),
                Mode::OneStepOff | Mode::Async => self.open_draws(mode, ledger),
            },
            ..CoreState::default()
        }
    }

    /// Stored episodes that no commit names, and whose draws the next session would run again.
    pub(super) fn open_episodes(&self, ledger: &Ledger) -> Vec<EpisodeId> {
        let named = self.stored.iter().filter(|(id, _)| ledger.is_named(id));
        let settled: HashSet<u64> = named.map(|(_, r)| r.draw).collect();
        let settled = |draw: &u64| settled.contains(draw) || self.named.contains(draw);
        let open = self.stored.iter().filter(|(_, r)| !settled(&r.draw));
        open.map(|(id, _)| id.clone()).collect()
    }

    /// Draws that earlier sessions began and no commit names, as the store of a run finds them.
    fn open_draws(&self, mode: Mode, ledger: &Ledger) -> OpenDraws {
        let mut named: HashMap<u64, bool> = HashMap::new();
        for (id, record) in &self.stored {
            *named.entry(record.draw).or_default() |= ledger.is_named(id);
        }
        let settled = |d: &u64| self.named.contains(d) || named.get(d) == Some(&true);
        let next = named
            .keys()
            .map(|d| d + 1)
            .max()
            .unwrap_or(0)
            .max(self.next);
        let commits = self.orders.keys().next_back().copied();
        let known = commits.unwrap_or(0).max(self.checkpoint);
        let in_order = mode == Mode::OneStepOff;
        let lost: BTreeSet<u64> = self
            .stored
            .values()
            .filter(|r| !in_order && r.newest.is_some_and(|v| v > known) && !settled(&r.draw))
            .map(|r| r.draw)
            .collect();
        let dropped = self.stored.iter().filter(|(_, r)| lost.contains(&r.draw));
        let reason = "sampled by weights that were lost before their commit".to_owned();
        OpenDraws {
            dropped: dropped
                .map(|(id, _)| (id.clone(), reason.clone()))
                .collect(),
            open: (0..next)
                .filter(|d| !settled(d) && !lost.contains(d))
                .collect(),
            next,
        }
    }
}
