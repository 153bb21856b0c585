//! The whole system in virtual time: the real cores, and models of all that takes time.
//!
//! | part | what is real | what is a model |
//! |---|---|---|
//! | `updates` | `PipelineCore` | trainer, transfer of weights |
//! | `episodes` | `EpisodeMachine`, `AdmissionCore`, `OutlookCore` | sandboxes, tools |
//! | `serving` | `Router`; with `engines.model = "scheduler"` the embedded engine's scheduler | passes, probes |
//! | `rows` | the queue with its leases | scorers, the store |
//! | `faults` | - | what fails |
//!
//! A world is a function of its plan: two worlds with equal plans have equal events.

mod episodes;
mod faults;
mod rows;
mod serving;
mod updates;

use crate::agenda::{Agenda, Micros, micros, seconds};
use crate::check::{Bug, Ledger, Violation};
use crate::engine::{Engine, Speed};
use crate::measure::{Measure, Report};
use crate::plan::Plan;
use episodes::Episode;
use rows::{DurableState, Scorers};
use sinew_engines::AttemptId;
use sinew_engines::route::{Router, RouterConfig};
use sinew_orchestrator::{Command, CoreConfig, Event, PipelineCore, StopReason};
use sinew_rollout::{AdmissionConfig, AdmissionCore, OutlookCore, Ticket};
use sinew_store::queue::{MemoryQueue, QueueLimits};
use sinew_types::{EpisodeId, PolicyVersion};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use updates::Updates;

/// Interval of admission's looks at the engines, as in the runner.
const LOOK_S: f64 = 0.25;
/// Ids of a block of the router's memory, at least: blocks of single ids would cost a look for each id.
const BLOCK_IDS: usize = 2;
/// The wall clock at the start, in milliseconds: room for a clock that is set back.
const WALL_MS: i64 = 1_000_000_000_000;

/// An episode's place in the slab, and the number of the happening that counts for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct At {
    /// Place in the slab.
    slot: u32,
    /// Number of its stay in this place.
    round: u32,
}

/// Event of the simulation.
#[derive(Clone, Debug, PartialEq)]
enum Happening {
    Booted(At),
    ToolDone(At),
    Deadline(At),
    Stored(At),
    /// An engine has news, if this wake-up still counts.
    Engine(u32, u32),
    EngineBack(u32),
    EngineReady(u32),
    Scored(u64),
    Trained(u64),
    Transferred,
    Loaded,
    Look,
    Probe,
    RouterTick,
    Fault(u32),
    /// Another session begins after a kill.
    Session,
}

impl Happening {
    /// Whether it outlives a kill of the run's process: engines and failures do.
    fn outlives(&self) -> bool {
        matches!(
            self,
            Self::EngineBack(_) | Self::Fault(_) | Self::Session | Self::Engine(..)
        )
    }
}

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
    /// The virtual time.
    now: Micros,
    /// Future events.
    agenda: Agenda<Happening>,
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
    /// The real core of admission.
    admission: AdmissionCore,
    /// Estimates which episodes take long, if the longest begin first.
    outlook: OutlookCore,
    /// The real router.
    router: Router,
    /// The servers, by their number.
    engines: Vec<Engine>,
    /// Engine and request of each attempt that runs.
    attempts: HashMap<AttemptId, (usize, u64)>,
    /// The router's commands are being carried out.
    pumping: bool,
    /// Time of the router's next tick.
    tick_at: Option<Micros>,
    /// Places of episodes, reused.
    episodes: Vec<Episode>,
    /// Places without an episode.
    free: Vec<u32>,
    /// The place of each episode that has not left.
    by_id: HashMap<EpisodeId, u32>,
    /// Episodes that have not asked to start, in order.
    waiting: VecDeque<u32>,
    /// Place of each admission ticket.
    tickets: HashMap<Ticket, u32>,
    /// Turns that are held while weights wait for those that run.
    held: Vec<u32>,
    /// The real queue, in memory.
    queue: MemoryQueue,
    /// The scorers, and the state of the store.
    scorers: Scorers,
    /// Durable data.
    kept: DurableState,
    /// Lead of the wall clock over the virtual time, in milliseconds.
    wall_ahead_ms: i64,
    /// Whether the wall clock was ever set, so that earlier leases may have expired.
    wall_was_set: bool,
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
        let filled = match bug {
            Some(Bug::Overfill) => 8,
            _ => 1,
        };
        let engine = |_| Engine::new(plan.engines.model, speed, filled);
        let queue = MemoryQueue::in_memory(QueueLimits {
            max_rows: 1 << 22,
            ..QueueLimits::default()
        });
        let mut world = Self {
            core: PipelineCore::new(
                Arc::clone(&config),
                sinew_orchestrator::CoreState::default(),
            ),
            config,
            speed,
            now: 0,
            agenda: Agenda::default(),
            commands: VecDeque::new(),
            stopped: None,
            updates: Updates::default(),
            admission: admission(&plan, grain),
            outlook: OutlookCore::default(),
            router: router(&plan, grain, 0),
            engines: (0..plan.engines.count).map(engine).collect(),
            attempts: HashMap::new(),
            pumping: false,
            tick_at: None,
            episodes: Vec::new(),
            free: Vec::new(),
            by_id: HashMap::new(),
            waiting: VecDeque::new(),
            tickets: HashMap::new(),
            held: Vec::new(),
            queue,
            scorers: Scorers::new(plan.scoring.scorers),
            kept: DurableState::default(),
            wall_ahead_ms: 0,
            wall_was_set: false,
            ledger: Ledger::new(checks, plan.ahead() as u64),
            measure: Measure::new(&plan),
            dead: false,
            bug,
            log: None,
            plan,
        };
        world.join();
        for n in 0..world.plan.faults.len() {
            let at = micros(world.plan.faults[n].at_s);
            world.agenda.add(at, Happening::Fault(n as u32));
        }
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
            let Some((at, what)) = self.agenda.next() else {
                return End::Broken(Violation::new(
                    "progress",
                    "nothing is left to happen, and the run goes on",
                ));
            };
            if at > limit {
                self.now = limit;
                self.measure.end(limit);
                return End::Time;
            }
            self.now = self.now.max(at);
            self.measure.events += 1;
            if let Some(log) = &mut self.log {
                log.push(format!("{:12.6}  {what:?}", seconds(self.now)));
            }
            self.happen(what);
            if self.ledger.is_stuck(self.now) {
                return End::Broken(Violation::new("progress", "no update in four hours"));
            }
        }
    }

    /// Virtual seconds.
    fn now_s(&self) -> f64 {
        seconds(self.now)
    }

    /// The wall clock, which can be set.
    fn wall_ms(&self) -> u64 {
        (WALL_MS + (self.now / 1000) as i64 + self.wall_ahead_ms).max(0) as u64
    }

    /// Something happens later.
    fn after(&mut self, delay_s: f64, what: Happening) {
        self.agenda.add(self.now + micros(delay_s), what);
    }

    /// An event for the loop's core.
    fn tell(&mut self, event: Event) {
        self.measure.inputs += 1;
        let commands = self.core.on(event, self.now_s());
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
        }
    }

    /// Report of the simulation.
    pub(crate) fn report(&mut self) -> Report {
        let busy_s = self.busy_s();
        let mut report = self.measure.report(&self.plan, busy_s);
        for load in self.engines.iter().map(Engine::load_now) {
            report.work.passes += load.passes;
            report.work.sampled += load.sampled;
            report.work.prefilled += load.prefilled;
        }
        report
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
        let now_s = self.now_s();
        self.measure.inputs += 1;
        let status = self.router.status(now_s);
        self.admission.read(&status, now_s);
        self.settle();
        self.score_some();
        self.renew_rows();
        self.forget_rows();
        if self.is_idle() {
            self.ledger
                .note("progress", "nothing runs, and the run goes on".into());
        }
        self.measure.gauge(
            self.now,
            &self.admission.reading(),
            status.running,
            self.updates.trains,
        );
        self.after(LOOK_S, Happening::Look);
    }

    /// Whether nothing is under way that could bring the run on.
    fn is_idle(&self) -> bool {
        let updates = &self.updates;
        let works = updates.trains || updates.publishes || updates.drains || updates.loads;
        self.by_id.is_empty() && !works && self.commands.is_empty() && self.measure.events > 1
    }

    /// The first invariant that is broken now, if there is one.
    fn check(&mut self) -> Option<Violation> {
        if !self.ledger.checks {
            return None;
        }
        let reading = self.admission.reading();
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
        let inside = self.episodes.iter().filter(|e| e.has_sandbox()).count();
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
        let full = self.engines.iter().find_map(Engine::fault);
        if let Some(why) = full {
            return Some(Violation::new("kv", why));
        }
        self.check_rows()
    }

    /// The first invariant that is broken at the end of a run, if there is one.
    fn check_end(&mut self) -> Option<Violation> {
        if !self.ledger.checks || self.dead {
            return None;
        }
        let mut open: Vec<EpisodeId> = self.by_id.keys().cloned().collect();
        open.extend(self.updates.ended.keys().cloned());
        // The next session would run draws again that no commit names: their stored episodes are open, too.
        let named = self
            .kept
            .stored
            .iter()
            .filter(|(id, _)| self.ledger.is_named(id));
        let settled: HashSet<u64> = named.map(|(_, r)| r.draw).collect();
        let settled = |draw: &u64| settled.contains(draw) || self.kept.named.contains(draw);
        let stored = self.kept.stored.iter().filter(|(_, r)| !settled(&r.draw));
        open.extend(stored.map(|(id, _)| id.clone()));
        self.ledger.end(&open)
    }
}

fn admission(plan: &Plan, grain: usize) -> AdmissionCore {
    let turn = (plan.episode.turn_tokens.mean() as usize / grain).max(1);
    let mut config = AdmissionConfig::new(plan.places(), turn);
    config.max_starting = plan.tools.starting;
    config.reserve_tokens = config.reserve_tokens.div_ceil(grain);
    AdmissionCore::new(config)
}

/// The router's rules in ids. Its memory of an engine is of as many tokens as in a run.
fn router_config(plan: &Plan, grain: usize) -> RouterConfig {
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
    let names = (0..plan.engines.count).map(|n| format!("engine-{n}"));
    let config = router_config(plan, grain);
    Router::new(config, names.collect(), PolicyVersion(version))
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let counters = world.router.counters();
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
