//! Runs that were killed, torn or made longer end like one that was not: to the bit.

use crate::{Running, json_file, last_line, newest_checkpoint, sinew};
use serde_json::Value;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// `recipes/tiny.toml` with a smaller model, `more` typed over it.
pub(crate) fn recipe(dir: &Path, steps: u32, more: &[(&str, &str)]) -> PathBuf {
    let mut table: toml::Table = crate::small_tiny().parse().unwrap();
    let basics = format!(
        "model.d_model = 32\nmodel.heads = 2\nmodel.kv_heads = 1\nmodel.d_ff = 64\n\
         rollout.tasks_per_step = 4\nrollout.group_size = 8\n\
         train.steps = {steps}\ntrain.checkpoint_every = 2\neval.episodes_per_task = 2\n"
    );
    let more: Vec<String> = more.iter().map(|(k, v)| format!("{k} = {v}\n")).collect();
    for line in basics.lines().chain(more.iter().map(|l| l.trim())) {
        let (key, value) = line.split_once(" = ").unwrap();
        let value: toml::Table = format!("v = {value}").parse().unwrap();
        let (section, key) = key.split_once('.').unwrap();
        let section = table
            .entry(section)
            .or_insert_with(|| toml::Table::new().into());
        section
            .as_table_mut()
            .unwrap()
            .insert(key.into(), value["v"].clone());
    }
    let path = dir.join("recipe.toml");
    std::fs::write(&path, toml::to_string(&table).unwrap()).unwrap();
    path
}

pub(crate) fn train(recipe: &Path, run: &Path, more: &[&str]) -> Command {
    let mut command = sinew();
    command.arg("train").arg(recipe).arg("--json").args(more);
    command.arg("--run-dir").arg(run);
    command
}

/// A run that begins now and prints nothing.
pub(crate) fn start(recipe: &Path, run: &Path, more: &[&str]) -> Running {
    let mut command = train(recipe, run, more);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    Running(command.spawn().unwrap())
}

/// The option that resumes a run, if this file of its folder is there.
pub(crate) fn if_begun(file: &Path) -> &'static [&'static str] {
    if file.exists() { &["--resume"] } else { &[] }
}

pub(crate) fn done(recipe: &Path, run: &Path, more: &[&str]) -> Value {
    last_line(&train(recipe, run, more).output().unwrap())
}

/// Expected end of a run: every file of the last checkpoint that training made, and the measurements. Wall
/// times differ.
pub(crate) fn end(run: &Path, last: &Value) -> (Vec<(String, Vec<u8>)>, Value) {
    let mut files: Vec<(String, Vec<u8>)> = std::fs::read_dir(newest_checkpoint(run))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .map(|p| {
            let name = p.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(p).unwrap())
        })
        .collect();
    files.sort();
    let mut measured = last.clone();
    // Progress of episodes when a session was killed depends on the clock.
    for timed in ["wall_s", "waits", "resumed"] {
        measured.as_object_mut().unwrap().remove(timed);
    }
    // The gain is paired by task: it needs the episodes of the first measurement, which a store in memory or
    // a torn one lost.
    measured["eval"].as_object_mut().unwrap().remove("gain");
    (files, measured)
}

pub(crate) fn same(
    what: &str,
    a: &(Vec<(String, Vec<u8>)>, Value),
    b: &(Vec<(String, Vec<u8>)>, Value),
) {
    assert_eq!(a.1, b.1, "{what}");
    assert!(a.0.len() > 1, "{what}: weights and optimizer");
    for (a, b) in a.0.iter().zip(&b.0) {
        assert!(a == b, "{what}: {} differs", a.0);
    }
}

/// Kills the run again and again at instants that `seed` draws, until it comes to its end.
pub(crate) fn killed_often(recipe: &Path, run: &Path, mut seed: u64) -> (Value, u32) {
    let mut kills = 0;
    loop {
        let resume = if_begun(&run.join("recipe.toml"));
        if kills >= 6 {
            return (done(recipe, run, resume), kills);
        }
        let mut child = start(recipe, run, resume);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis(120 + (seed >> 33) % 500));
        child.kill();
        kills += 1;
    }
}

#[test]
fn killed_at_any_instant_a_run_ends_as_if_it_had_not_been() {
    for (seed, (name, more)) in [
        (
            "two updates a step, two processes",
            &[
                ("train.minibatches", "2"),
                ("train.data_parallel", "2"),
                ("train.schedule", "\"cosine\""),
                ("eval.every", "2"),
            ][..],
        ),
        (
            "adapters and a reference",
            &[
                ("train.lora", "{ rank = 4 }"),
                ("algorithm.kl", "{ coefficient = 0.01 }"),
            ],
        ),
        (
            "a critic, adaptive tasks",
            &[
                ("algorithm.type", "\"ppo\""),
                ("algorithm.truncated", "\"bootstrap\""),
                ("tasks.sampling", "\"adaptive\""),
                ("train.weight_decay", "0.1"),
            ],
        ),
        (
            "groups that are refilled",
            &[("algorithm.type", "\"dapo\""), ("rollout.group_size", "2")],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let dir = tempfile::tempdir().unwrap();
        let recipe = recipe(dir.path(), 6, more);
        let (whole, killed) = (dir.path().join("whole"), dir.path().join("killed"));
        let whole_end = end(&whole, &done(&recipe, &whole, &[]));
        let (last, kills) = killed_often(&recipe, &killed, seed as u64);
        same(
            &format!("{name}, {kills} kills"),
            &end(&killed, &last),
            &whole_end,
        );
        let measured = |run: &Path| -> Vec<Value> {
            let lines = json_file(run.join("evals.jsonl")).into_iter();
            lines
                .map(|v: Value| serde_json::json!([v["when"], v["step"], v["stats"]["success"]]))
                .collect()
        };
        assert_eq!(measured(&killed), measured(&whole), "{name}");
        let steps = json_file(killed.join("metrics.jsonl"));
        let refilled: u64 = steps.iter().map(|s| s["refilled"].as_u64().unwrap()).sum();
        assert_eq!(refilled > 0, name.contains("refilled"), "{name}");
        // Four groups of two are trained at most, however many were run.
        assert!(refilled == 0 || steps.iter().all(|s| s["rows"].as_u64().unwrap() <= 8));
    }
}

#[test]
fn killed_before_a_checkpoint_is_named_a_run_ends_with_the_same_names() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 3, &[]);
    let run = dir.path().join("run");
    let whole = end(&run, &done(&recipe, &run, &[]));
    let latest = run.join("checkpoints/LATEST");
    let names = |run: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(run.join("checkpoints")).unwrap();
        let mut names: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
        names.sort();
        names
    };
    let whole_names = names(&run);
    for named in [Some("step-00000002\n"), None] {
        match named {
            Some(before) => std::fs::write(&latest, before).unwrap(),
            None => std::fs::remove_file(&latest).unwrap(),
        }
        let last = done(&recipe, &run, &["--resume"]);
        same(
            "the folder is there, its name is not",
            &end(&run, &last),
            &whole,
        );
        assert_eq!(names(&run), whole_names);
        let named = std::fs::read_to_string(&latest).unwrap();
        assert_eq!(named, "step-00000003\n");
    }
}

/// Cuts the newest segment of a run's store.
fn tear(run: &Path, keep: impl Fn(u64) -> u64) {
    let segments = std::fs::read_dir(run.join("store/segments")).unwrap();
    let newest = segments.map(|e| e.unwrap().path()).max().unwrap();
    let length = std::fs::metadata(&newest).unwrap().len();
    let file = OpenOptions::new().write(true).open(&newest).unwrap();
    file.set_len(keep(length)).unwrap();
}

/// Takes the count of lost episodes out of how a run ended.
fn lost(end: &mut (Vec<(String, Vec<u8>)>, Value)) -> u64 {
    let lost = end.1["samples"]["lost"].take();
    lost.as_u64().unwrap()
}

#[test]
fn a_torn_store_costs_the_run_nothing_but_time() {
    let dir = tempfile::tempdir().unwrap();
    let short = recipe(dir.path(), 3, &[]);
    let run = dir.path().join("run");
    done(&short, &run, &[]);
    // The checkpoint of step 3 is removed: its episodes, and those of the steps after, are asked for again.
    assert!(newest_checkpoint(&run).ends_with("step-00000003"));
    let whole = dir.path().join("whole");
    let long = recipe(dir.path(), 5, &[]);
    let mut expected = end(&whole, &done(&long, &whole, &[]));
    assert_eq!(lost(&mut expected), 0);
    // Trained episodes that are lost are counted as gone; the others run again.
    for (name, keep, gone) in [
        ("the last byte", (|n| n - 1) as fn(u64) -> u64, false),
        ("half", |n| n / 2, true),
        ("all", |_| 0, true),
    ] {
        let torn = dir.path().join(name.replace(' ', "-"));
        let copied = Command::new("cp").arg("-r").arg(&run).arg(&torn).status();
        assert!(copied.unwrap().success());
        std::fs::remove_dir_all(torn.join("checkpoints/step-00000003")).unwrap();
        tear(&torn, keep);
        let resume = ["--resume", "--accept-loss"];
        let output = train(&long, &torn, &resume).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("torn write"), "{name}: {told}");
        let warned = told.contains("trained episodes are gone from the store");
        assert_eq!(warned, gone, "{name}: {told}");
        let mut ended = end(&torn, &last_line(&output));
        assert_eq!(lost(&mut ended) > 0, gone, "{name}");
        same(name, &ended, &expected);
    }
}

#[test]
fn a_store_whose_index_is_made_anew_without_its_tail_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    done(&recipe(dir.path(), 3, &[]), &run, &[]);
    tear(&run, |n| n / 2);
    remove_index(&run);
    let long = recipe(dir.path(), 5, &[]);
    let last = done(&long, &run, &["--resume", "--accept-loss"]);
    let whole = dir.path().join("whole");
    let mut ended = end(&run, &last);
    let mut expected = end(&whole, &done(&long, &whole, &[]));
    assert!(lost(&mut ended) > lost(&mut expected));
    same("rebuilt", &ended, &expected);
}

/// Files of a folder with their contents.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<_> = entries
        .map(|e| e.unwrap().path())
        .map(|p| (p.clone(), std::fs::read(p).unwrap()))
        .collect();
    files.sort();
    files
}

fn remove_index(run: &Path) {
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(run.join(format!("store/index.sqlite{suffix}")));
    }
}

#[test]
fn damage_in_the_middle_of_the_store_is_reported_and_refused_unless_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    done(&recipe(dir.path(), 3, &[]), &run, &[]);
    let listed = |run: &Path| {
        let mut command = sinew();
        command.args(["episodes", "--json", "--limit", "10000", "--run-dir"]);
        let text = command.arg(run).output().unwrap().stdout;
        String::from_utf8(text).unwrap().lines().count()
    };
    let before = listed(&run);
    remove_index(&run);
    let segments = run.join("store/segments");
    let (path, mut bytes) = files(&segments).pop().unwrap();
    bytes[2000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let damaged = files(&segments);
    let long = recipe(dir.path(), 5, &[]);
    for _ in 0..2 {
        let told = crate::failure(&train(&long, &run, &["--resume"]).output().unwrap(), 1);
        assert!(
            told.contains("cannot be read") && told.contains("--accept-loss"),
            "{told}"
        );
        assert_eq!(files(&segments), damaged, "nothing is cut off");
    }
    let accepted = train(&long, &run, &["--resume", "--accept-loss"])
        .output()
        .unwrap();
    let last = last_line(&accepted);
    let told = String::from_utf8_lossy(&accepted.stderr).into_owned();
    assert!(told.contains("cannot be read"), "{told}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    let whole = dir.path().join("whole");
    let expected = done(&long, &whole, &[]);
    assert_eq!(end(&run, &last).0, end(&whole, &expected).0);
    // The missing episodes are at most those of one commit.
    assert!(listed(&run) + 32 >= listed(&whole), "{before}");
    // It is not asked again.
    done(&recipe(dir.path(), 6, &[]), &run, &["--resume"]);
}

#[test]
fn a_run_with_a_damaged_index_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    done(&recipe(dir.path(), 3, &[]), &run, &[]);
    let index = run.join("store/index.sqlite");
    let mut bytes = std::fs::read(&index).unwrap();
    // Ids of episodes, wherever the index has them: some copies may lie in what it does not use.
    let ids = bytes.windows(5).enumerate();
    let ids: Vec<usize> = ids
        .filter(|(_, w)| *w == b"d0000")
        .map(|(i, _)| i)
        .collect();
    assert!(!ids.is_empty());
    for at in ids {
        bytes[at + 2] ^= 1;
    }
    std::fs::write(&index, bytes).unwrap();
    let reading = sinew().args(["episodes", "--run-dir"]).arg(&run).output();
    assert!(crate::failure(&reading.unwrap(), 1).contains("is damaged"));
    let long = recipe(dir.path(), 5, &[]);
    let resumed = train(&long, &run, &["--resume"]).output().unwrap();
    let told = String::from_utf8_lossy(&resumed.stderr).into_owned();
    assert!(told.contains("made anew from the segments"), "{told}");
    let whole = dir.path().join("whole");
    same(
        "a new index",
        &end(&run, &last_line(&resumed)),
        &end(&whole, &done(&long, &whole, &[])),
    );
}

#[test]
fn a_run_made_longer_is_measured_with_its_new_weights() {
    let dir = tempfile::tempdir().unwrap();
    for store in ["\"disk\"", "\"memory\""] {
        let more = [("store.type", store), ("eval.episodes_per_task", "8")];
        let run = dir.path().join(format!("run-{}", store.trim_matches('"')));
        let short = done(&recipe(dir.path(), 2, &more), &run, &[]);
        let long = recipe(dir.path(), 12, &more);
        let last = done(&long, &run, &["--resume"]);
        let whole = dir
            .path()
            .join(format!("whole-{}", store.trim_matches('"')));
        let expected = end(&whole, &done(&long, &whole, &[]));
        let mut ended = end(&run, &last);
        if store.contains("memory") {
            // Episodes that the first session stored are gone, and not counted.
            ended.1["samples"] = expected.1["samples"].clone();
        }
        same(store, &ended, &expected);
        assert_eq!(last["eval"]["before"], short["eval"]["before"]);
        assert_ne!(last["eval"]["after"], short["eval"]["after"]);
    }
}
