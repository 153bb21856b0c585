//! The benches for real, small: rows are there and well formed, and what a bench proves holds.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use serde_json::Value;
use std::process::Command;

fn bench() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinew-bench"));
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    command
}

/// What a bench prints.
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
        (&["soak", "--turns", "1"], "--turns"),
    ] {
        let output = bench().args(args).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(errors.contains(hint), "{args:?}: {errors}");
    }
}
