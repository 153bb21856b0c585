//! The whole system in virtual time: the real cores, and models of all that takes time.
//!
//! | part | what is real | what is a model |
//! |---|---|---|
//! | `updates` | `PipelineCore` | trainer, transfer of weights |
//! | `episodes`, `slab`, `gate` | `EpisodeMachine`, `AdmissionCore`, `OutlookCore` | sandboxes, tools |
//! | `serving`, `fleet` | `Router`; engine scheduler if `engines.model = "scheduler"` | passes, probes |
//! | `rows`, `queue`, `durable` | the queue with its leases | scorers, the store |
//! | `faults`, `clock` | - | what fails, time |
//! | `units`, `spot` | - | roles and their hosts, their losses, links |
//! | `scaling` | the autoscaler of roles | start and end of units, prices |
//!
//! `slab`, `gate`, `fleet`, `units`, `queue`, `durable` and `clock` have the state; the others are the
//! methods of `World` that connect these parts.
//!
//! A world is a function of its plan: two worlds with equal plans have equal events.

mod clock;
mod durable;
mod episodes;
mod faults;
mod fleet;
mod gate;
mod queue;
mod rows;
mod scaling;
mod serving;
mod slab;
mod spot;
mod units;
mod updates;

use crate::agenda::{Micros, micros, seconds};
use crate::check::{Bug, Ledger, Violation};
use crate::engine::{Engine, Speed};
use crate::measure::{Measure, Report, RoleUse};
use crate::plan::{Plan, RoleKind};
use clock::{Clock, Happening};
use durable::DurableState;
use fleet::Fleet;
use gate::Gate;
use queue::Rows;
use scaling::Scaling;
use sinew_orchestrator::{Command, CoreConfig, Event, PipelineCore, StopReason};
use sinew_types::EpisodeId;
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use units::Units;
use updates::Updates;

/// Interval of admission's looks at the engines, as in the runner.
const LOOK_S: f64 = 0.25;

/// End of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum End {
    /// The run did what it was to do.
    Done,
    /// `run.max_s` is over.
    Time,
    /// An invariant does not hold.
    Broken(Violation),
}

/// The system.
#[derive(Debug)]
pub(crate) struct World {
    plan: Arc<Plan>,
    /// Times and sizes of an engine, in ids.
    speed: Speed,
    /// Time, and future events.
    clock: Clock,
    /// Config of the core, from the plan.
    config: Arc<CoreConfig>,
    /// The real core of the loop.
    core: PipelineCore,
    /// Commands that are not carried out yet.
    commands: VecDeque<Command>,
    /// Reason of the run's end, once it has ended.
    stopped: Option<StopReason>,
    /// The update at work.
    updates: Updates,
    /// Admission, and those that wait for it.
    gate: Gate,
    /// Engines and their router.
    fleet: Fleet,
    /// Units of roles.
    units: Units,
    /// Counts of units that follow their work.
    scaling: Scaling,
    /// Time at which the owner has taken all traces that workers brought.
    taken_at: Micros,
    /// Episodes in their places.
    episodes: Slab,
    /// Turns that are held while weights wait for those that run.
    held: Vec<u32>,
    /// The queue, and those that lease its rows.
    rows: Rows,
    /// Durable data.
    kept: DurableState,
    /// State of every episode.
    pub(crate) ledger: Ledger,
    /// Counters of the report.
    pub(crate) measure: Measure,
    /// The process of the run is dead.
    dead: bool,
    /// A fault of the harness that is to be found.
    pub(crate) bug: Option<Bug>,
    /// Lines of what happened, where they are wanted.
    pub(crate) log: Option<Vec<String>>,
}

impl World {
    /// The world of a plan at its beginning. `checks`: invariants are held at every event.
    pub(crate) fn new(plan: Arc<Plan>, checks: bool, bug: Option<Bug>) -> Self {
        let grain = plan.grain();
        let speed = Speed::of(&plan.engines, &plan.weights, grain);
        let config = Arc::new(updates::config(&plan));
        let mut ledger = Ledger::new(checks, plan.ahead() as u64);
        let mut world = Self {
            core: PipelineCore::new(
                Arc::clone(&config),
                sinew_orchestrator::CoreState::default(),
            ),
            config,
            speed,
            clock: Clock::default(),
            commands: VecDeque::new(),
            stopped: None,
            updates: Updates::default(),
            gate: Gate::new(&plan, grain),
            fleet: Fleet::new(&plan, speed, bug),
            units: Units::new(&plan),
            scaling: Scaling::new(&plan),
            taken_at: 0,
            episodes: Slab::default(),
            held: Vec::new(),
            rows: Rows::new(plan.scoring.scorers, &mut ledger),
            kept: DurableState::default(),
            ledger,
            measure: Measure::new(&plan),
            dead: false,
            bug,
            log: None,
            plan,
        };
        for n in 0..world.plan.faults.len() {
            let at = micros(world.plan.faults[n].at_s);
            world.clock.agenda.add(at, Happening::Fault(n as u32));
        }
        world.plan_losses();
        world.begin_scaling();
        world.begin_session();
        world
    }

    /// Runs it to its end.
    pub(crate) fn run(&mut self) -> End {
        let limit = match self.plan.run.max_s {
            0.0 => Micros::MAX,
            max_s => micros(max_s),
        };
        loop {
            self.carry_out_all();
            if let Some(violation) = self.check() {
                return End::Broken(violation);
            }
            if self.stopped.is_some() {
                return match self.check_end() {
                    Some(violation) => End::Broken(violation),
                    None => End::Done,
                };
            }
            let Some((at, what)) = self.clock.agenda.next() else {
                return End::Broken(Violation::new(
                    "progress",
                    "nothing is left to happen, and the run goes on",
                ));
            };
            if at > limit {
                self.clock.now = limit;
                self.measure.end(limit);
                return End::Time;
            }
            self.clock.now = self.clock.now.max(at);
            self.measure.events += 1;
            if let Some(log) = &mut self.log {
                log.push(format!("{:12.6}  {what:?}", seconds(self.clock.now)));
            }
            self.happen(what);
            if self.ledger.is_stuck(self.clock.now) {
                return End::Broken(Violation::new("progress", "no update in four hours"));
            }
        }
    }

    /// An event for the loop's core.
    fn tell(&mut self, event: Event) {
        self.measure.inputs += 1;
        let commands = self.core.on(event, self.clock.now_s());
        self.commands.extend(commands);
    }

    fn carry_out_all(&mut self) {
        while let Some(command) = self.commands.pop_front() {
            if self.stopped.is_some() || self.dead {
                self.commands.clear();
                return;
            }
            self.carry_out(command);
        }
    }

    /// Handles an event that is due.
    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Booted(at) => self.booted(at),
            Happening::ToolDone(at) => self.tool_done(at),
            Happening::Deadline(at) => self.deadline(at),
            Happening::Stored(at) => self.stored(at),
            Happening::Engine(engine, wake) => self.engine_woke(engine as usize, wake),
            Happening::EngineBack(engine) => self.engine_back(engine as usize),
            Happening::EngineReady(engine) => self.engine_ready(engine as usize),
            Happening::Scored(job) => self.scored(job),
            Happening::Trained(step) => self.trained(step),
            Happening::Transferred => self.transferred(),
            Happening::Loaded => self.loaded(),
            Happening::Look => self.look(),
            Happening::Probe => self.probe(),
            Happening::RouterTick => self.router_tick(),
            Happening::Fault(n) => self.fault(n as usize),
            Happening::Session => self.next_session(),
            Happening::Notice(unit) => self.notice(unit as usize),
            Happening::Lost(unit) => self.lost(unit as usize),
            Happening::UnitBack(unit) => self.unit_back(unit as usize),
            Happening::Wave(role) => self.wave(role as usize),
            Happening::Tick => self.tick(),
            Happening::Ticket(at) => self.ticket(at),
        }
    }

    /// Report of the simulation.
    pub(crate) fn report(&mut self) -> Report {
        let busy_s = self.busy_s();
        let mut report = self.measure.report(&self.plan, busy_s);
        for load in self.fleet.engines.iter().map(Engine::load_now) {
            report.work.passes += load.passes;
            report.work.sampled += load.sampled;
            report.work.prefilled += load.prefilled;
        }
        report.lost_s = self.units.lost_s;
        self.pay();
        report.roles = self.role_uses(&report);
        self.report_scaling(&mut report);
        report
    }

    /// Use of each role of the plan, over the whole simulation.
    fn role_uses(&self, report: &Report) -> Vec<RoleUse> {
        let all_s = report.virtual_s.max(1e-9);
        let mut busy_s = vec![0.0; self.plan.roles.len()];
        for unit in &self.units.all {
            let engine = unit.engine.and_then(|n| self.fleet.engines.get(n));
            busy_s[unit.role] += engine.map_or(0.0, |e| e.busy_s);
        }
        let counts = self.units.counts(self.clock.now);
        let roles = self.plan.roles.iter().zip(counts).zip(busy_s);
        let uses = roles.enumerate().map(|(n, ((role, counts), busy_s))| {
            let units_s = if role.is_scaled() {
                self.scaling.unit_seconds(n).max(1e-9)
            } else {
                all_s * role.count as f64
            };
            RoleUse {
                kind: role.kind,
                host: role.host.clone(),
                units: role.count,
                utilization: match role.kind {
                    RoleKind::Engine => Some((busy_s / units_s).clamp(0.0, 1.0)),
                    RoleKind::Trainer => Some(report.utilization.trainer),
                    RoleKind::Rollout | RoleKind::Sandbox => {
                        Some(counts.held_s / units_s / role.capacity() as f64)
                    }
                    RoleKind::Scorer => None,
                },
                up: (1.0 - counts.down_s / units_s).clamp(0.0, 1.0),
                losses: counts.losses,
                per_hour: role.count as f64 * role.price_per_hour,
                scaling: None,
            }
        });
        uses.collect()
    }

    /// A session of the run begins.
    fn begin_session(&mut self) {
        self.dead = false;
        self.probe();
        self.tell(Event::Begin);
        self.look();
    }

    /// Lets admission read the engines, and scorers read the queue, from time to time.
    fn look(&mut self) {
        let now_s = self.clock.now_s();
        self.measure.inputs += 1;
        let status = self.fleet.router.status(now_s);
        self.gate.admission.read(&status, now_s);
        self.settle();
        self.score_some();
        self.renew_rows();
        self.rows.forget(&mut self.ledger);
        if self.is_idle() {
            self.ledger
                .note("progress", "nothing runs, and the run goes on".into());
        }
        self.measure.gauge(
            self.clock.now,
            &self.gate.admission.reading(),
            status.running,
            self.updates.trains,
        );
        self.clock.after(LOOK_S, Happening::Look);
    }

    /// Whether nothing is under way that could bring the run on.
    fn is_idle(&self) -> bool {
        self.episodes.is_empty()
            && !self.updates.is_busy()
            && self.commands.is_empty()
            && self.measure.events > 1
    }

    /// The first invariant that is broken now, if there is one.
    fn check(&mut self) -> Option<Violation> {
        if !self.ledger.checks {
            return None;
        }
        let reading = self.gate.admission.reading();
        let places = self.plan.places();
        if let Some(found) = self.ledger.take() {
            return Some(found);
        }
        let begun = reading.starting + reading.generating + reading.acting + reading.paused;
        if begun > places {
            return Some(Violation::new(
                "slots",
                format!("{begun} episodes have begun, allowed: {places}"),
            ));
        }
        let inside = self.episodes.with_sandbox().count();
        if inside > places {
            return Some(Violation::new(
                "slots",
                format!("{inside} sandboxes, allowed: {places}"),
            ));
        }
        if inside != begun {
            let why = format!(
                "admission counts {begun} episodes that have begun, {inside} have a sandbox"
            );
            return Some(Violation::new("slots", why));
        }
        let full = self.fleet.engines.iter().find_map(Engine::fault);
        if let Some(why) = full {
            return Some(Violation::new("kv", why));
        }
        self.rows.check(self.clock.wall_was_set, &mut self.ledger)
    }

    /// The first invariant that is broken at the end of a run, if there is one.
    fn check_end(&mut self) -> Option<Violation> {
        if !self.ledger.checks || self.dead {
            return None;
        }
        let mut open: Vec<EpisodeId> = self.episodes.ids().cloned().collect();
        open.extend(self.updates.ended.keys().cloned());
        open.extend(self.kept.open_episodes(&self.ledger));
        self.ledger.end(&open)
    }
}

#[cfg(test)]
mod tests {
    use super::fleet::{BLOCK_IDS, router_config};
    use super::*;
    use sinew_engines::route::RouterConfig;
    use std::path::Path;

    /// Two engines, and contexts that take five times what 1,024 blocks of 64 tokens hold.
    fn plan(grain: usize) -> Plan {
        let text = format!(
            "name = \"coarse\"\n\
             [run]\nmode = \"async\"\nmax_staleness = 8\nupdates = 100\nmax_s = 600\n\
             [rollout]\ngroups_per_update = 64\ngroup_size = 4\nin_flight = 64\n\
             [episode]\nturns = 12\nprompt_tokens = 2048\nturn_tokens = 256\n\
             observation_tokens = 512\n\
             [tools]\ncall_s = {{ uniform = [1, 9] }}\nsandboxes = 64\n\
             [engines]\ncount = 2\nkv_tokens = 2000000\ngrain = {grain}\n"
        );
        Plan::parse(Path::new("coarse.toml"), &text).unwrap()
    }

    #[test]
    fn the_router_remembers_as_many_tokens_at_any_grain() {
        let defaults = RouterConfig::default();
        let tokens = defaults.max_blocks * defaults.block_tokens;
        for grain in (0..=12).map(|bits| 1 << bits) {
            let config = router_config(&plan(grain), grain);
            let block = config.block_tokens * grain;
            assert!(config.block_tokens >= BLOCK_IDS && block >= defaults.block_tokens);
            let held = config.max_blocks * block;
            assert!((tokens..tokens + block).contains(&held), "{grain}: {held}");
        }
    }

    #[test]
    fn episodes_of_a_coarse_plan_find_their_engine_again() {
        let hits = |grain| {
            let mut world = World::new(Arc::new(plan(grain)), true, None);
            assert_eq!(world.run(), End::Time);
            let counters = world.fleet.router.counters();
            assert!(counters.attempts > 1000, "{counters:?}");
            counters.affinity_hits as f64 / counters.attempts as f64
        };
        let (fine, coarse) = (hits(1), hits(64));
        assert!(
            fine > 0.9 && (fine - coarse).abs() < 0.03,
            "{fine} {coarse}"
        );
    }
}
