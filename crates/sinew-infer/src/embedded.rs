//! The embedded engine: a model of this process behind the `Engine` port.

use crate::core::ModelCore;
use crate::engine_thread::EngineThread;
use crate::forward::Forward;
use crate::scheduler::SchedulerConfig;
use crate::stop::TokenBytes;
use sinew_grammar::Grammars;
use sinew_types::{
    Clock, Engine, EngineError, EngineStatus, EventSink, GenerateRequest, PolicyVersion, RequestId,
    TensorSource,
};
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

/// Generates with a forward pass on a separate thread.
///
/// Thread-safe. Event sinks are called on that thread; they may submit and abort, but not load
/// weights. A slow sink delays the next pass of all requests. Dropping the engine ends the thread
/// after the current pass; requests that have not ended then fail with [`EngineError::Stopped`].
#[derive(Debug)]
pub struct EmbeddedEngine {
    thread: EngineThread,
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
        let thread = EngineThread::start(core, grammars, config.max_waiting, clock)?;
        Ok(Self { thread })
    }
}

impl Engine for EmbeddedEngine {
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        self.thread.submit(request, sink)
    }

    fn abort(&self, request: RequestId) {
        self.thread.abort(request);
    }

    fn pause(&self, paused: bool) {
        self.thread.pause(paused);
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        self.thread.load_weights(version, weights)
    }

    fn status(&self) -> EngineStatus {
        self.thread.status()
    }

    fn holds_formats(&self) -> bool {
        self.thread.holds_formats()
    }
}
