//! Sub-commands in the form in which `sinew` hands them over.

use crate::{program, root};
use serde_json::Value;
use std::process::Command;

fn lab() -> Command {
    let mut command = Command::new(program());
    command.current_dir(root());
    command
}

#[test]
fn attacks_are_a_table_with_a_sum_and_one_object_a_case() {
    let attack = |args: &[&str]| {
        let mut sinew = lab();
        sinew
            .args(["sandbox", "attack", "--filter", "14"])
            .args(args);
        let output = sinew.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    for level in ["process", "wasm"] {
        let table = attack(&["--level", level]);
        let rows: Vec<Value> = attack(&["--level", level, "--json"])
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let (last, lines) = table
            .lines()
            .collect::<Vec<_>>()
            .split_last()
            .map(|(l, r)| (*l, r.to_vec()))
            .unwrap();
        assert_eq!(lines.len(), rows.len(), "{table}");
        for (line, row) in lines.iter().zip(&rows) {
            assert_eq!(row["level"], level);
            assert!(line.starts_with(row["outcome"].as_str().unwrap()), "{line}");
            assert!(line.contains(row["case"].as_str().unwrap()), "{line}");
        }
        let held = rows.iter().filter(|r| r["outcome"] == "held").count();
        assert!(held > 0, "{table}");
        assert!(
            last.starts_with(&format!("level {level}: {held} held, 0 escaped, ")),
            "{last}"
        );
    }
}

#[test]
fn wrong_input_is_refused_with_what_is_allowed() {
    for (args, hint) in [
        (
            &["sandbox", "attack", "--filter", "no such case"][..],
            "--filter",
        ),
        (&["sandbox", "bench", "--only", "speed"], "prewarmed"),
        (
            &["sandbox", "bench", "--level", "wasm", "--full"],
            "process level",
        ),
        (&["sandbox", "leaks", "--level", "chroot"], "podman"),
    ] {
        let output = lab().args(args).output().unwrap();
        let errors = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}: {errors}");
        assert!(errors.contains(hint), "{args:?}: {errors}");
    }
}

#[test]
fn latencies_are_rows_with_targets() {
    let mut bench = lab();
    bench.args(["sandbox", "bench", "--only", "fresh,creates", "--json"]);
    let output = bench.args(["--count", "20"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let row = |name: &str| rows.iter().find(|r| r["name"] == name).unwrap();
    assert!(row("process_python_fresh")["value"].as_f64().unwrap() > 0.0);
    assert_eq!(row("process_python_fresh")["target"], 5.0);
}
