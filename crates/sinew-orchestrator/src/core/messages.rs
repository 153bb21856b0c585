//! Inputs and outputs of the core, as data.

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

/// Draws that earlier sessions began and no commit names, and the first draw that none began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenDraws {
    /// Draws in their order.
    pub open: Vec<u64>,
    /// Larger than all of them.
    pub next: u64,
    /// Stored episodes of others, which are left out with this reason.
    pub dropped: BTreeMap<EpisodeId, String>,
}

/// State with which a resumed run begins.
#[derive(Clone, Debug, Default)]
pub struct CoreState {
    /// Steps that the weights have seen.
    pub step: u64,
    /// Curriculum of the checkpoint.
    pub curriculum: Arc<Curriculum>,
    /// The last step after which held-out tasks were measured in between.
    pub measured_at: u64,
    /// Counts of what went wrong in the steps before.
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

/// Reason why a run comes to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// Its steps are done, or its time is up.
    Done,
    /// Its last steps were bad.
    Bad(String),
    /// It was asked to stop.
    Interrupted,
}

/// Input of the core.
#[derive(Clone, Debug)]
pub enum Event {
    /// The first event of a session.
    Begin,
    /// A first measurement was found, so that none has to be made.
    FirstEvalFound,
    /// An episode is over and in the store.
    EpisodeEnded(EpisodeResult),
    /// A group was scored: what its members with a reward showed.
    GroupScored {
        group: GroupId,
        outcomes: BTreeMap<EpisodeId, TaskOutcome>,
    },
    /// Result of a comparison of the step's groups.
    SpentGroupsCounted {
        /// Groups without a signal, or with too many failed episodes.
        spent: usize,
    },
    /// Groups that a source gave, and episodes of it that must not be trained.
    GroupsFetched {
        /// Groups in the source's order.
        groups: Vec<Vec<EpisodeId>>,
        dropped: BTreeMap<EpisodeId, String>,
        /// Task and reward of the episodes that are alone in their group.
        alone: Vec<(String, f64)>,
    },
    /// A look at the groups that wait for rewards.
    LateRewardsCollected {
        /// Groups that can be trained.
        groups: Vec<Vec<EpisodeId>>,
        /// Episodes whose rewards did not come in time.
        dropped: BTreeMap<EpisodeId, String>,
        /// Task and reward of the episodes that are alone in their group.
        alone: Vec<(String, f64)>,
        /// Groups that continue to wait.
        waiting: usize,
        /// More groups may be begun.
        may_begin: bool,
    },
    /// The episodes of a committed update; `None` if the store does not have them all.
    CommittedLoaded(Option<Vec<Vec<EpisodeId>>>),
    /// Rows were made: from these episodes, and not from those.
    RowsReady {
        rows: usize,
        trained: Vec<EpisodeId>,
        dropped: BTreeMap<EpisodeId, String>,
        /// Their contribution to what is usual in the run.
        sightings: Vec<Sighting>,
    },
    /// An update was applied, or there was nothing to apply.
    UpdateDone(Box<StepRecord>),
    /// Every later token is drawn by the new weights, which have this version.
    WeightsLive { version: u64 },
    /// Value of a complete group, or of its first episodes.
    GroupInspected {
        group: GroupId,
        /// The rewards teach something.
        signal: bool,
        /// The oldest version that sampled a token of it, if one did.
        oldest: Option<u64>,
        /// Those of the held-back episodes, and of their further attempts, that are in the store.
        stored: Vec<EpisodeId>,
        /// Task and reward, if only one episode was waited for to get its reward.
        alone: Option<(String, f64)>,
    },
    /// A measurement was summed up.
    EvaluationDone,
    /// The run was asked to stop. `whole`: the weights are those of a step.
    Interrupted { whole: bool },
    /// Time passed.
    Tick,
}

/// One update as it is committed, without the driver's part.
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
    /// Look for the first measurement of a resumed run.
    FindFirstEval(Vec<EvalSet>),
    /// Run episodes and report each end. Held-out ones at a separate temperature.
    Start {
        /// All at once; the driver decides how many run at a time.
        draws: Vec<Draw>,
        /// Set for held-out episodes.
        temperature: Option<f32>,
    },
    /// Stop these episodes: nothing more is heard of them.
    Abandon { episodes: Vec<EpisodeId> },
    /// Score a group whose members have all ended, and report that. Others continue meanwhile.
    ScoreGroup {
        /// Last attempts, in their order.
        members: Vec<Draw>,
    },
    /// Ask the source for groups.
    Fetch { step: u64 },
    /// Read the episodes of a committed update.
    LoadCommitted { step: u64 },
    /// Let these groups wait for their rewards, and look which of all that wait can be trained: at once, or
    /// now and then where generation overlaps with training.
    CollectLateRewards {
        step: u64,
        groups: Vec<Vec<EpisodeId>>,
        /// Nothing else can be done: give rewards a moment to come.
        wait: bool,
    },
    /// Ask the algorithm which groups will leave the batch.
    CountSpentGroups {
        /// Their episodes have ended.
        groups: Vec<Vec<EpisodeId>>,
    },
    /// Say whether a group teaches something, and how old it is.
    InspectGroup {
        group: GroupId,
        /// All of it, or the first ones. They have ended.
        episodes: Vec<EpisodeId>,
        /// Those that did not begin in this session and may be in the store.
        held: Vec<EpisodeId>,
    },
    /// Make rows of these groups.
    Score {
        step: u64,
        groups: Vec<Vec<EpisodeId>>,
        counts: RunCounts,
        /// Left out before, with the reason, because they are too far behind or their rewards did not come.
        left_out: BTreeMap<EpisodeId, String>,
    },
    /// Train on the rows; if there are none, report it at once.
    Train {
        step: u64,
        /// Episodes that gave no row, by reason.
        left_out: BTreeMap<String, usize>,
    },
    /// Bring the weights to where tokens are sampled.
    Publish { step: u64 },
    /// Record an update durably; it counts from then on.
    Commit(UpdateCommit),
    /// Save weights, optimizer and the state of the run.
    Checkpoint { step: u64 },
    /// Tell what the step did, with what is wrong, if anything is.
    Record { step: u64, alarm: Option<Alarm> },
    /// Sum up a measurement of these episodes.
    Measure {
        when: EvalTime,
        sets: Vec<Vec<EpisodeId>>,
    },
    /// The source has nothing more.
    SourceDry { step: u64 },
    /// The last command of a session.
    Stop(StopReason),
}

/// Episodes of a step in addition to the trained ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Run again because the system failed them, and how many of these went well.
    pub retried: usize,
    /// Part of `retried`.
    pub recovered: usize,
    /// Groups that were run in the place of others.
    pub refilled: usize,
    /// Episodes that were not begun, because the first ones of their group had decided it.
    pub not_begun: usize,
}

/// Held-out episodes that are measured together.
#[derive(Clone, Debug, PartialEq)]
pub struct EvalSet {
    /// Purpose of its episodes, such as `eval-before`.
    pub purpose: String,
    /// 0 is greedy.
    pub temperature: f32,
    pub draws: Vec<Draw>,
}
