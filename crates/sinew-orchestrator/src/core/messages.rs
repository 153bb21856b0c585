//! Events (inputs) and commands (outputs) of the core, as plain data.

use super::config::EvalTime;
use super::slots::{EpisodeResult, TaskOutcome};
use crate::curriculum::Curriculum;
use crate::health::{Alarm, Health};
use crate::record::StepRecord;
use crate::schedule::Draw;
use sinew_algo::trust::Sighting;
use sinew_types::{EpisodeId, GroupId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Draws that earlier sessions started but no commit names, and the number of the first unused draw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenDraws {
    /// Started draws in ascending order.
    pub open: Vec<u64>,
    /// Number of the first unused draw, larger than all in `open`.
    pub next: u64,
    /// Stored episodes of other draws, which are left out, with the reason.
    pub dropped: BTreeMap<EpisodeId, String>,
}

/// State from which a resumed run continues.
#[derive(Clone, Debug, Default)]
pub struct CoreState {
    /// Number of training steps that are contained in the weights.
    pub step: u64,
    /// Curriculum of the checkpoint.
    pub curriculum: Arc<Curriculum>,
    /// The last step after which held-out tasks were measured in between.
    pub measured_at: u64,
    /// Counts of consecutive bad steps at the end of the earlier ones.
    pub health: Health,
    /// Later updates that were committed, with the curriculum after each: they are done again from the same
    /// episodes.
    pub committed: BTreeMap<u64, Arc<Curriculum>>,
    /// The step that was begun and not committed, with the rounds of groups that it began after its first:
    /// they are begun again, so that none of their episodes is forgotten.
    pub begun: (u64, u32),
    /// Version of the weights.
    pub version: u64,
    /// Draws that earlier sessions began, if generation overlaps with training.
    pub draws: OpenDraws,
}

/// Reason for the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// All steps are done, or the time limit is reached.
    Done,
    /// The last steps were bad, for this reason.
    Bad(String),
    /// The run was asked to stop, for example by a signal.
    Interrupted,
}

/// Input of the core.
#[derive(Clone, Debug)]
pub enum Event {
    /// The first event of a session.
    Begin,
    /// The driver has found the first measurement, so that it is not repeated.
    FirstEvalFound,
    /// An episode has ended and is stored.
    EpisodeEnded(EpisodeResult),
    /// The driver has scored a group. Contains the outcomes of the episodes with a reward.
    GroupScored {
        group: GroupId,
        outcomes: BTreeMap<EpisodeId, TaskOutcome>,
    },
    /// The driver has compared the groups of the step.
    SpentGroupsCounted {
        /// Number of groups without a training signal or with too many failed episodes.
        spent: usize,
    },
    /// The source delivered groups.
    GroupsFetched {
        /// Groups in the source's order.
        groups: Vec<Vec<EpisodeId>>,
        /// Episodes of the source that must not be trained, with the reason. If this and `groups` are empty,
        /// the source has no more.
        dropped: BTreeMap<EpisodeId, String>,
        /// Task and reward of episodes that are the only ones of their group.
        alone: Vec<(String, f64)>,
    },
    /// The driver has checked the groups that wait for rewards.
    LateRewardsCollected {
        /// Groups that can be trained.
        groups: Vec<Vec<EpisodeId>>,
        /// Episodes whose rewards did not come in time.
        dropped: BTreeMap<EpisodeId, String>,
        /// Task and reward of episodes that are the only ones of their group.
        alone: Vec<(String, f64)>,
        /// Number of groups that still wait.
        waiting: usize,
        /// Whether more groups may be started.
        may_begin: bool,
    },
    /// Episodes of a committed update; `None` if some are missing in the store.
    CommittedLoaded(Option<Vec<Vec<EpisodeId>>>),
    /// Training rows were made. Contains the episodes with a row, and those without.
    RowsReady {
        rows: usize,
        trained: Vec<EpisodeId>,
        dropped: BTreeMap<EpisodeId, String>,
        /// Data of these rows for the statistics of usual values, which suspicious episodes are compared
        /// with.
        sightings: Vec<Sighting>,
    },
    /// The update of the step has ended: applied, skipped, or without rows to train on.
    UpdateDone(Box<StepRecord>),
    /// The engine samples every later token with the weights of this version.
    WeightsLive { version: u64 },
    /// Value of a complete group, or of the first episodes of a group.
    GroupInspected {
        group: GroupId,
        /// Whether the rewards give a training signal.
        signal: bool,
        /// The oldest weights version that sampled a token of the group; `None` if no token was sampled.
        oldest: Option<u64>,
        /// Held-back episodes and their further attempts that the store holds.
        stored: Vec<EpisodeId>,
        /// Task and reward of an episode that is the only one of its group and got its reward late.
        alone: Option<(String, f64)>,
    },
    /// The driver has summarized a measurement.
    EvaluationDone,
    /// The run was asked to stop. `whole`: the weights are those of a complete step.
    Interrupted { whole: bool },
    /// Time passed.
    Tick,
}

/// The decisions of one update's commit; the driver adds its own data.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateCommit {
    /// Number of the step, from 1.
    pub step: u64,
    /// Trained episodes in the order of the rows.
    pub trained: Vec<EpisodeId>,
    /// Episodes left out, with the reason of each.
    pub dropped: BTreeMap<EpisodeId, String>,
    /// Curriculum after the update.
    pub curriculum: Arc<Curriculum>,
    /// It takes the place of an earlier commit of the step.
    pub again: bool,
}

/// Output of the core: an action for the driver.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Find the first measurement of a resumed run, by its stored episodes or by its record.
    FindFirstEval(Vec<EvalSet>),
    /// Run episodes and report the end of each. Held-out episodes have a separate temperature.
    Start {
        /// Episodes to start; the driver decides how many run at a time.
        draws: Vec<Draw>,
        /// Sampling temperature of held-out episodes; `None` for training episodes.
        temperature: Option<f32>,
    },
    /// Stop these episodes. The core expects no further event about them.
    Abandon { episodes: Vec<EpisodeId> },
    /// Score a group whose episodes have all ended, and report the result. Other work continues meanwhile.
    ScoreGroup {
        /// The last attempt of each episode, in order.
        members: Vec<Draw>,
    },
    /// Ask the source for groups.
    Fetch { step: u64 },
    /// Read the episodes of a committed update.
    LoadCommitted { step: u64 },
    /// Let these groups wait for late rewards, and report which waiting groups can be trained: at once, or
    /// from time to time if generation overlaps with training.
    CollectLateRewards {
        step: u64,
        groups: Vec<Vec<EpisodeId>>,
        /// Whether the core has nothing else to do; the driver then waits a moment for rewards.
        wait: bool,
    },
    /// Ask the algorithm which groups it will remove from the batch.
    CountSpentGroups {
        /// Groups whose episodes have ended.
        groups: Vec<Vec<EpisodeId>>,
    },
    /// Report whether a group has a training signal, and how old its samples are.
    InspectGroup {
        group: GroupId,
        /// Ended episodes of the group: all of them, or the first ones.
        episodes: Vec<EpisodeId>,
        /// Episodes that did not start in this session but may be in the store.
        held: Vec<EpisodeId>,
    },
    /// Make training rows of these groups.
    Score {
        step: u64,
        groups: Vec<Vec<EpisodeId>>,
        counts: RunCounts,
        /// Episodes that were left out before, as too old or without rewards, with the reason.
        left_out: BTreeMap<EpisodeId, String>,
    },
    /// Train on the rows. Without rows, report the end of the update at once.
    Train {
        step: u64,
        /// Number of episodes without a row, by reason.
        left_out: BTreeMap<String, usize>,
    },
    /// Publish the weights to the engine.
    Publish { step: u64 },
    /// Write the commit of an update durably. The update counts from then on.
    Commit(UpdateCommit),
    /// Save the weights, the optimizer and the state of the run.
    Checkpoint { step: u64 },
    /// Record the step, with an alarm if there is one.
    Record { step: u64, alarm: Option<Alarm> },
    /// Summarize a measurement of these episodes.
    Measure {
        when: EvalTime,
        sets: Vec<Vec<EpisodeId>>,
    },
    /// The source has no more groups.
    SourceDry { step: u64 },
    /// The last command of a session.
    Stop(StopReason),
}

/// Counts of episodes of a step other than the trained ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Number of ended further attempts. An episode is run again if the system failed it, or if a part of the
    /// system has changed since it ran.
    pub retried: usize,
    /// Number of these attempts that the system did not fail.
    pub recovered: usize,
    /// Number of groups that replaced others.
    pub refilled: usize,
    /// Number of episodes that were never started, because the first episodes of their group had no training
    /// signal.
    pub not_begun: usize,
}

/// Held-out episodes that are measured together.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalSet {
    /// Purpose of its episodes, such as `eval-before`.
    pub purpose: String,
    /// Sampling temperature; 0 is greedy.
    pub temperature: f32,
    pub draws: Vec<Draw>,
}
