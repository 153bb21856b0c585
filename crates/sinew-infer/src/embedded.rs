//! The embedded engine: a model of this process behind the `Engine` port.

use crate::core::ModelCore;
use crate::engine_thread::EmbeddedEngine;
use crate::forward::Forward;
use crate::scheduler::SchedulerConfig;
use crate::stop::TokenBytes;
use sinew_grammar::Grammars;
use sinew_types::{Clock, EngineError, PolicyVersion};
use std::sync::Arc;

/// Limits of an embedded engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Limits for filling passes.
    pub scheduler: SchedulerConfig,
    /// Maximum number of requests that wait for their first pass; more are refused with
    /// `QueueFull`. Default: 4096.
    pub max_waiting: usize,
    /// Version of the weights that the forward pass holds at the start.
    pub version: PolicyVersion,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            scheduler: SchedulerConfig::default(),
            max_waiting: 4096,
            version: PolicyVersion::default(),
        }
    }
}

impl EmbeddedEngine {
    /// Starts an engine. Stop strings need `token_bytes`; `clock` measures the time that the engine
    /// is busy, in seconds.
    ///
    /// # Errors
    /// If a limit does not allow any work, or the thread does not start.
    pub fn new(
        forward: impl Forward + 'static,
        config: EngineConfig,
        token_bytes: Option<TokenBytes>,
        clock: Clock,
    ) -> Result<Self, EngineError> {
        Self::with_formats(forward, config, token_bytes, None, clock)
    }

    /// Starts an engine for requests with formats as well: `grammars` makes their masks.
    ///
    /// # Errors
    /// Same as [`EmbeddedEngine::new`].
    pub fn with_formats(
        forward: impl Forward + 'static,
        config: EngineConfig,
        token_bytes: Option<TokenBytes>,
        grammars: Option<Arc<dyn Grammars>>,
        clock: Clock,
    ) -> Result<Self, EngineError> {
        let core = ModelCore::new(forward, config.scheduler, token_bytes, config.version)?;
        Self::start(core, grammars, config.max_waiting, clock)
    }
}
