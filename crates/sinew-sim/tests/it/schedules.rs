//! The whole system under seeded schedules with failures: invariants at every event.
//!
//! A seed that fails is printed with the smallest plan that still fails; `sinew sim FILE
//! --check --events` replays
//! it. The number of seeds is bounded for the tests of every commit; `sinew sim --search N` runs more.

use sinew_sim::{Bug, Fault, FaultKind, Mode, Model, Plan, find, random_plan, replay, simulate};
use std::path::Path;

/// Seeds of every test run: four parts, which run at the same time.
const PART: u64 = 2500;

/// Runs the seeds of a part.
fn holds(part: u64) {
    if let Some(failure) = find(part * PART..(part + 1) * PART, None) {
        let plan = toml::to_string(&failure.plan).unwrap();
        panic!("seed {}: {}\n{plan}", failure.seed, failure.violation);
    }
}

#[test]
fn every_invariant_holds_in_seeded_schedules_with_failures() {
    holds(0);
}

#[test]
fn every_invariant_holds_in_the_second_part_of_them() {
    holds(1);
}

#[test]
fn every_invariant_holds_in_the_third_part_of_them() {
    holds(2);
}

#[test]
fn every_invariant_holds_in_the_fourth_part_of_them() {
    holds(3);
}

/// A fault of the harness for every invariant: the check that never fails shows nothing.
#[test]
fn each_invariant_can_be_broken_and_its_plan_becomes_small() {
    for (bug, invariants) in Bug::ALL {
        let failure = find(0..300, Some(bug)).unwrap_or_else(|| panic!("{bug:?} is not found"));
        let found = failure.violation.invariant;
        assert!(
            invariants.contains(&found),
            "{bug:?}: {}",
            failure.violation
        );
        let before = random_plan(failure.seed);
        assert!(failure.plan.faults.len() <= before.faults.len());
        // The reduced plan is replayed from its text, and breaks the same invariant.
        let text = toml::to_string(&failure.plan).unwrap();
        let read = Plan::parse(Path::new("small.toml"), &text).unwrap();
        assert_eq!(replay(&read, Some(bug), None), Some(failure.violation));
        assert_eq!(
            replay(&read, None, None),
            None,
            "{bug:?}: the system itself holds"
        );
    }
}

#[test]
fn a_schedule_is_a_function_of_its_plan() {
    for seed in 0..20 {
        let plan = random_plan(seed);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        assert_eq!(
            replay(&plan, None, Some(&mut first)),
            replay(&plan, None, Some(&mut second))
        );
        assert!(first == second && !first.is_empty(), "seed {seed}");
    }
}

/// Small, without failures: figures that can be computed by hand.
#[test]
fn a_run_without_waits_takes_the_time_of_its_parts() {
    let mut plan = Plan::default();
    plan.run.updates = 5;
    plan.rollout.groups_per_update = 2;
    plan.rollout.group_size = 2;
    plan.episode.turns = 1.0.into();
    plan.episode.prompt_tokens = 10.0.into();
    plan.episode.turn_tokens = 100.0.into();
    plan.tools.boot_s = 1.0.into();
    plan.tools.call_s = 2.0.into();
    plan.scoring.score_s = 0.5.into();
    plan.engines.count = 1;
    plan.engines.pass_s = 0.01;
    plan.engines.row_s = 0.0;
    plan.trainer.fixed_s = 3.0;
    plan.trainer.tokens_per_s = 1e9;
    plan.weights.transfer_s = 0.25;
    plan.weights.load_s = 0.25;
    plan.store.commit_s = 0.0;
    let report = simulate(&plan, true).unwrap();
    // Boot 1, 100 passes of 10 ms, tool 2, score 0.5, update 3, weights 0.5.
    let step_s = report.tail.step_s.p50;
    assert!((step_s - 8.0).abs() < 0.1, "{step_s}");
    assert!((report.utilization.trainer - 3.0 / 8.0).abs() < 0.01);
    assert!((report.utilization.engines - 1.0 / 8.0).abs() < 0.01);
    assert_eq!(report.staleness.keys().collect::<Vec<_>>(), ["0"]);
    // An update takes as long as the slower side if both run at once.
    plan.run.mode = Mode::Async;
    plan.run.updates = 20;
    plan.run.warm_up = 5;
    let report = simulate(&plan, true).unwrap();
    assert!(report.tail.step_s.mean < 5.5, "{}", report.tail.step_s.mean);
    assert!(
        report.staleness.keys().all(|age| age == "0" || age == "1"),
        "{:?}",
        report.staleness
    );
}

/// Both models of an engine give the same result for a plan that fits both.
#[test]
fn curves_and_the_real_scheduler_agree() {
    let mut plan = Plan::default();
    plan.run.updates = 4;
    plan.rollout.groups_per_update = 8;
    plan.rollout.group_size = 4;
    plan.episode.turns = 2.0.into();
    plan.episode.prompt_tokens = 60.0.into();
    plan.episode.turn_tokens = 40.0.into();
    plan.episode.observation_tokens = 30.0.into();
    plan.episode.max_context_tokens = 1000;
    plan.engines.count = 2;
    plan.engines.kv_tokens = 8000;
    plan.engines.prefill_tokens_per_s = 5000.0;
    plan.engines.grain = 1;
    let curves = simulate(&plan, true).unwrap();
    plan.engines.model = Model::Scheduler;
    let passes = simulate(&plan, true).unwrap();
    let ratio = curves.throughput.updates_per_h / passes.throughput.updates_per_h;
    assert!((0.93..1.07).contains(&ratio), "{ratio}");
    let busy = curves.utilization.engines / passes.utilization.engines;
    assert!((0.8..1.2).contains(&busy), "{busy}");
}

#[test]
fn a_killed_run_goes_on_and_an_engine_that_is_down_is_left_out() {
    let mut plan = Plan::default();
    plan.run.mode = Mode::Async;
    plan.run.updates = 12;
    plan.run.checkpoint_every = 4;
    plan.rollout.groups_per_update = 4;
    let fault = |at_s, kind| Fault {
        at_s,
        kind,
        target: 1,
        for_s: 20.0,
        by: 1.0,
    };
    plan.faults = vec![
        fault(12.0, FaultKind::Kill),
        fault(60.0, FaultKind::EngineCrash),
        fault(90.0, FaultKind::Kill),
    ];
    let report = simulate(&plan, true).unwrap();
    assert!(report.sessions >= 2 && report.updates >= 12, "{report:?}");
}
