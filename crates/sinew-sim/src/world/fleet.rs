//! Engines, the router before them, and the attempts that run.

use super::clock::{Clock, Happening};
use crate::agenda::{Micros, micros};
use crate::check::Bug;
use crate::engine::{Engine, Load, Speed};
use crate::plan::Plan;
use sinew_engines::route::{Router, RouterConfig};
use sinew_engines::{AttemptError, AttemptId, Probe, ServedWeights};
use sinew_types::{Lineage, PolicyVersion, WeightsId};
use std::collections::HashMap;

/// Ids of a block of the router's memory, at least: blocks of single ids would cost a look for each id.
pub(super) const BLOCK_IDS: usize = 2;

/// Engines and their router.
#[derive(Debug)]
pub(super) struct Fleet {
    /// The real router.
    pub(super) router: Router,
    /// The servers, by their number.
    pub(super) engines: Vec<Engine>,
    /// Engine and request of each attempt that runs.
    pub(super) attempts: HashMap<AttemptId, (usize, u64)>,
    /// The router's commands are being carried out.
    pub(super) pumping: bool,
    /// Time of the router's next tick.
    tick_at: Option<Micros>,
}

impl Fleet {
    /// Engines with the first weights.
    pub(super) fn new(plan: &Plan, speed: Speed, bug: Option<Bug>) -> Self {
        let filled = match bug {
            Some(Bug::Overfill) => 8,
            _ => 1,
        };
        let engine = |_| Engine::new(plan.engines.model, speed, filled);
        Self {
            router: router(plan, speed.grain, 0),
            engines: (0..plan.engine_places()).map(engine).collect(),
            attempts: HashMap::new(),
            pumping: false,
            tick_at: None,
        }
    }

    /// Another session begins: its router knows nothing, and engines that are up get its weights.
    pub(super) fn begin_session(&mut self, plan: &Plan, grain: usize, version: u64, now: Micros) {
        self.attempts.clear();
        self.tick_at = None;
        self.router = router(plan, grain, version);
        for engine in self.engines.iter_mut().filter(|e| e.is_up(now)) {
            engine.load(version);
        }
    }

    /// Attempts that run on an engine.
    pub(super) fn attempts_on(&self, engine: usize) -> Vec<AttemptId> {
        let here = self.attempts.iter().filter(|(_, (e, _))| *e == engine);
        let mut here: Vec<AttemptId> = here.map(|(id, _)| *id).collect();
        here.sort_unstable();
        here
    }

    /// Ends all attempts: nobody waits for them any more.
    pub(super) fn cancel_all(&mut self, now: Micros) {
        for engine in 0..self.engines.len() {
            for attempt in self.attempts_on(engine) {
                self.engines[engine].cancel(attempt, now);
            }
        }
        self.attempts.clear();
    }

    /// The next time at which something happens in an engine is looked up again.
    pub(super) fn wake(&mut self, engine: usize, clock: &mut Clock) {
        let target = &mut self.engines[engine];
        target.wake = target.wake.wrapping_add(1);
        if let Some(at) = target.next() {
            let wakes = Happening::Engine(engine as u32, target.wake);
            clock.agenda.add(at.max(clock.now), wakes);
        }
    }

    /// Puts the router's next tick down, if it is sooner than the one that is.
    pub(super) fn plan_tick(&mut self, clock: &mut Clock) {
        let Some(next_s) = self.router.next_tick(clock.now_s()) else {
            return;
        };
        let at = micros(next_s).max(clock.now) + 1;
        if self.tick_at.is_none_or(|due| at < due) {
            self.tick_at = Some(at);
            clock.agenda.add(at, Happening::RouterTick);
        }
    }

    /// Time of the router is up.
    pub(super) fn tick(&mut self, clock: &Clock) {
        if self.tick_at.is_some_and(|at| at <= clock.now) {
            self.tick_at = None;
        }
        self.router.tick(clock.now_s());
    }

    /// Result of a probe of an engine.
    pub(super) fn probe(
        &self,
        engine: usize,
        now: Micros,
        bug: Option<Bug>,
    ) -> Result<Probe, AttemptError> {
        if !self.engines[engine].is_up(now) {
            return Err(no_connection(engine, "no answer"));
        }
        let load: Load = self.engines[engine].load_now();
        let weights = match (self.engines[engine].version, bug) {
            (_, Some(Bug::OldWeights)) => ServedWeights::Version(self.router.weights()),
            (Some(version), _) => ServedWeights::Version(weights(version)),
            (None, _) => ServedWeights::Unlabelled,
        };
        Ok(Probe {
            running: load.running,
            waiting: load.waiting,
            kv_tokens_total: Some(load.kv_total),
            kv_tokens_free: Some(load.kv_total.saturating_sub(load.kv_used)),
            sampled_tokens: load.sampled,
            prefill_tokens: load.prefilled,
            cached_prompt_tokens: load.cached,
            preemptions: load.preemptions,
            ..Probe::new(weights)
        })
    }

    /// Loads weights into the engines that are up, and returns the result for each engine.
    pub(super) fn load(
        &mut self,
        version: u64,
        now: Micros,
        bug: Option<Bug>,
    ) -> Vec<(usize, Result<(), AttemptError>)> {
        let mut results = Vec::with_capacity(self.engines.len());
        for (number, engine) in self.engines.iter_mut().enumerate() {
            let result = if engine.is_up(now) {
                let forgets = bug == Some(Bug::OldWeights) && number == 0;
                if !forgets {
                    engine.load(version);
                }
                Ok(())
            } else {
                Err(no_connection(number, "it is down"))
            };
            results.push((number, result));
        }
        results
    }
}

/// Error of an engine that nothing reaches.
pub(super) fn no_connection(engine: usize, why: &str) -> AttemptError {
    AttemptError::Connect {
        to: format!("engine-{engine}"),
        why: why.into(),
    }
}

/// The router's rules in ids. Its memory of an engine is of as many tokens as in a run.
pub(super) fn router_config(plan: &Plan, grain: usize) -> RouterConfig {
    let defaults = RouterConfig::default();
    let block = defaults.block_tokens.div_ceil(grain).max(BLOCK_IDS);
    let remembered = defaults.max_blocks * defaults.block_tokens;
    RouterConfig {
        max_waiting: plan.places().max(defaults.max_waiting),
        max_running: plan.engines.max_running,
        block_tokens: block,
        max_blocks: remembered.div_ceil(block * grain),
        reserve_tokens: defaults.reserve_tokens.div_ceil(grain),
        ..defaults
    }
}

fn router(plan: &Plan, grain: usize, version: u64) -> Router {
    let names = (0..plan.engine_places()).map(|n| format!("engine-{n}"));
    let config = router_config(plan, grain);
    Router::new(config, names.collect(), weights(version))
}

/// The weights of a version. A simulated trainer repeats its bits, so there is one lineage.
pub(super) fn weights(version: u64) -> WeightsId {
    WeightsId::new(PolicyVersion(version), Lineage::default())
}
