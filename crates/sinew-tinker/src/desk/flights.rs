//! The thread that samples: gives requests to the engine, with their adapters loaded, and collects their
//! tokens.
//!
//! A request is up to a thousand sequences. They have seeds that follow from the request, so that a request
//! that runs again after a kill samples the same tokens from the same weights.

mod adapters;
mod collect;
mod output;
mod volley;

use super::clerk::{Line, sample_cancelled};
use super::codec::encode;
use super::flight_orders::{FlightOrders, Order, SampleTask};
use super::folders::Folders;
use super::rules::BaseRules;
use super::types::{Outcome, RequestId};
use crate::TinkerError;
use adapters::Hangar;
use collect::{Collector, Sequence};
use sinew_types::{
    AdapterName, Engine, EngineError, FinishReason, GenerateRequest, RequestId as EngineRequest,
};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use volley::{Drawn, draws, mains};

/// Wait for orders while nothing waits for the engine.
const IDLE: Duration = Duration::from_secs(5);
/// Wait while requests wait for a place at the engine.
const BUSY: Duration = Duration::from_millis(20);
/// Times that a request is tried whose adapter was not there.
const TRIES: u32 = 3;

/// Makes an engine for the folder of a whole model.
pub type MakeEngine = Box<dyn FnMut(&Path) -> Result<Arc<dyn Engine>, String> + Send>;

/// A request whose sequences are at the engine.
struct Flight {
    task: SampleTask,
    tries: u32,
    engine: Arc<dyn Engine>,
    adapter: Option<AdapterName>,
    collector: Arc<Collector>,
    /// Sequences that the engine has not taken yet, with their places.
    waiting: VecDeque<(usize, GenerateRequest)>,
    /// Those that it has.
    ids: Vec<EngineRequest>,
    /// Tokens drawn at the places of the prompt, once they are.
    drawn: Option<Drawn>,
    is_cancelled: bool,
}

/// Parts of the thread.
pub(super) struct FlightParts {
    pub(super) line: Line,
    pub(super) orders: Arc<FlightOrders>,
    pub(super) engine: Arc<dyn Engine>,
    /// Engines for whole models, if there are some.
    pub(super) make: Option<MakeEngine>,
    pub(super) folders: Folders,
    pub(super) rules: BaseRules,
    pub(super) loaded_adapters: usize,
    pub(super) full_samplers: usize,
}

/// State of the thread.
pub(super) struct Flights {
    line: Line,
    orders: Arc<FlightOrders>,
    rules: BaseRules,
    hangar: Hangar,
    /// Requests that wait for a place for their weights.
    parked: VecDeque<(SampleTask, u32)>,
    flights: BTreeMap<u64, Flight>,
    /// Numbers of flights and of sequences.
    last_flight: u64,
    last_sequence: u64,
}

impl Flights {
    /// Without requests.
    pub(super) fn new(parts: FlightParts) -> Self {
        Self {
            line: parts.line,
            orders: parts.orders,
            rules: parts.rules,
            hangar: Hangar::new(
                parts.engine,
                parts.make,
                parts.folders,
                parts.loaded_adapters,
                parts.full_samplers,
            ),
            parked: VecDeque::new(),
            flights: BTreeMap::new(),
            last_flight: 0,
            last_sequence: 0,
        }
    }

    /// Carries out orders until it is stopped. Requests at the engine are then given up: they run again after
    /// the next start.
    pub(super) fn run(mut self) {
        loop {
            let waits = !self.parked.is_empty() || self.flights.values().any(Flight::waits);
            match self.orders.next(if waits { BUSY } else { IDLE }) {
                Order::Stop => break,
                Order::Start(task) => self.start(*task, 0),
                Order::Cancel(request) => self.cancel(&request),
                Order::Ground(folder) => self.hangar.ground(&folder),
                Order::Publish(adapter) => self.hangar.publish(adapter),
                Order::ForgetAll => self.forget_all(),
                Order::Ended(flight) => self.ended(flight),
                Order::Idle => {}
            }
            self.push_waiting();
            self.unpark();
        }
        self.forget_all();
    }

    /// Gives up all requests, without a word to the clerk.
    fn forget_all(&mut self) {
        self.parked.clear();
        for flight in std::mem::take(&mut self.flights).into_values() {
            flight.abort();
            self.hangar.leave(&flight.task.source);
        }
    }

    fn start(&mut self, task: SampleTask, tries: u32) {
        match self.hangar.board(&task.source) {
            Ok(Some((engine, adapter))) => self.launch(task, tries, engine, adapter),
            Ok(None) => self.parked.push_back((task, tries)),
            Err(_) if tries + 1 < TRIES => self.parked.push_back((task, tries + 1)),
            Err(error) => self.report(&task.request, &Outcome::from(&error), 0),
        }
    }

    /// Tries the requests again that wait for a place for their weights.
    fn unpark(&mut self) {
        for _ in 0..self.parked.len() {
            if let Some((task, tries)) = self.parked.pop_front() {
                self.start(task, tries);
            }
        }
    }

    /// Gives the first requests of a task to the engine: those that draw, if it asks for some.
    fn launch(
        &mut self,
        task: SampleTask,
        tries: u32,
        engine: Arc<dyn Engine>,
        adapter: Option<AdapterName>,
    ) {
        let requests = if task.input.alternatives > 0 && task.input.prompt.len() > 1 {
            draws(&task, adapter.as_ref())
        } else {
            mains(&task, adapter.as_ref(), &self.rules, None)
        };
        self.last_flight += 1;
        let number = self.last_flight;
        let orders = Arc::clone(&self.orders);
        let flight = Flight {
            collector: Collector::new(number, requests.len(), orders),
            waiting: self.numbered(requests),
            task,
            tries,
            engine,
            adapter,
            ids: Vec::new(),
            drawn: None,
            is_cancelled: false,
        };
        self.flights.insert(number, flight);
    }

    /// Gives sequences their ids at the engine.
    fn numbered(&mut self, requests: Vec<GenerateRequest>) -> VecDeque<(usize, GenerateRequest)> {
        let mut numbered = VecDeque::with_capacity(requests.len());
        for (place, mut request) in requests.into_iter().enumerate() {
            self.last_sequence += 1;
            request.id = EngineRequest(self.last_sequence);
            numbered.push_back((place, request));
        }
        numbered
    }

    /// Gives the engine what it takes.
    fn push_waiting(&mut self) {
        for flight in self.flights.values_mut() {
            flight.push();
        }
    }

    fn cancel(&mut self, request: &RequestId) {
        if let Some(at) = self
            .parked
            .iter()
            .position(|(task, _)| task.request == *request)
        {
            self.parked.remove(at);
            self.report(request, &sample_cancelled(), 0);
            return;
        }
        let mut flights = self.flights.values_mut();
        if let Some(flight) = flights.find(|flight| flight.task.request == *request) {
            flight.is_cancelled = true;
            flight.abort();
            flight.drop_waiting();
        }
    }

    /// All sequences of a flight have ended.
    fn ended(&mut self, number: u64) {
        let Some(flight) = self.flights.remove(&number) else {
            return;
        };
        let sequences = flight.collector.take_all();
        let sampled: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let prompt = flight.task.input.prompt.len();
        let tokens = (sampled + prompt) as u64;
        if flight.is_cancelled {
            self.hangar.leave(&flight.task.source);
            return self.report(&flight.task.request, &sample_cancelled(), tokens);
        }
        match first_error(&sequences) {
            Some(EngineError::UnknownAdapter { name }) if flight.tries + 1 < TRIES => {
                self.hangar.leave(&flight.task.source);
                self.hangar.lost(&name);
                self.parked.push_back((flight.task, flight.tries + 1));
            }
            Some(error) => {
                self.hangar.leave(&flight.task.source);
                let outcome = Outcome::from(&failed(error));
                self.report(&flight.task.request, &outcome, tokens);
            }
            None => self.succeed(flight, sequences, tokens),
        }
    }

    /// Goes on with what was drawn, or reports the samples.
    fn succeed(&mut self, mut flight: Flight, sequences: Vec<Sequence>, tokens: u64) {
        let input = &flight.task.input;
        if input.alternatives > 0 && input.prompt.len() > 1 && flight.drawn.is_none() {
            let drawn = Drawn::of(&sequences, input.alternatives as usize);
            let adapter = flight.adapter.as_ref();
            let requests = mains(&flight.task, adapter, &self.rules, Some(&drawn));
            self.last_flight += 1;
            let number = self.last_flight;
            let orders = Arc::clone(&self.orders);
            flight.collector = Collector::new(number, requests.len(), orders);
            flight.waiting = self.numbered(requests);
            flight.ids.clear();
            flight.drawn = Some(drawn);
            self.flights.insert(number, flight);
            return;
        }
        self.hangar.leave(&flight.task.source);
        let outcome = output::outcome(input, &sequences, flight.drawn.as_ref());
        self.report(&flight.task.request, &outcome, tokens);
    }

    /// Tells the clerk the end of a request.
    fn report(&self, request: &RequestId, outcome: &Outcome, tokens: u64) {
        let failed = matches!(outcome, Outcome::Failed { .. });
        let request = request.clone();
        match encode(outcome) {
            Ok(result) => self
                .line
                .report(move |clerk| clerk.flown(&request, &result, failed, tokens)),
            Err(error) => self.line.report(move |_| Err(error)),
        }
    }
}

impl Flight {
    /// Whether sequences wait for the engine.
    fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Gives the engine the sequences that it takes.
    fn push(&mut self) {
        while let Some((place, request)) = self.waiting.pop_front() {
            let id = request.id;
            let sink = self.collector.sink(place);
            match self.engine.submit(request.clone(), sink) {
                Ok(()) => self.ids.push(id),
                Err(EngineError::QueueFull { .. }) => {
                    self.waiting.push_front((place, request));
                    return;
                }
                Err(error) => self.collector.refuse(place, error),
            }
        }
    }

    fn abort(&self) {
        for id in &self.ids {
            self.engine.abort(*id);
        }
    }

    /// Ends the sequences that the engine has not taken.
    fn drop_waiting(&mut self) {
        for (place, _) in std::mem::take(&mut self.waiting) {
            let error = EngineError::Stopped("the request was cancelled".to_owned());
            self.collector.refuse(place, error);
        }
    }
}

/// The first failure among the sequences of a request, which fails as a whole.
fn first_error(sequences: &[Sequence]) -> Option<EngineError> {
    sequences.iter().find_map(|sequence| match &sequence.end {
        Some(Ok(FinishReason::Aborted)) => {
            let why = "the engine ended the request".to_owned();
            Some(EngineError::Failed(why))
        }
        Some(Ok(_)) => None,
        Some(Err(error)) => Some(error.clone()),
        None => Some(EngineError::Failed("a sequence has no end".to_owned())),
    })
}

/// A failure of the engine, as a client sees it: its own mistakes by their names.
fn failed(error: EngineError) -> TinkerError {
    match error {
        EngineError::InvalidSampling {
            name,
            value,
            allowed,
        } => TinkerError::value(name, value, allowed),
        EngineError::PromptTooLong { prompt, context } => TinkerError::Limit {
            what: "the length of prompt".to_owned(),
            value: prompt as u64,
            limit: context as u64,
            hint: "that is the context of the engine; shorten the prompt".to_owned(),
        },
        EngineError::UnknownToken {
            id,
            position,
            vocab,
        } => TinkerError::value(
            format!("prompt[{position}]"),
            id,
            format!("token ids below {vocab}"),
        ),
        other => TinkerError::Internal(other.to_string()),
    }
}

#[cfg(test)]
mod tests;
