//! The embedded engine without its thread: its owner decides when a pass is computed.
//!
//! A simulator steps it under virtual time, with a [`Forward`] that computes nothing.

use crate::core::{Core, ModelCore};
use crate::forward::Forward;
use crate::scheduler::SchedulerConfig;
use sinew_types::{
    EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, TensorSource,
};

/// Scheduler, blocks, prefix cache and a forward pass, one pass a call. Requests with formats are refused.
#[derive(Debug)]
pub struct Stepper<F> {
    core: ModelCore<F>,
}

impl<F: Forward> Stepper<F> {
    /// A stepper without requests; its tokens carry `version`.
    ///
    /// # Errors
    /// If a limit is 0.
    pub fn new(
        forward: F,
        config: SchedulerConfig,
        version: PolicyVersion,
    ) -> Result<Self, EngineError> {
        let core = ModelCore::new(forward, config, None, version)?;
        Ok(Self { core })
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If its parameters are out of range, or its id is in use.
    pub fn submit(&mut self, request: GenerateRequest) -> Result<(), EngineError> {
        self.core.submit(request, None)
    }

    /// Ends a request; its last event is added to `events`.
    pub fn abort(&mut self, id: RequestId, events: &mut Vec<EngineEvent>) {
        self.core.abort(id, events);
    }

    /// Replaces the weights: later tokens carry `version`.
    ///
    /// # Errors
    /// If the forward pass refuses them; the old ones stay.
    pub fn load_weights(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<(), EngineError> {
        self.core.load_weights(version, weights)
    }

    /// Computes one pass: at most one more token for each request.
    pub fn step(&mut self, events: &mut Vec<EngineEvent>) {
        self.core.step(events);
    }

    /// Whether a pass would compute anything.
    pub fn has_work(&self) -> bool {
        self.core.has_work()
    }

    /// Counts of requests, memory and tokens.
    pub fn status(&self) -> EngineStatus {
        self.core.status()
    }
}
