//! The weights that sample: probes of engines, loads, pauses, and weights that another program publishes.
//!
//! If [`super::RouterConfig::follow`] is set, the newest weights among the engines sample. A lineage that was
//! seen later is newer, whatever its version: a trainer that restarts goes back to its checkpoint. An attempt
//! during which the weights changed is not a failure. Its tokens stay, as those of the (older) version with
//! which it began, and its request continues from them.

use super::{RequestState, Router};
use crate::attempt::AttemptId;
use crate::backend::{Probe, ServedWeights};
use crate::error::AttemptError;
use sinew_types::{EngineError, RequestId, WeightsId};
use std::collections::{BTreeMap, BTreeSet};

/// Begins the label of a server while its weights are being loaded: `loading-v12-9f3c12ab`.
const LOADING: &str = "loading-v";
/// Maximum number of lineages whose age is remembered.
const MAX_LINEAGES: usize = 64;

impl Router {
    /// The weights of an engine changed while an attempt ran: the request continues with the new ones. A
    /// label that is not a version means that weights are being loaded: the engine takes nothing until a
    /// probe finds a version.
    ///
    /// An attempt that gained nothing starts no deadline again under such a label. Unless the label means
    /// that weights are being loaded, it counts as a failure: a server can report a version in its info and
    /// none with its tokens, and would be asked without end.
    pub(super) fn followed(
        &mut self,
        now: f64,
        request: RequestId,
        engine: usize,
        error: &AttemptError,
    ) {
        let AttemptError::Version { found: label, .. } = error else {
            return;
        };
        self.counters.interrupted_attempts += 1;
        self.seen.clear(engine);
        if let Some(engine) = self.engines.get_mut(engine) {
            engine.weights = label.parse().ok();
            if engine.weights.is_none() {
                engine.trouble = Some(format!("it has {label:.60}"));
            }
        }
        self.adopt();
        let Some(state) = self.requests.get_mut(&request) else {
            return;
        };
        if let Some(reason) = state.known_end() {
            return self.finish(request, reason);
        }
        if label.parse::<WeightsId>().is_ok() || state.attempt_tokens > 0 {
            state.deadline = now + self.config.max_wait_s;
        } else if !label.starts_with(LOADING) {
            state.failures += 1;
            self.counters.failed_attempts += 1;
        }
        let limit = self.config.max_failures;
        let why = match state.deadline <= now {
            true => "the deadline is over".to_owned(),
            false if state.failures >= limit => format!("{limit} attempts failed in a row"),
            false => String::new(),
        };
        if !why.is_empty() {
            let why = format!("{why}, the last with: {error}");
            return self.fail(request, EngineError::Failed(why));
        }
        state.not_before = now;
        self.wake = self.wake.min(state.deadline);
        self.waiting.insert(state.place());
    }

    /// The newest weights that an engine has become those that sample.
    fn adopt(&mut self) {
        if !self.config.follow {
            return;
        }
        for id in self.engines.iter().filter_map(|e| e.weights) {
            if !self.lineages.contains(&id.lineage) {
                self.lineages.push_back(id.lineage);
            }
            if self.lineages.len() > MAX_LINEAGES {
                self.lineages.pop_front();
            }
        }
        let age = |id: &WeightsId| {
            let seen = self.lineages.iter().position(|l| *l == id.lineage);
            (seen, id.version)
        };
        let newest = self.engines.iter().filter_map(|e| e.weights);
        self.weights = newest.max_by_key(age).unwrap_or(self.weights);
    }

    /// Takes the result of a probe of an engine.
    pub fn probed(&mut self, now: f64, engine: usize, result: Result<Probe, AttemptError>) {
        let Some(state) = self.engines.get_mut(engine) else {
            return;
        };
        match result {
            Ok(probe) => {
                let weights = match &probe.weights {
                    ServedWeights::Version(id) => Some(*id),
                    ServedWeights::Unlabelled | ServedWeights::Foreign(_) => None,
                };
                if weights != state.weights {
                    self.seen.clear(engine);
                }
                let follows = self.config.follow && weights.is_some();
                if weights != Some(self.weights) && !follows {
                    state.trouble = Some(format!("it has {}", probe.weights));
                    if state.weights == Some(self.weights) && !self.config.follow {
                        self.counters.wrong_version += 1;
                    }
                } else if state.breaker.opens_until().is_none() {
                    state.trouble = None;
                }
                if weights == Some(self.weights) || probe.weights == ServedWeights::Unlabelled {
                    // It was loaded again, or started anew.
                    state.quarantine = None;
                }
                state.weights = weights;
                if let Some(adapters) = &probe.adapters {
                    state.adapters.clone_from(adapters);
                }
                state.reserved = 0;
                state.probe = Some(probe);
                self.adopt();
            }
            Err(error) => {
                state.trouble = Some(error.to_string());
                // It may come back with other weights.
                state.weights = None;
                state.probe = None;
                self.seen.clear(engine);
                self.adopt();
            }
        }
        self.schedule(now);
    }

    /// Stops (`true`) or continues. Running attempts end; their requests keep their ids and wait.
    pub fn pause(&mut self, now: f64, paused: bool) {
        self.paused = paused;
        self.interrupt(now, |_, _| true);
        self.renew_deadlines(now);
        self.schedule(now);
    }

    /// Engines give up their memory (`true`), or have it again. Attempts end as in a pause. Weights may be
    /// loaded meanwhile.
    pub fn sleep(&mut self, now: f64, asleep: bool) {
        self.asleep = asleep;
        self.interrupt(now, |_, _| true);
        self.renew_deadlines(now);
        self.schedule(now);
    }

    /// Announces a load of weights: nothing starts until [`Router::loaded`]. Attempts end as in a pause,
    /// except on engines that are set in `kept`: there they continue with the new weights, unless they ask
    /// for an adapter, whose version says nothing about the weights below it.
    pub fn load_begins(&mut self, now: f64, kept: &[bool]) {
        self.loading = true;
        self.interrupt(now, |engine, request| {
            request.adapter.is_some() || !kept.get(engine).copied().unwrap_or(false)
        });
    }

    /// Weights that attempts on an engine sample with, but those that name their adapter.
    pub fn in_use(&self, engine: usize) -> BTreeSet<WeightsId> {
        let attempts = self.engines.get(engine).map(|e| e.attempts.iter());
        let requests = attempts
            .into_iter()
            .flatten()
            .filter_map(|a| self.attempts.get(a));
        let states = requests.filter_map(|r| self.requests.get(r));
        let unnamed = states.filter(|state| state.adapter.is_none());
        unnamed.map(|state| state.weights).collect()
    }

    /// Takes the results of a load, engine by engine. If one engine has the new weights, they
    /// sample from now on; otherwise the weights stay, and engines serve that are found to have
    /// them. Returns whether they have changed.
    pub fn loaded(
        &mut self,
        now: f64,
        weights: WeightsId,
        results: &[(usize, Result<(), AttemptError>)],
    ) -> bool {
        let stopped = std::mem::replace(&mut self.loading, false);
        let changed = results.iter().any(|(_, r)| r.is_ok());
        if changed {
            self.weights = weights;
        }
        let all = results.len() == self.engines.len() && results.iter().all(|(_, r)| r.is_ok());
        if all {
            self.seen.clear_all();
        }
        for (index, result) in results {
            let Some(engine) = self.engines.get_mut(*index) else {
                continue;
            };
            match result {
                Ok(()) => {
                    engine.weights = Some(weights);
                    engine.trouble = None;
                    engine.quarantine = None;
                    if !all {
                        self.seen.clear(*index);
                    }
                }
                Err(error) => engine.not_loaded(weights, error),
            }
        }
        // They would sample with unknown weights; adapters that were there before still are.
        let failed = |engine: usize, _: &RequestState| {
            stopped && results.iter().any(|(i, r)| *i == engine && r.is_err())
        };
        self.interrupt(now, failed);
        self.renew_deadlines(now);
        self.schedule(now);
        changed
    }

    /// Takes the failure of a load outside of a load for all engines: it serves nothing until the next one.
    pub fn not_repaired(&mut self, now: f64, engine: usize, error: &AttemptError) {
        let weights = self.weights;
        if let Some(state) = self.engines.get_mut(engine) {
            state.not_loaded(weights, error);
            self.seen.clear(engine);
        }
        self.adopt();
        self.schedule(now);
    }

    /// Whether an engine has weights that differ from those of its replicas.
    pub fn is_in_quarantine(&self, engine: usize) -> bool {
        self.engines
            .get(engine)
            .is_some_and(|e| e.quarantine.is_some())
    }

    /// Ends the attempts that are chosen by their engine and their request, without harm to their requests.
    pub(super) fn interrupt(&mut self, now: f64, chosen: impl Fn(usize, &RequestState) -> bool) {
        // The order of the attempts matters: equal histories must give equal commands.
        let ended = |r: &RequestId| {
            let state = self.requests.get(r);
            state.is_some_and(|r| r.attempt.is_some_and(|(_, engine)| chosen(engine, r)))
        };
        let attempts = self.attempts.iter().filter(|(_, r)| ended(r));
        let attempts: BTreeMap<AttemptId, RequestId> = attempts.map(|(a, r)| (*a, *r)).collect();
        for request in attempts.into_values() {
            self.cancel_attempt(request);
            self.counters.interrupted_attempts += 1;
            let Some(state) = self.requests.get_mut(&request) else {
                continue;
            };
            if let Some(reason) = state.known_end() {
                self.finish(request, reason);
                continue;
            }
            state.not_before = now;
            state.deadline = now + self.config.max_wait_s;
            self.wake = self.wake.min(state.deadline);
            self.waiting.insert(state.place());
        }
    }
}
