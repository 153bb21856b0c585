//! The decisions of an owner about its roles: pure, with the owner's clock as an argument.
//!
//! A role that is missing is started again under the next number, after a pause that grows with each failure,
//! and at most so many times in a window. The reason of the first failure stays visible. An engine that stays
//! in quarantine is ended, which is such a failure.

use crate::launch::{Launched, LaunchedRole};
use crate::registry::{Origin, Place, Registry};
use crate::role::{RoleId, RoleState};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Habits of a supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SupervisorLimits {
    /// Starts of one place in a window, the first included; at least 1.
    pub starts: u32,
    /// Length of the window.
    pub window_ms: u64,
    /// Pause after the first failure; it doubles with each further one.
    pub backoff_ms: u64,
    /// Longest pause.
    pub longest_backoff_ms: u64,
    /// Time after which a started role that its launcher does not list is lost.
    pub unlisted_ms: u64,
    /// Time after which a started engine that stays in quarantine is replaced.
    pub quarantine_ms: u64,
}

impl Default for SupervisorLimits {
    fn default() -> Self {
        Self {
            starts: 10,
            window_ms: 600_000,
            backoff_ms: 1_000,
            longest_backoff_ms: 60_000,
            unlisted_ms: 60_000,
            quarantine_ms: 60_000,
        }
    }
}

/// A step that the driver takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask the launcher to start a role.
    Start(RoleId),
    /// Ask the launcher to end a role.
    Stop(String),
}

/// Starts and failures of one place.
#[derive(Clone, Debug, Default)]
struct History {
    starts: VecDeque<u64>,
    failures: u32,
    not_before_ms: u64,
    /// The incarnation whose end was counted last.
    counted: Option<u32>,
    /// Whether the end of starts was reported.
    reported: bool,
}

/// The decisions of a supervisor.
#[derive(Clone, Debug)]
pub struct SupervisorCore {
    limits: SupervisorLimits,
    places: BTreeMap<Place, History>,
    adopted: bool,
    /// Whether missing roles are started.
    refills: bool,
}

impl SupervisorCore {
    /// A supervisor whose launcher starts roles, or does not.
    pub fn new(limits: SupervisorLimits, starts: bool) -> Self {
        Self {
            limits,
            places: BTreeMap::new(),
            adopted: false,
            refills: starts,
        }
    }

    /// Missing roles are not started any more: the run ends.
    pub fn end(&mut self) {
        self.refills = false;
    }

    /// The steps of now. `launched` is what the launcher lists; `None`: it could not be asked.
    pub fn decide(
        &mut self,
        registry: &mut Registry,
        launched: Option<&[LaunchedRole]>,
        now_ms: u64,
    ) -> Vec<Step> {
        let mut steps = Vec::new();
        if let Some(launched) = launched {
            self.adopt(registry, launched, now_ms);
            self.reconcile(registry, launched, now_ms, &mut steps);
        }
        let expired = registry.expire(now_ms);
        steps.extend(expired.into_iter().map(|id| Step::Stop(id.to_string())));
        overdue(registry, now_ms, &mut steps);
        if self.refills {
            replace_wrong(registry, self.limits.quarantine_ms, now_ms, &mut steps);
        }
        self.count_failures(registry, now_ms);
        // Without a list a role of an earlier owner could be started a second time.
        if self.refills && self.adopted {
            registry.refill(now_ms);
            self.start(registry, now_ms, &mut steps);
        }
        steps
    }

    /// Takes over roles of an earlier owner, once.
    fn adopt(&mut self, registry: &mut Registry, launched: &[LaunchedRole], now_ms: u64) {
        if self.adopted {
            return;
        }
        self.adopted = true;
        for role in launched {
            let running = !matches!(role.state, Launched::Ended(_));
            registry.adopt(&role.name, running, now_ms);
        }
    }

    /// Compares the registry with what the launcher lists.
    fn reconcile(
        &self,
        registry: &mut Registry,
        launched: &[LaunchedRole],
        now_ms: u64,
        steps: &mut Vec<Step>,
    ) {
        let listed: BTreeMap<&str, &Launched> = launched
            .iter()
            .map(|role| (role.name.as_str(), &role.state))
            .collect();
        let mut known = BTreeSet::new();
        let mut ended = Vec::new();
        for (place, slot) in registry.slots() {
            let name = registry.id_of(place).to_string();
            if !slot.is_there() {
                continue;
            }
            let since = now_ms.saturating_sub(slot.since_ms);
            let lost = slot.state == RoleState::Creating && since >= self.limits.unlisted_ms;
            // The end of a role that drains is as it should be.
            let wrong = slot.state != RoleState::Draining;
            match listed.get(name.as_str()) {
                Some(Launched::Ended(why)) => ended.push((place, wrong.then(|| why.clone()))),
                None if lost => {
                    let why = "its launcher does not know it";
                    ended.push((place, Some(why.to_owned())));
                }
                _ => {}
            }
            known.insert(name);
        }
        for (place, why) in ended {
            registry.ended(place, why, now_ms);
        }
        // Only roles: the owner itself has a name of another form.
        let strays = launched.iter().filter(|role| {
            let runs = !matches!(role.state, Launched::Ended(_));
            runs && RoleId::parse(&role.name).is_some() && !known.contains(&role.name)
        });
        steps.extend(strays.map(|role| Step::Stop(role.name.clone())));
    }

    /// Counts the ends of roles that should not have ended, each once.
    fn count_failures(&mut self, registry: &Registry, now_ms: u64) {
        for (place, slot) in registry.slots() {
            let history = self.places.entry(place).or_default();
            let steady = slot.state == RoleState::Ready
                && now_ms.saturating_sub(slot.since_ms) >= self.limits.window_ms;
            if steady {
                history.failures = 0;
            }
            let failed = !slot.is_there() && slot.cause.is_some();
            if failed
                && slot.origin == Origin::Launched
                && history.counted != Some(slot.incarnation)
            {
                history.counted = Some(slot.incarnation);
                history.failures = history.failures.saturating_add(1);
                let factor = 1u64 << (history.failures - 1).min(32);
                let pause = self.limits.backoff_ms.saturating_mul(factor);
                history.not_before_ms = now_ms + pause.min(self.limits.longest_backoff_ms);
            }
        }
    }

    /// Starts what is pending, as far as pauses and the window allow.
    fn start(&mut self, registry: &mut Registry, now_ms: u64, steps: &mut Vec<Step>) {
        let pending = registry
            .slots()
            .filter(|(_, slot)| slot.state == RoleState::Pending);
        let pending: Vec<Place> = pending.map(|(place, _)| place).collect();
        for place in pending {
            let history = self.places.entry(place).or_default();
            let begin = now_ms.saturating_sub(self.limits.window_ms);
            while history.starts.front().is_some_and(|at| *at < begin) {
                history.starts.pop_front();
                history.reported = false;
            }
            if history.starts.len() >= self.limits.starts.max(1) as usize {
                if !history.reported {
                    history.reported = true;
                    let (starts, window_s) = (self.limits.starts, self.limits.window_ms / 1000);
                    let cause =
                        format!("started {starts} times in {window_s} s, which is the limit");
                    registry.explain(place, cause, now_ms);
                }
                continue;
            }
            if now_ms >= history.not_before_ms {
                history.starts.push_back(now_ms);
                registry.created(place, now_ms);
                steps.push(Step::Start(registry.id_of(place)));
            }
        }
    }
}

/// Ends roles that drain for too long.
fn overdue(registry: &mut Registry, now_ms: u64, steps: &mut Vec<Step>) {
    let drain_ms = registry.limits().drain_ms;
    let late = registry.slots().filter(|(_, slot)| {
        slot.state == RoleState::Draining && now_ms.saturating_sub(slot.since_ms) >= drain_ms
    });
    let late: Vec<Place> = late.map(|(place, _)| place).collect();
    for place in late {
        steps.push(Step::Stop(registry.id_of(place).to_string()));
        let cause = format!("did not end its work within {drain_ms} ms");
        registry.ended(place, Some(cause), now_ms);
    }
}

/// Ends roles that a launcher started and whose weights stay wrong for too long: the next incarnation of the
/// place follows as after any other failure. What a person started is not ended here.
fn replace_wrong(
    registry: &mut Registry,
    quarantine_ms: u64,
    now_ms: u64,
    steps: &mut Vec<Step>,
) {
    let wrong = registry.slots().filter(|(_, slot)| {
        let since = slot.quarantined_ms.map(|at| now_ms.saturating_sub(at));
        let works = slot.is_there() && slot.state != RoleState::Draining;
        works && slot.origin == Origin::Launched && since.is_some_and(|ms| ms >= quarantine_ms)
    });
    let wrong: Vec<Place> = wrong.map(|(place, _)| place).collect();
    for place in wrong {
        steps.push(Step::Stop(registry.id_of(place).to_string()));
        let cause = format!("in quarantine for {quarantine_ms} ms, so it is replaced");
        registry.ended(place, Some(cause), now_ms);
    }
}

#[cfg(test)]
mod tests;
