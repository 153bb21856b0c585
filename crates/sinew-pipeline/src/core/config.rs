//! What the decisions of a run depend on, as data: fixed before the run begins.

use crate::curriculum::TasksByKind;
use crate::schedule::draws_per_step;
use sinew_algo::AdaptiveConfig;

/// Which tasks a step runs.
#[derive(Debug)]
pub enum TaskSampling {
    /// All of them, once an epoch, in an order of the seed's.
    Uniform,
    /// Types that are neither solved nor hopeless more often.
    Adaptive {
        config: AdaptiveConfig,
        tasks: TasksByKind,
    },
}

/// Held-out measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvalConfig {
    pub tasks: usize,
    pub episodes_per_task: usize,
    /// Also every so many steps; 0 for before and after only.
    pub every: u64,
    pub temperature: f32,
    /// Also one greedy episode a task, before and after.
    pub greedy: bool,
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    Train,
    /// One held-out measurement.
    Measure,
}

/// Where training episodes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Samples {
    /// They are run, on tasks that the core draws.
    Run,
    /// A source gives groups of them.
    Given,
}

/// What the decisions of a run depend on.
#[derive(Debug)]
pub struct CoreConfig {
    pub goal: Goal,
    /// Of tasks and sampling.
    pub seed: u64,
    pub steps: u64,
    /// Training stops early after this many seconds.
    pub max_wall_s: Option<f64>,
    pub checkpoint_every: u64,
    pub samples: Samples,
    pub tasks_per_step: usize,
    pub group_size: usize,
    /// How often an episode that the system failed is run again.
    pub retries: u32,
    /// Rounds in which groups that teach nothing are replaced.
    pub refill: u32,
    pub tasks: TaskSampling,
    /// Sizes of the taskset's splits.
    pub train_tasks: usize,
    pub held_out_tasks: usize,
    pub eval: EvalConfig,
}

impl CoreConfig {
    /// Draws that each step has to itself.
    pub fn draws_per_step(&self) -> u64 {
        // Given episodes replace no others.
        let refill = match self.samples {
            Samples::Run => self.refill,
            Samples::Given => 0,
        };
        draws_per_step(self.tasks_per_step, refill)
    }
}
