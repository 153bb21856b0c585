//! Runs that cannot reach their goal: they report it, stop where they can be resumed, and end with a separate
//! exit code.

use crate::resume::{done, end, recipe, same, train};
use crate::serve::signal;
use crate::{failure, json_lines, last_object, newest_checkpoint, root, sinew};
use serde_json::Value;
use sinew_store::{Filter, StoreReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

fn lines(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Ids of the training episodes that a run's store holds.
fn stored(run: &Path) -> Vec<String> {
    let mut command = sinew();
    command.args([
        "episodes",
        "--purpose",
        "train",
        "--limit",
        "10000",
        "--json",
    ]);
    let output = command.arg("--run-dir").arg(run).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let id = |e: &Value| e["episode"].as_str().unwrap().to_owned();
    json_lines(&text).iter().map(id).collect()
}

/// Waits until `ready`, while the run is at work.
fn wait(child: &mut Child, what: &str, ready: impl Fn() -> bool) {
    let begun = Instant::now();
    while !ready() {
        assert!(child.try_wait().unwrap().is_none(), "{what}: it has ended");
        assert!(begun.elapsed() < Duration::from_secs(240), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_model_that_diverges_ends_its_run_by_name_and_its_episodes_are_run_again() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = recipe(
        dir.path(),
        40,
        &[
            ("train.lora", "{ rank = 4, alpha = 1e30 }"),
            ("train.checkpoint_every", "1"),
        ],
    );
    let output = train(&recipe, &run, &[]).output().unwrap();
    let errors = failure(&output, 1);
    for needle in ["the run was stopped", "the model has diverged", "--resume"] {
        assert!(errors.contains(needle), "{needle}: {errors}");
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("{\"warning\":"), "it is said while it runs");
    let steps = lines(&run.join("metrics.jsonl")).len();
    assert!(steps < 12, "{steps} steps");
    assert!(stored(&run).iter().all(|e| !e.contains("-r")));

    failure(&train(&recipe, &run, &["--resume"]).output().unwrap(), 1);
    let again = stored(&run).iter().filter(|e| e.ends_with("-r1")).count();
    assert!(again > 0, "failed episodes are run again");
}

#[test]
fn a_run_that_trains_no_token_says_so_and_ends_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    // So cold that all episodes of a group are one, and their rewards equal.
    let recipe = recipe(dir.path(), 6, &[("rollout.temperature", "0.001")]);
    let output = train(&recipe, &run, &[]).output().unwrap();
    let errors = failure(&output, 1);
    for needle in [
        "nothing was trained in 5 steps",
        "the run trained no token",
        "equal rewards in the group",
    ] {
        assert!(errors.contains(needle), "{needle}: {errors}");
    }
    let last = last_object(&output);
    let trouble = last["trouble"][0].as_str().unwrap();
    assert!(trouble.contains("trained no token"), "{last}");
    assert_eq!(last["tokens"]["trained_once"], 0, "{last}");
    let report = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("100.0 %"), "all episodes were left out");
}

#[test]
fn trained_episodes_that_are_gone_are_counted_and_decide_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let first = done(&recipe(dir.path(), 3, &[]), &run, &[]);
    let trained = &first["samples"]["trained"];
    assert!(trained.as_u64().unwrap() > 0, "{first}");
    std::fs::remove_dir_all(run.join("store")).unwrap();
    let accepted = dir.path().join("accepted");
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .args([&run, &accepted])
        .status();
    assert!(copied.unwrap().success());

    let longer = recipe(dir.path(), 4, &[]);
    let output = train(&longer, &run, &["--resume"]).output().unwrap();
    let errors = failure(&output, 1);
    let gone = format!("{trained} trained episodes are gone from the store");
    assert_eq!(
        errors.matches(&gone).count(),
        2,
        "at once and at the end: {errors}"
    );
    assert_eq!(last_object(&output)["samples"]["lost"], *trained);

    let last = done(&longer, &accepted, &["--resume", "--accept-loss"]);
    assert_eq!(last["samples"]["lost"], *trained, "counted all the same");
    // It is found once, and counted from then on.
    let last = done(&recipe(dir.path(), 5, &[]), &run, &["--resume"]);
    assert_eq!(last["samples"]["lost"], *trained);
}

#[test]
fn a_recipe_that_was_changed_is_refused_until_the_change_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    done(&recipe(dir.path(), 2, &[]), &run, &[]);
    let own = run.join("recipe.toml");
    let text = std::fs::read_to_string(&own).unwrap();
    let edited = text
        .replace("seed = 0", "seed = 5")
        .replace("learning_rate = 0.003", "learning_rate = 0.001")
        .replace("steps = 2", "steps = 3");
    assert_ne!(text, edited);
    std::fs::write(&own, &edited).unwrap();
    let refused = |more: &[&str]| {
        let resumed = [&["--resume"], more].concat();
        failure(&train(&own, &run, &resumed).output().unwrap(), 2)
    };
    let errors = refused(&[]);
    for needle in [
        "seed: 0 became 5",
        "train.learning_rate: 0.003 became 0.001",
        "--allow-change seed --allow-change train.learning_rate",
    ] {
        assert!(errors.contains(needle), "{needle}: {errors}");
    }
    let errors = refused(&["--allow-change", "seed"]);
    assert!(
        !errors.contains("seed:") && errors.contains("learning_rate"),
        "{errors}"
    );
    // The checkpoint has the settings that it was trained with, whatever lies next to it.
    std::fs::copy(&own, run.join("began.toml")).unwrap();
    assert!(refused(&[]).contains("seed: 0 became 5"));
    let allowed = [
        "--resume",
        "--allow-change",
        "seed",
        "--allow-change",
        "train",
    ];
    done(&own, &run, &allowed);
    done(&own, &run, &["--resume"]);
    let state = std::fs::read(newest_checkpoint(&run).join("state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    assert_eq!(state["commit"]["cursor"]["step"], 3);
}

#[test]
fn records_that_cannot_be_read_are_written_again_as_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let short = done(&recipe(dir.path(), 4, &[]), &run, &[]);
    let path = run.join("metrics.jsonl");
    let written = lines(&path);
    let mut damaged = written.clone();
    damaged[1] = "{\"step\": 2, \"wall_s\": oops".into();
    std::fs::write(&path, damaged.join("\n") + "\n").unwrap();
    let longer = recipe(dir.path(), 5, &[]);
    let output = train(&longer, &run, &["--resume"]).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        errors.contains("1 lines could not be read; 1 records"),
        "{errors}"
    );
    // Times that end after the commit that holds the record.
    let timeless = |line: &String| {
        let mut record: Value = serde_json::from_str(line).unwrap();
        record["checkpoint_s"] = Value::Null;
        record["waits"] = Value::Null;
        record
    };
    let now = lines(&path);
    let (rebuilt, whole): (Vec<_>, Vec<_>) = (0..4).partition(|&i| i == 1);
    assert!(whole.iter().all(|&i| now[i] == written[i]), "to the bit");
    assert!(
        rebuilt
            .iter()
            .all(|&i| timeless(&now[i]) == timeless(&written[i]))
    );
    let sampled = |last: &Value| last["tokens"]["sampled"].as_u64().unwrap();
    assert!(sampled(&last_object(&output)) > sampled(&short));
}

#[test]
fn a_terminal_that_goes_leaves_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let recipe = recipe(dir.path(), 1000, &[("train.checkpoint_every", "1000")]);
    let mut child = train(&recipe, &run, &[])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let metrics = run.join("metrics.jsonl");
    wait(&mut child, "two steps", || lines(&metrics).len() >= 2);
    assert!(!run.join("checkpoints/LATEST").exists());
    signal(child.id(), "HUP");
    let errors = failure(&child.wait_with_output().unwrap(), 130);
    assert!(errors.contains("stopping:"), "it answers at once: {errors}");
    let newest = format!("step-{:08}", lines(&metrics).len());
    assert!(newest_checkpoint(&run).ends_with(newest));
}

#[test]
fn a_run_is_interrupted_in_the_middle_of_a_training_step() {
    const EPISODES: usize = 20 * 32;
    let dir = tempfile::tempdir().unwrap();
    // One step of hundreds of micro-batches, and two updates.
    let recipe = recipe(
        dir.path(),
        1,
        &[
            ("model.d_model", "320"),
            ("model.heads", "10"),
            ("model.kv_heads", "2"),
            ("model.d_ff", "896"),
            ("rollout.tasks_per_step", "20"),
            ("rollout.group_size", "32"),
            ("train.micro_batch_tokens", "64"),
            ("train.minibatches", "2"),
        ],
    );
    let run = dir.path().join("run");
    let mut child = train(&recipe, &run, &[])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A look by the program takes as long as a part of the step.
    let filter = Filter {
        purpose: Some("train".into()),
        limit: EPISODES,
        ..Filter::default()
    };
    wait(&mut child, "the episodes of the step", || {
        let reader = StoreReader::open(&run.join("store"));
        reader.is_ok_and(|r| r.list(&filter).unwrap().episodes.len() == EPISODES)
    });
    signal(child.id(), "INT");
    let errors = failure(&child.wait_with_output().unwrap(), 130);
    assert!(
        errors.contains("stopping:") && errors.contains("--resume"),
        "{errors}"
    );
    assert_eq!(
        lines(&run.join("metrics.jsonl")).len(),
        0,
        "the step was not done"
    );
    assert!(!run.join("checkpoints/LATEST").exists(), "of no whole step");
    let whole = dir.path().join("whole");
    let expected = end(&whole, &done(&recipe, &whole, &[]));
    same(
        "resumed",
        &end(&run, &done(&recipe, &run, &["--resume"])),
        &expected,
    );
}

#[test]
fn a_limit_of_the_size_of_files_is_an_error_with_a_name() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let more = [
        ("model.d_model", "256"),
        ("model.d_ff", "512"),
        ("train.checkpoint_every", "1"),
    ];
    let recipe = recipe(dir.path(), 4, &more);
    let mut command = std::process::Command::new("sh");
    // 4 MiB, in blocks of 512 bytes: less than a checkpoint, more than what is written before.
    command.args(["-c", "ulimit -f 8192; exec \"$0\" \"$@\""]);
    command.arg(env!("CARGO_BIN_EXE_sinew")).arg("train");
    command.arg(&recipe).arg("--run-dir").arg(&run);
    let errors = failure(&command.current_dir(root()).output().unwrap(), 1);
    assert!(errors.contains("File too large"), "{errors}");
}
