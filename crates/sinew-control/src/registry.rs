//! The registry of roles: pure, with the owner's clock as an argument.
//!
//! A place is a kind and an index below the limit; it holds one incarnation at a time. A place whose role was
//! removed stays known, so that a later incarnation has a higher number and an earlier one is refused.

mod slot;
mod weights;

pub use slot::ControlLimits;
pub(crate) use slot::{Origin, Place, Slot};

use crate::autoscale::AutoscaleInputs;
use crate::error::ControlError;
use crate::role::{
    Heartbeat, Lease, MAX_CAUSE_BYTES, MAX_NAME_BYTES, Orders, Registration, RoleId, RoleKind,
    RoleState, RoleView, ScalePlan, cut,
};
use crate::wire::{RoleEvent, RolesPage};
use slot::checked;
use std::collections::{BTreeMap, VecDeque};
use weights::{Fitness, WantedWeights, fitness};

/// All roles of a run.
#[derive(Clone, Debug)]
pub struct Registry {
    run: String,
    fence: u64,
    limits: ControlLimits,
    slots: BTreeMap<Place, Slot>,
    wanted: BTreeMap<RoleKind, u32>,
    weights: Option<WantedWeights>,
    events: VecDeque<RoleEvent>,
    last_event: u64,
}

impl Registry {
    /// An empty registry of the owner with this fence.
    pub fn new(run: &str, fence: u64, limits: ControlLimits) -> Self {
        Self {
            run: run.to_owned(),
            fence,
            limits,
            slots: BTreeMap::new(),
            wanted: BTreeMap::new(),
            weights: None,
            events: VecDeque::new(),
            last_event: 0,
        }
    }

    /// Generation of the owner.
    pub fn fence(&self) -> u64 {
        self.fence
    }

    /// Limits of this registry.
    pub fn limits(&self) -> &ControlLimits {
        &self.limits
    }

    /// Wanted counts.
    pub fn wanted(&self) -> &BTreeMap<RoleKind, u32> {
        &self.wanted
    }

    /// Takes a role in. `known` is the fence of the last owner that the role knows.
    ///
    /// # Errors
    /// If a field is not allowed, the place has a newer incarnation, all places are taken, or this owner is
    /// older than the role's last one.
    pub fn register(
        &mut self,
        registration: &Registration,
        known: Option<u64>,
        now_ms: u64,
    ) -> Result<Lease, ControlError> {
        self.check_fence(known.map(|known| known.max(self.fence)))?;
        let id = self.take_place(registration, Origin::Joined, now_ms)?;
        Ok(Lease {
            id,
            fence: self.fence,
            lease_ms: self.limits.lease_ms,
            renew_ms: self.limits.renew_ms,
        })
    }

    /// Takes in a server that sends no heartbeats.
    ///
    /// # Errors
    /// As [`Registry::register`], and if it has no address.
    pub fn add_outside(
        &mut self,
        registration: &Registration,
        now_ms: u64,
    ) -> Result<RoleId, ControlError> {
        if registration.address.is_none() {
            let allowed = "an address such as http://10.0.0.7:8000";
            return Err(ControlError::field("address", "null", allowed));
        }
        self.take_place(registration, Origin::Outside, now_ms)
    }

    fn take_place(
        &mut self,
        registration: &Registration,
        origin: Origin,
        now_ms: u64,
    ) -> Result<RoleId, ControlError> {
        checked(registration)?;
        let (place, incarnation) = self.place_of(registration)?;
        let id = self.id(place, incarnation);
        let old = self.slots.get(&place);
        if old.is_some_and(|slot| slot.incarnation > incarnation) {
            return Err(ControlError::Superseded(id.to_string()));
        }
        let same = old.filter(|slot| slot.incarnation == incarnation);
        // A role that was to drain still drains after it registered again.
        let draining = same.is_some_and(|slot| slot.state == RoleState::Draining);
        let state = if draining {
            RoleState::Draining
        } else {
            RoleState::HealthChecking
        };
        let slot = Slot {
            incarnation,
            origin: same
                .filter(|slot| slot.state != RoleState::Pending)
                .map_or(origin, |slot| slot.origin),
            state,
            registration: registration.clone(),
            heartbeat: Heartbeat::default(),
            seen_ms: now_ms,
            since_ms: now_ms,
            cause: same.and_then(|slot| slot.cause.clone()),
            waits: None,
            quarantined_ms: None,
        };
        self.slots.insert(place, slot);
        if !draining {
            self.record(place, None, now_ms);
        }
        Ok(id)
    }

    /// The place and incarnation that a registration asks for.
    fn place_of(&self, registration: &Registration) -> Result<(Place, u32), ControlError> {
        let (kind, name) = (registration.kind, registration.name.as_str());
        if let Some((run, named, index, incarnation)) = RoleId::parse(name) {
            if run != self.run || named != kind || index >= self.limits.roles {
                let (run, most) = (&self.run, self.limits.roles);
                let allowed = format!("{run}-{kind}-INDEX-INCARNATION with an index below {most}");
                return Err(ControlError::field("name", name, allowed));
            }
            return Ok(((kind, index), incarnation));
        }
        // The same name again is the same role.
        let same = |slot: &Slot| !name.is_empty() && slot.registration.name == name;
        let mut places = self.of_kind(kind);
        if let Some((place, slot)) = places.find(|(_, slot)| same(slot)) {
            return Ok((place, slot.incarnation + u32::from(!slot.is_there())));
        }
        self.free(kind)
            .ok_or(ControlError::Full(self.limits.roles as usize))
    }

    /// The lowest place of a kind that a role can join, with its next incarnation.
    fn free(&self, kind: RoleKind) -> Option<(Place, u32)> {
        (0..self.limits.roles).find_map(|index| {
            let place = (kind, index);
            match self.slots.get(&place) {
                None => Some((place, 0)),
                Some(slot) if !slot.is_there() => Some((place, slot.incarnation + 1)),
                // Nothing was started for it yet.
                Some(slot) if slot.state == RoleState::Pending => Some((place, slot.incarnation)),
                Some(_) => None,
            }
        })
    }

    /// Renews a lease.
    ///
    /// # Errors
    /// If the fence is another one, the lease ended, or another incarnation has the place.
    pub fn beat(
        &mut self,
        id: &str,
        fence: u64,
        heartbeat: Heartbeat,
        now_ms: u64,
    ) -> Result<Orders, ControlError> {
        self.check_fence(Some(fence))?;
        let place = self.place(id)?;
        if !self.slots[&place].is_registered() {
            return Err(ControlError::Gone(id.to_owned()));
        }
        self.observed(place, heartbeat, now_ms);
        let slot = &self.slots[&place];
        Ok(Orders {
            fence: self.fence,
            drain: slot.state == RoleState::Draining,
            wanted_version: self.weights.as_ref().map(|weights| weights.version),
        })
    }

    /// The state of a role that sends no heartbeats, as the owner found it.
    pub fn observe(&mut self, id: &str, heartbeat: Heartbeat, now_ms: u64) {
        if let Ok(place) = self.place(id) {
            self.observed(place, heartbeat, now_ms);
        }
    }

    fn observed(&mut self, place: Place, mut heartbeat: Heartbeat, now_ms: u64) {
        let Some(slot) = self.slots.get_mut(&place) else {
            return;
        };
        if let Some(cause) = &mut heartbeat.cause {
            cut(cause, MAX_CAUSE_BYTES);
        }
        let heard = slot.heartbeat.cause.take();
        let new = |cause: &String| slot.cause.is_none() && heard.as_ref() != Some(cause);
        let first = heartbeat.cause.clone().filter(new);
        // The last words of a role that drains are no failure: only an event has them.
        if slot.state != RoleState::Draining {
            slot.cause = slot.cause.take().or_else(|| first.clone());
        }
        slot.heartbeat = heartbeat;
        slot.seen_ms = now_ms;
        if first.is_some() {
            self.record(place, first, now_ms);
        }
        self.advance(place, now_ms);
    }

    /// Ends the registration of a role. One that is removed already stays so.
    ///
    /// # Errors
    /// If the fence is another one, or another incarnation has the place.
    pub fn leave(&mut self, id: &str, fence: u64, now_ms: u64) -> Result<(), ControlError> {
        self.check_fence(Some(fence))?;
        let place = self.place(id)?;
        self.become_state(place, RoleState::Removed, None, now_ms);
        Ok(())
    }

    /// Lets a role end its work. `fence` is that of the role; people have none.
    ///
    /// # Errors
    /// If the fence is another one, or no such role is there.
    pub fn drain(&mut self, id: &str, fence: Option<u64>, now_ms: u64) -> Result<(), ControlError> {
        self.check_fence(fence)?;
        let place = self.place(id)?;
        self.drain_place(place, now_ms);
        Ok(())
    }

    fn drain_place(&mut self, place: Place, now_ms: u64) {
        let Some(slot) = self.slots.get(&place) else {
            return;
        };
        // Nothing runs there yet, or nothing listens to orders.
        let none = slot.state == RoleState::Pending || slot.origin == Origin::Outside;
        let next = if none {
            RoleState::Removed
        } else {
            RoleState::Draining
        };
        self.become_state(place, next, None, now_ms);
    }

    /// Sets a wanted count. The plan is carried out at once, but for a dry run: roles that are to start are
    /// `PENDING`, those that are to leave drain.
    ///
    /// # Errors
    /// If the count is above the limit.
    pub fn scale(
        &mut self,
        kind: RoleKind,
        count: u32,
        dry_run: bool,
        now_ms: u64,
    ) -> Result<ScalePlan, ControlError> {
        if count > self.limits.roles {
            let allowed = format!("0 to {}", self.limits.roles);
            return Err(ControlError::field("count", count, allowed));
        }
        let before = self.wanted.get(&kind).copied().unwrap_or(0);
        let drain = self.surplus(kind, count);
        let start = self.shortage(kind, count);
        let id = |(place, incarnation): &(Place, u32)| self.id(*place, *incarnation);
        let plan = ScalePlan {
            kind,
            before,
            count,
            start: start.iter().map(id).collect(),
            drain: drain.iter().map(|place| self.id_of(*place)).collect(),
            dry_run,
        };
        if !dry_run {
            self.wanted.insert(kind, count);
            for place in drain {
                self.drain_place(place, now_ms);
            }
            for (place, incarnation) in start {
                self.add_pending(place, incarnation, now_ms);
            }
        }
        Ok(plan)
    }

    /// Makes a place for every role that is wanted and not there.
    pub(crate) fn refill(&mut self, now_ms: u64) {
        for (kind, count) in self.wanted.clone() {
            for (place, incarnation) in self.shortage(kind, count) {
                self.add_pending(place, incarnation, now_ms);
            }
        }
    }

    fn add_pending(&mut self, place: Place, incarnation: u32, now_ms: u64) {
        let old = self.slots.get(&place);
        let slot = Slot {
            incarnation,
            origin: Origin::Launched,
            state: RoleState::Pending,
            registration: Registration {
                kind: place.0,
                name: self.id(place, incarnation).to_string(),
                host: String::new(),
                address: None,
                build: String::new(),
                capacity: 1,
                preemptible: false,
            },
            heartbeat: Heartbeat::default(),
            seen_ms: now_ms,
            since_ms: now_ms,
            // The reason why the one before it ended is shown until this one has its own.
            cause: old.and_then(|slot| slot.cause.clone()),
            waits: None,
            quarantined_ms: None,
        };
        self.slots.insert(place, slot);
        self.record(place, None, now_ms);
    }

    /// Places that stay when a count is wanted; a role that drains is none.
    fn staying(&self, kind: RoleKind) -> Vec<(Place, &Slot)> {
        let stays = |slot: &Slot| slot.is_there() && slot.state != RoleState::Draining;
        self.of_kind(kind).filter(|(_, slot)| stays(slot)).collect()
    }

    /// The places above a count: first those that do nothing yet, then hosts that may be taken away, then
    /// those with the least work, then the highest index.
    fn surplus(&self, kind: RoleKind, count: u32) -> Vec<Place> {
        let mut there = self.staying(kind);
        there.sort_by_key(|(place, slot)| {
            let ready = slot.state == RoleState::Ready && slot.quarantined_ms.is_none();
            let (kept, busy) = (!slot.registration.preemptible, slot.heartbeat.busy);
            (ready, kept, busy, std::cmp::Reverse(place.1))
        });
        let above = there.len().saturating_sub(count as usize);
        there
            .into_iter()
            .take(above)
            .map(|(place, _)| place)
            .collect()
    }

    /// The lowest free places that fill a kind up to a count, with their incarnations.
    fn shortage(&self, kind: RoleKind, count: u32) -> Vec<(Place, u32)> {
        let missing = (count as usize).saturating_sub(self.staying(kind).len());
        let next = |index| {
            let place = (kind, index);
            match self.slots.get(&place) {
                None => Some((place, 0)),
                Some(slot) if slot.is_there() => None,
                Some(slot) => Some((place, slot.incarnation + 1)),
            }
        };
        (0..self.limits.roles)
            .filter_map(next)
            .take(missing)
            .collect()
    }

    /// Removes roles whose leases ended, and gives them. Servers without heartbeats wait for their health.
    pub fn expire(&mut self, now_ms: u64) -> Vec<RoleId> {
        let limits = self.limits.clone();
        let late = |slot: &Slot| match slot.state {
            RoleState::Creating => now_ms.saturating_sub(slot.since_ms) >= limits.start_ms,
            RoleState::HealthChecking if slot.origin == Origin::Outside => false,
            _ if slot.is_registered() => now_ms.saturating_sub(slot.seen_ms) >= limits.lease_ms,
            _ => false,
        };
        let ended = self.slots.iter().filter(|(_, slot)| late(slot));
        let ended: Vec<Place> = ended.map(|(place, _)| *place).collect();
        for place in &ended {
            let slot = &self.slots[place];
            let cause = match slot.state {
                RoleState::Creating => format!("not registered after {} ms", limits.start_ms),
                _ => format!("not heard of for {} ms", limits.lease_ms),
            };
            tracing::warn!(role = %self.id_of(*place), %cause, "a role is lost");
            // A server that a person added stays, and is asked on.
            let next = match slot.origin {
                Origin::Outside => RoleState::HealthChecking,
                Origin::Launched | Origin::Joined => RoleState::Removed,
            };
            self.become_state(*place, next, Some(cause), now_ms);
        }
        let removed = ended
            .into_iter()
            .filter(|place| !self.slots[place].is_there());
        removed.map(|place| self.id_of(place)).collect()
    }

    /// The launcher was asked to start a role.
    pub(crate) fn created(&mut self, place: Place, now_ms: u64) {
        self.become_state(place, RoleState::Creating, None, now_ms);
    }

    /// The engine has no place yet for a role that its launcher started, with its reason, or has one. The
    /// time for its registration begins with the place: hours in a queue are no reason to start it anew.
    pub(crate) fn awaits(&mut self, place: Place, why: Option<&str>, now_ms: u64) {
        let slot = self.slots.get_mut(&place);
        let Some(slot) = slot.filter(|slot| slot.state == RoleState::Creating) else {
            return;
        };
        slot.waits = why.map(|why| {
            slot.since_ms = now_ms;
            let mut why = why.to_owned();
            cut(&mut why, MAX_CAUSE_BYTES);
            why
        });
    }

    /// A role has ended, as its launcher says, or was stopped.
    pub(crate) fn ended(&mut self, place: Place, cause: Option<String>, now_ms: u64) {
        self.become_state(place, RoleState::Removed, cause, now_ms);
    }

    /// Takes over a role that a launcher started for an earlier owner.
    pub(crate) fn adopt(&mut self, id: &str, running: bool, now_ms: u64) {
        let parsed = RoleId::parse(id)
            .filter(|(run, _, index, _)| *run == self.run && *index < self.limits.roles);
        let Some((_, kind, index, incarnation)) = parsed else {
            return;
        };
        let place = (kind, index);
        let old = self.slots.get_mut(&place);
        let pending = old
            .as_ref()
            .is_some_and(|slot| slot.state == RoleState::Pending);
        match old {
            Some(slot) if slot.incarnation > incarnation => {}
            // It registered before the launcher was asked.
            Some(slot) if slot.incarnation == incarnation && slot.is_there() && !pending => {
                slot.origin = Origin::Launched;
            }
            // A name that was used is never started again.
            _ if pending && !running => self.add_pending(place, incarnation + 1, now_ms),
            _ => {
                self.add_pending(place, incarnation, now_ms);
                let state = if running {
                    RoleState::Creating
                } else {
                    RoleState::Removed
                };
                self.become_state(place, state, None, now_ms);
            }
        }
    }

    /// Lets every role end its work; wanted counts stay for the next owner.
    pub(crate) fn drain_all(&mut self, now_ms: u64) {
        let places: Vec<Place> = self.slots.keys().copied().collect();
        for place in places {
            self.drain_place(place, now_ms);
        }
    }

    /// Notes why a role is not as it should be, without a change of its state.
    pub(crate) fn explain(&mut self, place: Place, cause: String, now_ms: u64) {
        if let Some(slot) = self.slots.get_mut(&place) {
            slot.cause.get_or_insert_with(|| cause.clone());
            self.record(place, Some(cause), now_ms);
        }
    }

    /// Sets the weights that engines shall serve. Without a checksum only the version is compared.
    pub fn set_weights(&mut self, version: u64, checksum: Option<String>, now_ms: u64) {
        self.weights = Some(WantedWeights { version, checksum });
        // A registration without a heartbeat shows nothing yet.
        let heard = |slot: &Slot| slot.state != RoleState::HealthChecking;
        let places = self.slots.iter().filter(|(_, slot)| heard(slot));
        let places: Vec<Place> = places.map(|(place, _)| *place).collect();
        for place in places {
            self.advance(place, now_ms);
        }
    }

    /// Moves a role that lives to the state that its heartbeat earns.
    fn advance(&mut self, place: Place, now_ms: u64) {
        use RoleState::{HealthChecking, Ready, WeightSyncing};
        let Some(slot) = self.slots.get(&place) else {
            return;
        };
        if !matches!(slot.state, HealthChecking | WeightSyncing | Ready) {
            return;
        }
        let fit = match &self.weights {
            Some(wanted) if place.0.has_weights() => fitness(wanted, &slot.heartbeat),
            _ => Fitness::Fits,
        };
        let (state, reason) = match fit {
            Fitness::Fits => (Ready, None),
            Fitness::Behind => (WeightSyncing, None),
            Fitness::Wrong(reason) => (WeightSyncing, Some(reason)),
        };
        let was = slot.quarantined_ms;
        if let Some(slot) = self.slots.get_mut(&place) {
            slot.quarantined_ms = reason.as_ref().map(|_| was.unwrap_or(now_ms));
            if reason.is_some() && slot.cause.is_none() {
                slot.cause.clone_from(&reason);
            }
        }
        if reason.is_some() && was.is_none() {
            self.record(place, reason, now_ms);
        }
        self.become_state(place, state, None, now_ms);
    }

    /// Changes a state, if that is allowed and a change.
    fn become_state(&mut self, place: Place, next: RoleState, cause: Option<String>, now_ms: u64) {
        let Some(slot) = self.slots.get_mut(&place) else {
            return;
        };
        if !slot.state.may_become(next) {
            return;
        }
        slot.state = next;
        slot.since_ms = now_ms;
        slot.waits = None;
        slot.cause = match next {
            // The cause of an earlier end is over.
            RoleState::Ready => slot.heartbeat.cause.clone(),
            _ => slot.cause.take().or_else(|| cause.clone()),
        };
        self.record(place, cause, now_ms);
    }

    fn record(&mut self, place: Place, cause: Option<String>, now_ms: u64) {
        self.last_event += 1;
        let event = RoleEvent {
            seq: self.last_event,
            at_ms: now_ms,
            id: self.id_of(place),
            state: self.slots[&place].state,
            cause,
        };
        if self.events.len() >= self.limits.events {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Events after a number, oldest first, as far as they are kept.
    pub fn events_after(&self, seq: u64) -> Vec<RoleEvent> {
        let new = self.events.iter().filter(|event| event.seq > seq);
        new.cloned().collect()
    }

    /// All roles that are there, and the last one of each place that failed.
    pub fn views(&self, now_ms: u64) -> Vec<RoleView> {
        let shown = |slot: &Slot| slot.is_there() || slot.cause.is_some();
        let slots = self.slots.iter().filter(|(_, slot)| shown(slot));
        slots
            .map(|(place, slot)| RoleView {
                id: self.id_of(*place),
                registration: slot.registration.clone(),
                state: slot.state,
                heartbeat: slot.heartbeat.clone(),
                last_seen_ms: now_ms.saturating_sub(slot.seen_ms),
                cause: slot.cause.clone(),
                waits: slot.waits.clone(),
                quarantined: slot.quarantined_ms.is_some(),
            })
            .collect()
    }

    /// Everything that people see.
    pub fn page(&self, kind: Option<RoleKind>, now_ms: u64) -> RolesPage {
        let mut roles = self.views(now_ms);
        roles.retain(|role| kind.is_none_or(|kind| role.registration.kind == kind));
        RolesPage {
            run: self.run.clone(),
            fence: self.fence,
            wanted_version: self.weights.as_ref().map(|weights| weights.version),
            wanted: self.wanted.clone(),
            stopping: false,
            roles,
            events: self.events_after(0),
        }
    }

    /// The roles of a kind, and work that waits before them.
    pub(crate) fn load(&self, kind: RoleKind, waiting: u32, now_ms: u64) -> AutoscaleInputs {
        let is_ready = |slot: &Slot| slot.state == RoleState::Ready;
        let slots = self.of_kind(kind).map(|(_, slot)| slot);
        let ready: Vec<&Slot> = slots.filter(|slot| is_ready(slot)).collect();
        let sum = |of: fn(&Slot) -> u32| {
            ready
                .iter()
                .map(|slot| of(slot))
                .fold(0, u32::saturating_add)
        };
        AutoscaleInputs {
            now_ms,
            wanted: self.wanted.get(&kind).copied().unwrap_or(0),
            ready: u32::try_from(ready.len()).unwrap_or(u32::MAX),
            capacity: sum(|slot| slot.registration.capacity),
            busy: sum(|slot| slot.heartbeat.busy),
            queued: sum(|slot| slot.heartbeat.queued).saturating_add(waiting),
            idle_s: ready.iter().map(|slot| slot.heartbeat.idle_s).collect(),
        }
    }

    /// All places with their roles.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (Place, &Slot)> {
        self.slots.iter().map(|(place, slot)| (*place, slot))
    }

    fn of_kind(&self, kind: RoleKind) -> impl Iterator<Item = (Place, &Slot)> {
        self.slots().filter(move |(place, _)| place.0 == kind)
    }

    /// Name of an incarnation in a place.
    pub(crate) fn id(&self, place: Place, incarnation: u32) -> RoleId {
        RoleId::new(&self.run, place.0, place.1, incarnation)
    }

    /// Name of the role in a place.
    pub(crate) fn id_of(&self, place: Place) -> RoleId {
        let slot = self.slots.get(&place);
        self.id(place, slot.map_or(0, |slot| slot.incarnation))
    }

    /// The place of a role that is there.
    fn place(&self, id: &str) -> Result<Place, ControlError> {
        let gone = || ControlError::Gone(id.chars().take(MAX_NAME_BYTES).collect());
        let parsed = RoleId::parse(id).filter(|(run, ..)| *run == self.run);
        let (_, kind, index, incarnation) = parsed.ok_or_else(gone)?;
        let slot = self.slots.get(&(kind, index)).ok_or_else(gone)?;
        if slot.incarnation > incarnation {
            return Err(ControlError::Superseded(id.to_owned()));
        }
        if slot.incarnation < incarnation || !slot.is_there() {
            return Err(gone());
        }
        Ok((kind, index))
    }

    /// Refuses calls of another generation, in both directions: an older role's, and a newer one's that reach
    /// an owner which was replaced.
    fn check_fence(&self, given: Option<u64>) -> Result<(), ControlError> {
        match given {
            Some(given) if given != self.fence => Err(ControlError::Fenced {
                given,
                own: self.fence,
            }),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
