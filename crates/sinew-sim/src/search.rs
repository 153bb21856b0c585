//! Seeded schedules of a small system with failures, and the smallest plan that still fails.
//!
//! A seed decides the plan: mode, sizes, lengths, failures and their times. A seed whose run breaks an
//! invariant is made smaller as long as the smaller plan breaks the same one; `sinew sim PLAN` replays the
//! final plan.

use crate::check::{Bug, Violation};
use crate::dist::{Dist, Form, uniform};
use crate::plan::{Fault, FaultKind, Mode, Model, Plan};
use crate::world::{End, World};
use sinew_types::mix_seed;
use std::sync::Arc;

/// Failures of a schedule, at most.
const MAX_FAULTS: u64 = 6;
/// Runs that one round of making smaller may take.
const MAX_TRIES: usize = 400;
/// Failures fall into the first seconds of a run.
const FAULT_SPAN_S: f64 = 25.0;

/// A seed that breaks an invariant.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// Seed of the plan.
    pub seed: u64,
    pub violation: Violation,
    /// The plan of the seed, made smaller.
    pub plan: Plan,
}

/// Numbers of a seed.
struct Dice {
    /// Seed of all numbers.
    seed: u64,
    /// Numbers drawn so far.
    n: u64,
}

impl Dice {
    /// A number in [0, 1).
    fn share(&mut self) -> f64 {
        self.n += 1;
        uniform(mix_seed(self.seed, self.n))
    }

    /// One of `from..=to`.
    fn between(&mut self, from: u64, to: u64) -> u64 {
        from + (self.share() * (to - from + 1) as f64) as u64
    }

    /// One of some values.
    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[(self.share() * all.len() as f64) as usize]
    }
}

/// The plan of a seed: a small system in which anything can fail.
pub fn random_plan(seed: u64) -> Plan {
    let mut dice = Dice { seed, n: 0 };
    let mut plan = Plan {
        name: format!("seed-{seed}"),
        seed,
        ..Plan::default()
    };
    let r = &mut plan.run;
    r.mode = dice.one_of(&[Mode::Sync, Mode::OneStepOff, Mode::Async]);
    r.max_staleness = dice.between(1, 3);
    r.updates = dice.between(2, 4);
    r.checkpoint_every = dice.between(1, 2);
    let r = &mut plan.rollout;
    r.groups_per_update = dice.between(1, 3) as usize;
    r.group_size = dice.between(2, 4) as usize;
    r.in_flight = dice.between(2, 24) as usize;
    r.retries = dice.between(0, 2) as u32;
    r.no_signal = dice.one_of(&[0.0, 0.0, 0.3]);
    r.tasks = dice.one_of(&[7, 1_000_000]);
    r.timeout_s = 60.0;
    if plan.run.mode == Mode::Sync {
        r.over_sample = dice.one_of(&[0, 0, 1]);
        r.longest_first = dice.share() < 0.3;
    }
    r.refill = match r.over_sample {
        0 => dice.between(0, 1) as u32,
        _ => 0,
    };
    lengths(&mut dice, &mut plan);
    parts(&mut dice, &mut plan);
    plan.faults = faults(&mut dice);
    plan
}

/// Lengths of a small system.
fn lengths(dice: &mut Dice, plan: &mut Plan) {
    let e = &mut plan.episode;
    e.turns = Dist::Of(Form::Uniform([1.0, 3.0]));
    e.prompt_tokens = Dist::Of(Form::Uniform([1.0, 40.0]));
    e.turn_tokens = Dist::Of(Form::Uniform([1.0, 16.0]));
    e.observation_tokens = Dist::Of(Form::Uniform([1.0, 20.0]));
    e.max_context_tokens = dice.one_of(&[48, 200]);
    e.task_share = dice.one_of(&[0.0, 0.8]);
}

/// Sizes and times of a small system.
fn parts(dice: &mut Dice, plan: &mut Plan) {
    let t = &mut plan.tools;
    t.boot_s = Dist::Of(Form::Exponential(0.2));
    t.call_s = Dist::Of(Form::Exponential(dice.one_of(&[0.01, 0.5, 3.0])));
    t.sandboxes = dice.between(2, 24) as usize;
    t.starting = dice.between(1, 8) as usize;
    let s = &mut plan.scoring;
    s.scorers = dice.between(1, 4) as usize;
    s.score_s = Dist::Of(Form::Exponential(0.2));
    s.lease_s = dice.one_of(&[2.0, 600.0]);
    let e = &mut plan.engines;
    e.count = dice.between(1, 3) as usize;
    e.model = dice.one_of(&[Model::Curves, Model::Scheduler]);
    e.max_running = dice.between(1, 16) as usize;
    e.max_batched_tokens = dice.between(16, 64) as usize;
    e.kv_tokens = dice.between(256, 1024) as usize;
    e.pass_s = 0.05;
    e.row_s = 0.001;
    e.prefill_tokens_per_s = 500.0;
    e.probe_s = dice.one_of(&[0.3, 1.0]);
    e.grain = 1;
    plan.trainer.fixed_s = dice.one_of(&[0.01, 2.0]);
    plan.weights.transfer_s = dice.one_of(&[0.0, 0.5]);
    plan.weights.load_s = dice.one_of(&[0.0, 0.3]);
    plan.weights.keep_kv = dice.share() < 0.3;
    plan.weights.drain = dice.share() < 0.2;
}

/// Draws failures and their times.
fn faults(dice: &mut Dice) -> Vec<Fault> {
    const KINDS: [FaultKind; 9] = [
        FaultKind::EngineCrash,
        FaultKind::Partition,
        FaultKind::SandboxLoss,
        FaultKind::ToolHang,
        FaultKind::ScorerCrash,
        FaultKind::StorePause,
        FaultKind::SlowDisk,
        FaultKind::ClockJump,
        FaultKind::Kill,
    ];
    let count = dice.between(0, MAX_FAULTS);
    let mut faults: Vec<Fault> = (0..count)
        .map(|_| Fault {
            at_s: (dice.share() * FAULT_SPAN_S * 1000.0).round() / 1000.0,
            kind: dice.one_of(&KINDS),
            target: dice.between(0, 99),
            for_s: (dice.share() * 8.0 * 1000.0).round() / 1000.0,
            by: dice.one_of(&[-3600.0, -5.0, 5.0, 50.0, 7200.0]),
        })
        .collect();
    faults.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
    faults
}

/// Runs a plan with every invariant; the one that does not hold, if one does not. `log`: lines of what
/// happened.
pub fn replay(plan: &Plan, bug: Option<Bug>, log: Option<&mut Vec<String>>) -> Option<Violation> {
    let mut world = World::new(Arc::new(plan.clone()), true, bug);
    world.log = log.as_ref().map(|_| Vec::new());
    let end = world.run();
    if let (Some(to), Some(lines)) = (log, world.log.take()) {
        *to = lines;
    }
    match end {
        End::Broken(violation) => Some(violation),
        End::Done | End::Time => None,
    }
}

/// Runs the plans of the seeds, and makes that of the first that fails smaller.
pub fn find(seeds: impl Iterator<Item = u64>, bug: Option<Bug>) -> Option<Failure> {
    for seed in seeds {
        let plan = random_plan(seed);
        if let Some(violation) = replay(&plan, bug, None) {
            let (plan, violation) = shrink(plan, violation, bug);
            return Some(Failure {
                seed,
                violation,
                plan,
            });
        }
    }
    None
}

/// The smallest plan that can be reached by single steps and breaks the same invariant.
pub fn shrink(mut plan: Plan, mut violation: Violation, bug: Option<Bug>) -> (Plan, Violation) {
    let mut tries = 0;
    'again: loop {
        for smaller in steps(&plan) {
            tries += 1;
            if tries > MAX_TRIES {
                return (plan, violation);
            }
            let found = replay(&smaller, bug, None);
            if let Some(found) = found.filter(|f| f.invariant == violation.invariant) {
                (plan, violation) = (smaller, found);
                continue 'again;
            }
        }
        return (plan, violation);
    }
}

/// Plans that are a little smaller, the largest steps first.
fn steps(plan: &Plan) -> Vec<Plan> {
    let mut out = Vec::new();
    let mut change = |change: &dyn Fn(&mut Plan)| {
        let mut smaller = plan.clone();
        change(&mut smaller);
        if smaller != *plan && smaller.check().is_ok() {
            out.push(smaller);
        }
    };
    let half = plan.faults.len() / 2;
    change(&|p| p.faults.truncate(half));
    change(&|p| drop(p.faults.drain(..half)));
    for n in 0..plan.faults.len() {
        change(&|p| {
            p.faults.remove(n);
        });
    }
    change(&|p| p.engines.count = 1);
    change(&|p| p.run.updates = (p.run.updates - 1).max(p.run.warm_up + 1));
    change(&|p| p.rollout.groups_per_update = 1);
    change(&|p| p.rollout.group_size = (p.rollout.group_size - 1).max(2));
    change(&|p| p.run.mode = Mode::Sync);
    change(&|p| p.engines.model = Model::Curves);
    change(&|p| p.episode.turns = 1.0.into());
    change(&|p| p.rollout.refill = 0);
    change(&|p| p.rollout.over_sample = 0);
    change(&|p| p.rollout.no_signal = 0.0);
    change(&|p| p.rollout.longest_first = false);
    change(&|p| p.weights.drain = false);
    change(&|p| p.scoring.scorers = 1);
    change(&|p| p.tools.call_s = 0.1.into());
    change(&|p| p.tools.boot_s = 0.1.into());
    change(&|p| p.scoring.score_s = 0.1.into());
    out
}
