//! Task folders of Harbor without containers: the project of `sinew init`, and what does not pass.

use crate::{failure, last_line, run_ok, sinew};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Output;

fn run(folder: &Path, args: &[&str]) -> Output {
    sinew().current_dir(folder).args(args).output().unwrap()
}

/// The checked tasks of a report by their names.
fn checked<'a>(report: &'a Value, name: &str) -> &'a Value {
    let tasks = report["tasks"].as_array().unwrap();
    tasks.iter().find(|t| t["task"] == name).unwrap()
}

#[test]
fn tasks_of_init_are_solved_by_their_solutions_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut init = sinew();
    let args = ["init", "mine", "--start", "harbor"];
    let told = run_ok(init.current_dir(dir.path()).args(args));
    assert!(told.contains("sinew env check tasks --all"), "{told}");
    let mine = dir.path().join("mine");
    let args = [
        "env",
        "check",
        "tasks",
        "--all",
        "--sessions",
        "2",
        "--json",
    ];
    let report = last_line(&run(&mine, &args));
    assert_eq!(report["passed"], 2);
    assert_eq!(report["failed"], 0);
    assert_eq!(report["level"], "process");
    let count = checked(&report, "count-001");
    assert_eq!(count["oracle"], 1.0);
    assert_eq!(count["null"], 0.0);
    let told = run_ok(sinew().current_dir(&mine).args(["env", "check", "tasks"]));
    assert!(told.contains("2 of 2 tasks pass"), "{told}");
}

#[test]
fn tasks_that_pass_by_themselves_or_never_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let task = |name: &str, keys: &str, test: &str| {
        let folder = dir.path().join("tasks").join(name);
        for below in ["tests", "solution"] {
            fs::create_dir_all(folder.join(below)).unwrap();
        }
        fs::write(folder.join("task.toml"), keys).unwrap();
        fs::write(folder.join("instruction.md"), "Do it.\n").unwrap();
        fs::write(folder.join("tests/test.sh"), test).unwrap();
        fs::write(folder.join("solution/solve.sh"), "touch done\n").unwrap();
    };
    task("easy", "", "echo 1 >$VERIFIER_LOGS/reward.txt\n");
    task("broken", "", "exit 1\n");
    task("gpu", "[environment]\ngpus = 1\n", "true\n");
    let tests =
        "[ -f done ] && [ ! -e /tmp/solution ] && r=1 || r=0\necho $r >$VERIFIER_LOGS/reward.txt\n";
    task("good", "", tests);
    let output = run(dir.path(), &["env", "check", "tasks", "--all", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(report["passed"], 1);
    assert_eq!(report["failed"], 2);
    assert_eq!(checked(&report, "good")["passed"], true);
    let why = |name: &str| checked(&report, name)["why"].as_str().unwrap().to_owned();
    assert!(why("easy").contains("solved without any work"), "{text}");
    assert!(why("broken").contains("neither reward.txt"), "{text}");
    assert_eq!(checked(&report, "gpu")["skipped"], "accelerator");
    fs::write(
        dir.path().join("tasks/good/task.toml"),
        "[agent]\ntimeout_sec = 0\n",
    )
    .unwrap();
    let told = failure(&run(dir.path(), &["env", "check", "tasks"]), 2);
    assert!(
        told.contains("good/task.toml: agent.timeout_sec = 0"),
        "{told}"
    );
}
