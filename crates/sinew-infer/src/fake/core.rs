//! Requests of a fake engine, without threads.

use super::model::{FakeModel, PROBABILITIES, hash_on};
use super::{FakeConfig, Fault};
use crate::constraint::Constraint;
use crate::core::Core;
use crate::params::{self, RequestLimits};
use crate::scheduler::{duplicate, unknown};
use crate::sequence::{OrderKey, Sequence};
use sinew_types::{
    Adapter, AdapterName, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest,
    PolicyVersion, PromptLogprobs, RequestId, SampledToken, TensorSource, TokenId, mix_hash,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::PoisonError;

/// A request of the fake engine.
struct FakeSequence {
    sequence: Sequence,
    /// Its adapter; `None`: the engine's own weights.
    adapter: Option<AdapterName>,
    /// Log-probabilities of its prompt that are still to be reported.
    prompt_logprobs: Option<PromptLogprobs>,
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
pub(super) struct FakeCore {
    pub(super) config: FakeConfig,
    /// Versions of the adapters that are loaded.
    adapters: BTreeMap<AdapterName, PolicyVersion>,
    sequences: BTreeMap<OrderKey, FakeSequence>,
    index: HashMap<RequestId, OrderKey>,
    arrivals: u64,
    status: EngineStatus,
    /// Whether passes take [`FakeConfig::latency`]: only on a thread of the engine's own, never on the one of
    /// a caller that steps it.
    sleeps: bool,
}

impl FakeCore {
    pub(super) fn new(config: FakeConfig, sleeps: bool) -> Result<Self, EngineError> {
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
            adapters: BTreeMap::new(),
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
        let (model, version) = match &fake.adapter {
            Some(name) => {
                // It is loaded as long as a request uses it.
                let version = self.adapters.get(name).copied().unwrap_or_default();
                (self.config.model.adapted(name), version)
            }
            None => (self.config.model, self.status.version),
        };
        if let Some(asked) = fake.prompt_logprobs.take() {
            let prompt = &fake.sequence.tokens[..fake.sequence.prompt];
            let logprobs = model.score(&asked, prompt);
            events.push(EngineEvent::Prompt { request, logprobs });
        }
        let token = match fake.next(model, version) {
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
        mut request: GenerateRequest,
        constraint: Option<Constraint>,
    ) -> Result<(), EngineError> {
        params::check_request(&request, &self.limits())?;
        params::check_constraint(&request, constraint.as_ref())?;
        if self.index.contains_key(&request.id) {
            return Err(duplicate(request.id));
        }
        let model = match &request.adapter {
            Some(name) if !self.adapters.contains_key(name) => return Err(unknown(name)),
            Some(name) => self.config.model.adapted(name),
            None => self.config.model,
        };
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
            hash: model.hash(&request.prompt),
            adapter: request.adapter.take(),
            prompt_logprobs: request.prompt_logprobs.take(),
            sequence: Sequence::new(request, constraint, None),
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

    fn load_adapter(
        &mut self,
        name: &AdapterName,
        version: PolicyVersion,
        adapter: &Adapter,
    ) -> Result<(), EngineError> {
        let refused = |why: String| EngineError::Weights(format!("adapter {name}: {why}"));
        if adapter.tensors.names().is_empty() {
            return Err(refused("no tensor in the set".to_owned()));
        }
        let max = self.config.max_adapters;
        if !self.adapters.contains_key(name) && self.adapters.len() >= max {
            return Err(refused(format!("max_adapters = {max}: as many are loaded")));
        }
        self.adapters.insert(name.clone(), version);
        Ok(())
    }

    fn unload_adapter(&mut self, name: &AdapterName, events: &mut Vec<EngineEvent>) {
        self.adapters.remove(name);
        let users = self.sequences.iter();
        let users = users.filter(|(_, fake)| fake.adapter.as_ref() == Some(name));
        let users: Vec<OrderKey> = users.map(|(key, _)| *key).collect();
        for fake in users.into_iter().filter_map(|key| self.remove(key)) {
            events.push(EngineEvent::Failed {
                request: fake.sequence.id,
                error: unknown(name),
            });
        }
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
