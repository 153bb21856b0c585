//! Settings of a run, as plain data: a recipe that was resolved, without its text forms.

use sinew_algo::trust::TrustConfig;
use sinew_orchestrator::CoreConfig;
use std::path::PathBuf;
use std::sync::Arc;

/// A run of the training loop.
#[derive(Debug)]
pub struct PipelineConfig {
    /// Inputs of its decisions.
    pub core: Arc<CoreConfig>,
    /// Maximum tokens of a path that is trained.
    pub max_context_tokens: usize,
    /// Folder of everything that the run writes.
    pub run_dir: PathBuf,
    /// The sub-command, for advice on how to continue.
    pub command: &'static str,
    /// Recipe as TOML; checkpoints keep it.
    pub recipe: String,
    /// Treatment of suspicious rewards.
    pub trust: Arc<TrustConfig>,
    /// If true, lost stored episodes do not make the run end badly.
    pub accept_loss: bool,
}
