//! Curricula of recipes, in real runs: turns that grow, pools, dials, progress; the same after a kill.

use crate::resume::{done, end, killed_often, recipe, same};
use crate::{json_lines, run_ok, sinew, steps};
use serde_json::Value;
use std::path::Path;

/// The lines of a listing of a run as JSON.
fn listed(run: &Path, purpose: &str) -> Vec<Value> {
    let mut list = sinew();
    list.arg("episodes")
        .arg(run)
        .args(["--purpose", purpose, "--json", "--limit", "10000"]);
    let text = run_ok(&mut list);
    json_lines(&text)
}

/// Most turns of the training episodes of a range of draws.
fn most(rows: &[Value], draws: std::ops::Range<u64>) -> u64 {
    let of = rows
        .iter()
        .filter(|r| draws.contains(&r["draw"].as_u64().unwrap()));
    of.map(|r| r["turns"].as_u64().unwrap()).max().unwrap()
}

/// Four groups a step, two steps a stage: what a stage allows, some episode of 64 uses, as hardly any policy
/// of so few steps is at its goal in the first turn.
#[test]
fn turns_grow_by_stages_and_held_out_episodes_have_all() {
    let ratio = "{ type = \"truncate\", low = 0.0, high = 2.0 }";
    for more in [
        &[("train.mode", "\"sync\"")][..],
        &[
            ("train.mode", "\"one_step_off\""),
            ("algorithm.correction", ratio),
        ],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let stages = [
            ("rollout.turn_stages", "[1, 3]"),
            ("rollout.turn_stage_steps", "2"),
        ];
        let recipe = recipe(dir.path(), 4, &[&stages, more].concat());
        let run = dir.path().join("run");
        done(&recipe, &run, &[]);
        let rows = listed(&run, "train");
        assert_eq!((most(&rows, 0..8), most(&rows, 8..16)), (1, 3), "{more:?}");
        let held_out = listed(&run, "eval-before");
        assert_eq!(most(&held_out, 0..u64::MAX), 4, "{more:?}");
    }
}

/// Tasks and turns are a function of what was committed: a run that is killed again and again ends with the
/// same weights, to the bit.
#[test]
fn killed_runs_draw_the_same_by_every_curriculum() {
    let sampling = ("tasks.sampling", "\"adaptive\"");
    for (seed, (name, more)) in [
        (
            "pools, stages",
            vec![
                sampling,
                ("tasks.signal", "\"pools\""),
                ("tasks.easy_share", "0.2"),
                ("rollout.turn_stages", "[2, 4]"),
                ("rollout.turn_stage_steps", "3"),
            ],
        ),
        (
            "mixed groups",
            vec![sampling, ("tasks.signal", "\"mixed\"")],
        ),
        (
            "a dial",
            vec![sampling, ("tasks.signal", "\"aim\""), ("tasks.gain", "1.5")],
        ),
        (
            "progress",
            vec![
                sampling,
                ("tasks.signal", "\"progress\""),
                ("tasks.window", "8"),
            ],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), 5, &more);
        let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
        let whole_end = end(&whole, &done(&recipe, &whole, &[]));
        let (last, kills) = killed_often(&recipe, &killed, 40 + seed as u64);
        same(
            &format!("{name}, {kills} kills"),
            &end(&killed, &last),
            &whole_end,
        );
        let shares = |run: &Path| -> Vec<Value> {
            steps(run)
                .iter()
                .map(|s| s["task_shares"].clone())
                .collect()
        };
        assert_eq!(shares(&killed), shares(&whole), "{name}");
        let sum = |s: &Value| {
            s.as_object()
                .unwrap()
                .values()
                .map(|p| p.as_f64().unwrap())
                .sum::<f64>()
        };
        for step in shares(&whole) {
            assert!((sum(&step) - 1.0).abs() < 1e-9, "{name}: {step}");
        }
    }
}

#[test]
fn settings_without_effect_are_refused() {
    for (more, part) in [
        (&[("tasks.window", "8")][..], "without tasks.sampling"),
        (
            &[("tasks.sampling", "\"adaptive\""), ("tasks.window", "8")],
            "tasks.signal = \"success\"",
        ),
        (
            &[
                ("tasks.sampling", "\"adaptive\""),
                ("tasks.signal", "\"pools\""),
                ("tasks.floor", "0.1"),
            ],
            "tasks.signal = \"pools\"",
        ),
        (
            &[("tasks.sampling", "\"adaptive\""), ("tasks.across", "true")],
            "without [[env]]",
        ),
        (
            &[
                ("tasks.sampling", "\"adaptive\""),
                ("tasks.signal", "\"mixed\""),
                ("rollout.group_size", "1"),
            ],
            "needs groups",
        ),
        (
            &[
                ("tasks.sampling", "\"adaptive\""),
                ("tasks.signal", "\"aim\""),
                ("tasks.target", "1.0"),
            ],
            "above 0, below 1",
        ),
        (
            &[("rollout.turn_stages", "[3, 2]")],
            "none less than the one before",
        ),
        (&[("rollout.turn_stages", "[9]")], "rollout.max_turns"),
        (
            &[("rollout.turn_stage_steps", "5")],
            "without rollout.turn_stages",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), 2, more);
        let checked = sinew().arg("check").arg(&recipe).output().unwrap();
        let told = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(
            !checked.status.success() && told.contains(part),
            "{more:?}: {told}"
        );
    }
}
