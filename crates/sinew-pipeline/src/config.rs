//! What a run is to do, as plain data: a recipe that was resolved, without its text forms.

use crate::core::CoreConfig;
use crate::curriculum::TasksByKind;
use sinew_algo::AdaptiveConfig;
use std::path::PathBuf;
use std::sync::Arc;

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

/// A run of the training loop.
#[derive(Debug)]
pub struct PipelineConfig {
    /// What its decisions depend on.
    pub core: Arc<CoreConfig>,
    /// Maximum tokens of a path that is trained.
    pub max_context_tokens: usize,
    /// Folder of everything that the run writes.
    pub run_dir: PathBuf,
    /// The sub-command, for advice on how to go on.
    pub command: &'static str,
    /// As TOML; checkpoints keep it.
    pub recipe: String,
    /// Stored episodes that are gone are no reason to end badly.
    pub accept_loss: bool,
}
