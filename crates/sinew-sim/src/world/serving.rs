//! Turns: requests to the router, attempts on engines, and their results.
//!
//! A turn that admission lets continue becomes a request of the router. The router starts attempts on
//! engines. Sampled tokens go back through the router, which marks each with the weights that it takes the
//! engine to have. The ledger compares them with those that the engine really has.
//!
//! Attempts on an engine that is down fail as a connection would. An engine that comes back gets the weights
//! that sample now, and serves only after the router has examined it.

use super::World;
use super::clock::Happening;
use super::fleet::{no_connection, weights};
use super::slab::EpisodeState;
use crate::check::Bug;
use crate::engine::{AttemptNews, Job};
use sinew_engines::route::Command as RouterCommand;
use sinew_engines::{Attempt, AttemptEnd, AttemptError, AttemptId, AttemptToken};
use sinew_rollout::EpisodeEvent;
use sinew_types::{
    EngineEvent, FailureKind, FinishReason, GenerateRequest, RequestId, SamplingParams, mix_seed,
};

/// Seconds until another try where an engine cannot take its weights yet.
const AGAIN_S: f64 = 1.0;

/// The episode's place, from a request's number.
fn slot_of(request: RequestId) -> u32 {
    (request.0 & 0xffff_ffff) as u32
}

impl World {
    /// A turn may generate: its request goes to the router.
    pub(super) fn generate(&mut self, slot: u32) {
        if self.updates.drains {
            self.held.push(slot);
            return;
        }
        let now_s = self.clock.now_s();
        let seed = self.episodes[slot].sampling_seed();
        let episode = &mut self.episodes[slot];
        let Some(machine) = &episode.machine else {
            return;
        };
        episode.requests += 1;
        let number = u64::from(slot) | u64::from(episode.requests) << 32;
        let sampling = SamplingParams {
            max_tokens: episode.length as u32,
            seed,
            ..SamplingParams::default()
        };
        let prompt = machine.shared_context();
        let request = GenerateRequest::new(RequestId(number), prompt, sampling);
        episode.request = Some(number);
        episode.doing = EpisodeState::Generates;
        self.measure.inputs += 2;
        if let Err(error) = self.fleet.router.submit(now_s, request) {
            return self.fail(slot, FailureKind::Engine, &error.to_string());
        }
        self.fleet.router.tick(now_s);
        self.pump();
    }

    /// Ends a request that is not wanted any more.
    pub(super) fn abort(&mut self, request: u64) {
        self.measure.inputs += 1;
        self.fleet.router.abort(RequestId(request));
        self.pump();
    }

    /// Carries out the router's commands.
    pub(super) fn pump(&mut self) {
        if std::mem::replace(&mut self.fleet.pumping, true) {
            return;
        }
        while let Some(command) = self.fleet.router.command() {
            match command {
                RouterCommand::Start { engine, attempt } => self.start_attempt(engine, attempt),
                RouterCommand::Cancel { engine, attempt } => {
                    self.fleet.attempts.remove(&attempt);
                    self.fleet.engines[engine].cancel(attempt, self.clock.now);
                    self.fleet.wake(engine, &mut self.clock);
                }
                RouterCommand::Tell(event) => self.heard(event),
            }
        }
        self.fleet.pumping = false;
        self.fleet.plan_tick(&mut self.clock);
    }

    /// An engine begins an attempt.
    fn start_attempt(&mut self, engine: usize, attempt: Attempt) {
        let id = attempt.id;
        // The router's attempt does not name its owner; its request is the one that waits for it.
        let Some(request) = self.fleet.router.request_of(id) else {
            return;
        };
        let slot = slot_of(request);
        let served = self.fleet.engines[engine].version;
        self.fleet.attempts.insert(id, (engine, request.0));
        if !self.fleet.engines[engine].is_up(self.clock.now) {
            return self.attempt_over(id, Err(no_connection(engine, "it is down")));
        }
        if served != Some(attempt.weights.version.0) && self.bug != Some(Bug::OldWeights) {
            let found = served.map_or("no label".to_owned(), |v| weights(v).to_string());
            let expected = attempt.weights;
            return self.attempt_over(id, Err(AttemptError::Version { expected, found }));
        }
        self.episodes[slot].engine = self.units.of_engine(engine);
        let episode = &self.episodes[slot];
        let (own, group) = episode.cache_keys(self.plan.seed, slot);
        let job = Job {
            attempt: id,
            length: attempt.sampling.max_tokens as usize,
            seed: attempt.sampling.seed,
            prompt: attempt.prompt,
            episode: own,
            group,
            shared: episode.prompt,
        };
        self.fleet.engines[engine].start(job, self.clock.now);
        self.fleet.wake(engine, &mut self.clock);
    }

    /// Something happened in an engine.
    pub(super) fn engine_woke(&mut self, engine: usize, wake: u32) {
        if self.fleet.engines[engine].wake != wake {
            return;
        }
        self.advance(engine);
        self.fleet.wake(engine, &mut self.clock);
    }

    /// An engine works until now.
    fn advance(&mut self, engine: usize) {
        let mut news = Vec::new();
        self.fleet.engines[engine].advance(self.clock.now, &mut news);
        self.take_news(engine, news);
    }

    /// Delivers what an engine has sampled.
    fn take_news(&mut self, engine: usize, news: Vec<AttemptNews>) {
        if self.clock.now < self.fleet.engines[engine].cut_until || self.dead {
            // Nothing reaches the router.
            return;
        }
        for one in news {
            let Some(&(_, request)) = self.fleet.attempts.get(&one.attempt) else {
                continue;
            };
            let length = one.tokens.len() as u64;
            self.measure.sampled += length;
            self.ledger
                .sampled(request, self.fleet.engines[engine].version, length);
            let token = |id| AttemptToken {
                id,
                logprob: -1.0,
                top: Vec::new(),
                version: None,
            };
            let end = one.ended.then_some(FinishReason::Length);
            let tokens: Vec<AttemptToken> = one.tokens.into_iter().map(token).collect();
            self.measure.inputs += 1;
            self.fleet.router.tokens(one.attempt, tokens, end);
            self.pump();
            if one.ended {
                let end = AttemptEnd {
                    reason: FinishReason::Length,
                    cached_prompt_tokens: one.cached as u32,
                    routes: None,
                };
                self.attempt_over(one.attempt, Ok(end));
            }
        }
    }

    /// An attempt is over.
    pub(super) fn attempt_over(
        &mut self,
        attempt: AttemptId,
        result: Result<AttemptEnd, AttemptError>,
    ) {
        self.fleet.attempts.remove(&attempt);
        let spread = crate::dist::uniform(mix_seed(self.plan.seed ^ 0x5b7e, attempt.0));
        self.measure.inputs += 1;
        self.fleet
            .router
            .attempt_ended(self.clock.now_s(), attempt, result, spread);
        self.pump();
        if self.updates.drains && self.fleet.attempts.is_empty() {
            self.begin_load();
        }
    }

    /// An event of a request.
    fn heard(&mut self, event: EngineEvent) {
        let request = match &event {
            EngineEvent::Prompt { request, .. }
            | EngineEvent::Tokens { request, .. }
            | EngineEvent::Finished { request, .. }
            | EngineEvent::Failed { request, .. } => *request,
        };
        let slot = slot_of(request);
        if self.episodes[slot].request != Some(request.0) {
            return;
        }
        match event {
            // No episode asks for log-probabilities of its prompt.
            EngineEvent::Prompt { .. } => {}
            EngineEvent::Tokens { tokens, .. } => {
                let versions = tokens.first().zip(tokens.last());
                let versions = versions.map(|(a, b)| (a.version.0, b.version.0));
                self.ledger
                    .handed_on(request.0, versions, tokens.len() as u64);
                self.event(slot, EpisodeEvent::Tokens(tokens));
            }
            EngineEvent::Finished { reason, .. } => {
                self.ledger.request_ended(request.0);
                self.turn_over(slot);
                self.event(slot, EpisodeEvent::TurnFinished(reason));
            }
            EngineEvent::Failed { error, .. } => {
                self.ledger.request_ended(request.0);
                self.turn_over(slot);
                self.fail(slot, FailureKind::Engine, &error.to_string());
            }
        }
    }

    /// Time of the router is up.
    pub(super) fn router_tick(&mut self) {
        self.measure.inputs += 1;
        self.fleet.tick(&self.clock);
        self.pump();
    }

    /// The router looks at every engine.
    pub(super) fn probe(&mut self) {
        for engine in 0..self.fleet.engines.len() {
            self.probe_one(engine);
        }
        self.clock
            .after(self.plan.engines.probe_s, Happening::Probe);
    }

    /// The router looks at an engine.
    pub(super) fn probe_one(&mut self, engine: usize) {
        self.advance(engine);
        let result = if self.units.is_leaving(engine) {
            Err(no_connection(engine, "it is about to end"))
        } else {
            self.fleet.probe(engine, self.clock.now, self.bug)
        };
        self.measure.inputs += 1;
        self.fleet.router.probed(self.clock.now_s(), engine, result);
        self.pump();
        self.fleet.wake(engine, &mut self.clock);
    }

    /// The new weights could be loaded.
    pub(super) fn transferred(&mut self) {
        if self.plan.weights.drain && !self.fleet.attempts.is_empty() {
            self.updates.drains = true;
            return;
        }
        self.begin_load();
    }

    /// Engines stop to load.
    fn begin_load(&mut self) {
        self.updates.drains = false;
        for engine in 0..self.fleet.engines.len() {
            let mut news = Vec::new();
            if self.fleet.engines[engine].is_up(self.clock.now) {
                self.fleet.engines[engine].flush(self.clock.now, &mut news);
            }
            self.take_news(engine, news);
        }
        self.measure.inputs += 1;
        self.fleet.router.load_begins(self.clock.now_s(), &[]);
        self.pump();
        self.updates.loads = true;
        self.clock
            .after(self.plan.weights.load_s, Happening::Loaded);
    }

    /// Engines have loaded, as far as they could.
    pub(super) fn loaded(&mut self) {
        let version = self.updates.version_to_come;
        let now = self.clock.now;
        if !self.fleet.engines.iter().any(|e| e.is_up(now)) {
            return self.clock.after(AGAIN_S, Happening::Loaded);
        }
        let results = self.fleet.load(version, now, self.bug);
        self.updates.loads = false;
        self.measure.inputs += 1;
        self.fleet
            .router
            .loaded(self.clock.now_s(), weights(version), &results);
        for engine in 0..self.fleet.engines.len() {
            self.probe_one(engine);
        }
        self.release_held();
        self.live(version);
    }

    /// Turns that waited for the weights continue.
    pub(super) fn release_held(&mut self) {
        for slot in std::mem::take(&mut self.held) {
            if self.episodes[slot].doing == EpisodeState::WaitsForTurn {
                self.generate(slot);
            }
        }
    }

    /// An engine answers again: it is given the weights that sample.
    pub(super) fn engine_back(&mut self, engine: usize) {
        if self.fleet.engines[engine].is_up(self.clock.now) && !self.dead {
            self.clock.after(
                self.plan.weights.load_s,
                Happening::EngineReady(engine as u32),
            );
        }
    }

    /// An engine has its weights.
    pub(super) fn engine_ready(&mut self, engine: usize) {
        if !self.fleet.engines[engine].is_up(self.clock.now) {
            return;
        }
        if self.updates.loads {
            return self
                .clock
                .after(AGAIN_S, Happening::EngineReady(engine as u32));
        }
        let version = self.fleet.router.version().0;
        if self.fleet.engines[engine].version != Some(version) {
            self.fleet.engines[engine].load(version);
        }
        self.probe_one(engine);
    }

    /// Seconds that all engines computed.
    pub(super) fn busy_s(&mut self) -> f64 {
        for engine in 0..self.fleet.engines.len() {
            self.advance(engine);
            self.fleet.wake(engine, &mut self.clock);
        }
        self.fleet.engines.iter().map(|e| e.busy_s).sum()
    }
}
