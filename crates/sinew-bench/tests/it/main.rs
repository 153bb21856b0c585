//! Small runs of the benches: rows are there and well formed, and the proofs of a bench hold.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::Value;
use std::process::Command;

fn bench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinew-bench"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command
}

/// Rows that a bench prints.
fn rows(args: &[&str]) -> Vec<Value> {
    let done = bench().args(args).arg("--json").output().unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{errors}");
    let text = String::from_utf8(done.stdout).unwrap();
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.collect()
}

/// A short day: nothing grows, no token is lost, whatever agents do.
#[test]
fn a_soak_of_agents_loses_nothing() {
    let rows = rows(&["soak", "--turns", "3000"]);
    let missed: Vec<_> = rows.iter().filter(|r| r["met"] == false).collect();
    assert!(missed.is_empty(), "{missed:?}");
    // It has done what it is for.
    let value = |name: &str| {
        let row = rows.iter().find(|r| r["name"] == format!("soak.{name}"));
        row.unwrap_or_else(|| panic!("no {name}"))["value"]
            .as_f64()
            .unwrap()
    };
    assert_eq!(value("gateways"), 24.0);
    assert!(value("turns") >= 2500.0);
    for some in [
        "join_extend",
        "join_realign",
        "join_rollback",
        "join_fork",
        "recognized",
        "retries_coalesced",
        "clients_gone",
        "left_to_expire",
        "stored_tokens",
    ] {
        assert!(value(some) >= 5.0, "{some}: {rows:?}");
    }
    let limited = rows.iter().filter(|r| r["target"].is_number()).count();
    assert_eq!(limited, 9, "{rows:?}");
}

#[test]
fn wrong_input_is_refused_with_what_is_allowed() {
    for (args, hint) in [
        (&["compute", "--only", "speed"][..], "scaling"),
        (&["torch", "--only", "speed"], "overhead"),
        (&["torch", "--python", "/nowhere"], "no such file"),
        (&["env", "--env", "moon"], "household:Household"),
        (&["soak", "--turns", "1"], "--turns"),
        (&["pipeline", "--only", "speed"], "interleave"),
        (&["pipeline", "--longest-ms", "1"], "--shortest-ms"),
        (
            &["pipeline", "--only", "store", "--plot", "x.svg"],
            "overlap",
        ),
    ] {
        let output = bench().args(args).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(errors.contains(hint), "{args:?}: {errors}");
    }
}

/// Every part of the bench of the training loop, small: how fast it is, is not asked here.
#[test]
fn the_pipeline_is_measured_beside_ideal_schedules() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("timeline.svg");
    let small = "pipeline --rounds 1 --episodes 16 --sandboxes 8 --turns 2 --slots 16 --pass-ms 1 \
        --shortest-ms 1 --longest-ms 20 --steps 2 --rows 2000 --plot";
    let done = bench()
        .args(small.split_whitespace())
        .arg(&plot)
        .arg("--json")
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{errors}");
    let text = String::from_utf8(done.stdout).unwrap();
    let rows: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |part: &str| {
        let name = |r: &&Value| r["name"].as_str().unwrap().starts_with(part);
        rows.iter().filter(name).collect::<Vec<_>>()
    };
    for (part, count, targets) in [
        ("interleave: ", 3, 2),
        ("sandboxes", 3, 2),
        ("overlap: ", 9, 1),
        ("durable: ", 5, 3),
        ("store: ", 4, 2),
    ] {
        let rows = of(part);
        // A host that cannot isolate processes has one row with that reason.
        if part == "sandboxes" && rows[0]["why"].is_string() {
            continue;
        }
        assert_eq!(rows.len(), count, "{part}: {text}");
        for row in &rows {
            assert!(row["value"].as_f64().unwrap().is_finite(), "{row}");
            assert!(
                row["spread"].is_number() && row["unit"].is_string(),
                "{row}"
            );
            assert_eq!(row["target"].is_number(), row["met"].is_boolean(), "{row}");
        }
        let with = rows.iter().filter(|r| r["target"].is_number()).count();
        assert_eq!(with, targets, "{part}: {text}");
    }
    // No schedule uses more places than the ideal one, and both modes train the same number of episodes.
    for row in of("interleave: places") {
        assert!(row["ratio"].as_f64().unwrap() <= 1.0, "{row}");
    }
    let trained = of("overlap: trained");
    let episodes = |r: &Value| r["value"].as_f64().unwrap();
    assert!(trained.iter().all(|r| episodes(r) <= 64.0), "{trained:?}");
    let svg = std::fs::read_to_string(&plot).unwrap();
    for lane in ["sync: engine", "sync: tools", "async: trainer"] {
        assert!(svg.contains(lane), "{lane}");
    }
    let left = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name());
    let left: Vec<_> = left
        .filter(|n| n.to_string_lossy().starts_with("sinew-bench-"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// Steps of a native environment and of one in Python through the whole loop; how many, is not asked here.
#[test]
fn steps_are_measured_at_every_number_of_episodes() {
    let asked = "env --only steps --env tiny,memory:Memory --at-once 1,8";
    let rows = rows(&asked.split(' ').collect::<Vec<_>>());
    let names: Vec<&str> = rows.iter().map(|r| r["name"].as_str().unwrap()).collect();
    let of = |world: &str| names.iter().filter(|n| n.starts_with(world)).count();
    // Memory, two numbers of episodes, and for `tiny` the compared rows: its steps without the loop, and its
    // loop.
    assert_eq!((of("tiny: "), of("memory:Memory: ")), (5, 3), "{names:?}");
    for row in &rows {
        assert!(row["value"].as_f64().unwrap() >= 0.0, "{row}");
        assert_eq!(
            row["unit"] == "KiB",
            row["name"].as_str().unwrap().contains("memory of")
        );
    }
    // Rows of peers have the reason if there is no Python for the peers.
    for (name, peer) in [
        ("tiny: steps alone, without the loop", "Gymnasium"),
        ("tiny: loop of 64 at once, whole episodes", "verifiers"),
    ] {
        let row = rows.iter().find(|r| r["name"] == name).unwrap();
        assert_eq!((&row["met"], &row["peer"]), (&false.into(), &peer.into()));
    }
}
