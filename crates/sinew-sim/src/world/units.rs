//! Units of roles: which are there, what they hold, and the links between their hosts.
//!
//! The run begins when all units are there. A unit that is lost is replaced: its successor works after the
//! role's `start_s`, and is the same unit here. A unit that knows of its loss takes nothing new.
//!
//! A role whose count follows its work has more places than units: a unit that ends leaves its place empty,
//! and its successor starts in another one.

use crate::agenda::{Micros, seconds};
use crate::dist::uniform;
use crate::plan::{OWNER_HOST, Plan, RoleKind};
use sinew_types::{mix_hash, mix_seed};
use std::collections::{BTreeSet, HashMap, VecDeque};

/// Time of what is not planned.
const NEVER: Micros = Micros::MAX;
/// Purpose of the random numbers of losses.
pub(super) const LOSSES: u64 = 0x10_55e5;

/// State of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnitState {
    /// It takes work.
    Up,
    /// It takes nothing new, and is lost soon.
    Leaving,
    /// It is gone, and its successor starts.
    Down,
    /// Its place is empty, and costs nothing.
    Empty,
}

/// A unit of a role.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    /// Number of its role in the plan.
    pub(super) role: usize,
    pub(super) kind: RoleKind,
    /// Number of the engine that it is.
    pub(super) engine: Option<usize>,
    state: UnitState,
    /// Work that it holds, and the most.
    held: usize,
    capacity: usize,
    /// Losses so far: the next one is drawn by it.
    pub(super) losses: u64,
    /// Times of its notice, of its loss and of the start of its successor, as far as they are known.
    pub(super) notice_at: Micros,
    pub(super) loss_at: Micros,
    pub(super) back_at: Micros,
    /// Time since which it has no work, as ticks see it.
    pub(super) idle_since: Option<Micros>,
    /// Time since which it is down.
    down_since: Micros,
    /// Seconds in which it was down.
    down_s: f64,
    /// Sum over time of the work that it held, until `changed`.
    held_s: f64,
    changed: Micros,
}

/// Counts of a role, for the report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RoleCounts {
    /// Losses of its units.
    pub(super) losses: u64,
    /// Seconds that its units were down.
    pub(super) down_s: f64,
    /// Sum over time and units of the work that they held.
    pub(super) held_s: f64,
}

/// All units of a plan.
#[derive(Debug, Default)]
pub(super) struct Units {
    pub(super) all: Vec<Unit>,
    /// Units that take work, by what they hold: of rollout workers, and of sandbox hosts.
    open: [BTreeSet<(usize, u32)>; 2],
    /// Whether there is a role of the kind.
    exists: [bool; 2],
    /// Episodes that wait for a unit, with the number of their stay.
    pub(super) waiting: VecDeque<(u32, u32)>,
    /// Unit of each engine, where engines are units.
    engines: Vec<u32>,
    /// Number of the host of each role; 0 is that of the run's process.
    hosts: Vec<usize>,
    /// Seconds one way and seconds of a byte between two hosts.
    links: HashMap<(usize, usize), (f64, f64)>,
    /// Units of each role that cost something.
    rented: Vec<usize>,
    /// Seconds of work that losses destroyed.
    pub(super) lost_s: f64,
}

/// The place of a kind that holds episodes.
fn place_of(kind: RoleKind) -> Option<usize> {
    match kind {
        RoleKind::Rollout => Some(0),
        RoleKind::Sandbox => Some(1),
        RoleKind::Engine | RoleKind::Trainer | RoleKind::Scorer => None,
    }
}

impl Units {
    /// The units of a plan, all up.
    pub(super) fn new(plan: &Plan) -> Self {
        let mut names: Vec<&str> = vec![OWNER_HOST];
        let mut number = |name| {
            let known = names.iter().position(|n| *n == name);
            known.unwrap_or_else(|| {
                names.push(name);
                names.len() - 1
            })
        };
        let mut units = Self {
            hosts: plan.roles.iter().map(|r| number(r.host.as_str())).collect(),
            rented: plan.roles.iter().map(|r| r.count).collect(),
            ..Self::default()
        };
        for link in &plan.links {
            let (from, to) = (number(link.from.as_str()), number(link.to.as_str()));
            let byte_s = link.mbit_per_s.map_or(0.0, |mbit| 8.0 / (mbit * 1e6));
            for pair in [(from, to), (to, from)] {
                units.links.insert(pair, (link.latency_ms / 1e3, byte_s));
            }
        }
        for (role, spec) in plan.roles.iter().enumerate() {
            for place in 0..spec.unit_places() {
                let number = units.all.len() as u32;
                let engine = spec.has_engine().then_some(units.engines.len());
                let is_there = place < spec.count;
                units.engines.extend(engine.map(|_| number));
                units.all.push(Unit {
                    role,
                    kind: spec.kind,
                    engine,
                    state: if is_there {
                        UnitState::Up
                    } else {
                        UnitState::Empty
                    },
                    held: 0,
                    capacity: spec.capacity(),
                    losses: 0,
                    notice_at: NEVER,
                    loss_at: NEVER,
                    back_at: NEVER,
                    idle_since: None,
                    down_since: 0,
                    down_s: 0.0,
                    held_s: 0.0,
                    changed: 0,
                });
                if let Some(place) = place_of(spec.kind) {
                    units.exists[place] = true;
                    if is_there {
                        units.open[place].insert((0, number));
                    }
                }
            }
        }
        units
    }

    /// Seconds until the next loss of a unit, of a role that loses units on the mean after `mean_s`.
    pub(super) fn until_loss_s(&self, seed: u64, unit: usize, mean_s: f64) -> f64 {
        let key = mix_hash(mix_seed(seed ^ LOSSES, unit as u64), self.all[unit].losses);
        -mean_s * (1.0 - uniform(key)).ln()
    }

    /// Takes a place on a unit of each kind that holds episodes and has units. `None`: one kind has no room.
    pub(super) fn take(&mut self, now: Micros) -> Option<[Option<u32>; 2]> {
        let mut found = [None; 2];
        for (place, chosen) in found.iter_mut().enumerate() {
            if !self.exists[place] {
                continue;
            }
            let (held, unit) = *self.open[place].first()?;
            if held >= self.all[unit as usize].capacity {
                return None;
            }
            *chosen = Some(unit);
        }
        for unit in found.into_iter().flatten() {
            self.hold(unit, now, 1);
        }
        Some(found)
    }

    /// Gives places back. True: there were some.
    pub(super) fn give_back(&mut self, places: [Option<u32>; 2], now: Micros) -> bool {
        for unit in places.into_iter().flatten() {
            self.hold(unit, now, -1);
        }
        places != [None; 2]
    }

    /// Changes the work that a unit holds.
    fn hold(&mut self, unit: u32, now: Micros, by: isize) {
        let own = &mut self.all[unit as usize];
        own.held_s += own.held as f64 * seconds(now.saturating_sub(own.changed));
        own.changed = now;
        let before = own.held;
        own.held = before.saturating_add_signed(by);
        let (held, state) = (own.held, own.state);
        if let Some(place) = place_of(own.kind)
            && state == UnitState::Up
        {
            self.open[place].remove(&(before, unit));
            self.open[place].insert((held, unit));
        }
    }

    /// A unit takes nothing new from now on. False: it is not up.
    pub(super) fn leave(&mut self, unit: usize) -> bool {
        if self.all[unit].state != UnitState::Up {
            return false;
        }
        self.close(unit);
        self.all[unit].state = UnitState::Leaving;
        true
    }

    /// Nothing is placed on a unit.
    fn close(&mut self, unit: usize) {
        let own = &self.all[unit];
        if let Some(place) = place_of(own.kind) {
            self.open[place].remove(&(own.held, unit as u32));
        }
    }

    /// A unit is gone.
    pub(super) fn lose(&mut self, unit: usize, now: Micros) {
        self.close(unit);
        let own = &mut self.all[unit];
        own.state = UnitState::Down;
        own.losses += 1;
        own.down_since = now;
    }

    /// Starts a unit in an empty place of a role, to work at `back_at`. `None`: no place is empty.
    pub(super) fn start(&mut self, role: usize, now: Micros, back_at: Micros) -> Option<usize> {
        let empty = |u: &Unit| u.role == role && u.state == UnitState::Empty;
        let place = self.all.iter().position(empty)?;
        let own = &mut self.all[place];
        (own.state, own.down_since, own.back_at) = (UnitState::Down, now, back_at);
        self.rented[role] += 1;
        Some(place)
    }

    /// A unit ends, and leaves its place empty.
    pub(super) fn end(&mut self, unit: usize, now: Micros) {
        if self.all[unit].state == UnitState::Empty {
            return;
        }
        self.close(unit);
        let own = &mut self.all[unit];
        if own.state == UnitState::Down {
            own.down_s += seconds(now.saturating_sub(own.down_since));
        }
        own.state = UnitState::Empty;
        (own.notice_at, own.loss_at, own.back_at) = (NEVER, NEVER, NEVER);
        own.idle_since = None;
        self.rented[own.role] -= 1;
    }

    /// Units of a role that stay: those that work or start.
    pub(super) fn staying(&self, role: usize) -> Vec<usize> {
        self.in_states(role, &[UnitState::Up, UnitState::Down])
    }

    /// Units of a role that take work.
    pub(super) fn working(&self, role: usize) -> Vec<usize> {
        self.in_states(role, &[UnitState::Up])
    }

    /// Units of a role that take nothing new.
    pub(super) fn leaving(&self, role: usize) -> Vec<usize> {
        self.in_states(role, &[UnitState::Leaving])
    }

    fn in_states(&self, role: usize, states: &[UnitState]) -> Vec<usize> {
        let all = self.all.iter().enumerate();
        let found = all.filter(|(_, u)| u.role == role && states.contains(&u.state));
        found.map(|(unit, _)| unit).collect()
    }

    /// Whether a unit takes work.
    pub(super) fn works(&self, unit: usize) -> bool {
        self.all[unit].state == UnitState::Up
    }

    /// Work that a unit holds, and the most that it may.
    pub(super) fn work_of(&self, unit: usize) -> (usize, usize) {
        (self.all[unit].held, self.all[unit].capacity)
    }

    /// Units of a role that cost something.
    pub(super) fn rented(&self, role: usize) -> usize {
        self.rented[role]
    }

    /// The successor of a unit works.
    pub(super) fn come_back(&mut self, unit: usize, now: Micros) {
        let own = &mut self.all[unit];
        own.down_s += seconds(now.saturating_sub(own.down_since));
        own.state = UnitState::Up;
        let held = own.held;
        if let Some(place) = place_of(own.kind) {
            self.open[place].insert((held, unit as u32));
        }
    }

    /// All work is gone: the run's process has ended.
    pub(super) fn empty(&mut self, now: Micros) {
        self.waiting.clear();
        for unit in 0..self.all.len() {
            let held = isize::try_from(self.all[unit].held).unwrap_or(isize::MAX);
            if held > 0 {
                self.hold(unit as u32, now, -held);
            }
        }
    }

    /// The unit that an engine is, where engines are units.
    pub(super) fn of_engine(&self, engine: usize) -> Option<u32> {
        self.engines.get(engine).copied()
    }

    /// Whether an engine takes no new requests.
    pub(super) fn is_leaving(&self, engine: usize) -> bool {
        let unit = self.of_engine(engine);
        unit.is_some_and(|u| self.all[u as usize].state == UnitState::Leaving)
    }

    /// Host of a unit; `None`: that of the run's process.
    fn host(&self, unit: Option<u32>) -> usize {
        unit.map_or(0, |u| self.hosts[self.all[u as usize].role])
    }

    /// Seconds one way and seconds of a byte between the hosts of two units.
    pub(super) fn link(&self, from: Option<u32>, to: Option<u32>) -> (f64, f64) {
        if self.links.is_empty() {
            return (0.0, 0.0);
        }
        let pair = (self.host(from), self.host(to));
        self.links.get(&pair).copied().unwrap_or_default()
    }

    /// Seconds in which links bring weights of `bytes` from the trainer to the engine that is farthest.
    pub(super) fn transfer_s(&self, bytes: f64) -> f64 {
        let trainer = self.all.iter().position(|u| u.kind == RoleKind::Trainer);
        let trainer = trainer.map(|unit| unit as u32);
        let farthest = self.engines.iter().map(|engine| {
            let (latency_s, byte_s) = self.link(trainer, Some(*engine));
            latency_s + bytes * byte_s
        });
        farthest.fold(0.0, f64::max)
    }

    /// Counts of each role until now.
    pub(super) fn counts(&self, now: Micros) -> Vec<RoleCounts> {
        let mut all = vec![RoleCounts::default(); self.hosts.len()];
        for unit in &self.all {
            let counts = &mut all[unit.role];
            counts.losses += unit.losses;
            let down = match unit.state {
                UnitState::Down => seconds(now.saturating_sub(unit.down_since)),
                UnitState::Up | UnitState::Leaving | UnitState::Empty => 0.0,
            };
            counts.down_s += unit.down_s + down;
            let since = seconds(now.saturating_sub(unit.changed));
            counts.held_s += unit.held_s + unit.held as f64 * since;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn units(text: &str) -> Units {
        Units::new(&Plan::parse(Path::new("units.toml"), text).unwrap())
    }

    #[test]
    fn episodes_go_to_the_units_with_most_room_and_never_to_those_that_leave() {
        let mut units = units(
            "[[role]]\nkind = \"rollout\"\ncount = 2\ncapacity = 2\n\
             [[role]]\nkind = \"sandbox\"\ncount = 3\ncapacity = 1\n",
        );
        assert_eq!(units.take(0), Some([Some(0), Some(2)]));
        assert!(units.leave(3) && !units.leave(3));
        assert_eq!(units.take(0), Some([Some(1), Some(4)]));
        // No sandbox is left, and nothing is taken.
        assert_eq!(units.take(0), None);
        assert_eq!(units.all[0].held + units.all[1].held, 2);
        units.lose(3, 5);
        units.come_back(3, 1_000_005);
        assert_eq!(units.take(1_000_005), Some([Some(0), Some(3)]));
        assert!(units.give_back([Some(0), Some(2)], 2_000_000));
        let counts = units.counts(2_000_000);
        assert_eq!((counts[1].losses, counts[1].down_s), (1, 1.0));
        assert!(counts[0].held_s > 2.9, "{counts:?}");
        units.empty(2_000_000);
        assert!(units.all.iter().all(|u| u.held == 0));
    }

    #[test]
    fn links_are_of_both_ways_and_weights_wait_for_the_farthest_engine() {
        let units = units(
            "[[role]]\nkind = \"engine\"\ncount = 2\nhost = \"near\"\n[[role]]\nkind = \"engine\"\nhost = \"far\"\n\
             [[link]]\nfrom = \"far\"\nto = \"local\"\nlatency_ms = 50\nmbit_per_s = 100\n",
        );
        assert_eq!(units.link(None, units.of_engine(0)), (0.0, 0.0));
        assert_eq!(
            units.link(None, units.of_engine(2)),
            units.link(units.of_engine(2), None)
        );
        // 100 megabytes at 100 megabits a second.
        assert!((units.transfer_s(1e8) - 8.05).abs() < 1e-9);
    }
}
