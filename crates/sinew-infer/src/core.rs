//! An engine without threads or clock: requests in, passes on demand, events out.

use crate::forward::{Forward, ForwardLimits};
use crate::params::RequestLimits;
use crate::plan::Plan;
use crate::sampler::{self, Draw};
use crate::scheduler::{Scheduler, SchedulerConfig, request_limits};
use crate::softmax::BadLogits;
use crate::stop::TokenBytes;
use sinew_types::{
    EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, TensorSource,
};
use std::sync::OnceLock;

/// What the door of an engine ([`crate::door::Door`]) drives.
pub(crate) trait Core: Send {
    fn limits(&self) -> RequestLimits;
    fn submit(&mut self, request: GenerateRequest) -> Result<(), EngineError>;
    fn abort(&mut self, id: RequestId, events: &mut Vec<EngineEvent>);
    fn load_weights(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<(), EngineError>;
    /// One pass: at most one more token for each request.
    fn step(&mut self, events: &mut Vec<EngineEvent>);
    fn has_work(&self) -> bool;
    /// All but the time it was busy.
    fn status(&self) -> EngineStatus;
}

/// Scheduler, forward pass and sampler put together.
#[derive(Debug)]
pub(crate) struct ModelCore<F> {
    forward: F,
    limits: ForwardLimits,
    scheduler: Scheduler,
    token_bytes: bool,
}

impl<F: Forward> ModelCore<F> {
    pub(crate) fn new(
        forward: F,
        config: SchedulerConfig,
        token_bytes: Option<TokenBytes>,
        version: PolicyVersion,
    ) -> Result<Self, EngineError> {
        let limits = forward.limits();
        Ok(Self {
            forward,
            limits,
            token_bytes: token_bytes.is_some(),
            scheduler: Scheduler::new(config, &limits, token_bytes, version)?,
        })
    }

    fn compute(&mut self, plan: &Plan) -> Result<(), EngineError> {
        for &copy in &plan.copies_before {
            self.forward.copy_block(copy);
        }
        self.forward
            .forward(&plan.batch)
            .map_err(EngineError::Failed)?;
        for &copy in &plan.copies_after {
            self.forward.copy_block(copy);
        }
        Ok(())
    }

    /// Draws the plan's tokens, in parallel: each depends on its own request alone.
    fn sample(&self, plan: &Plan) -> Vec<Result<Draw, EngineError>> {
        let vocab = self.limits.vocab;
        let logits = self.forward.logits();
        let running = &self.scheduler.running;
        let sequences: Vec<_> = plan.samples.iter().map(|s| running.get(&s.key)).collect();
        let drawn: Vec<OnceLock<Result<Draw, BadLogits>>> =
            plan.samples.iter().map(|_| OnceLock::new()).collect();
        self.forward.parallel_for(plan.samples.len(), &|i| {
            let row = plan.samples[i].logits;
            let logits = &logits[row * vocab..(row + 1) * vocab];
            if let Some(s) = sequences[i] {
                let draw = sampler::draw(logits, &s.sampling, s.tokens.len());
                // A task runs once, so its cell is empty.
                let _ = drawn[i].set(draw);
            }
        });
        let failed = |e: BadLogits| EngineError::Failed(e.to_string());
        drawn
            .into_iter()
            .map(|cell| cell.into_inner().unwrap_or(Err(BadLogits)).map_err(failed))
            .collect()
    }
}

impl<F: Forward> Core for ModelCore<F> {
    fn limits(&self) -> RequestLimits {
        request_limits(&self.limits, self.token_bytes)
    }

    fn submit(&mut self, request: GenerateRequest) -> Result<(), EngineError> {
        self.scheduler.submit(request)
    }

    fn abort(&mut self, id: RequestId, events: &mut Vec<EngineEvent>) {
        events.extend(self.scheduler.abort(id));
    }

    fn load_weights(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<(), EngineError> {
        let loaded = self.forward.load_weights(weights);
        loaded.map_err(EngineError::Weights)?;
        self.scheduler.swap_weights(version);
        Ok(())
    }

    fn step(&mut self, events: &mut Vec<EngineEvent>) {
        let Some(plan) = self.scheduler.plan() else {
            return;
        };
        match self.compute(&plan) {
            Ok(()) => {
                let drawn = self.sample(&plan);
                self.scheduler.commit(plan, drawn, events);
            }
            Err(error) => self.scheduler.commit_failure(&plan, &error, events),
        }
    }

    fn has_work(&self) -> bool {
        self.scheduler.has_work()
    }

    fn status(&self) -> EngineStatus {
        self.scheduler.status()
    }
}

#[cfg(test)]
mod tests;
