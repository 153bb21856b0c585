//! Plans that are handed out: each runs, and matches its documentation.

use crate::root;
use sinew_sim::{PRESETS, Plan, Report, advise, simulate, svg, text};
use std::path::Path;

/// A plan of a size that a test can run: few groups, few updates, coarse ids.
fn small(mut plan: Plan) -> Plan {
    plan.run.updates = plan.run.warm_up + 1;
    plan.rollout.groups_per_update = plan.rollout.groups_per_update.min(4);
    plan.rollout.group_size = plan.rollout.group_size.min(4);
    plan.engines.count = plan.engines.count.min(8);
    plan.engines.grain = 128;
    plan
}

fn run(plan: Plan) -> Report {
    let report = simulate(&plan, false).unwrap();
    assert!(report.throughput.trained_per_s > 0.0, "{}", report.name);
    let line = serde_json::json!(report);
    for key in ["utilization", "throughput", "staleness", "tail", "cost"] {
        assert!(line[key].is_object(), "{key}");
    }
    report
}

#[test]
fn every_preset_runs() {
    for (name, _) in PRESETS {
        let plan = Plan::parse(Path::new(name), &format!("preset = \"{name}\"\n")).unwrap();
        run(small(plan));
    }
}

/// A preset over a preset over a preset has the keys of all of them.
#[test]
fn presets_lie_over_each_other() {
    let plan =
        |name: &str| Plan::parse(Path::new(name), &format!("preset = \"{name}\"\n")).unwrap();
    let (first, second, third) = (
        plan("relax-colocate"),
        plan("relax-async"),
        plan("verl-async"),
    );
    assert_eq!(first.episode, third.episode);
    assert_eq!(second.trainer, third.trainer);
    assert_eq!(third.engines.kv_tokens, first.engines.kv_tokens);
}

#[test]
fn every_plan_of_the_recipes_runs_and_is_drawn() {
    let folder = root().join("recipes/sim");
    let mut count = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        // Those of papers are presets.
        if path.is_dir() {
            continue;
        }
        let plan = Plan::load(&path).unwrap();
        let report = run(small(plan));
        assert!(text(&report).contains("throughput"));
        assert!(svg(&report).unwrap().contains("</svg>"));
        count += 1;
    }
    assert!(count >= 3, "{count}");
}

#[test]
fn what_to_buy_next_is_what_is_short() {
    let mut plan = Plan::default();
    plan.run.updates = 6;
    plan.rollout.groups_per_update = 16;
    plan.rollout.group_size = 4;
    plan.engines.grain = 32;
    // One slow engine, and enough of everything else.
    plan.engines.count = 1;
    plan.engines.max_running = 4;
    plan.engines.pass_s = 0.05;
    let mut report = simulate(&plan, false).unwrap();
    advise(&plan, &mut report).unwrap();
    assert_eq!(report.next[0].what, "one engine more", "{:?}", report.next);
    assert!(report.next[0].gain > 1.3);
    // A slow trainer instead.
    plan.engines.count = 8;
    plan.engines.max_running = 256;
    plan.trainer.devices = 1.0;
    plan.trainer.tokens_per_s = 500.0;
    let mut report = simulate(&plan, false).unwrap();
    advise(&plan, &mut report).unwrap();
    assert_eq!(
        report.next[0].what, "one trainer device more",
        "{:?}",
        report.next
    );
}
