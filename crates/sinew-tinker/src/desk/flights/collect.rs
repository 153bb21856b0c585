//! The sequences of a request, as the engine's thread delivers them.

use crate::desk::flight_orders::FlightOrders;
use sinew_types::{EngineError, EngineEvent, EventSink, FinishReason, PromptLogprob, SampledToken};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One sequence, as far as the engine delivered it.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    pub(super) tokens: Vec<SampledToken>,
    pub(super) prompt: Vec<PromptLogprob>,
    /// Its end.
    pub(super) end: Option<Result<FinishReason, EngineError>>,
    pub(super) cached: u32,
}

#[derive(Debug)]
struct State {
    sequences: Vec<Sequence>,
    /// Sequences that have not ended.
    open: usize,
}

/// Collects the sequences of a flight, and tells its end.
#[derive(Debug)]
pub(super) struct Collector {
    flight: u64,
    orders: Arc<FlightOrders>,
    state: Mutex<State>,
}

impl Collector {
    /// For so many sequences, at least one.
    pub(super) fn new(flight: u64, sequences: usize, orders: Arc<FlightOrders>) -> Arc<Self> {
        Arc::new(Self {
            flight,
            orders,
            state: Mutex::new(State {
                sequences: vec![Sequence::default(); sequences],
                open: sequences,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the events of the sequence at `place`.
    pub(super) fn sink(self: &Arc<Self>, place: usize) -> EventSink {
        let collector = Arc::clone(self);
        Box::new(move |event| collector.take(place, event))
    }

    fn take(&self, place: usize, event: EngineEvent) {
        match event {
            EngineEvent::Prompt { logprobs, .. } => {
                if let Some(sequence) = self.lock().sequences.get_mut(place) {
                    sequence.prompt = logprobs;
                }
            }
            EngineEvent::Tokens { tokens, .. } => {
                if let Some(sequence) = self.lock().sequences.get_mut(place) {
                    sequence.tokens.extend(tokens);
                }
            }
            EngineEvent::Finished {
                reason,
                cached_prompt_tokens,
                ..
            } => self.end(place, Ok(reason), cached_prompt_tokens),
            EngineEvent::Failed { error, .. } => self.end(place, Err(error), 0),
        }
    }

    /// The engine did not take a sequence.
    pub(super) fn refuse(&self, place: usize, error: EngineError) {
        self.end(place, Err(error), 0);
    }

    fn end(&self, place: usize, end: Result<FinishReason, EngineError>, cached: u32) {
        let mut state = self.lock();
        let Some(sequence) = state.sequences.get_mut(place) else {
            return;
        };
        if sequence.end.is_some() {
            return;
        }
        sequence.end = Some(end);
        sequence.cached = cached;
        state.open -= 1;
        let all = state.open == 0;
        drop(state);
        if all {
            self.orders.ended(self.flight);
        }
    }

    /// All sequences, once they have ended.
    pub(super) fn take_all(&self) -> Vec<Sequence> {
        std::mem::take(&mut self.lock().sequences)
    }
}
