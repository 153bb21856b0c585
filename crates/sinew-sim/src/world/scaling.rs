//! Counts of units that follow their work: the real autoscaler of a run, and what its decisions do.
//!
//! As the registry of a run does, a role that is to have fewer units lets those end first that do not work
//! yet, then those with the least work; they end their work before they go. A unit that leaves does not
//! count, so that its successor starts at once.

use super::World;
use super::clock::Happening;
use crate::agenda::{Micros, micros, seconds};
use crate::measure::{Report, RoleScaling};
use crate::plan::{Plan, Role, RoleKind};
use sinew_control::{AutoscaleInputs, Autoscaler};
use std::cmp::Reverse;
use std::sync::Arc;

/// Interval of decisions: that of the heartbeats of a run's roles.
const TICK_S: f64 = 5.0;

/// The autoscaler of a role, and what it decided.
#[derive(Debug, Default)]
struct RoleScaler {
    core: Autoscaler,
    wanted: usize,
    changes: u64,
    /// Changes in the other direction than the one before.
    reversals: u64,
    rose: Option<bool>,
    least: usize,
    most: usize,
}

impl RoleScaler {
    fn of(count: usize) -> Self {
        Self {
            wanted: count,
            least: count,
            most: count,
            ..Self::default()
        }
    }

    fn want(&mut self, count: usize) {
        let rises = count > self.wanted;
        self.changes += 1;
        self.reversals += u64::from(self.rose.is_some_and(|rose| rose != rises));
        self.rose = Some(rises);
        self.wanted = count;
        self.least = self.least.min(count);
        self.most = self.most.max(count);
    }
}

/// Counts and costs of roles.
#[derive(Debug, Default)]
pub(super) struct Scaling {
    /// Scalers in the order of the roles; `None`: the count of the role is fixed.
    scalers: Vec<Option<RoleScaler>>,
    /// Rent so far by role, in the plan's currency, and seconds of units.
    spent: Vec<f64>,
    rented_s: Vec<f64>,
    /// Time until which rent is added up.
    paid_at: Micros,
}

impl Scaling {
    pub(super) fn new(plan: &Plan) -> Self {
        let scaler = |role: &Role| role.is_scaled().then(|| RoleScaler::of(role.count));
        Self {
            scalers: plan.roles.iter().map(scaler).collect(),
            spent: vec![0.0; plan.roles.len()],
            rented_s: vec![0.0; plan.roles.len()],
            paid_at: 0,
        }
    }

    /// Seconds of the units of a role that were paid for.
    pub(super) fn unit_seconds(&self, role: usize) -> f64 {
        self.rented_s[role]
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

impl World {
    /// Empties the places that have no unit at the start, and begins to look at the work.
    pub(super) fn begin_scaling(&mut self) {
        if !self.plan.has_ticks() {
            return;
        }
        for unit in 0..self.units.all.len() {
            let engine = self.units.all[unit].engine;
            if let Some(engine) = engine.filter(|_| !self.units.works(unit)) {
                self.take_down(engine, Micros::MAX);
            }
        }
        self.clock.after(TICK_S, Happening::Tick);
    }

    /// Adds rent up, decides, and ends units that have done their work.
    pub(super) fn tick(&mut self) {
        self.pay();
        for role in 0..self.plan.roles.len() {
            if !self.dead {
                self.scale(role);
            }
            self.end_done(role);
        }
        self.clock.after(TICK_S, Happening::Tick);
    }

    /// Adds up what units cost since the last time.
    pub(super) fn pay(&mut self) {
        let now = self.clock.now;
        let from = std::mem::replace(&mut self.scaling.paid_at, now);
        let past_s = seconds(now.saturating_sub(from));
        for (role, spec) in self.plan.roles.iter().enumerate() {
            let units_s = past_s * self.units.rented(role) as f64;
            self.scaling.rented_s[role] += units_s;
            self.scaling.spent[role] += units_s / 3600.0 * spec.price_at(seconds(from));
        }
    }

    /// Lets the autoscaler decide about a role.
    fn scale(&mut self, role: usize) {
        let plan = Arc::clone(&self.plan);
        let Some(limits) = plan.limits_of(&plan.roles[role], self.clock.now_s()) else {
            return;
        };
        let Some(inputs) = self.autoscale_inputs(role) else {
            return;
        };
        let Some(scaler) = &mut self.scaling.scalers[role] else {
            return;
        };
        if let Some(count) = scaler.core.decide(&limits, &inputs) {
            scaler.want(count as usize);
            self.shrink(role, count as usize);
            self.refill(role);
        }
    }

    /// The work of a role, as its heartbeats would tell it.
    fn autoscale_inputs(&mut self, role: usize) -> Option<AutoscaleInputs> {
        let wanted = self.scaling.scalers[role].as_ref()?.wanted;
        let (now, kind) = (self.clock.now, self.plan.roles[role].kind);
        let before = match kind {
            RoleKind::Engine => self.fleet.router.status(self.clock.now_s()).waiting,
            _ => self.units.waiting.len(),
        };
        let mut inputs = AutoscaleInputs {
            now_ms: now / 1000,
            wanted: number(wanted),
            ready: 0,
            capacity: 0,
            busy: 0,
            queued: number(before),
            idle_s: Vec::new(),
        };
        for unit in self.units.working(role) {
            let (busy, queued, capacity) = match self.units.all[unit].engine {
                Some(engine) if kind == RoleKind::Engine => {
                    let engine = &self.fleet.engines[engine];
                    if engine.version.is_none() || !engine.is_up(now) {
                        continue;
                    }
                    let load = engine.load_now();
                    (load.running, load.waiting, self.plan.engines.max_running)
                }
                _ => {
                    let (held, capacity) = self.units.work_of(unit);
                    (held, 0, capacity)
                }
            };
            inputs.ready += 1;
            inputs.capacity = inputs.capacity.saturating_add(number(capacity));
            inputs.busy = inputs.busy.saturating_add(number(busy));
            inputs.queued = inputs.queued.saturating_add(number(queued));
            let idle_since = &mut self.units.all[unit].idle_since;
            let idle_s = if busy + queued > 0 {
                *idle_since = None;
                0.0
            } else {
                seconds(now - *idle_since.get_or_insert(now))
            };
            inputs.idle_s.push(idle_s);
        }
        Some(inputs)
    }

    /// Lets the units above a count leave.
    fn shrink(&mut self, role: usize, count: usize) {
        let mut there = self.units.staying(role);
        there.sort_by_key(|unit| {
            let (works, work) = (self.units.works(*unit), self.work_on(*unit));
            (works, work, Reverse(*unit))
        });
        let above = there.len().saturating_sub(count);
        for unit in there.into_iter().take(above) {
            // One that does not work yet has nothing to end.
            if !self.leave_unit(unit) {
                self.end_unit(unit);
            }
        }
    }

    /// Work that a unit has.
    fn work_on(&self, unit: usize) -> usize {
        let held = self.units.work_of(unit).0;
        let engine = self.units.all[unit].engine;
        held + engine.map_or(0, |engine| self.fleet.attempts_on(engine).len())
    }

    /// Starts units up to the count that is wanted of a role whose count follows its work.
    pub(super) fn refill(&mut self, role: usize) {
        let scaler = self.scaling.scalers[role].as_ref();
        // Nothing starts units while the run's process is dead.
        let Some(wanted) = scaler.map(|s| s.wanted).filter(|_| !self.dead) else {
            return;
        };
        let (now, start_s) = (self.clock.now, self.plan.roles[role].start_s);
        let back_at = now + micros(start_s);
        while self.units.staying(role).len() < wanted {
            self.pay();
            // Units that leave have all other places; one of them is empty soon.
            let Some(unit) = self.units.start(role, now, back_at) else {
                return;
            };
            if let Some(engine) = self.units.all[unit].engine {
                self.fleet.engines[engine].down_until = back_at;
                self.clock
                    .after(start_s, Happening::EngineBack(engine as u32));
            }
            self.clock.after(start_s, Happening::UnitBack(unit as u32));
        }
    }

    /// Ends the units of a role that leave and have no work, and starts others that are wanted.
    fn end_done(&mut self, role: usize) {
        if !self.plan.roles[role].is_scaled() {
            return;
        }
        for unit in self.units.leaving(role) {
            // One that knows of its loss is there until then.
            let is_lost_soon = self.units.all[unit].notice_at <= self.clock.now;
            if self.work_on(unit) == 0 && !is_lost_soon {
                self.end_unit(unit);
            }
        }
        self.refill(role);
    }

    /// A unit ends, and its place is empty.
    pub(super) fn end_unit(&mut self, unit: usize) {
        self.pay();
        if let Some(engine) = self.units.all[unit].engine {
            self.take_down(engine, Micros::MAX);
        }
        self.units.end(unit, self.clock.now);
    }

    /// Puts counts and costs of roles that change them into a report.
    pub(super) fn report_scaling(&self, report: &mut Report) {
        if !self.plan.has_ticks() {
            return;
        }
        let all_s = report.virtual_s.max(1e-9);
        let mut more = 0.0;
        for (role, spec) in self.plan.roles.iter().enumerate() {
            let per_hour = self.scaling.spent[role] * 3600.0 / all_s;
            more += per_hour - spec.count as f64 * spec.price_per_hour;
            if let Some(used) = report.roles.get_mut(role) {
                used.per_hour = per_hour;
                if spec.is_scaled() && spec.kind == RoleKind::Engine {
                    let share = used.utilization.unwrap_or(report.utilization.engines);
                    report.utilization.engines = share;
                }
                used.scaling = self.scaling.scalers[role].as_ref().map(|s| RoleScaling {
                    mean: self.scaling.rented_s[role] / all_s,
                    least: s.least,
                    most: s.most,
                    last: s.wanted,
                    changes: s.changes,
                    reversals: s.reversals,
                });
            }
        }
        let per_hour = report.cost.per_hour + more;
        report.cost = report.throughput.cost(per_hour, report.window_s);
    }
}
