//! Settings of the core, as data that is fixed before the run begins.

use crate::curriculum::TaskShares;
use crate::schedule::draws_per_step;
use sinew_algo::AdaptiveConfig;

/// Rule that chooses the tasks of a step.
#[derive(Debug)]
pub enum TaskSampling {
    /// Every task once per epoch, in an order that follows from the seed.
    Uniform,
    /// Tasks are drawn by shares of the environments, and of the task types within an environment.
    Shares {
        /// The training tasks with their shares.
        tasks: TaskShares,
        /// Limits and memory of the success estimates. With them, task types of medium success are drawn more
        /// often than solved or hopeless ones.
        adaptive: Option<AdaptiveConfig>,
    },
}

/// Held-out measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalConfig {
    /// Number of measured held-out tasks, taken from the start of their split.
    pub tasks: usize,
    /// Sampled episodes of each task. Their mean is the success of the task.
    pub episodes_per_task: usize,
    /// Steps between two measurements during training; 0: only before and after training.
    pub every: u64,
    /// Temperature of the sampled episodes.
    pub temperature: f32,
    /// Whether one greedy episode per task is run as well, before and after training.
    pub greedy: bool,
}

/// The work of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Training steps, with held-out measurements before and after.
    Train,
    /// One held-out measurement without training.
    Measure,
}

/// Source of training episodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleKind {
    /// The run samples the episodes itself, on tasks that the core draws.
    Run,
    /// An external source delivers groups of finished episodes.
    Given,
}

/// Settings for generation that overlaps with training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Optimizer updates that a sample may be behind the weights when it is trained.
    pub max_staleness: u64,
    /// Number of optimizer updates in a step.
    pub updates_per_step: u64,
    /// If true, updates take groups in the order of their draws, and new weights wait until all running
    /// groups have ended: the trained samples are then a function of the seed. If false, updates take the
    /// groups that are complete, and weights are replaced between two tokens.
    pub in_order: bool,
    /// Limits for rewards that arrive from outside after the episode. Needs `in_order` to be false.
    pub late: Option<LateGroups>,
}

/// Limits for groups that wait for rewards from outside while others run and are trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateGroups {
    /// Maximum number of waiting groups; no group is started while this many run or wait. After this many
    /// groups were left out for an update, as too old or without rewards, the update uses the groups that
    /// are complete.
    pub max_waiting: usize,
    /// Optimizer updates that a group may be behind the weights when it is trained.
    pub max_staleness: u64,
}

/// All settings of the core.
#[derive(Debug)]
pub struct CoreConfig {
    /// Training, or one measurement.
    pub goal: Goal,
    /// Seed of tasks and sampling.
    pub seed: u64,
    /// Optimizer steps of the whole run, including earlier sessions.
    pub steps: u64,
    /// Training stops early after this many seconds.
    pub max_wall_s: Option<f64>,
    /// Steps between two checkpoints. The last step always writes one.
    pub checkpoint_every: u64,
    /// Source of the training episodes.
    pub samples: SampleKind,
    /// Number of groups that a step trains.
    pub tasks_per_step: usize,
    /// Number of surplus groups that a step starts; it stops as many once enough groups are complete.
    pub over_sample: usize,
    /// Episodes of a group.
    pub group_size: usize,
    /// Number of episodes of a group that start first. If these have no training signal, the others are never
    /// started. `None`: all start at once.
    pub stop_decided: Option<usize>,
    /// Maximum number of further attempts after the system failed an episode.
    pub retries: u32,
    /// Maximum number of rounds in which a step replaces groups without a training signal. If generation
    /// overlaps with training, an update replaces at most this many times `tasks_per_step` groups.
    pub refill: u32,
    /// Additional rounds of groups that a step may run while no group has its rewards from outside. `None`:
    /// rewards are complete when the episode ends, or generation overlaps with training.
    pub late_rounds: Option<u32>,
    /// Overlap of generation with training; `None`: generation and training alternate.
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

    /// Number of draws that are reserved for each step.
    pub fn draws_per_step(&self) -> u64 {
        // Given episodes replace no others.
        let refill = match self.samples {
            SampleKind::Run => self.late_rounds.unwrap_or(self.refill),
            SampleKind::Given => 0,
        };
        draws_per_step(self.tasks_per_step + self.over_sample, refill)
    }
}

/// Point of a run at which held-out tasks are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvalTime {
    /// Before training, with the first weights.
    Before,
    /// Between two training steps, every [`EvalConfig::every`] steps.
    During,
    /// After training, with the last weights.
    After,
    /// The only measurement of a run that trains nothing.
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
