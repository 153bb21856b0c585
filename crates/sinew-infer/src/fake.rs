//! An engine without a model: token ids from a hash of the prefix, scripts and faults on demand. It serves
//! tests, simulation and first steps without a download.
//!
//! Its log-probabilities can be recomputed from only prefix and token ([`FakeModel`]), so a test can check a
//! whole training path token by token.

use crate::constraint::Constraint;
use crate::core::Core;
use crate::engine_thread::{EmbeddedEngine, deliver, last_of, request_of};
use crate::params::{self, RequestLimits};
use crate::sampler;
use crate::scheduler::duplicate;
use crate::sequence::{OrderKey, Sequence};
use crate::stop::TokenBytes;
use sinew_grammar::{Grammars, Mask};
use sinew_types::{
    Clock, Engine, EngineError, EngineEvent, EngineStatus, EventSink, FinishReason, GOLDEN_GAMMA,
    GenerateRequest, PolicyVersion, RequestId, SampledToken, SamplingParams, TensorSource, TokenId,
    TokenLogprob, mix_hash,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Probabilities of the tokens that can follow a prefix, the most likely first.
const PROBABILITIES: [f32; 4] = [0.4, 0.3, 0.2, 0.1];

/// The distribution that a [`FakeEngine`] samples: after each prefix four tokens, or the end.
///
/// The four have probabilities 0.4, 0.3, 0.2 and 0.1 at temperature 1; which ids they are is a hash
/// of seed and prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FakeModel {
    /// Number of token ids, at least 4.
    pub vocab: usize,
    /// Two models with different seeds have nothing in common.
    pub seed: u64,
    /// A token that is the only continuation of about one prefix in `.1`; `None`: outputs end only at limits.
    pub end: Option<(TokenId, u32)>,
}

/// Base of the polynomial that hashes a prefix: odd, so that every token changes the hash.
const BASE: u64 = GOLDEN_GAMMA;

/// Tokens that are hashed side by side.
const SIDE_BY_SIDE: usize = 8;

/// `BASE` to the powers from 0 to [`SIDE_BY_SIDE`].
const POWERS: [u64; SIDE_BY_SIDE + 1] = {
    let mut powers = [1u64; SIDE_BY_SIDE + 1];
    let mut i = 1;
    while i <= SIDE_BY_SIDE {
        powers[i] = powers[i - 1].wrapping_mul(BASE);
        i += 1;
    }
    powers
};

/// Contribution of a block of zero tokens to the hash: a token counts as one more than its id, so
/// that every token counts.
const ZEROS: u64 = {
    let (mut sum, mut i) = (0u64, 0);
    while i < SIDE_BY_SIDE {
        sum = sum.wrapping_add(POWERS[i]);
        i += 1;
    }
    sum
};

/// Extends the hash of a prefix, modulo 2^64: one product and one sum for each token, mostly
/// independent of each other, because prompts are long.
fn hash_on(hash: u64, tokens: &[TokenId]) -> u64 {
    let (blocks, rest) = tokens.as_chunks::<SIDE_BY_SIDE>();
    let mut hash = hash;
    for &[a, b, c, d, e, f, g, h] in blocks {
        let term = |token: TokenId, power: usize| u64::from(token).wrapping_mul(POWERS[power]);
        let first = term(a, 7).wrapping_add(term(b, 6));
        let second = term(c, 5).wrapping_add(term(d, 4));
        let third = term(e, 3).wrapping_add(term(f, 2));
        let last = term(g, 1).wrapping_add(term(h, 0));
        let sum = first
            .wrapping_add(second)
            .wrapping_add(third.wrapping_add(last));
        let before = hash.wrapping_mul(POWERS[SIDE_BY_SIDE]);
        hash = before.wrapping_add(sum).wrapping_add(ZEROS);
    }
    for &token in rest {
        hash = hash.wrapping_mul(BASE).wrapping_add(u64::from(token) + 1);
    }
    hash
}

impl FakeModel {
    /// [`FakeModel::logprob_at`] temperature 1, in nats.
    pub fn logprob(&self, prefix: &[TokenId], token: TokenId) -> f32 {
        self.logprob_at(prefix, token, 1.0)
    }

    /// Natural log-probability of `token` after `prefix` at a temperature above 0. A token that would not be
    /// sampled there (a scripted one) has a stand-in value between -10 and -9.
    pub fn logprob_at(&self, prefix: &[TokenId], token: TokenId, temperature: f32) -> f32 {
        self.logprob_in(self.state(prefix), token, temperature)
    }

    /// The hash that decides about the token after a prefix.
    fn state(&self, prefix: &[TokenId]) -> u64 {
        mix_hash(self.hash(prefix), 0)
    }

    fn hash(&self, prefix: &[TokenId]) -> u64 {
        hash_on(mix_hash(self.seed, 0x5EED), prefix)
    }

    /// The end token, if it is the only continuation in this state.
    fn ends_at(&self, state: u64) -> Option<TokenId> {
        let (end, mean) = self.end?;
        mix_hash(state, 1)
            .is_multiple_of(u64::from(mean.max(1)))
            .then_some(end)
    }

    /// The token of a rank: consecutive ids from a first one that the state selects.
    fn candidate(&self, state: u64, rank: usize) -> TokenId {
        ((state % self.vocab as u64) as usize + rank).rem_euclid(self.vocab) as TokenId
    }

    /// Log-probability as of [`FakeModel::logprob_at`], from the state of the prefix.
    fn logprob_in(&self, state: u64, token: TokenId, temperature: f32) -> f32 {
        if let Some(end) = self.ends_at(state)
            && end == token
        {
            return 0.0;
        }
        let rank = (0..PROBABILITIES.len()).find(|&r| self.candidate(state, r) == token);
        match rank {
            Some(rank) if self.ends_at(state).is_none() => {
                let divided = |p: f32| p.ln() / temperature;
                let sum: f32 = PROBABILITIES.iter().map(|&p| divided(p).exp()).sum();
                divided(PROBABILITIES[rank]) - sum.ln()
            }
            _ => -10.0 + (mix_hash(state, u64::from(token)) % 1000) as f32 / 1000.0,
        }
    }

    /// The first tokens of `mask` from the candidate on, around the end of the vocabulary: without a mask
    /// they are the candidates themselves.
    fn candidates(&self, state: u64, mask: &Mask) -> Vec<TokenId> {
        let first = self.candidate(state, 0);
        let allowed: Vec<TokenId> = mask.tokens().collect();
        let (before, after) = allowed.split_at(allowed.partition_point(|&t| t < first));
        let around = after.iter().chain(before).copied();
        around.take(PROBABILITIES.len()).collect()
    }

    /// Log-probability as of [`FakeModel::logprob_at`] for a token that `mask` allows, among all allowed
    /// ones, from the state of the prefix.
    fn logprob_of(&self, state: u64, token: TokenId, temperature: f32, mask: &Mask) -> f32 {
        let end = self.ends_at(state).filter(|&end| mask.allows(end));
        if mask.only() == Some(token) || end == Some(token) {
            return 0.0;
        }
        let candidates = self.candidates(state, mask);
        let rank = candidates.iter().position(|&t| t == token);
        match rank.filter(|_| end.is_none()) {
            Some(rank) => {
                let divided = |p: f32| p.ln() / temperature;
                let likely = &PROBABILITIES[..candidates.len()];
                let sum: f32 = likely.iter().map(|&p| divided(p).exp()).sum();
                divided(PROBABILITIES[rank]) - sum.ln()
            }
            None => -10.0 + (mix_hash(state, u64::from(token)) % 1000) as f32 / 1000.0,
        }
    }

    /// The token at the end of `s`, which has a format. `scripted` is taken if the format allows it.
    fn draw_constrained(
        &self,
        state: u64,
        s: &Sequence,
        constraint: &mut Constraint,
        scripted: Option<TokenId>,
        version: PolicyVersion,
    ) -> Result<SampledToken, EngineError> {
        let mask = constraint.mask()?;
        let candidates = self.candidates(state, &mask);
        let scripted = scripted.filter(|&t| mask.allows(t));
        let end = self.ends_at(state).filter(|&end| mask.allows(end));
        let id = scripted.or(end).unwrap_or_else(|| {
            let sampling = SamplingParams {
                logit_bias: Vec::new(),
                ..s.sampling.clone()
            };
            let logits = PROBABILITIES.map(f32::ln);
            let drawn = sampler::draw(&logits[..candidates.len()], &sampling, s.tokens.len());
            candidates[drawn.map_or(0, |d| d.id as usize)]
        });
        let temperature = s.sampling.policy_temperature();
        let logprob = |id: TokenId| self.logprob_of(state, id, temperature, &mask);
        let count = usize::from(s.sampling.top_logprobs);
        let top = candidates.into_iter().take(count);
        Ok(SampledToken {
            id,
            logprob: logprob(id),
            version,
            top: top
                .map(|id| TokenLogprob {
                    id,
                    logprob: logprob(id),
                })
                .collect(),
            choice: Some(constraint.accept(id, &mask, 0.0)?),
        })
    }

    /// The token at the end of `s`, with what a real engine reports about it.
    fn draw(&self, state: u64, s: &Sequence, version: PolicyVersion) -> SampledToken {
        let (id, top) = match self.ends_at(state) {
            Some(end) => (end, vec![end]),
            None => {
                let tokens = [0, 1, 2, 3].map(|rank| self.candidate(state, rank));
                let mut sampling = s.sampling.clone();
                sampling.logit_bias.retain_mut(|(id, _)| {
                    let rank = tokens.iter().position(|t| t == id);
                    *id = rank.unwrap_or(0) as TokenId;
                    rank.is_some()
                });
                let logits = PROBABILITIES.map(f32::ln);
                let drawn = sampler::draw(&logits, &sampling, s.tokens.len());
                let rank = drawn.map_or(0, |d| d.id as usize);
                (tokens[rank], tokens.to_vec())
            }
        };
        let count = usize::from(s.sampling.top_logprobs);
        let temperature = s.sampling.policy_temperature();
        let logprob = |id: TokenId| self.logprob_in(state, id, temperature);
        let top = top.into_iter().take(count);
        SampledToken {
            id,
            logprob: logprob(id),
            version,
            top: top
                .map(|id| TokenLogprob {
                    id,
                    logprob: logprob(id),
                })
                .collect(),
            choice: None,
        }
    }
}

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
            script: None,
            faults: HashMap::new(),
            token_bytes: None,
            grammars: None,
            latency: Duration::ZERO,
        }
    }
}

impl fmt::Debug for FakeConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeConfig")
            .field("model", &self.model)
            .field("context", &self.context)
            .field("scripted", &self.script.is_some())
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

/// A request of the fake engine.
struct FakeSequence {
    sequence: Sequence,
    /// Hash of its tokens.
    hash: u64,
    /// Prescribed tokens that are still to come.
    script: std::vec::IntoIter<TokenId>,
    fault: Option<Fault>,
}

impl FakeSequence {
    /// The next token: a scripted one, or one that is drawn.
    fn next(
        &mut self,
        model: FakeModel,
        version: PolicyVersion,
    ) -> Result<SampledToken, EngineError> {
        let state = mix_hash(self.hash, 0);
        let scripted = self.script.next();
        if let Some(constraint) = &self.sequence.constraint {
            let mut constraint = constraint.lock().unwrap_or_else(PoisonError::into_inner);
            let token = model.draw_constrained(
                state,
                &self.sequence,
                &mut constraint,
                scripted,
                version,
            )?;
            if scripted.is_some_and(|id| id != token.id) {
                self.script = Vec::new().into_iter();
            }
            return Ok(token);
        }
        let mut token = model.draw(state, &self.sequence, version);
        if let Some(scripted) = scripted {
            token.id = scripted;
            let temperature = self.sequence.sampling.policy_temperature();
            token.logprob = model.logprob_in(state, scripted, temperature);
        }
        Ok(token)
    }
}

/// Requests of a fake engine, without threads.
struct FakeCore {
    config: FakeConfig,
    sequences: BTreeMap<OrderKey, FakeSequence>,
    index: HashMap<RequestId, OrderKey>,
    arrivals: u64,
    status: EngineStatus,
    /// Whether passes take [`FakeConfig::latency`]: only on a thread of the engine's own, never on the one of
    /// a caller of [`FakeEngine::step`].
    sleeps: bool,
}

impl FakeCore {
    fn new(config: FakeConfig, sleeps: bool) -> Result<Self, EngineError> {
        if config.model.vocab < PROBABILITIES.len() {
            let vocab = config.model.vocab;
            let message = format!("vocab = {vocab}: a fake model needs at least 4 tokens");
            return Err(EngineError::Failed(message));
        }
        let status = EngineStatus {
            version: config.version,
            ..EngineStatus::default()
        };
        Ok(Self {
            config,
            sequences: BTreeMap::new(),
            index: HashMap::new(),
            arrivals: 0,
            status,
            sleeps,
        })
    }

    /// Adds one token to `key`, or carries out its fault; whether it has ended.
    fn advance(&mut self, key: OrderKey, events: &mut Vec<EngineEvent>) -> bool {
        let Some(fake) = self.sequences.get_mut(&key) else {
            return false;
        };
        let request = fake.sequence.id;
        let sampled = (fake.sequence.tokens.len() - fake.sequence.prompt) as u32;
        match &fake.fault {
            Some(Fault::HangAfter { tokens }) if sampled >= *tokens => return false,
            Some(Fault::PanicAfter { tokens }) if sampled >= *tokens => {
                panic!("a fault was asked for")
            }
            Some(Fault::FailAfter { tokens, error }) if sampled >= *tokens => {
                let error = error.clone();
                events.push(EngineEvent::Failed { request, error });
                return true;
            }
            _ => {}
        }
        let token = match fake.next(self.config.model, self.status.version) {
            Ok(token) => token,
            Err(error) => {
                events.push(EngineEvent::Failed { request, error });
                return true;
            }
        };
        fake.hash = hash_on(fake.hash, &[token.id]);
        let bytes = self.config.token_bytes.as_ref();
        let ends = fake.sequence.ended();
        let end = fake
            .sequence
            .push(token.id, ends, self.config.context, bytes);
        self.status.sampled_tokens += 1;
        let tokens = vec![token];
        events.push(EngineEvent::Tokens { request, tokens });
        if let Some(reason) = end {
            events.push(finished(request, reason));
            return true;
        }
        false
    }

    fn remove(&mut self, key: OrderKey) -> Option<FakeSequence> {
        let fake = self.sequences.remove(&key)?;
        self.index.remove(&fake.sequence.id);
        Some(fake)
    }
}

fn finished(request: RequestId, reason: FinishReason) -> EngineEvent {
    EngineEvent::Finished {
        request,
        reason,
        cached_prompt_tokens: 0,
        routes: None,
    }
}

impl Core for FakeCore {
    fn limits(&self) -> RequestLimits {
        RequestLimits {
            vocab: self.config.model.vocab,
            context: self.config.context,
            token_bytes: self.config.token_bytes.is_some(),
        }
    }

    fn submit(
        &mut self,
        request: GenerateRequest,
        constraint: Option<Constraint>,
    ) -> Result<(), EngineError> {
        params::check_request(&request, &self.limits())?;
        params::check_constraint(&request, constraint.as_ref())?;
        if self.index.contains_key(&request.id) {
            return Err(duplicate(request.id));
        }
        let key = OrderKey {
            priority: Reverse(request.priority),
            arrival: self.arrivals,
        };
        self.arrivals += 1;
        let fault = self.config.faults.get(&key.arrival).cloned();
        if let Some(Fault::Refuse(error)) = fault {
            return Err(error);
        }
        let script = self
            .config
            .script
            .as_ref()
            .and_then(|script| script(&request));
        self.index.insert(request.id, key);
        self.status.prefill_tokens += request.prompt.len() as u64;
        let fake = FakeSequence {
            hash: self.config.model.hash(&request.prompt),
            sequence: Sequence::new(request, constraint),
            script: script.unwrap_or_default().into_iter(),
            fault,
        };
        self.sequences.insert(key, fake);
        Ok(())
    }

    fn abort(&mut self, id: RequestId, events: &mut Vec<EngineEvent>) {
        if let Some(&key) = self.index.get(&id)
            && self.remove(key).is_some()
        {
            events.push(finished(id, FinishReason::Aborted));
        }
    }

    fn load_weights(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<(), EngineError> {
        if weights.names().is_empty() {
            let why = "no tensor in the set".to_owned();
            return Err(EngineError::Weights(why));
        }
        self.status.version = version;
        Ok(())
    }

    fn step(&mut self, events: &mut Vec<EngineEvent>) {
        if self.sleeps && !self.config.latency.is_zero() {
            std::thread::sleep(self.config.latency);
        }
        let running = self.sequences.keys().take(self.config.max_running);
        let keys: Vec<OrderKey> = running.copied().collect();
        for key in keys {
            if self.advance(key, events) {
                self.remove(key);
            }
        }
    }

    /// A hanging request is not work: it must not keep a thread busy without end.
    fn has_work(&self) -> bool {
        let hangs = |fake: &FakeSequence| match fake.fault {
            Some(Fault::HangAfter { tokens }) => {
                fake.sequence.tokens.len() - fake.sequence.prompt >= tokens as usize
            }
            _ => false,
        };
        let mut running = self.sequences.values().take(self.config.max_running);
        running.any(|fake| !hangs(fake))
    }

    fn status(&self) -> EngineStatus {
        let total = self.config.context * self.config.max_running;
        let used = |fake: &FakeSequence| fake.sequence.tokens.len();
        let running = self.sequences.values().take(self.config.max_running);
        EngineStatus {
            running: self.sequences.len().min(self.config.max_running),
            waiting: self.sequences.len().saturating_sub(self.config.max_running),
            kv_tokens_total: total,
            kv_tokens_free: total - running.map(used).sum::<usize>(),
            ..self.status.clone()
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However the tokens arrive the hash is the same, and it is that of no other prefix.
        #[test]
        fn a_hash_goes_on_and_tells_prefixes_apart(
            tokens in prop::collection::vec(0u32..9, 1..60),
            cut in 0usize..60,
            change in 0usize..60,
        ) {
            let whole = hash_on(1, &tokens);
            let (before, after) = tokens.split_at(cut.min(tokens.len()));
            prop_assert_eq!(hash_on(hash_on(1, before), after), whole);
            let one_by_one = tokens.iter().fold(1, |hash, &t| hash_on(hash, &[t]));
            prop_assert_eq!(one_by_one, whole);
            let mut other = tokens.clone();
            other[change % tokens.len()] += 1;
            prop_assert_ne!(hash_on(1, &other), whole);
            other.clone_from(&tokens);
            other.reverse();
            prop_assert_eq!(hash_on(1, &other) == whole, other == tokens);
            prop_assert_ne!(hash_on(1, &tokens[1..]), whole);
        }
    }
}
