//! Runs whose episodes workers run: real processes on this host, killed during the test.

use crate::first::free_address;
use crate::live::{self, letters};
use crate::overlap::count;
use crate::queue::until;
use crate::resume::{done, end, recipe};
use crate::serve::signal;
use crate::{Running, failure, sinew};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A run that listens for workers. It is killed when the test is over.
pub(crate) struct Owner {
    child: Running,
    pub(crate) url: String,
    run: PathBuf,
    lines: JoinHandle<Vec<Value>>,
}

impl Owner {
    /// Starts a run at an address, and waits until workers may come.
    fn start(recipe: &Path, run: &Path, at: &str, more: &[&str]) -> Self {
        Self::start_as(sinew(), recipe, run, at, more)
    }

    /// The same with a command that runs the program somewhere.
    pub(crate) fn start_as(
        mut command: Command,
        recipe: &Path,
        run: &Path,
        at: &str,
        more: &[&str],
    ) -> Self {
        command
            .arg("train")
            .arg(recipe)
            .args(["--json", "--control", at]);
        command.arg("--run-dir").arg(run).args(more);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let url = loop {
            let line = lines.next().expect("it ended first").unwrap();
            let value: Value = serde_json::from_str(&line).unwrap();
            if let Some(url) = value["control"]["url"].as_str() {
                break url.to_owned();
            }
        };
        let read = move || {
            let values = lines.map_while(Result::ok);
            values
                .map(|line| serde_json::from_str(&line).unwrap())
                .collect()
        };
        Self {
            child: Running(child),
            url,
            run: run.to_owned(),
            lines: std::thread::spawn(read),
        }
    }

    /// A worker of this run that has joined, or has done more.
    fn worker(&self, more: &[&str], wanted: impl Fn(&Value) -> bool) -> Running {
        self.worker_as(sinew(), &self.run.with_extension("weights"), more, wanted)
    }

    /// The same with a command that runs the program somewhere, and a folder for weights there.
    pub(crate) fn worker_as(
        &self,
        mut command: Command,
        weights: &Path,
        more: &[&str],
        wanted: impl Fn(&Value) -> bool,
    ) -> Running {
        command.args(["worker", "--json", "--slots", "8", "--owner", &self.url]);
        command
            .arg("--token-file")
            .arg(self.run.join("control-token"));
        command.arg("--weights-dir").arg(weights).args(more);
        until(&mut command, wanted).0
    }

    /// An engine of this run, which listens.
    fn engine(&self) -> Running {
        let mut command = sinew();
        command.args(["worker", "--json", "--role", "engine", "--owner", &self.url]);
        command.args(["--listen", "127.0.0.1:0", "--token-file"]);
        command.arg(self.run.join("control-token"));
        let weights = self.run.with_extension("weights");
        command.arg("--weights-dir").arg(weights);
        until(&mut command, |line| line["engine"].is_object()).0
    }

    fn token(&self) -> String {
        let token = std::fs::read_to_string(self.run.join("control-token")).unwrap();
        token.trim().to_owned()
    }

    /// The last line of a run that ends well.
    pub(crate) fn end(mut self) -> Value {
        let lines = self.lines.join().unwrap();
        assert!(self.child.wait().unwrap().success(), "{lines:?}");
        lines.last().unwrap().clone()
    }
}

fn joined(line: &Value) -> bool {
    line["worker"].is_object()
}

pub(crate) fn finished(line: &Value) -> bool {
    line["episodes"]["finished"].as_u64().is_some_and(|n| n > 0)
}

/// Starts a role while the only worker of a run stands still, so that the run cannot end before.
fn meanwhile(worker: &Running, start: impl FnOnce() -> Running) -> Running {
    signal(worker.id(), "STOP");
    let started = start();
    signal(worker.id(), "CONT");
    started
}

/// Both runs have the same weights and optimizer, to the bit, and the same results.
pub(crate) fn same_end(what: &str, a: (&Path, &Value), b: (&Path, &Value)) {
    let ((files, _), (others, _)) = (end(a.0, a.1), end(b.0, b.1));
    assert!(files.len() > 1, "{what}: weights and optimizer");
    for (a, b) in files.iter().zip(&others) {
        assert!(a == b, "{what}: {} differs", a.0);
    }
    assert_eq!(a.1["eval"]["after"], b.1["eval"]["after"], "{what}");
    assert_eq!(a.1["samples"], b.1["samples"], "{what}");
}

#[test]
fn workers_of_which_one_dies_give_the_run_of_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[("rollout.ticket_lease_s", "1.0")]);
    let whole = dir.path().join("whole");
    let single = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    let mut dies = owner.worker(&[], finished);
    let _stays = meanwhile(&dies, || owner.worker(&[], joined));
    dies.kill();
    let last = owner.end();
    same_end("workers", (&run, &last), (&whole, &single));
}

#[test]
fn an_owner_that_is_killed_continues_with_the_same_workers() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 6, &[("rollout.ticket_lease_s", "1.0")]);
    let whole = dir.path().join("whole");
    let single = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    let at = free_address();
    let owner = Owner::start(&recipe, &run, &at, &[]);
    let _worker = owner.worker(&[], finished);
    drop(owner);
    let owner = Owner::start(&recipe, &run, &at, &["--resume"]);
    let last = owner.end();
    same_end("resumed", (&run, &last), (&whole, &single));
    // It continues without workers as well; here nothing is left to train.
    let again = done(&recipe, &run, &["--resume"]);
    assert_eq!(count(&again, "trained_twice"), 0);
}

#[test]
fn an_async_run_keeps_its_bound_on_staleness_with_workers() {
    let dir = tempfile::tempdir().unwrap();
    let mode = [
        (
            "algorithm.correction",
            "{ type = \"truncate\", low = 0.0, high = 2.0 }",
        ),
        ("train.mode", "\"async\""),
        ("train.max_staleness", "2"),
        ("rollout.ticket_lease_s", "1.0"),
    ];
    let recipe = recipe(dir.path(), 8, &mode);
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    let mut dies = owner.worker(&[], finished);
    let _stays = meanwhile(&dies, || owner.worker(&[], joined));
    dies.kill();
    let last = owner.end();
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    assert!(count(&last, "trained") > 0);
    let behind = last["staleness"].as_object().unwrap();
    let oldest = behind.keys().map(|n| n.parse::<u64>().unwrap()).max();
    assert!(oldest <= Some(2), "{behind:?}");
}

#[test]
fn a_worker_that_is_asked_to_leave_hands_its_episodes_back() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let whole = dir.path().join("whole");
    let single = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    let mut leaves = owner.worker(&["--notice-s", "0"], finished);
    let _stays = meanwhile(&leaves, || owner.worker(&[], joined));
    assert!(leaves.terminate());
    let last = owner.end();
    same_end("left", (&run, &last), (&whole, &single));
}

#[test]
fn engines_of_the_registry_give_the_run_of_one_process() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let whole = dir.path().join("whole");
    let single = done(&recipe, &whole, &[]);
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    let _engines = [owner.engine(), owner.engine()];
    let _worker = owner.worker(&["--engines", "roles"], joined);
    let last = owner.end();
    same_end("engines", (&run, &last), (&whole, &single));
}

#[test]
fn an_engine_that_dies_costs_no_episode() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), 4, &[]);
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    // The worker waits for the first one.
    let worker = owner.worker(&["--engines", "roles"], joined);
    let mut dies = owner.engine();
    let _stays = meanwhile(&worker, || owner.engine());
    dies.kill();
    let last = owner.end();
    drop(worker);
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    assert!(count(&last, "trained") > 0);
}

/// A rollout recipe of live agents, whose gateways are those of the workers.
fn live_recipe(dir: &Path) -> PathBuf {
    let changes = [
        ("group_size = 8", "group_size = 4"),
        ("tasks_per_step = 6", "tasks_per_step = 2"),
        ("steps = 30", "steps = 6"),
        ("[rollout]\n", "[rollout]\nplace = \"workers\"\n"),
    ];
    live::recipe(dir, &changes)
}

#[test]
fn agents_that_open_rollouts_at_workers_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run");
    let owner = Owner::start(&live_recipe(dir.path()), &run, "127.0.0.1:0", &[]);
    let places = [free_address(), free_address()];
    let serve = |place: &String| owner.worker(&["--serve", place], joined);
    let _workers: Vec<Running> = places.iter().map(serve).collect();
    let stop = Arc::<AtomicBool>::default();
    let agent = |n: usize| {
        let (places, token, stop) = (places.clone(), owner.token(), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut finished = BTreeSet::new();
            for round in 0_usize.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                // The rollouts of a group are at both workers.
                let (place, group) = (&places[n % 2], format!("g{}-{round}", n / 4));
                match live::rollout(place, &token, &group, letters) {
                    Some(id) => drop(finished.insert(id)),
                    None => std::thread::sleep(Duration::from_millis(50)),
                }
            }
            finished
        })
    };
    let agents: Vec<JoinHandle<BTreeSet<String>>> = (0..8).map(agent).collect();
    let last = owner.end();
    stop.store(true, Ordering::SeqCst);
    let finished = agents.into_iter().map(|agent| agent.join().unwrap());
    let finished: BTreeSet<String> = finished.flatten().collect();
    assert_eq!(
        (count(&last, "lost"), count(&last, "trained_twice")),
        (0, 0)
    );
    assert!(count(&last, "trained") > 0 && finished.len() >= 6 * 8);
    let mut episodes = sinew();
    episodes.args([
        "episodes",
        "--purpose",
        "live",
        "--limit",
        "10000",
        "--json",
    ]);
    let stored = episodes.arg("--run-dir").arg(&run).output().unwrap();
    let stored = String::from_utf8(stored.stdout).unwrap();
    // Whatever an agent was answered for is in the store of the run.
    let lost: Vec<&String> = finished.iter().filter(|id| !stored.contains(*id)).collect();
    assert!(lost.is_empty(), "{lost:?}");
}

#[test]
fn live_agents_need_the_addresses_of_workers() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = live_recipe(dir.path());
    let mut train = sinew();
    train.arg("train").arg(&recipe).arg("--run-dir");
    train.arg(dir.path().join("both"));
    train.args(["--control", "127.0.0.1:0", "--serve", "127.0.0.1:0"]);
    let both = failure(&train.output().unwrap(), 2);
    assert!(both.contains("give each worker --serve"), "{both}");
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    let mut worker = sinew();
    worker.args(["worker", "--owner", &owner.url, "--token-file"]);
    let worker = worker.arg(run.join("control-token")).output().unwrap();
    let silent = failure(&worker, 2);
    assert!(silent.contains("--serve"), "{silent}");
}

#[test]
fn a_worker_with_other_rows_or_another_token_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.jsonl");
    let write = |answer: &str| {
        let row = |i| format!("{{\"question\": \"q{i}\", \"answer\": \"{answer}\"}}\n");
        std::fs::write(&rows, (0..4).map(row).collect::<String>()).unwrap();
    };
    write("a");
    let recipe = dir.path().join("rows.toml");
    let text = format!(
        "name = \"rows\"\nreward = \"exact(answer)\"\nalgorithm = {{ type = \"grpo\" }}\n\
         model = {{ type = \"scratch\", d_model = 32, layers = 1, heads = 2, kv_heads = 1, d_ff = 64 }}\n\
         tasks = {{ source = {rows:?}, prompt = \"{{{{ question }}}}\" }}\n\
         rollout = {{ tasks_per_step = 2, group_size = 2, max_turns = 1, max_turn_tokens = 8, max_context_tokens = 256 }}\n\
         train = {{ steps = 1, learning_rate = 1e-3, micro_batch_tokens = 1024 }}\n"
    );
    std::fs::write(&recipe, text).unwrap();
    let run = dir.path().join("run");
    let owner = Owner::start(&recipe, &run, "127.0.0.1:0", &[]);
    write("b");
    let token = run.join("control-token");
    let worker = |token: &Path| {
        let mut command = sinew();
        command.args(["worker", "--owner", &owner.url, "--token-file"]);
        command.arg(token).output().unwrap()
    };
    let other = failure(&worker(&token), 3);
    assert!(
        other.contains("tasks.rows") && other.contains("hint"),
        "{other}"
    );
    let wrong = dir.path().join("wrong");
    std::fs::write(&wrong, "another-token-of-the-tests").unwrap();
    let stranger = failure(&worker(&wrong), 3);
    assert!(stranger.contains("401"), "{stranger}");
}

#[test]
fn options_without_effect_and_roles_without_use_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "token-of-the-worker-tests").unwrap();
    let refused = |more: &[&str]| {
        let mut command = sinew();
        command.args(["worker", "--owner", "http://127.0.0.1:1", "--token-file"]);
        failure(&command.arg(&token).args(more).output().unwrap(), 2)
    };
    let trainer = refused(&["--role", "trainer"]);
    assert!(trainer.contains("[trainer] type = \"torch\""), "{trainer}");
    let slots = refused(&["--role", "scorer", "--slots", "4"]);
    assert!(
        slots.contains("--slots") && slots.contains("rollout"),
        "{slots}"
    );
    let engine = refused(&["--role", "engine"]);
    assert!(engine.contains("--listen"), "{engine}");
    let engines = refused(&["--role", "engine", "--engines", "own"]);
    assert!(
        engines.contains("--engines") && engines.contains("rollout"),
        "{engines}"
    );
    let recipe = recipe(dir.path(), 1, &[("rollout.place", "\"workers\"")]);
    let mut train = sinew();
    train.arg("train").arg(&recipe).arg("--run-dir");
    let single = train.arg(dir.path().join("run")).output().unwrap();
    let single = failure(&single, 2);
    assert!(single.contains("--control"), "{single}");
}
