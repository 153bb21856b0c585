//! `sinew sim` as people use it: repeated seeds, and predictions of recorded runs.

use crate::{last_line, root, run_ok, sinew, small_tiny};
use serde_json::Value;

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
    let mut train = sinew();
    train
        .arg("train")
        .arg(&recipe)
        .args(["--json", "--run-dir"]);
    last_line(&train.arg(&run).output().unwrap());
    let told = run_ok(sinew().args(["sim", "--json", "--calibrate"]).arg(&run));
    let lines: Vec<Value> = told
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
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
