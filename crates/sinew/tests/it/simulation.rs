//! `sinew sim` as people use it: repeated seeds, and predictions of recorded runs.

use crate::resume::done;
use crate::{json_lines, root, run_ok, sinew, small_tiny};
use serde_json::Value;
use std::path::Path;

/// A seed that is printed is run again only by its number, event by event.
#[test]
fn a_seed_is_run_again() {
    let told = run_ok(sinew().args(["sim", "--seed", "7", "--json"]));
    let line: Value = serde_json::from_str(told.trim()).unwrap();
    assert_eq!(
        (&line["plan"], &line["holds"]),
        (&"seed-7".into(), &true.into())
    );
    let events = || run_ok(sinew().args(["sim", "--seed", "7", "--events"]));
    let first = events();
    assert!(first.lines().count() > 20 && first == events(), "{first}");
    let output = sinew().args(["sim", "large", "--events"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

/// The plan of a run is its recipe's and its store's, and what it costs is what it recorded.
#[test]
fn a_recorded_run_is_predicted() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("recorded");
    let recipe = dir.path().join("recorded.toml");
    let text = small_tiny().replacen("steps = 60", "steps = 6", 1);
    std::fs::write(&recipe, text).unwrap();
    done(&recipe, &run, &[]);
    let told = run_ok(sinew().args(["sim", "--json", "--calibrate"]).arg(&run));
    let lines = json_lines(&told);
    let [one, all] = &lines[..] else {
        panic!("{told}");
    };
    assert_eq!(
        (&one["run"], &one["mode"]),
        (&"recorded".into(), &"sync".into())
    );
    assert_eq!(
        (&one["groups"], &one["group_size"]),
        (&8.into(), &16.into())
    );
    // Machines are shared: how near it is, is measured, not tested.
    for key in ["measured_s", "own_s"] {
        assert!(one[key].as_f64().unwrap() > 0.0, "{key}: {one}");
    }
    assert!(one["others_s"].is_null());
    assert_eq!(all["runs"], 1);
    assert!(all["median_error"].as_f64().is_some());
    held_against_its_plan(dir.path(), &recipe, &run);
    let missing = sinew()
        .args(["sim", "--calibrate", "no-such-run"])
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("holds no stored run"));
    assert!(
        root()
            .join("recipes/sim/published/areal-sync.toml")
            .exists()
    );
}

/// The times of a run become those of its recipe's plan, which is held against the run.
fn held_against_its_plan(dir: &Path, recipe: &Path, run: &Path) {
    let times = dir.join("times.toml");
    let mut write = sinew();
    write.args(["sim", "--json", "--calibrate"]).arg(run);
    run_ok(write.arg("--write").arg(&times));
    let text = std::fs::read_to_string(&times).unwrap();
    assert!(
        text.contains("pass_s") && !text.contains("[hops]"),
        "{text}"
    );
    let mut plan = sinew();
    plan.arg("sim").arg(recipe).arg("--calibration").arg(&times);
    plan.args(["--json", "--no-advice", "--updates", "6", "--against"]);
    let told = run_ok(plan.arg(run));
    let line: Value = serde_json::from_str(told.trim()).unwrap();
    let row = &line["against"]["rows"][0];
    for key in ["measured", "predicted"] {
        assert!(row[key].as_f64().unwrap() > 0.0, "{key}: {line}");
    }
    assert_eq!(line["plan"]["rollout"]["groups_per_update"], 8);
    assert_eq!(line["assumed"].as_array().unwrap().len(), 0, "{line}");
}

/// `[launch]` of a recipe becomes roles; without measured times what is assumed is said.
#[test]
fn a_recipe_is_planned_as_it_is_launched() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("launched.toml");
    let launch = "[launch]\n[launch.rollout]\ncount = 2\nmin = 1\nmax = 4\npreemptible = true\nprice_per_hour = 0.5\n\
                  [launch.autoscale]\nqueue = 0.25\n";
    std::fs::write(&recipe, format!("{}\n{launch}", small_tiny())).unwrap();
    let mut plan = sinew();
    plan.arg("sim").arg(&recipe);
    plan.args(["--json", "--updates", "3", "--preempt-s", "900"]);
    let told = run_ok(&mut plan);
    let line: Value = serde_json::from_str(told.trim()).unwrap();
    let role = &line["plan"]["role"][0];
    assert_eq!(
        (
            &role["kind"],
            &role["count"],
            &role["max"],
            &role["with_engine"]
        ),
        (&"rollout".into(), &2.into(), &4.into(), &true.into())
    );
    assert_eq!(role["preemptible"]["mean_s"], 900.0);
    let sizes = line["sizes"].as_array().unwrap();
    assert_eq!(sizes.len(), 4, "{line}");
    assert!(line["bottleneck"][0].is_string());
    let assumed = line["assumed"].to_string();
    assert!(
        assumed.contains("900") && assumed.contains("defaults of a plan"),
        "{assumed}"
    );
    let text = run_ok(sinew().arg("sim").arg(&recipe).args(["--updates", "3"]));
    for word in ["bottleneck", "assumed", "of capacity"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    // A plan says itself what a recipe cannot.
    let plan = root().join("recipes/sim/spot.toml");
    let output = sinew()
        .arg("sim")
        .arg(&plan)
        .args(["--latency-ms", "3"])
        .output();
    let output = output.unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("[[link]]"));
}
