//! The router: requests in, attempts out.
//!
//! A request waits (by priority, then arrival), runs as an attempt, and waits again if the attempt ends
//! early: with a pause after a failure, at once after a load of weights. It ends normally, by its own error,
//! at the queue's deadline, or after too many attempts in a row without a new token.
//!
//! An engine takes attempts while it is healthy, awake, verified to have the version, not paused by its
//! breaker, and has KV capacity for the prompt and the reserve. If there are several, the one with the
//! longest known prefix wins, unless it is much more loaded than the least loaded one. The load of an engine
//! is the expected remaining work of its attempts: see `lengths`.
//!
//! The choice of the weights that sample, and what their changes do to attempts, is in `versions`; adapters
//! that requests name are in `adapters`.

mod adapters;
mod versions;

use super::lengths::{LEAST, Lengths};
use super::loads::Loads;
use super::prefix::{BlockHashes, SeenBlocks};
use super::state::{
    Command, Counters, EngineState, EngineView, Place, RequestState, RoutedAdapter,
};
use super::{OnPartial, RouterConfig};
use crate::attempt::{AttemptEnd, AttemptId, AttemptToken};
use crate::error::{AttemptError, Blame};
use sinew_types::{
    AdapterName, Choice, EngineError, EngineEvent, EngineStatus, FinishReason, GenerateRequest,
    Lineage, PolicyVersion, PromptLogprob, RequestId, SampledToken, WeightsId,
};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};

/// Maximum waiting requests that are considered in one go; bounds the work of a step.
const MAX_SCANNED: usize = 256;

/// Decides what runs where. Times are seconds since any fixed moment and never go back.
///
/// Every call can add commands; the caller takes them with [`Router::command`] until there is none
/// and carries them out in order. The same calls with the same times give the same commands.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    /// The weights that sample.
    weights: WeightsId,
    /// Every lineage that was seen, the latest last; bounded.
    lineages: VecDeque<Lineage>,
    /// Adapters that requests can name.
    adapters: BTreeMap<AdapterName, RoutedAdapter>,
    engines: Vec<EngineState>,
    loads: Loads,
    seen: SeenBlocks,
    requests: HashMap<RequestId, RequestState>,
    waiting: BTreeSet<Place>,
    attempts: HashMap<AttemptId, RequestId>,
    lengths: Lengths,
    /// Reasons to start nothing: a pause, weights being loaded, engines without memory.
    paused: bool,
    loading: bool,
    asleep: bool,
    next_attempt: u64,
    arrivals: u64,
    /// Lower bound of the next time at which only waiting changes anything.
    wake: f64,
    commands: VecDeque<Command>,
    counters: Counters,
}

impl Router {
    /// A router over the engines of these names, none of which is usable until it was probed. All
    /// tokens are to be sampled by `weights`.
    pub fn new(config: RouterConfig, engines: Vec<String>, weights: WeightsId) -> Self {
        let breaker = config.breaker;
        let loads = Loads::new(engines.len(), config.max_running);
        let engines = engines.into_iter();
        Self {
            config,
            weights,
            lineages: VecDeque::from([weights.lineage]),
            adapters: BTreeMap::new(),
            loads,
            seen: SeenBlocks::default(),
            engines: engines.map(|n| EngineState::new(n, breaker)).collect(),
            requests: HashMap::new(),
            waiting: BTreeSet::new(),
            attempts: HashMap::new(),
            lengths: Lengths::default(),
            paused: false,
            loading: false,
            asleep: false,
            next_attempt: 0,
            arrivals: 0,
            wake: f64::INFINITY,
            commands: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// The next command, oldest first.
    pub fn command(&mut self) -> Option<Command> {
        self.commands.pop_front()
    }

    /// The version that samples.
    pub fn version(&self) -> PolicyVersion {
        self.weights.version
    }

    /// The weights that sample.
    pub fn weights(&self) -> WeightsId {
        self.weights
    }

    /// The request that an attempt is for; `None` once the attempt is over.
    pub fn request_of(&self, attempt: AttemptId) -> Option<RequestId> {
        self.attempts.get(&attempt).copied()
    }

    /// Counters since the start.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The state of each engine, for users.
    pub fn engines(&self, now: f64) -> Vec<EngineView> {
        let engines = self.engines.iter();
        let views = engines.map(|e| e.view(self.weights, now));
        let mut views: Vec<_> = views.collect();
        if self.asleep {
            for view in &mut views {
                view.idle_because = Some("it sleeps".to_owned());
            }
        }
        views
    }

    /// Queues a request.
    ///
    /// # Errors
    /// If the queue is full, the id is in use, or the adapter is not loaded.
    pub fn submit(&mut self, now: f64, mut request: GenerateRequest) -> Result<(), EngineError> {
        if self.requests.contains_key(&request.id) {
            let why = format!("request id {} is in use", request.id.0);
            return Err(EngineError::Failed(why));
        }
        let (waiting, limit) = (self.waiting.len(), self.config.max_waiting);
        if waiting >= limit {
            return Err(EngineError::QueueFull { waiting, limit });
        }
        let adapter = self.adapter_of(request.adapter.as_ref())?;
        let blocks = BlockHashes::new(adapter.map(|a| a.server_name.as_str()));
        let engine = self.engines.first().map_or("", |e| e.name.as_str());
        let law = self.config.formats.apply(&mut request.sampling, engine)?;
        let mut state = RequestState {
            id: request.id,
            adapter: request.adapter,
            prompt_logprobs: request.prompt_logprobs.map(Into::into),
            law,
            prompt: request.prompt,
            sampled: Vec::new(),
            sampling: request.sampling,
            priority: request.priority,
            arrival: self.arrivals,
            blocks,
            prompt_blocks: 0,
            remembered: (0, 0),
            rest: 1.0,
            attempt: None,
            weights: self.weights,
            attempt_tokens: 0,
            end: None,
            failures: 0,
            not_before: now,
            deadline: now + self.config.max_wait_s,
            failed_on: None,
            cached_prompt_tokens: 0,
            routes: None,
        };
        state.blocks.push(&state.prompt, self.config.block_tokens);
        state.prompt_blocks = state.blocks.hashes().len();
        self.arrivals += 1;
        self.counters.requests += 1;
        self.wake = self.wake.min(state.deadline);
        self.waiting.insert(state.place());
        self.requests.insert(state.id, state);
        Ok(())
    }

    /// Ends a request as aborted; its running attempt is cancelled. Unknown requests are ignored.
    pub fn abort(&mut self, request: RequestId) {
        if self.requests.contains_key(&request) {
            self.cancel_attempt(request);
            self.finish(request, FinishReason::Aborted);
        }
    }

    /// Log-probabilities of the prompt of an attempt; those of attempts that are over are dropped.
    pub fn prompt(&mut self, attempt: AttemptId, logprobs: Vec<PromptLogprob>) {
        let request = self.attempts.get(&attempt);
        let state = request.and_then(|id| self.requests.get_mut(id));
        if let Some(state) = state
            && state.prompt_logprobs.take().is_some()
        {
            let request = state.id;
            self.tell(EngineEvent::Prompt { request, logprobs });
        }
    }

    /// Tokens of an attempt, and why it ends if that is known already; those of attempts that are over
    /// are dropped.
    pub fn tokens(
        &mut self,
        attempt: AttemptId,
        tokens: Vec<AttemptToken>,
        end: Option<FinishReason>,
    ) {
        let Some(state) = self
            .attempts
            .get(&attempt)
            .and_then(|id| self.requests.get_mut(id))
        else {
            return;
        };
        state.end = end;
        if tokens.is_empty() {
            return;
        }
        let (before, count) = (state.sampled.len(), tokens.len());
        state.sampled.extend(tokens.iter().map(|t| t.id));
        let ids = &state.sampled[before..];
        state.blocks.push(ids, self.config.block_tokens);
        state.attempt_tokens += count;
        state.failures = 0;
        if let (Some(mean), Some((_, engine))) = (self.lengths.mean(), state.attempt) {
            let done = (count as f64 / mean).min((state.rest - LEAST).max(0.0));
            state.rest -= done;
            self.engines[engine].load -= done;
            self.loads.changed(engine, &self.engines[engine]);
        }
        self.counters.sampled_tokens += count as u64;
        let (request, version) = (state.id, state.weights.version);
        // Nothing is known of the masks.
        let choice = state.law.clone().map(|law| Choice {
            law,
            allowed: 0,
            mask: 0,
            log_mass: 0.0,
        });
        let tokens = tokens.into_iter().map(|t| SampledToken {
            id: t.id,
            logprob: t.logprob,
            version: t.version.unwrap_or(version),
            top: t.top,
            choice: choice.clone(),
        });
        let tokens = tokens.collect();
        self.tell(EngineEvent::Tokens { request, tokens });
    }

    /// Handles the end of an attempt. `spread` in [0, 1) varies the pause before the next one.
    pub fn attempt_ended(
        &mut self,
        now: f64,
        attempt: AttemptId,
        result: Result<AttemptEnd, AttemptError>,
        spread: f64,
    ) {
        let Some(request) = self.attempts.get(&attempt).copied() else {
            return;
        };
        let engine = self.release_attempt(request);
        match result {
            Ok(end) => self.attempt_succeeded(request, engine, end),
            Err(error) => self.attempt_failed(now, request, engine, error, spread),
        }
        self.schedule(now);
    }

    fn attempt_succeeded(&mut self, request: RequestId, engine: Option<usize>, end: AttemptEnd) {
        let Some(state) = self.requests.get_mut(&request) else {
            return;
        };
        state.cached_prompt_tokens = state.cached_prompt_tokens.max(end.cached_prompt_tokens);
        state.routes = end.routes;
        if let Some(engine) = engine
            && let Some(target) = self.engines.get_mut(engine)
        {
            target.breaker.succeeded();
            target.trouble = None;
            let (count, forgotten) = state.remembered;
            let known = if self.seen.forgotten(engine) == forgotten {
                count
            } else {
                0
            };
            let new = &state.blocks.hashes()[known..];
            self.seen.remember(engine, new, self.config.max_blocks);
        }
        self.finish(request, end.reason);
    }

    /// Decides what follows a failed attempt: the end of the request, or a place in the queue after
    /// a pause.
    fn attempt_failed(
        &mut self,
        now: f64,
        request: RequestId,
        engine: Option<usize>,
        error: AttemptError,
        spread: f64,
    ) {
        if let (true, AttemptError::Version { .. }, Some(engine)) =
            (self.config.follow, &error, engine)
        {
            return self.followed(now, request, engine, &error);
        }
        self.counters.failed_attempts += 1;
        let blame = error.blame();
        if let Some(engine) = engine {
            self.blame(now, engine, &error, blame);
        }
        let Some(state) = self.requests.get_mut(&request) else {
            return;
        };
        let tainted = matches!(error, AttemptError::Version { .. }) && state.attempt_tokens > 0;
        let partial = !state.sampled.is_empty();
        state.failures += u32::from(blame != Blame::Moment);
        state.failed_on = engine;
        let failed = |why: &str| EngineError::Failed(format!("{why}: {error}"));
        if let AttemptError::Refused(error) = &error {
            let error = error.clone();
            return self.fail(request, error);
        }
        if tainted {
            return self.fail(request, failed("the weights changed while it was sampled"));
        }
        if let Some(reason) = state.known_end() {
            // Everything was there but the server's last word.
            return self.finish(request, reason);
        }
        match self.config.on_partial {
            OnPartial::Keep if partial => return self.finish(request, FinishReason::Aborted),
            OnPartial::Fail if partial => return self.fail(request, failed("cut")),
            _ => {}
        }
        let limit = self.config.max_failures;
        if state.failures >= limit {
            let why = format!("{limit} attempts failed in a row, the last with");
            return self.fail(request, failed(&why));
        }
        let doubled = f64::from(1u32 << state.failures.saturating_sub(1).min(16));
        let pause = (self.config.backoff_s * doubled).min(self.config.backoff_max_s);
        state.not_before = now + pause * (0.75 + 0.5 * spread);
        // A busy server is not a failure: the deadline of the queue is the limit then.
        if blame != Blame::Moment || state.attempt_tokens > 0 {
            state.deadline = now + self.config.max_wait_s;
        }
        self.wake = self.wake.min(state.not_before).min(state.deadline);
        self.waiting.insert(state.place());
    }

    /// Records an error at its engine: busy for a while, a failure of the breaker, or trust
    /// withdrawn.
    fn blame(&mut self, now: f64, engine: usize, error: &AttemptError, blame: Blame) {
        let Some(state) = self.engines.get_mut(engine) else {
            return;
        };
        let opened = match blame {
            Blame::Request => return,
            Blame::Moment => {
                state.busy_until = now + self.config.backoff_s;
                self.wake = self.wake.min(state.busy_until);
                return;
            }
            Blame::Engine => state.breaker.failed(now),
            Blame::Trust => {
                state.weights = None;
                state.breaker.trip(now);
                true
            }
        };
        state.trouble = Some(error.to_string());
        let until = state.breaker.opens_until().unwrap_or(f64::INFINITY);
        self.wake = self.wake.min(until);
        self.counters.breaker_opened += u64::from(opened);
        match error {
            AttemptError::Version { .. } => self.counters.wrong_version += 1,
            AttemptError::Tokens(_) | AttemptError::Protocol(_) => self.counters.wrong_answers += 1,
            _ => {}
        }
    }

    /// Restarts the deadlines of waiting requests, so that a pause does not count against them.
    fn renew_deadlines(&mut self, now: f64) {
        let deadline = now + self.config.max_wait_s;
        for (_, _, id) in &self.waiting {
            if let Some(state) = self.requests.get_mut(id) {
                state.deadline = deadline;
            }
        }
    }

    /// Ends requests whose deadline is over, and starts those whose pause is over.
    pub fn tick(&mut self, now: f64) {
        // Engines that are stopped on purpose do not end their requests.
        if now >= self.wake && !self.stands_still() {
            self.fail_late(now);
            self.wake = self.earliest(now);
        }
        self.schedule(now);
    }

    /// Fails requests whose deadline is over, with the reason for each engine.
    fn fail_late(&mut self, now: f64) {
        let late = |id: &RequestId| self.requests.get(id).is_some_and(|r| r.deadline <= now);
        let ids = self.waiting.iter().map(|(_, _, id)| *id);
        let late: Vec<_> = ids.filter(late).collect();
        for id in late {
            let reasons = self.reasons(id, now);
            let why = format!("no engine within {} s ({reasons})", self.config.max_wait_s);
            self.fail(id, EngineError::Stopped(why));
        }
    }

    /// The reason for which each engine does not serve a request.
    fn reasons(&self, request: RequestId, now: f64) -> String {
        let adapter = self.requests.get(&request).and_then(|r| r.adapter.as_ref());
        let reasons = self.engines.iter().map(|engine| {
            let lacks = || {
                let name = adapter.filter(|name| !self.has_adapter(engine, Some(*name)))?;
                Some(format!("it does not have the adapter {name}"))
            };
            let why = engine.unusable(self.weights, now).or_else(lacks);
            let why = why.as_deref().unwrap_or("no KV capacity");
            format!("{}: {why}", engine.name)
        });
        reasons.collect::<Vec<_>>().join("; ")
    }

    /// The next time after `now` at which only waiting changes anything: deadlines, pauses, trials of
    /// breakers.
    fn earliest(&self, now: f64) -> f64 {
        let waiting = self.waiting.iter();
        let waiting = waiting.filter_map(|(_, _, id)| self.requests.get(id));
        let times = waiting.flat_map(|r| [r.deadline, r.not_before]);
        let engines = self.engines.iter();
        let trials = engines.flat_map(|e| [e.breaker.opens_until(), Some(e.busy_until)]);
        let times = times.chain(trials.flatten()).filter(|t| *t > now);
        times.min_by(f64::total_cmp).unwrap_or(f64::INFINITY)
    }

    /// Time at which [`Router::tick`] has something to do, if nothing else happens; never before `now`.
    pub fn next_tick(&self, now: f64) -> Option<f64> {
        if self.stands_still() || self.waiting.is_empty() {
            return None;
        }
        // Longer than any wait, if nothing is known.
        Some(self.wake.max(now).min(now + 3600.0))
    }

    /// Totals over all usable engines, for admission. Counters are of all engines that answer.
    pub fn status(&self, now: f64) -> EngineStatus {
        let mut status = EngineStatus {
            version: self.weights.version,
            running: self.attempts.len(),
            waiting: self.waiting.len(),
            sampled_tokens: self.counters.sampled_tokens,
            asleep: self.asleep,
            ..EngineStatus::default()
        };
        for engine in &self.engines {
            let Some(probe) = &engine.probe else { continue };
            status.prefill_tokens += probe.prefill_tokens;
            status.cached_prompt_tokens += probe.cached_prompt_tokens;
            status.preemptions += probe.preemptions;
            if !self.asleep && engine.unusable(self.weights, now).is_none() {
                status.kv_tokens_total += probe.kv_tokens_total.unwrap_or(0);
                let free = probe.kv_tokens_free.unwrap_or(0);
                status.kv_tokens_free += free.saturating_sub(engine.reserved);
            }
        }
        status
    }

    /// Whether engines are stopped on purpose.
    fn stands_still(&self) -> bool {
        self.paused || self.loading || self.asleep
    }

    /// Starts waiting requests in order until one finds no engine: a large request is not overtaken
    /// forever by small ones that fit.
    fn schedule(&mut self, now: f64) {
        if self.stands_still() {
            return;
        }
        let mut next = self.waiting.first().copied();
        for _ in 0..MAX_SCANNED {
            let Some(place) = next else { return };
            next = self
                .waiting
                .range((Excluded(place), Unbounded))
                .next()
                .copied();
            let Some(state) = self.requests.get(&place.2) else {
                self.waiting.remove(&place);
                continue;
            };
            if state.not_before > now {
                continue;
            }
            if state.cut_in_a_format() {
                let tokens = state.sampled.len();
                let why = format!(
                    "cut after {tokens} tokens, and no server goes on in the middle of a format"
                );
                self.fail(place.2, EngineError::Format(why));
                continue;
            }
            let Some((engine, matched)) = self.pick(now, state) else {
                // Larger ones must not be starved by those that fit.
                break;
            };
            self.waiting.remove(&place);
            self.start(place.2, engine, matched);
        }
    }

    /// The best engine for a request, and how many of its leading blocks it has seen.
    fn pick(&self, now: f64, request: &RequestState) -> Option<(usize, usize)> {
        let tokens = request.kv_tokens(self.config.reserve_tokens);
        let able = |i: usize| {
            let engine = &self.engines[i];
            engine.has_capacity(&self.config, tokens)
                && engine.unusable(self.weights, now).is_none()
                && self.has_adapter(engine, request.adapter.as_ref())
        };
        let other = |i: usize| Some(i) != request.failed_on && able(i);
        let seen = || self.seen.matched(request.blocks.hashes());
        let Some((idlest, _)) = self.loads.iter().find(|(_, i)| other(*i)) else {
            let last = request.failed_on.filter(|i| able(*i))?;
            let seen = seen();
            let depth = seen.iter().find(|(_, engines)| engines.contains(last));
            return Some((last, depth.map_or(0, |(depth, _)| *depth)));
        };
        let load = |i: usize| self.engines[i].load;
        let limit = idlest + self.config.max_imbalance as f64;
        for (depth, engines) in seen() {
            let near = engines.iter().filter(|i| load(*i) <= limit && other(*i));
            let best = near.min_by(|a, b| load(*a).total_cmp(&load(*b)));
            if let Some(best) = best {
                return Some((best, depth));
            }
        }
        let free = |i: usize| {
            let probe = self.engines[i].probe.as_ref();
            probe.and_then(|p| p.kv_tokens_free).unwrap_or(0)
        };
        let idle = self.loads.iter().skip_while(|(load, _)| *load < idlest);
        let idle = idle.take_while(|(load, _)| *load <= idlest).map(|(_, i)| i);
        let best = idle
            .filter(|i| other(*i))
            .max_by_key(|i| (free(*i), usize::MAX - i));
        best.map(|i| (i, 0))
    }

    /// Starts an attempt of a request on an engine that has seen its first `matched` blocks.
    fn start(&mut self, request: RequestId, engine: usize, matched: usize) {
        let id = AttemptId(self.next_attempt);
        let adapter = self.requests.get(&request).and_then(|r| r.adapter.as_ref());
        let sampled_by = self.sampled_by(adapter);
        let weights = sampled_by.weights;
        let (Some(state), Some(target)) = (
            self.requests.get_mut(&request),
            self.engines.get_mut(engine),
        ) else {
            return;
        };
        self.next_attempt += 1;
        let attempt = state.next_attempt(id, sampled_by);
        target.reserved += state.kv_tokens(self.config.reserve_tokens);
        target.attempts.insert(id);
        let prompt = &state.blocks.hashes()[..state.prompt_blocks];
        state.rest = self.lengths.rest(prompt, state.sampled.len());
        target.load += state.rest;
        self.loads.changed(engine, target);
        let blocks = state.blocks.hashes();
        state.remembered = (blocks.len(), self.seen.forgotten(engine));
        let new = blocks.get(matched..).unwrap_or_default();
        self.seen.remember(engine, new, self.config.max_blocks);
        let moved = state.failed_on.take().is_some_and(|last| last != engine);
        self.counters.failovers += u64::from(moved);
        self.counters.replayed_tokens += state.sampled.len() as u64;
        self.counters.attempts += 1;
        self.counters.affinity_hits += u64::from(matched > 0);
        self.counters.affinity_misses += u64::from(matched == 0);
        state.attempt = Some((id, engine));
        state.weights = weights;
        state.attempt_tokens = 0;
        state.end = None;
        self.attempts.insert(id, request);
        self.commands.push_back(Command::Start { engine, attempt });
    }

    /// Forgets a request's attempt and returns the engine that it ran on.
    fn release_attempt(&mut self, request: RequestId) -> Option<usize> {
        let ended = self.requests.get_mut(&request)?;
        let ((attempt, engine), rest) = (ended.attempt.take()?, ended.rest);
        self.attempts.remove(&attempt);
        if let Some(state) = self.engines.get_mut(engine) {
            state.attempts.remove(&attempt);
            // Sums of parts that were added and taken away are not exact.
            state.load = if state.attempts.is_empty() {
                0.0
            } else {
                state.load - rest
            };
            self.loads.changed(engine, state);
        }
        Some(engine)
    }

    fn cancel_attempt(&mut self, request: RequestId) {
        let attempt = self.requests.get(&request).and_then(|r| r.attempt);
        if let (Some((attempt, _)), Some(engine)) = (attempt, self.release_attempt(request)) {
            self.commands.push_back(Command::Cancel { engine, attempt });
        }
    }

    /// Ends a request with its last event.
    fn finish(&mut self, request: RequestId, reason: FinishReason) {
        if let Some(state) = self.requests.remove(&request) {
            self.waiting.remove(&state.place());
            if reason != FinishReason::Aborted {
                let prompt = &state.blocks.hashes()[..state.prompt_blocks];
                self.lengths.ended(prompt, state.sampled.len());
            }
            // A later attempt can have the context's limit; the request's own limit counts here.
            let reason = match reason {
                FinishReason::Length if state.left() > 0 => FinishReason::ContextFull,
                other => other,
            };
            self.tell(EngineEvent::Finished {
                request,
                reason,
                cached_prompt_tokens: state.cached_prompt_tokens,
                routes: state.routes,
            });
        }
    }

    fn fail(&mut self, request: RequestId, error: EngineError) {
        if let Some(state) = self.requests.remove(&request) {
            self.waiting.remove(&state.place());
            self.tell(EngineEvent::Failed { request, error });
        }
    }

    fn tell(&mut self, event: EngineEvent) {
        self.commands.push_back(Command::Tell(event));
    }
}

#[cfg(test)]
#[path = "router_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "router_histories.rs"]
mod histories;

#[cfg(test)]
#[path = "router_named.rs"]
mod named;
