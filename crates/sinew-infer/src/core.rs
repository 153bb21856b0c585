//! An engine without threads or clock: requests in, passes on demand, events out.

use crate::forward::{Forward, ForwardLimits};
use crate::held::Held;
use crate::params::RequestLimits;
use crate::plan::{Plan, SampleSlot};
use crate::sampler::{self, Draw};
use crate::scheduler::{Scheduler, SchedulerConfig, request_limits};
use crate::sequence::Sequence;
use crate::stop::TokenBytes;
use sinew_tensor::Device;
use sinew_types::{
    EngineError, EngineEvent, EngineStatus, GenerateRequest, PolicyVersion, RequestId, TensorSource,
};
use std::sync::{OnceLock, PoisonError};

/// What the door of an engine ([`crate::door::Door`]) drives.
pub(crate) trait Core: Send {
    fn limits(&self) -> RequestLimits;
    /// `held`: what holds the request to its format, if it has one.
    fn submit(&mut self, request: GenerateRequest, held: Option<Held>) -> Result<(), EngineError>;
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
    /// Threads for sampling.
    device: Option<Device>,
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
            device: forward.device(),
            forward,
            limits,
            token_bytes: token_bytes.is_some(),
            scheduler: Scheduler::new(config, &limits, token_bytes, version)?,
        })
    }

    /// Does what the plan says; for each of its samples what was drawn.
    fn compute(&mut self, plan: &Plan) -> Result<Vec<Drawn>, EngineError> {
        for &copy in &plan.copies_before {
            self.forward.copy_block(copy);
        }
        let computed = self.forward.forward(&plan.batch);
        let logits = computed.map_err(EngineError::Failed)?;
        let running = &self.scheduler.running;
        let sequences = plan.samples.iter().map(|s| (*s, running.get(&s.key)));
        let sequences: Vec<_> = sequences.collect();
        let sizes = (self.limits.vocab, self.scheduler.context());
        let drawn = sample(logits, sizes, &sequences, self.device.as_ref());
        for &copy in &plan.copies_after {
            self.forward.copy_block(copy);
        }
        Ok(drawn)
    }
}

/// The tokens drawn for one sequence.
#[derive(Debug)]
pub(crate) struct Draws {
    pub(crate) draws: Vec<Draw>,
    /// How many guesses came true.
    pub(crate) right: usize,
    /// The last token ends an output that is held to a format.
    pub(crate) ended: bool,
}

type Drawn = Result<Draws, EngineError>;

/// Draws tokens for each sequence from its rows of `logits`, in parallel: a draw depends on
/// its own sequence alone.
fn sample(
    logits: &[f32],
    (vocab, context): (usize, usize),
    sequences: &[(SampleSlot, Option<&Sequence>)],
    device: Option<&Device>,
) -> Vec<Drawn> {
    let drawn: Vec<OnceLock<Drawn>> = sequences.iter().map(|_| OnceLock::new()).collect();
    let draw = |i: usize| {
        if let (slot, Some(sequence)) = sequences[i] {
            let rows = slot.logits * vocab..(slot.logits + slot.guessed + 1) * vocab;
            let draws = draw_along(
                &logits[rows],
                vocab,
                slot.guessed,
                sequence,
                context,
                device,
            );
            // A task runs once, so its cell is empty.
            let _ = drawn[i].set(draws);
        }
    };
    match device {
        Some(device) => device.pool().parallel_for(sequences.len(), &draw),
        None => (0..sequences.len()).for_each(draw),
    }
    let gone = || EngineError::Failed("a sequence of the pass is gone".to_owned());
    drawn
        .into_iter()
        .map(|cell| cell.into_inner().unwrap_or_else(|| Err(gone())))
        .collect()
}

/// Draws the token after the known ones, and goes on as long as the guess at the end of
/// `sequence` is what was drawn: the tokens are those of drawing one in each pass. Tokens that a format leaves
/// no choice about follow at once: they need no pass of their own. With a `device`, log-probabilities have
/// the bits of training.
fn draw_along(
    logits: &[f32],
    vocab: usize,
    guessed: usize,
    sequence: &Sequence,
    context: usize,
    device: Option<&Device>,
) -> Drawn {
    let known = sequence.tokens.len() - guessed;
    let sampling = &sequence.sampling;
    let mut draws = Vec::with_capacity(1);
    // No invariant spans a panic while it is locked.
    let held = sequence.held.as_ref();
    let mut held = held.map(|h| h.lock().unwrap_or_else(PoisonError::into_inner));
    for (i, row) in logits.chunks_exact(vocab).enumerate() {
        let draw = match &mut held {
            Some(held) => held.draw(row, sampling, known + i, device)?,
            None => {
                let drawn = sampler::draw(row, sampling, known + i);
                let mut draw = drawn.map_err(|e| EngineError::Failed(e.to_string()))?;
                if let Some(device) = device {
                    sampler::as_trained(&mut draw, device, row, sampling, None);
                }
                draw
            }
        };
        let goes_on = sequence.tokens.get(known + i) == Some(&draw.id);
        draws.push(draw);
        if !goes_on || held.as_ref().is_some_and(|h| h.ended()) {
            break;
        }
    }
    let right = draws.len() - 1;
    let mut ended = false;
    if let Some(held) = &mut held {
        let room = sequence.room(known, context);
        while draws.len() < room && !held.ended() {
            // What fails here fails again in the next pass, if there is one.
            let Ok(Some(draw)) = held.without_choice(sampling) else {
                break;
            };
            draws.push(draw);
        }
        ended = held.ended();
    }
    Ok(Draws {
        draws,
        right,
        ended,
    })
}

impl<F: Forward> Core for ModelCore<F> {
    fn limits(&self) -> RequestLimits {
        request_limits(&self.limits, self.token_bytes)
    }

    fn submit(&mut self, request: GenerateRequest, held: Option<Held>) -> Result<(), EngineError> {
        self.scheduler.submit(request, held)
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
