//! What a run is to do, as plain data: a recipe that was resolved, without its text forms.

use crate::curriculum::TasksByKind;
use sinew_algo::AdaptiveConfig;
use sinew_rollout::EpisodeOptions;
use std::path::PathBuf;

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

/// The held-out measurement before and after.
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

/// A run of the training loop.
#[derive(Debug)]
pub struct PipelineConfig {
    /// Of tasks and sampling.
    pub seed: u64,
    pub steps: u64,
    /// Training stops early after this many seconds.
    pub max_wall_s: Option<f64>,
    pub checkpoint_every: u64,
    pub tasks_per_step: usize,
    pub group_size: usize,
    pub max_in_flight: usize,
    pub tasks: TaskSampling,
    pub episode: EpisodeOptions,
    pub eval: EvalConfig,
    /// Folder of everything that the run writes.
    pub run_dir: PathBuf,
    /// Earlier sessions may have stored episodes.
    pub resumed: bool,
    /// What the store holds ends with the session.
    pub forgets: bool,
    /// Stored episodes that are gone are no reason to end badly.
    pub accept_loss: bool,
}
