//! An engine without a model: token ids from a hash of the prefix, scripts and faults on demand. It serves
//! tests, simulation and first steps without a download.
//!
//! Its log-probabilities can be recomputed from only prefix and token ([`FakeModel`]), so a test can check a
//! whole training path token by token. An adapter is another model, which follows from its name.

mod core;
mod model;

pub use model::FakeModel;

use self::core::FakeCore;
use crate::constraint::Constraint;
use crate::core::Core;
use crate::engine_thread::{EmbeddedEngine, deliver, last_of, request_of};
use crate::stop::TokenBytes;
use sinew_grammar::Grammars;
use sinew_types::{
    Adapter, AdapterName, Clock, Engine, EngineError, EngineEvent, EngineStatus, EventSink,
    GenerateRequest, PolicyVersion, RequestId, TensorSource, TokenId,
};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A failure that a test asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `submit` returns this error.
    Refuse(EngineError),
    /// The request fails after `tokens` tokens.
    FailAfter { tokens: u32, error: EngineError },
    /// The request hangs after `tokens` tokens, until it is aborted.
    HangAfter { tokens: u32 },
    /// The engine panics after `tokens` tokens, and stops for all requests.
    PanicAfter { tokens: u32 },
}

/// Tokens to answer a request with, instead of drawn ones.
pub type Script = Arc<dyn Fn(&GenerateRequest) -> Option<Vec<TokenId>> + Send + Sync>;

/// Limits and behaviour of a fake engine.
#[derive(Clone)]
pub struct FakeConfig {
    /// The distribution. Default: 512 tokens, seed 0, no end token.
    pub model: FakeModel,
    /// Maximum tokens of prompt and output together. Default: 8192.
    pub context: usize,
    /// Maximum requests that get a token in one pass. Default: 128.
    pub max_running: usize,
    /// Maximum requests that wait; more are refused. Default: 4096.
    pub max_waiting: usize,
    /// Version of the weights at the start.
    pub version: PolicyVersion,
    /// Maximum adapters that are loaded at once; one more is refused. Default: 64.
    pub max_adapters: usize,
    /// Prescribed outputs. If the scripted tokens do not end the generation, drawn ones follow; so
    /// they do from the point at which a request's format bars a scripted one.
    pub script: Option<Script>,
    /// The fault of the n-th request that passes the checks, counted from 0.
    pub faults: HashMap<u64, Fault>,
    /// Needed for stop strings.
    pub token_bytes: Option<TokenBytes>,
    /// Makes the masks of requests with formats.
    pub grammars: Option<Arc<dyn Grammars>>,
    /// Time that each pass takes in the threaded mode; 0 by default. The engine's own thread sleeps, as a
    /// real one computes: `submit` and `abort` return at once, `load_weights` and dropping the engine wait
    /// for the end of a pass.
    pub latency: Duration,
}

impl Default for FakeConfig {
    fn default() -> Self {
        Self {
            model: FakeModel {
                vocab: 512,
                seed: 0,
                end: None,
            },
            context: 8192,
            max_running: 128,
            max_waiting: 4096,
            version: PolicyVersion::default(),
            max_adapters: 64,
            script: None,
            faults: HashMap::new(),
            token_bytes: None,
            grammars: None,
            latency: Duration::ZERO,
        }
    }
}

sinew_types::debug_fields!(
    FakeConfig as this,
    model = this.model,
    context = this.context,
    scripted = this.script.is_some(),
    faults = this.faults
);

/// An engine without a model: deterministic, with log-probabilities that [`FakeModel`] can
/// recompute. Threaded like a real one, or stepped by the caller, which makes whole simulations
/// reproducible.
#[derive(Debug)]
pub struct FakeEngine {
    mode: Mode,
}

/// Way in which passes are driven.
#[derive(Debug)]
enum Mode {
    Threaded(EmbeddedEngine),
    Stepped(Box<Mutex<SteppedEngine>>),
}

/// An engine that the caller steps.
struct SteppedEngine {
    core: FakeCore,
    sinks: HashMap<RequestId, EventSink>,
    /// Whether [`FakeEngine::step`] does nothing.
    paused: bool,
    /// Events that no sink has seen yet, in order.
    events: VecDeque<EngineEvent>,
    /// Whether a caller is handing them out; a sink that acts on the engine only adds more.
    handing_out: bool,
}

impl fmt::Debug for SteppedEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stepped")
            .field("live", &self.sinks.len())
            .field("paused", &self.paused)
            .finish_non_exhaustive()
    }
}

impl FakeEngine {
    /// An engine on a separate thread. `clock` measures its busy time. Faults of kind [`Fault::Refuse`]
    /// arrive as events here.
    ///
    /// # Errors
    /// If the vocabulary is too small or the thread does not start.
    pub fn threaded(config: FakeConfig, clock: Clock) -> Result<Self, EngineError> {
        let (max_waiting, grammars) = (config.max_waiting, config.grammars.clone());
        let core = FakeCore::new(config, true)?;
        let thread = EmbeddedEngine::start(core, grammars, max_waiting, clock)?;
        Ok(Self {
            mode: Mode::Threaded(thread),
        })
    }

    /// An engine that moves only when [`FakeEngine::step`] is called.
    ///
    /// # Errors
    /// If the vocabulary is too small.
    pub fn stepped(config: FakeConfig) -> Result<Self, EngineError> {
        let stepped = SteppedEngine {
            core: FakeCore::new(config, false)?,
            sinks: HashMap::new(),
            paused: false,
            events: VecDeque::new(),
            handing_out: false,
        };
        Ok(Self {
            mode: Mode::Stepped(Box::new(Mutex::new(stepped))),
        })
    }

    /// Samples one token for every running request, and returns whether any work remains. Sinks are called on
    /// the calling thread, and may submit. A threaded engine ignores it.
    pub fn step(&self) -> bool {
        let Mode::Stepped(stepped) = &self.mode else {
            return false;
        };
        let mut guard = lock(stepped);
        if guard.paused {
            return false;
        }
        let SteppedEngine { core, events, .. } = &mut *guard;
        let mut new = Vec::new();
        core.step(&mut new);
        events.extend(new);
        drop(guard);
        hand_out(stepped);
        lock(stepped).core.has_work()
    }
}

/// Locks a stepped engine; it stays usable after a panic of a sink.
fn lock(stepped: &Mutex<SteppedEngine>) -> MutexGuard<'_, SteppedEngine> {
    stepped.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls sinks without holding the lock, so that they may submit and abort.
fn hand_out(stepped: &Mutex<SteppedEngine>) {
    let mut guard = lock(stepped);
    if std::mem::replace(&mut guard.handing_out, true) {
        return;
    }
    while let Some(event) = guard.events.pop_front() {
        let id = request_of(&event);
        let Some(mut sink) = guard.sinks.remove(&id) else {
            continue;
        };
        drop(guard);
        let last = last_of(&event).is_some();
        let intact = deliver(&mut sink, event);
        guard = lock(stepped);
        if !last && intact {
            guard.sinks.insert(id, sink);
        } else if !last {
            // A broken sink ends its own request, as in the threaded mode.
            guard.core.abort(id, &mut Vec::new());
        }
    }
    guard.handing_out = false;
}

impl Engine for FakeEngine {
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError> {
        match &self.mode {
            Mode::Threaded(thread) => thread.submit(request, sink),
            Mode::Stepped(stepped) => {
                let mut guard = lock(stepped);
                let waiting = guard.core.status().waiting;
                let limit = guard.core.config.max_waiting;
                if waiting >= limit {
                    return Err(EngineError::QueueFull { waiting, limit });
                }
                let id = request.id;
                let config = &guard.core.config;
                let grammars = config.grammars.as_deref();
                let constraint = Constraint::start(grammars, &request, config.model.vocab)?;
                guard.core.submit(request, constraint)?;
                guard.sinks.insert(id, sink);
                Ok(())
            }
        }
    }

    fn abort(&self, request: RequestId) {
        match &self.mode {
            Mode::Threaded(thread) => thread.abort(request),
            Mode::Stepped(stepped) => {
                let mut events = Vec::new();
                let mut guard = lock(stepped);
                guard.core.abort(request, &mut events);
                guard.events.extend(events);
                drop(guard);
                hand_out(stepped);
            }
        }
    }

    fn pause(&self, paused: bool) {
        match &self.mode {
            Mode::Threaded(thread) => thread.pause(paused),
            Mode::Stepped(stepped) => lock(stepped).paused = paused,
        }
    }

    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError> {
        match &self.mode {
            Mode::Threaded(thread) => thread.load_weights(version, weights),
            Mode::Stepped(stepped) => lock(stepped).core.load_weights(version, &*weights),
        }
    }

    fn load_adapter(
        &self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: Adapter,
    ) -> Result<(), EngineError> {
        match &self.mode {
            Mode::Threaded(thread) => thread.load_adapter(name, version, adapter),
            Mode::Stepped(stepped) => lock(stepped).core.load_adapter(name, version, &adapter),
        }
    }

    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        match &self.mode {
            Mode::Threaded(thread) => thread.unload_adapter(name),
            Mode::Stepped(stepped) => {
                let mut events = Vec::new();
                let mut guard = lock(stepped);
                guard.core.unload_adapter(name, &mut events);
                guard.events.extend(events);
                drop(guard);
                hand_out(stepped);
                Ok(())
            }
        }
    }

    fn status(&self) -> EngineStatus {
        match &self.mode {
            Mode::Threaded(thread) => thread.status(),
            Mode::Stepped(stepped) => lock(stepped).core.status(),
        }
    }

    fn holds_formats(&self) -> bool {
        match &self.mode {
            Mode::Threaded(thread) => thread.holds_formats(),
            Mode::Stepped(stepped) => lock(stepped).core.config.grammars.is_some(),
        }
    }
}
