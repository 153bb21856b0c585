//! Losses of units: notice, loss, the start of a successor, and what becomes of their work.
//!
//! | unit | at the notice | at its loss |
//! |---|---|---|
//! | engine | the router sends nothing new | its requests go on elsewhere from their ids |
//! | sandbox host | takes no new episodes | its episodes fail, and the core runs them again |
//! | rollout worker | takes no new episodes | its episodes begin again after the lease of their tickets |
//! | trainer node | - | the gang starts again, and repeats what follows its last checkpoint |
//!
//! Successors of roles whose count follows their work start at the notice, as the registry of a run starts
//! them.

use super::World;
use super::clock::{At, Happening};
use super::slab::EpisodeState;
use super::units::LOSSES;
use crate::agenda::{Micros, micros, seconds};
use crate::plan::RoleKind;
use sinew_types::{FailureKind, mix_hash, mix_seed};

/// Seconds until the tickets of a worker that is gone are given out again.
const TICKET_LEASE_S: f64 = 30.0;

impl World {
    /// Draws the first loss of every unit.
    pub(super) fn plan_losses(&mut self) {
        for unit in 0..self.units.all.len() {
            self.plan_loss(unit);
        }
        for (role, spec) in self.plan.roles.iter().enumerate() {
            if let Some(every_s) = spec.preemptible.map(|l| l.every_s).filter(|s| *s > 0.0) {
                self.clock.after(every_s, Happening::Wave(role as u32));
            }
        }
    }

    /// A share of the units of a role that work is about to be lost.
    pub(super) fn wave(&mut self, role: usize) {
        let Some(losses) = self.plan.roles[role].preemptible else {
            return;
        };
        self.clock
            .after(losses.every_s, Happening::Wave(role as u32));
        let now = self.clock.now;
        let mut chosen = self.units.working(role);
        let count = (losses.share * chosen.len() as f64).round() as usize;
        let key = mix_seed(self.plan.seed ^ LOSSES, now);
        chosen.sort_by_key(|unit| mix_hash(key, *unit as u64));
        for unit in chosen.into_iter().take(count) {
            self.plan_loss_at(unit, losses.notice_s, losses.notice_s);
        }
    }

    /// Draws the next loss of a unit.
    fn plan_loss(&mut self, unit: usize) {
        let role = self.units.all[unit].role;
        let losses = self.plan.roles[role].preemptible;
        let Some(losses) = losses.filter(|l| l.mean_s > 0.0 && self.units.works(unit)) else {
            return;
        };
        let after_s = self.units.until_loss_s(self.plan.seed, unit, losses.mean_s);
        self.plan_loss_at(unit, after_s, losses.notice_s);
    }

    /// Plans the loss of a unit, and its notice before.
    fn plan_loss_at(&mut self, unit: usize, after_s: f64, notice_s: f64) {
        let (now, number) = (self.clock.now, unit as u32);
        let known_s = (after_s - notice_s).max(0.0);
        let own = &mut self.units.all[unit];
        own.loss_at = now + micros(after_s);
        if notice_s > 0.0 {
            own.notice_at = now + micros(known_s);
            self.clock.after(known_s, Happening::Notice(number));
        }
        self.clock.after(after_s, Happening::Lost(number));
    }

    /// A unit knows that it will be lost.
    pub(super) fn notice(&mut self, unit: usize) {
        // The unit may have ended since, and another one may have its place.
        if self.units.all[unit].notice_at == self.clock.now && self.leave_unit(unit) {
            self.refill(self.units.all[unit].role);
        }
    }

    /// A unit takes nothing new from now on. False: it takes nothing anyway.
    pub(super) fn leave_unit(&mut self, unit: usize) -> bool {
        if !self.units.leave(unit) {
            return false;
        }
        if let Some(engine) = self.units.all[unit].engine.filter(|_| !self.dead) {
            self.probe_one(engine);
        }
        true
    }

    /// A unit is lost.
    pub(super) fn lost(&mut self, unit: usize) {
        if self.units.all[unit].loss_at != self.clock.now {
            return;
        }
        let (role, kind) = (self.units.all[unit].role, self.units.all[unit].kind);
        let start_s = self.plan.roles[role].start_s;
        let is_scaled = self.plan.roles[role].is_scaled();
        self.units.lose(unit, self.clock.now);
        match (self.units.all[unit].engine, is_scaled) {
            (Some(engine), true) => self.take_down(engine, Micros::MAX),
            (Some(engine), false) => self.crash(engine, start_s),
            (None, _) => {}
        }
        match kind {
            RoleKind::Trainer => self.trainer_lost(start_s),
            RoleKind::Rollout | RoleKind::Sandbox => self.holder_lost(unit as u32, kind),
            RoleKind::Engine | RoleKind::Scorer => {}
        }
        if is_scaled {
            self.end_unit(unit);
            self.refill(role);
        } else {
            self.units.all[unit].back_at = self.clock.now + micros(start_s);
            self.clock.after(start_s, Happening::UnitBack(unit as u32));
        }
    }

    /// The successor of a unit works.
    pub(super) fn unit_back(&mut self, unit: usize) {
        if self.units.all[unit].back_at != self.clock.now {
            return;
        }
        self.units.come_back(unit, self.clock.now);
        self.plan_loss(unit);
        self.place_waiting();
    }

    /// Episodes lose the unit that held them.
    fn holder_lost(&mut self, unit: u32, kind: RoleKind) {
        if self.dead {
            return;
        }
        for slot in self.episodes.held_by(unit) {
            let episode = &self.episodes[slot];
            // The end of another one may have ended it, too.
            if !episode.has_sandbox() || !episode.places.contains(&Some(unit)) {
                continue;
            }
            self.units.lost_s += seconds(self.clock.now - episode.began);
            if kind == RoleKind::Sandbox {
                self.fail(slot, FailureKind::Sandbox, "the sandbox host is lost");
            } else {
                self.begin_again(slot);
            }
        }
    }

    /// An episode begins again on another worker, once its ticket is given out again.
    fn begin_again(&mut self, slot: u32) {
        self.cut(slot);
        let episode = &mut self.episodes[slot];
        // Happenings of the old round do not count any more.
        episode.round += 1;
        episode.machine = None;
        episode.doing = EpisodeState::Boots;
        episode.hangs = false;
        (episode.generate_s, episode.tool_s) = (0.0, 0.0);
        self.release_places(slot);
        self.then(slot, TICKET_LEASE_S, Happening::Ticket);
    }

    /// The ticket of an episode is given out again.
    pub(super) fn ticket(&mut self, at: At) {
        if self.episodes.is(at, EpisodeState::Boots) {
            self.start_world(at.slot);
        }
    }

    /// Gives back the places of an episode; others that wait take them.
    pub(super) fn release_places(&mut self, slot: u32) {
        let places = std::mem::take(&mut self.episodes[slot].places);
        if self.units.give_back(places, self.clock.now) {
            self.place_waiting();
        }
    }

    /// Starts the world of an episode on units with room, or lets it wait for them.
    pub(super) fn start_world(&mut self, slot: u32) {
        match self.units.take(self.clock.now) {
            Some(places) => {
                self.episodes[slot].places = places;
                self.boot_on(slot);
            }
            None => {
                let round = self.episodes[slot].round;
                self.units.waiting.push_back((slot, round));
            }
        }
    }

    /// Starts the worlds of episodes that waited, as far as there is room.
    pub(super) fn place_waiting(&mut self) {
        while let Some(&(slot, round)) = self.units.waiting.front() {
            let at = At { slot, round };
            if self.episodes.is(at, EpisodeState::Boots) {
                let Some(places) = self.units.take(self.clock.now) else {
                    return;
                };
                self.episodes[slot].places = places;
                self.boot_on(slot);
            }
            self.units.waiting.pop_front();
        }
    }

    /// Seconds that the network adds to a turn of an episode: to its engine and to its sandbox, and back.
    pub(super) fn hop_s(&self, slot: u32) -> f64 {
        let episode = &self.episodes[slot];
        let [worker, sandbox] = episode.places;
        let to_engine = self.units.link(worker, episode.engine).0;
        let to_sandbox = sandbox.map_or(0.0, |host| self.units.link(worker, Some(host)).0);
        2.0 * (to_engine + to_sandbox)
    }

    /// The trainer's gang starts again.
    fn trainer_lost(&mut self, start_s: f64) {
        let now = self.clock.now;
        let updates = &mut self.updates;
        let redo_s = updates.since_checkpoint_s;
        let ready = now + micros(start_s + redo_s);
        updates.trainer_ready = updates.trainer_ready.max(ready);
        self.units.lost_s += redo_s;
        if !updates.trains || self.dead {
            return;
        }
        let left_s = seconds(updates.trained_at.saturating_sub(now));
        self.units.lost_s += (updates.train_s - left_s).max(0.0);
        updates.trained_at = updates.trainer_ready + micros(updates.train_s);
        let (at, step) = (updates.trained_at, updates.train_step);
        self.clock.agenda.add(at, Happening::Trained(step));
    }
}
