//! An engine without threads or clock: requests in, passes on demand, events out.
//!
//! One call of [`Core::step`] is one pass: the scheduler plans it, the forward pass computes it and
//! draws, the scheduler takes the tokens. The thread around it is in `engine_thread`; tests call
//! the core directly.

use crate::constraint::Constraint;
use crate::draw::{Drawn, Draws};
use crate::forward::{Forward, ForwardLimits};
use crate::params::RequestLimits;
use crate::sampler::Sampler;
use crate::scheduler::{Plan, Scheduler, SchedulerConfig, request_limits};
use crate::sequence::Sequence;
use crate::stop::TokenBytes;
use sinew_tensor::Cpu;
use sinew_types::{
    EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, TensorSource,
};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The engine that an [`EmbeddedEngine`](crate::engine_thread::EmbeddedEngine) drives.
pub(crate) trait Core: Send {
    /// The limits that requests are checked against.
    fn limits(&self) -> RequestLimits;
    /// `constraint`: of the request's format, if it has one.
    fn submit(
        &mut self,
        request: GenerateRequest,
        constraint: Option<Constraint>,
    ) -> Result<(), EngineError>;
    /// Ends a request; its last event is added to `events`.
    fn abort(&mut self, id: RequestId, events: &mut Vec<EngineEvent>);
    fn load_weights(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<(), EngineError>;
    /// Computes one pass: at most one more token for each request, and accepted draft tokens. A failed pass
    /// fails the requests in it; the engine continues.
    fn step(&mut self, events: &mut Vec<EngineEvent>);
    /// Whether a pass would compute anything.
    fn has_work(&self) -> bool;
    /// Counts of requests, memory and tokens; the busy time is the thread's to add.
    fn status(&self) -> EngineStatus;
}

/// Scheduler and forward pass put together.
#[derive(Debug)]
pub(crate) struct ModelCore<F> {
    forward: F,
    limits: ForwardLimits,
    scheduler: Scheduler,
    /// Whether stop strings can be matched.
    token_bytes: bool,
    /// Threads for the work after a pass.
    cpu: Option<Cpu>,
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
            cpu: forward.cpu(),
            forward,
            limits,
            token_bytes: token_bytes.is_some(),
            scheduler: Scheduler::new(config, &limits, token_bytes, version)?,
        })
    }

    /// Carries out a plan: copies, the pass, copies; returns the result of each of its samples.
    fn compute(&mut self, plan: &Plan) -> Result<Vec<Result<Draws, EngineError>>, EngineError> {
        for &copy in &plan.copies_before {
            self.forward.copy_block(copy);
        }
        let sequences = plan.samples.iter().map(|slot| {
            let sequence = self.scheduler.running.get(&slot.key);
            sequence.ok_or_else(|| failed("a sequence of the pass is gone"))
        });
        let sequences: Vec<&Sequence> = sequences.collect::<Result<_, _>>()?;
        let samplers = plan.samples.iter().zip(&sequences).map(|(slot, sequence)| {
            let known = sequence.tokens.len() - slot.drafted;
            Sampler {
                row: slot.logits,
                draft: &sequence.tokens[known..],
                params: &sequence.sampling,
                position: known,
                constraint: sequence.constraint.as_ref(),
            }
        });
        let samplers: Vec<Sampler<'_>> = samplers.collect();
        let drawn = self.forward.step(&plan.batch, &samplers);
        let drawn = drawn.map_err(|e| EngineError::Failed(e.to_string()))?;
        if drawn.len() != samplers.len() {
            return Err(failed("a pass gave not one result for each sampler"));
        }
        for &copy in &plan.copies_after {
            self.forward.copy_block(copy);
        }
        let context = self.scheduler.context();
        let finish = |drawn, i: usize| follow(drawn, sequences[i], &samplers[i], context);
        Ok(in_parallel(self.cpu.as_ref(), drawn, finish))
    }
}

fn failed(why: &str) -> EngineError {
    EngineError::Failed(why.to_owned())
}

/// Calls `work` with each input and its index, on the threads of `cpu` if there are any. Results are in the
/// order of the inputs.
fn in_parallel<T: Send, R: Send + Sync>(
    cpu: Option<&Cpu>,
    inputs: Vec<T>,
    work: impl Fn(T, usize) -> R + Sync,
) -> Vec<R> {
    let Some(cpu) = cpu else {
        return inputs
            .into_iter()
            .zip(0..)
            .map(|(t, i)| work(t, i))
            .collect();
    };
    let inputs: Vec<Mutex<Option<T>>> = inputs.into_iter().map(|t| Mutex::new(Some(t))).collect();
    let results: Vec<OnceLock<R>> = inputs.iter().map(|_| OnceLock::new()).collect();
    cpu.pool().parallel_for(inputs.len(), &|i| {
        let input = inputs[i]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(input) = input {
            // A task runs once, so its cell is empty.
            let _ = results[i].set(work(input, i));
        }
    });
    results
        .into_iter()
        .filter_map(OnceLock::into_inner)
        .collect()
}

/// Adds the tokens that a format leaves no choice about: they need no separate pass.
fn follow(
    drawn: Drawn,
    sequence: &Sequence,
    sampler: &Sampler<'_>,
    context: usize,
) -> Result<Draws, EngineError> {
    let mut draws = drawn?;
    let accepted = draws.len().checked_sub(1);
    let accepted = accepted.filter(|&n| n <= sampler.draft.len());
    let accepted = accepted.ok_or_else(|| failed("a pass drew no token, or more than its rows"))?;
    let mut ended = false;
    if let Some(constraint) = sampler.constraint {
        // No invariant spans a panic while it is locked.
        let mut constraint = constraint.lock().unwrap_or_else(PoisonError::into_inner);
        let most = sequence.max_draws(sampler.position, context);
        while draws.len() < most && !constraint.ended() {
            // An error here is one of the next pass too, if there is one.
            let Ok(Some(draw)) = constraint.without_choice(sampler.params) else {
                break;
            };
            draws.push(draw);
        }
        ended = constraint.ended();
    }
    Ok(Draws {
        draws,
        accepted,
        ended,
    })
}

impl<F: Forward> Core for ModelCore<F> {
    fn limits(&self) -> RequestLimits {
        request_limits(&self.limits, self.token_bytes)
    }

    fn submit(
        &mut self,
        request: GenerateRequest,
        constraint: Option<Constraint>,
    ) -> Result<(), EngineError> {
        self.scheduler.submit(request, constraint)
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
        loaded.map_err(|e| EngineError::Weights(e.to_string()))?;
        self.scheduler.swap_weights(version);
        Ok(())
    }

    fn step(&mut self, events: &mut Vec<EngineEvent>) {
        let Some(plan) = self.scheduler.plan() else {
            return;
        };
        match self.compute(&plan) {
            Ok(drawn) => self.scheduler.commit(plan, drawn, events),
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
