//! Continuous batching as a pure state machine: no clock, no thread, no randomness.
//!
//! `plan` decides what the next pass computes, `commit` takes the tokens that were drawn. A request
//! that is preempted (or whose keys and values were of old weights) keeps its tokens and its place,
//! and recomputes the rest when it runs again.

mod adapters;
mod grouping;
mod plan;

pub(crate) use plan::{Plan, SampleSlot};

use crate::blocks::{Blocks, Parent, Space};
use crate::constraint::Constraint;
use crate::draft::{AcceptanceRate, NgramIndex};
use crate::draw::Draws;
use crate::forward::{AdapterSlot, ForwardLimits};
use crate::params::{self, RequestLimits};
use crate::prompt_row::Scored;
use crate::sequence::{OrderKey, Sequence};
use crate::stop::TokenBytes;
use adapters::Adapters;
use sinew_types::{
    AdapterName, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest,
    PolicyVersion, PromptLogprob, RequestId, SampledToken,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

/// Maximum number of logits of prompts that one pass computes for their log-probabilities, 64 MiB: those of a
/// whole prompt would be gigabytes.
const MAX_PROMPT_LOGITS: usize = 1 << 24;

/// The handling of keys and values of running requests when weights are replaced. Cached prefixes
/// of the old weights are never given to new requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SwapPolicy {
    /// Compute the KV cache again: later tokens are exactly those that the new weights sample.
    #[default]
    Recompute,
    /// Go on with them: no work is repeated, and a token's log-probability depends on old
    /// keys and values too, so a trainer that recomputes it sees a small difference.
    Keep,
}

/// Limits of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Maximum number of requests that run at once; at most `max_batched_tokens`. Default: 128.
    pub max_num_seqs: usize,
    /// Maximum number of tokens of one pass: a token of each generating request, prompts in the
    /// rest. Default: 512.
    pub max_batched_tokens: usize,
    /// Keys and values of running requests at a swap of weights. Default: recompute.
    pub swap: SwapPolicy,
    /// Speculative decoding: a pass that generates for few requests is filled up to as many rows
    /// with draft tokens to verify; 0 turns it off. It never changes what is sampled. Default: 0.
    pub speculative_tokens: usize,
    /// Maximum number of adapters that are loaded at once; loading one more is refused. Default: 64.
    pub max_adapters: usize,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            max_num_seqs: 128,
            max_batched_tokens: 512,
            swap: SwapPolicy::default(),
            speculative_tokens: 0,
            max_adapters: 64,
        }
    }
}

/// Counters since start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) sampled_tokens: u64,
    /// Rows of prompts, and of outputs that were computed again.
    pub(crate) prefill_tokens: u64,
    pub(crate) cached_prompt_tokens: u64,
    /// Times that a running request gave its blocks to another one.
    pub(crate) preemptions: u64,
    /// Draft tokens that were verified.
    pub(crate) drafted: u64,
    /// Number of accepted draft tokens.
    pub(crate) accepted: u64,
}

/// All requests and blocks of an engine.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) blocks: Blocks,
    /// Requests that do not run, in their order: new ones, and preempted ones at their old place.
    pub(crate) waiting: BTreeMap<OrderKey, Sequence>,
    /// Requests with blocks, in the same order.
    pub(crate) running: BTreeMap<OrderKey, Sequence>,
    pub(crate) counters: Counters,
    pub(crate) drafts: NgramIndex,
    pub(crate) acceptance: AcceptanceRate,
    index: HashMap<RequestId, OrderKey>,
    arrivals: u64,
    limits: RequestLimits,
    token_bytes: Option<TokenBytes>,
    version: PolicyVersion,
    /// Keys and values of the engine's own weights without an adapter.
    space: Space,
    adapters: Adapters,
    /// Maximum rows of a pass whose logits are computed for log-probabilities of prompts, at least 1.
    pub(crate) prompt_rows: usize,
}

/// The results of a planned pass, in the order of the plan.
#[derive(Debug)]
pub(crate) struct PassOutcome {
    /// The tokens that were drawn for each sample: one more than its accepted draft tokens.
    pub(crate) drawn: Vec<Result<Draws, EngineError>>,
    /// The log-probabilities of each row of a prompt.
    pub(crate) scored: Vec<Scored>,
}

/// The limits that requests to an engine with `limits` are checked against. A sequence that fills
/// all blocks ends as one that fills the context does.
pub(crate) fn request_limits(limits: &ForwardLimits, token_bytes: bool) -> RequestLimits {
    RequestLimits {
        vocab: limits.vocab,
        context: limits.context.min(limits.blocks * limits.block_tokens),
        token_bytes,
    }
}

impl Scheduler {
    /// A scheduler without requests.
    ///
    /// # Errors
    /// If a limit is 0.
    pub(crate) fn new(
        mut config: SchedulerConfig,
        limits: &ForwardLimits,
        token_bytes: Option<TokenBytes>,
        version: PolicyVersion,
    ) -> Result<Self, EngineError> {
        let sizes = [
            ("max_num_seqs", config.max_num_seqs),
            ("max_batched_tokens", config.max_batched_tokens),
            ("vocab", limits.vocab),
            ("context", limits.context),
            ("block_tokens", limits.block_tokens),
            ("blocks", limits.blocks),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
            let message = format!("{name} = 0: an engine needs at least 1");
            return Err(EngineError::Failed(message));
        }
        // Each running request computes a token in each pass.
        config.max_num_seqs = config.max_num_seqs.min(config.max_batched_tokens);
        let mut blocks = Blocks::new(limits.blocks, limits.block_tokens);
        Ok(Self {
            space: blocks.start_space(),
            adapters: Adapters::new(config.max_adapters),
            prompt_rows: (MAX_PROMPT_LOGITS / limits.vocab).max(1),
            config,
            blocks,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            counters: Counters::default(),
            drafts: NgramIndex::default(),
            acceptance: AcceptanceRate::default(),
            index: HashMap::new(),
            arrivals: 0,
            limits: request_limits(limits, token_bytes.is_some()),
            token_bytes,
            version,
        })
    }

    /// Accepts a request; [`crate::engine_thread`] bounds how many wait.
    ///
    /// # Errors
    /// If its parameters are out of range, its id is in use or its adapter is not loaded.
    pub(crate) fn submit(
        &mut self,
        request: GenerateRequest,
        constraint: Option<Constraint>,
    ) -> Result<(), EngineError> {
        params::check_request(&request, &self.limits)?;
        params::check_constraint(&request, constraint.as_ref())?;
        if self.index.contains_key(&request.id) {
            return Err(duplicate(request.id));
        }
        let adapter = match &request.adapter {
            Some(name) => Some(self.adapters.find(name).ok_or_else(|| unknown(name))?),
            None => None,
        };
        let key = OrderKey {
            priority: Reverse(request.priority),
            arrival: self.arrivals,
        };
        self.arrivals += 1;
        self.index.insert(request.id, key);
        let sequence = Sequence::new(request, constraint, adapter);
        self.waiting.insert(key, sequence);
        Ok(())
    }

    /// Ends a request and returns its last event, if the request exists.
    pub(crate) fn abort(&mut self, id: RequestId) -> Option<EngineEvent> {
        let key = *self.index.get(&id)?;
        let waiting = self.waiting.remove(&key);
        let sequence = waiting.or_else(|| self.running.remove(&key))?;
        Some(self.finish(sequence, FinishReason::Aborted))
    }

    /// Maximum number of tokens of prompt and output together.
    pub(crate) fn context(&self) -> usize {
        self.limits.context
    }

    /// The root below which the keys and values of an adapter are stored.
    fn root(&self, adapter: Option<AdapterSlot>) -> Parent {
        let adapter = adapter.and_then(|slot| self.adapters.get(slot));
        Parent::Root(adapter.map_or(self.space, |adapter| adapter.space))
    }

    /// Takes the results of a planned pass.
    pub(crate) fn commit(
        &mut self,
        plan: Plan,
        outcome: PassOutcome,
        events: &mut Vec<EngineEvent>,
    ) {
        for &block in &plan.written {
            self.blocks.mark_ready(block);
        }
        self.counters.prefill_tokens += plan.prefill_tokens as u64;
        let mut scored = outcome.scored.into_iter();
        for slot in &plan.scores {
            // All of them are taken, whatever the first of them is.
            let found: Vec<Scored> = scored.by_ref().take(slot.count).collect();
            let found: Result<Vec<PromptLogprob>, EngineError> = found.into_iter().collect();
            match found {
                Ok(found) => self.add_scores(slot.key, found),
                Err(error) => self.fail(slot.key, error, events),
            }
        }
        for (slot, drawn) in plan.samples.iter().zip(outcome.drawn) {
            let accepted = drawn.as_ref().map_or(0, |draws| draws.accepted);
            self.take_back(slot, accepted);
            match drawn {
                Ok(draws) => self.accept(slot.key, draws, events),
                Err(error) => self.fail(slot.key, error, events),
            }
        }
        self.unpin(&plan);
    }

    /// Records the failure of a planned pass: every request in it fails, with the same error.
    pub(crate) fn commit_failure(
        &mut self,
        plan: &Plan,
        error: &EngineError,
        events: &mut Vec<EngineEvent>,
    ) {
        for &key in plan.members.iter().rev() {
            self.fail(key, error.clone(), events);
        }
        self.unpin(plan);
    }

    fn add_scores(&mut self, key: OrderKey, found: Vec<PromptLogprob>) {
        let sequence = self.running.get_mut(&key);
        if let Some(scores) = sequence.and_then(|s| s.scores.as_mut()) {
            scores.add(found);
        }
    }

    fn unpin(&mut self, plan: &Plan) {
        for &block in plan.pins.iter().rev() {
            self.blocks.release(block);
        }
    }

    /// Removes a sequence's draft tokens, and of their keys and values all but those of the first `accepted`.
    fn take_back(&mut self, slot: &SampleSlot, accepted: usize) {
        let Some(sequence) = self.running.get_mut(&slot.key) else {
            return;
        };
        if slot.drafted == 0 {
            return;
        }
        sequence.adapt_draft(slot.drafted, accepted);
        self.counters.drafted += slot.drafted as u64;
        self.counters.accepted += accepted as u64;
        self.acceptance.note(slot.drafted, accepted);
        let known = sequence.tokens.len() - slot.drafted;
        sequence.tokens.truncate(known);
        sequence.computed = known + accepted;
        let block_tokens = self.blocks.block_tokens();
        let blocks = sequence.computed.div_ceil(block_tokens);
        for block in sequence.chain.drain(blocks..).rev() {
            self.blocks.truncate(block, 0);
            self.blocks.release(block);
        }
        if let Some(&last) = sequence.chain.last() {
            let slots = sequence.computed - (blocks - 1) * block_tokens;
            self.blocks.truncate(last, slots);
        }
    }

    /// Adds drawn tokens to a sequence and ends it if one of them is the last.
    fn accept(&mut self, key: OrderKey, drawn: Draws, events: &mut Vec<EngineEvent>) {
        let Some(sequence) = self.running.get_mut(&key) else {
            return;
        };
        sequence.prefilling = false;
        let request = sequence.id;
        if let Some(scores) = sequence.scores.take() {
            let logprobs = scores.finish();
            events.push(EngineEvent::Prompt { request, logprobs });
        }
        let adapter = sequence.adapter.and_then(|slot| self.adapters.get(slot));
        let version = adapter.map_or(self.version, |adapter| adapter.version);
        let bytes = self.token_bytes.as_ref();
        let count = drawn.draws.len();
        let mut tokens = Vec::with_capacity(count);
        let mut end = None;
        for (draw, left) in drawn.draws.into_iter().zip((0..count).rev()) {
            let ends = drawn.ended && left == 0;
            end = sequence.push(draw.id, ends, self.limits.context, bytes);
            tokens.push(SampledToken {
                id: draw.id,
                logprob: draw.logprob,
                version,
                top: draw.top,
                choice: draw.choice,
            });
            if end.is_some() {
                break;
            }
        }
        self.counters.sampled_tokens += tokens.len() as u64;
        events.push(EngineEvent::Tokens { request, tokens });
        if self.config.speculative_tokens > 0 {
            let known = sequence.cached_prompt.unwrap_or(0);
            self.drafts.note(key.arrival, &sequence.tokens, known);
        }
        if let Some(reason) = end
            && let Some(sequence) = self.running.remove(&key)
        {
            events.push(self.finish(sequence, reason));
        }
    }

    fn fail(&mut self, key: OrderKey, error: EngineError, events: &mut Vec<EngineEvent>) {
        let running = self.running.remove(&key);
        if let Some(mut sequence) = running.or_else(|| self.waiting.remove(&key)) {
            self.release(&mut sequence);
            self.index.remove(&sequence.id);
            events.push(EngineEvent::Failed {
                request: sequence.id,
                error,
            });
        }
    }

    fn finish(&mut self, mut sequence: Sequence, reason: FinishReason) -> EngineEvent {
        self.release(&mut sequence);
        self.index.remove(&sequence.id);
        EngineEvent::Finished {
            request: sequence.id,
            reason,
            cached_prompt_tokens: sequence.cached_prompt.unwrap_or(0) as u32,
            routes: None,
        }
    }

    /// Releases a sequence's blocks; they stay in the prefix cache until their memory is needed.
    fn release(&mut self, sequence: &mut Sequence) {
        for block in sequence.chain.drain(..).rev() {
            self.blocks.release(block);
        }
        sequence.computed = 0;
        sequence.prefilling = true;
    }

    /// Takes a sequence's blocks away; it waits at its old place, its tokens are kept.
    pub(crate) fn preempt(&mut self, key: OrderKey, mut sequence: Sequence) {
        self.release(&mut sequence);
        self.waiting.insert(key, sequence);
        self.counters.preemptions += 1;
    }

    /// Takes note of replaced weights: tokens drawn from now on without an adapter carry `version`. Keys and
    /// values of adapters are of the old weights, too.
    pub(crate) fn swap_weights(&mut self, version: PolicyVersion) {
        self.restart(|_| true);
        self.blocks.end_space(self.space);
        self.space = self.blocks.start_space();
        for adapter in self.adapters.iter_mut() {
            self.blocks.end_space(adapter.space);
            adapter.space = self.blocks.start_space();
        }
        self.version = version;
    }

    /// Slot under which the device is to load an adapter of this name.
    ///
    /// # Errors
    /// If too many are loaded.
    pub(crate) fn adapter_slot(&self, name: &AdapterName) -> Result<AdapterSlot, EngineError> {
        self.adapters.slot_for(name)
    }

    /// Takes note of an adapter that was loaded into the slot of its name, perhaps in place of another one:
    /// tokens drawn with it from now on carry `version`.
    pub(crate) fn swap_adapter(
        &mut self,
        slot: AdapterSlot,
        name: &AdapterName,
        version: PolicyVersion,
    ) {
        self.restart(|sequence| sequence.adapter == Some(slot));
        let space = self.blocks.start_space();
        if let Some(before) = self.adapters.put(slot, name, version, space) {
            self.blocks.end_space(before);
        }
    }

    /// Forgets an adapter and fails its requests; returns its slot if it was loaded.
    pub(crate) fn drop_adapter(
        &mut self,
        name: &AdapterName,
        events: &mut Vec<EngineEvent>,
    ) -> Option<AdapterSlot> {
        let (slot, adapter) = self.adapters.remove(name)?;
        let all = self.running.iter().chain(&self.waiting);
        let users = all.filter(|(_, sequence)| sequence.adapter == Some(slot));
        let users: Vec<OrderKey> = users.map(|(key, _)| *key).collect();
        for key in users {
            self.fail(key, unknown(name), events);
        }
        self.blocks.end_space(adapter.space);
        Some(slot)
    }

    /// Prepares sequences whose weights are replaced: their keys and values are computed again, unless they
    /// are to be kept. Log-probabilities of a prompt are all of one version, so they start over in any
    /// case.
    fn restart(&mut self, affected: impl Fn(&Sequence) -> bool) {
        let keeps = self.config.swap == SwapPolicy::Keep;
        for (key, mut sequence) in std::mem::take(&mut self.running) {
            if !affected(&sequence) || (keeps && sequence.scores.is_none()) {
                self.running.insert(key, sequence);
                continue;
            }
            self.release(&mut sequence);
            self.waiting.insert(key, sequence);
        }
        let waiting = self.waiting.values_mut().filter(|s| affected(s));
        for scores in waiting.filter_map(|s| s.scores.as_mut()) {
            scores.restart();
        }
    }

    /// Whether any request has not ended.
    pub(crate) fn has_work(&self) -> bool {
        !self.index.is_empty()
    }

    /// Counts of requests, blocks and tokens. `busy_s` is 0: the thread measures it.
    pub(crate) fn status(&self) -> EngineStatus {
        let block_tokens = self.blocks.block_tokens();
        EngineStatus {
            version: self.version,
            running: self.running.len(),
            waiting: self.waiting.len(),
            kv_tokens_free: self.blocks.available() * block_tokens,
            kv_tokens_total: self.blocks.total() * block_tokens,
            sampled_tokens: self.counters.sampled_tokens,
            prefill_tokens: self.counters.prefill_tokens,
            cached_prompt_tokens: self.counters.cached_prompt_tokens,
            preemptions: self.counters.preemptions,
            busy_s: 0.0,
            asleep: false,
        }
    }
}

#[cfg(test)]
impl Scheduler {
    /// Panics if an invariant does not hold between two passes.
    pub(crate) fn check(&self) {
        let running = self.running.values();
        self.blocks
            .check(running.map(|s| (&s.chain[..], &s.tokens[..s.computed])));
        assert!(
            self.waiting
                .values()
                .all(|s| s.chain.is_empty() && s.computed == 0)
        );
        assert!(self.running.values().all(|s| s.remaining() > 0));
        assert_eq!(self.index.len(), self.running.len() + self.waiting.len());
    }
}

/// The error of a request for an adapter that is not loaded.
pub(crate) fn unknown(name: &AdapterName) -> EngineError {
    EngineError::UnknownAdapter { name: name.clone() }
}

/// The error of a second request with the id of one that has not ended.
pub(crate) fn duplicate(id: RequestId) -> EngineError {
    EngineError::Failed(format!(
        "request id {} belongs to a request that has not ended: give each its own",
        id.0
    ))
}
