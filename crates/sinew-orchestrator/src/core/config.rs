//! Inputs of a run's decisions, as data: fixed before the run begins.

use crate::curriculum::TaskShares;
use crate::schedule::draws_per_step;
use sinew_algo::AdaptiveConfig;

/// Choice of the tasks of a step.
#[derive(Debug)]
pub enum TaskSampling {
    /// All of them, once an epoch, in an order of the seed's.
    Uniform,
    /// Tasks are drawn by shares: of environments, and of task types in them.
    Shares {
        /// The training tasks with their shares.
        tasks: TaskShares,
        /// Bounds and memory of the estimates, where types that are neither solved nor hopeless are drawn
        /// more often.
        adaptive: Option<AdaptiveConfig>,
    },
}

/// Held-out measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalConfig {
    /// Held-out tasks that are measured, the first of their split.
    pub tasks: usize,
    /// Sampled ones; their mean is the task's success.
    pub episodes_per_task: usize,
    /// Steps between further measurements; 0: there are only those before and after.
    pub every: u64,
    /// Temperature of the sampled episodes.
    pub temperature: f32,
    /// True if one greedy episode a task is run as well, before and after.
    pub greedy: bool,
}

/// Goal of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Steps of rollout and update, with held-out measurements before and after.
    Train,
    /// One held-out measurement.
    Measure,
}

/// Source of training episodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleKind {
    /// They are run, on tasks that the core draws.
    Run,
    /// A source gives groups of them.
    Given,
}

/// Overlap of generation with training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Optimizer updates that a sample may be behind the weights when it is trained.
    pub max_staleness: u64,
    /// Optimizer updates of a step.
    pub updates_per_step: u64,
    /// Updates take groups in the order of their draws, and new weights wait until all groups that run have
    /// ended: what is trained is a function of the seed. Otherwise updates take the groups that are complete,
    /// and weights are replaced between two tokens.
    pub in_order: bool,
    /// Rewards come from outside, some of them late. Needs updates that take what is complete.
    pub late: Option<LateGroups>,
}

/// Limits for groups that wait for rewards from outside while others run and are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateGroups {
    /// No group is begun while so many wait. An update that as many groups could not be taken for, because
    /// they are too old or have no rewards, is made of those that are there.
    pub max_waiting: usize,
    /// Optimizer updates that a group may be behind the weights when it is trained.
    pub max_staleness: u64,
}

/// Inputs of a run's decisions.
#[derive(Debug)]
pub struct CoreConfig {
    /// Training, or one measurement.
    pub goal: Goal,
    /// Seed of tasks and sampling.
    pub seed: u64,
    /// Optimizer steps of the whole run, those of earlier sessions included.
    pub steps: u64,
    /// Training stops early after this many seconds.
    pub max_wall_s: Option<f64>,
    /// Steps between two checkpoints; the last step has one in any case.
    pub checkpoint_every: u64,
    /// Run here, or given by a source.
    pub samples: SampleKind,
    /// Groups of a step.
    pub tasks_per_step: usize,
    /// Groups that a step begins in addition, and of which it stops as many once enough are complete.
    pub over_sample: usize,
    /// Episodes of a group.
    pub group_size: usize,
    /// Number of them that begin first: if these teach nothing, the others are not begun. `None`: all at
    /// once.
    pub stop_decided: Option<usize>,
    /// Number of further attempts of an episode that the system failed.
    pub retries: u32,
    /// Rounds in which groups that teach nothing are replaced.
    pub refill: u32,
    /// Groups wait for rewards from outside; while none has them, so many more rounds of groups are run in
    /// a step. `None`: every reward is there when its episode ends, or generation overlaps with training.
    pub late_rounds: Option<u32>,
    /// Generation and training overlap; `None`: they take turns.
    pub overlap: Option<Overlap>,
    /// Sampling of the tasks of a step.
    pub tasks: TaskSampling,
    /// Sizes of the taskset's splits.
    pub train_tasks: usize,
    pub held_out_tasks: usize,
    /// Held-out measurements.
    pub eval: EvalConfig,
}

impl CoreConfig {
    /// Whether rewards may come from outside after their episode.
    pub(crate) fn is_late(&self) -> bool {
        self.late_rounds.is_some() || self.overlap.is_some_and(|o| o.late.is_some())
    }

    /// Draws that each step has to itself.
    pub fn draws_per_step(&self) -> u64 {
        // Given episodes replace no others.
        let refill = match self.samples {
            SampleKind::Run => self.late_rounds.unwrap_or(self.refill),
            SampleKind::Given => 0,
        };
        draws_per_step(self.tasks_per_step + self.over_sample, refill)
    }
}

/// Time of a held-out measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalTime {
    /// The first weights.
    Before,
    /// The measurement is between two steps, every [`EvalConfig::every`].
    During,
    /// The last weights.
    After,
    /// The only one of a run that trains nothing.
    Now,
}

impl EvalTime {
    /// Name in records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Before => "before",
            Self::During => "during",
            Self::After => "after",
            Self::Now => "now",
        }
    }
}
