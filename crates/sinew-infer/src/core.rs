//! An engine without threads or clock: requests in, passes on demand, events out.
//!
//! One call of [`Core::step`] is one pass: the scheduler plans it, the forward pass computes it and
//! draws, the scheduler takes the tokens. The thread around it is in `engine_thread`; tests call
//! the core directly.

use crate::constraint::Constraint;
use crate::draw::{Drawn, Draws, map_indices};
use crate::forward::{Forward, ForwardLimits};
use crate::params::RequestLimits;
use crate::prompt_row::PromptRow;
use crate::sampler::Sampler;
use crate::scheduler::{PassOutcome, Plan, Scheduler, SchedulerConfig, request_limits};
use crate::sequence::{OrderKey, Sequence};
use crate::stop::TokenBytes;
use sinew_tensor::Cpu;
use sinew_types::{
    Adapter, AdapterName, EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion,
    RequestId, TensorSource,
};
use std::sync::{Mutex, PoisonError};

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
    /// Loads or replaces the adapter of a name.
    fn load_adapter(
        &mut self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: &Adapter,
    ) -> Result<(), EngineError>;
    /// Drops an adapter, if it is loaded; the last events of its requests are added to `events`.
    fn unload_adapter(&mut self, name: &AdapterName, events: &mut Vec<EngineEvent>);
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

    /// Carries out a plan: copies, the pass, copies.
    fn compute(&mut self, plan: &Plan) -> Result<PassOutcome, EngineError> {
        for &copy in &plan.copies_before {
            self.forward.copy_block(copy);
        }
        let samples = plan.samples.iter();
        let sequences = samples.map(|slot| running(&self.scheduler, slot.key));
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
        let prompts = prompt_rows(&self.scheduler, plan)?;
        let result = self.forward.step(&plan.batch, &samplers, &prompts);
        let result = result.map_err(|e| EngineError::Failed(e.to_string()))?;
        if result.drawn.len() != samplers.len() || result.scored.len() != prompts.len() {
            return Err(failed(
                "a pass gave not one result for each sampler and each row of a prompt",
            ));
        }
        for &copy in &plan.copies_after {
            self.forward.copy_block(copy);
        }
        let context = self.scheduler.context();
        let finish = |drawn, i: usize| follow(drawn, sequences[i], &samplers[i], context);
        Ok(PassOutcome {
            drawn: in_parallel(self.cpu.as_ref(), result.drawn, finish),
            scored: result.scored,
        })
    }
}

/// A sequence of a planned pass.
fn running(scheduler: &Scheduler, key: OrderKey) -> Result<&Sequence, EngineError> {
    let sequence = scheduler.running.get(&key);
    sequence.ok_or_else(|| failed("a sequence of the pass is gone"))
}

/// The rows of prompts whose log-probabilities a planned pass takes.
fn prompt_rows<'a>(
    scheduler: &'a Scheduler,
    plan: &Plan,
) -> Result<Vec<PromptRow<'a>>, EngineError> {
    let mut rows = Vec::new();
    for slot in &plan.scores {
        let sequence = running(scheduler, slot.key)?;
        let scores = sequence.scores.as_ref();
        let scores = scores.ok_or_else(|| failed("a prompt is scored that nobody asked for"))?;
        let positions = slot.position..slot.position + slot.count;
        let tokens = &sequence.tokens;
        let row = |(position, row)| scores.row(row, position, tokens[position]);
        rows.extend(positions.zip(slot.logits..).map(row));
    }
    Ok(rows)
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
    let inputs: Vec<Mutex<Option<T>>> = inputs.into_iter().map(|t| Mutex::new(Some(t))).collect();
    let results = map_indices(inputs.len(), cpu, |i| {
        // A task runs once, so its input is there.
        let mut input = inputs[i].lock().unwrap_or_else(PoisonError::into_inner);
        input.take().map(|input| work(input, i))
    });
    results.into_iter().flatten().collect()
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

    fn load_adapter(
        &mut self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: &Adapter,
    ) -> Result<(), EngineError> {
        let slot = self.scheduler.adapter_slot(name)?;
        let loaded = self.forward.load_adapter(slot, adapter);
        loaded.map_err(|e| EngineError::Weights(format!("adapter {name}: {e}")))?;
        self.scheduler.swap_adapter(slot, name, version);
        Ok(())
    }

    fn unload_adapter(&mut self, name: &AdapterName, events: &mut Vec<EngineEvent>) {
        if let Some(slot) = self.scheduler.drop_adapter(name, events) {
            self.forward.unload_adapter(slot);
        }
    }

    fn step(&mut self, events: &mut Vec<EngineEvent>) {
        let Some(plan) = self.scheduler.plan() else {
            return;
        };
        match self.compute(&plan) {
            Ok(outcome) => self.scheduler.commit(plan, outcome, events),
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
