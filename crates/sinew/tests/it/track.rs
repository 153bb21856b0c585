//! `--track`: trackers by their own clients, by a client that records, and by clients that fail.

use crate::resume::{done, end, recipe, same, train};
use crate::serve::signal;
use crate::{Running, failure, json_lines, root, run_ok, sinew, wait_until};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The interpreter with the clients.
fn clients() -> PathBuf {
    let python = root().join(".cache/venv-signals/bin/python3");
    assert!(
        python.exists(),
        "scripts/setup.sh installs {}",
        python.display()
    );
    // The file may be a link: its folder decides which packages it has.
    std::path::absolute(python).unwrap()
}

/// Nothing leaves the folder.
fn offline<'a>(command: &'a mut Command, dir: &Path) -> &'a mut Command {
    command
        .env("HOME", dir)
        .env("WANDB_MODE", "offline")
        .env("CLEARML_OFFLINE_MODE", "1")
        .env("CLEARML_CACHE_DIR", dir.join("clearml"))
        .env("MLFLOW_ALLOW_FILE_STORE", "true")
        .env("MLFLOW_TRACKING_URI", dir.join("mlflow"))
}

/// A run with clients of this folder: `wandb` records or refuses, `mlflow` hangs.
fn fake(recipe: &Path, run: &Path, names: &str, more: &[&str]) -> Command {
    faked(train(recipe, run, more), names)
}

fn faked(mut command: Command, names: &str) -> Command {
    let folder = root().join("crates/sinew/tests/it/trackers");
    command
        .args(["--track", names])
        .env("PYTHONPATH", std::path::absolute(folder).unwrap());
    command
}

#[test]
fn the_clients_of_trackers_read_every_number_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 3, &[("eval.every", "2")]);
    let run = dir.path().join("run");
    let python = clients();
    let mut command = train(&recipe, &run, &["--track-wait", "200"]);
    let names = "clearml,mlflow,tensorboard,wandb";
    command
        .args(["--track", names, "--track-python"])
        .arg(&python);
    run_ok(offline(&mut command, dir.path()));
    let tests = root().join("python/tests/trackers.py");
    let mut command = Command::new(python);
    let source = root().join("python/src").canonicalize().unwrap();
    command.current_dir(dir.path()).env("PYTHONPATH", source);
    command.arg(tests.canonicalize().unwrap()).arg(&run);
    run_ok(offline(&mut command, dir.path()));
}

#[test]
fn a_killed_run_is_one_run_of_its_tracker_when_it_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 80, &[]);
    let (run, record) = (dir.path().join("run"), dir.path().join("record"));
    let lines = || -> Vec<Value> {
        let text = std::fs::read_to_string(&record).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|l| l.ends_with('\n'));
        whole.map(|l| serde_json::from_str(l).unwrap()).collect()
    };
    let wait_for = |key: &str| wait_until(key, || lines().iter().any(|l| l.get(key).is_some()));
    let mut command = fake(&recipe, &run, "wandb", &[]);
    command.env("RECORD", &record).stdout(Stdio::null());
    let mut child = Running(command.stderr(Stdio::piped()).spawn().unwrap());
    // It stands still while the client starts, which on a slow machine takes longer than the run.
    wait_until("the first step", || {
        std::fs::read_to_string(run.join("metrics.jsonl")).is_ok_and(|text| text.contains('\n'))
    });
    signal(child.id(), "STOP");
    wait_for("row");
    child.kill();
    assert!(
        !child.wait().unwrap().success(),
        "it ended before it was killed"
    );
    // Nobody waits for the process that follows: it sees the end by itself.
    wait_for("end");
    run_ok(fake(&recipe, &run, "wandb", &["--resume"]).env("RECORD", &record));
    let lines = lines();
    let all = |key: &str| -> Vec<&Value> { lines.iter().filter_map(|l| l.get(key)).collect() };
    let ids = all("id");
    assert!(ids.len() == 2 && ids[0] == ids[1], "{ids:?}");
    assert_eq!(all("name"), ["tiny", "tiny"]);
    assert_eq!(all("end"), [1, 0]);
    assert!(all("why")[0].as_str().unwrap().starts_with("killed; "));
    let rows = all("row");
    let numbers = |key: &str| -> Vec<u64> {
        let found = rows.iter().filter_map(|row| row[key].as_f64());
        found.map(|n| n as u64).collect()
    };
    let steps: Vec<u64> = (1..=80).collect();
    let trained = rows
        .iter()
        .filter(|row| row.get("rollout/reward").is_some());
    let trained: Vec<u64> = trained
        .map(|row| row["step"].as_f64().unwrap() as u64)
        .collect();
    assert_eq!(trained, steps, "each step is there once");
    assert_eq!(numbers("held_out/number"), [1, 2]);
    let files = all("file");
    assert_eq!(files[files.len() - 2..], ["recipe.toml", "report.html"]);
}

#[test]
fn a_measurement_without_training_is_tracked() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let record = dir.path().join("record");
    let mut command = sinew();
    command.arg("eval").arg(&recipe).arg("--run-dir");
    command.arg(dir.path().join("run"));
    run_ok(faked(command, "wandb").env("RECORD", &record));
    let text = std::fs::read_to_string(record).unwrap();
    let lines = json_lines(&text).into_iter();
    let rows: Vec<Value> = lines.filter(|l: &Value| l.get("row").is_some()).collect();
    assert!(
        rows.len() == 1 && rows[0]["row"]["held_out/number"] == 1.0,
        "{text}"
    );
}

#[test]
fn trackers_that_fail_and_hang_change_nothing_of_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let (plain, run) = (dir.path().join("plain"), dir.path().join("run"));
    let expected = done(&recipe, &plain, &[]);
    let tracked = |run: &Path, names: &str, wait_s: &str| {
        let mut command = fake(&recipe, run, names, &["--track-wait", wait_s]);
        let output = command.output().unwrap();
        let last = crate::last_line(&output);
        same("run", &end(&plain, &expected), &end(run, &last));
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!said.contains("secret"), "{said}");
        said
    };
    let said = tracked(&run, "wandb,mlflow", "2");
    let late =
        "wandb,mlflow did not take all in 2 s after the end of the run: `python3 -m sinew.track";
    assert!(said.contains(late), "{said}");
    // The client that refuses ends with the run, so that nothing waits for all of this time.
    let said = tracked(&dir.path().join("refused"), "wandb", "200");
    let refused = "track: wandb: OSError: no route to https://tracker.example/\n";
    assert!(said.contains(refused), "{said}");
}

#[test]
fn unknown_trackers_and_missing_clients_are_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let run = dir.path().join("run");
    // A mere folder of that name is not a client.
    std::fs::create_dir(dir.path().join("wandb")).unwrap();
    // An interpreter without packages.
    let bare = dir.path().join("bare/bin/python3");
    let mut venv = Command::new("python3");
    run_ok(
        venv.args(["-m", "venv", "--without-pip"])
            .arg(dir.path().join("bare")),
    );
    let refused = |names: &str, python: &str, code: i32| {
        let mut command = train(&recipe, &run, &["--track", names, "--track-python", python]);
        command.current_dir(dir.path()).env_remove("PYTHONPATH");
        let why = failure(&command.output().unwrap(), code);
        assert!(!run.exists(), "{names} left a run folder");
        why
    };
    let why = refused("wanb", "python3", 2);
    let allowed =
        "--track wanb: there is no tracker 'wanb': allowed: clearml, mlflow, tensorboard, wandb";
    assert!(why.contains(allowed), "{why}");
    let bare = bare.to_str().unwrap();
    let why = refused("tensorboard,wandb", bare, 3);
    assert!(why.contains("has no package tensorboard"), "{why}");
    let why = refused("wandb", bare, 3);
    assert!(
        why.contains("-m pip install wandb (the extra sinew[track]"),
        "{why}"
    );
    let why = refused("wandb", "no-such-python", 3);
    assert!(why.contains("--track-python = \"no-such-python\""), "{why}");
    let mut alone = sinew();
    alone.args(["eval", "recipes/tiny.toml", "--track-wait", "3"]);
    assert!(failure(&alone.output().unwrap(), 2).contains("--track <NAMES>"));
}
