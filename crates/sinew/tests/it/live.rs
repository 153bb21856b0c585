//! `sinew train --serve`: agents that run already, and services that a recipe drives.

use crate::agents;
use crate::first::{free_address, free_port};
use crate::resume::train;
use crate::{Running, failure, last_line, root, sinew, steps, with_changes};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// A run that serves agents.
pub(crate) struct Run {
    pub(crate) child: Running,
    out: BufReader<ChildStdout>,
    pub(crate) address: String,
    pub(crate) token: String,
}

impl Run {
    /// Starts `sinew train` and reads its lines until the address for agents.
    pub(crate) fn start(recipe: &Path, dir: &Path, at: &str, more: &[&str]) -> Self {
        let mut child = train(recipe, dir, &[&["--serve", at], more].concat())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let serving = loop {
            let mut line = String::new();
            assert!(
                out.read_line(&mut line).unwrap() > 0,
                "it ended before it served"
            );
            let line: Value = serde_json::from_str(&line).unwrap();
            if !line["serving"].is_null() {
                break line["serving"].clone();
            }
        };
        let text = |field: &str| serving[field].as_str().unwrap().to_owned();
        let token = std::fs::read_to_string(text("token_file")).unwrap();
        Self {
            child: Running(child),
            out,
            address: text("url").strip_prefix("http://").unwrap().to_owned(),
            token: token.trim().to_owned(),
        }
    }

    /// Reads lines until so many steps were done.
    pub(crate) fn steps(&mut self, count: usize) {
        let mut seen = 0;
        while seen < count {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0, "it ended early");
            seen += usize::from(line.starts_with("{\"step\""));
        }
    }

    /// The last line of a run that ended well.
    pub(crate) fn end(mut self) -> Value {
        let lines = std::io::read_to_string(&mut self.out).unwrap();
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{lines}");
        serde_json::from_str(lines.lines().last().unwrap()).unwrap()
    }
}

/// Status and JSON of an answer; `None` if the server was not there, or went away.
pub(crate) fn send(
    method: &str,
    address: &str,
    path: &str,
    key: &str,
    body: &str,
) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(address).ok()?;
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    let (_, body) = answer.split_once("\r\n\r\n")?;
    Some((status, serde_json::from_str(body).ok()?))
}

/// Mean rewards of the first and of the last steps of a run.
fn rise(dir: &Path) -> (f64, f64) {
    let steps = steps(dir);
    let reward = |s: &Value| s["rollout"]["reward"].as_f64().unwrap();
    let mean = |s: &[Value]| s.iter().map(reward).sum::<f64>() / s.len() as f64;
    (mean(&steps[..3]), mean(&steps[steps.len() - 5..]))
}

fn rises(dir: &Path, last: &Value, by: f64) {
    let (first, end) = rise(dir);
    assert!(end > first + by, "{first} to {end}: {last}");
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
}

fn python(script: &str) -> Command {
    let mut command = Command::new(crate::python3());
    command
        .arg(root().join(script))
        .current_dir(root())
        .env("PYTHONPATH", root().join("python/src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env_remove("OPENAI_API_KEY");
    command
}

/// One client of the openai SDK, 48 users at a time, from the start of the run to its end.
#[test]
fn an_agent_that_runs_already_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let run = Run::start(
        &root().join("recipes/agent-live.toml"),
        &run_dir,
        "127.0.0.1:0",
        &[],
    );
    let url = format!("http://{}", run.address);
    let mut agent = python("examples/live_agent.py");
    agent
        .env("SINEW_URL", &url)
        .env("SINEW_TOKEN", &run.token)
        .env("OPENAI_BASE_URL", format!("{url}/v1"));
    let mut agent = Running(agent.spawn().unwrap());
    let last = run.end();
    assert!(agent.0.wait().unwrap().success());
    rises(&run_dir, &last, 0.2);
}

/// Starts the service of the examples, whose model is at a port of the loopback interface.
fn service(port: u16, model_port: u16) -> Running {
    let mut command = python("examples/service_agent.py");
    command.env("PORT", port.to_string()).env(
        "OPENAI_BASE_URL",
        format!("http://127.0.0.1:{model_port}/v1"),
    );
    let service = Running(command.spawn().unwrap());
    let begun = std::time::Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "the service does not listen"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    service
}

/// A copy of the recipe of services with the port of one, and with some of its text replaced.
fn service_recipe(dir: &Path, port: u16, changes: &[(&str, &str)]) -> PathBuf {
    let text = std::fs::read_to_string(root().join("recipes/agent-service.toml")).unwrap();
    let text = text.replace(":9000/", &format!(":{port}/"));
    let path = dir.join("service.toml");
    std::fs::write(&path, with_changes(text, changes)).unwrap();
    path
}

/// Tasks are posted to a service, whose one client of the openai SDK passes their keys.
#[test]
fn a_service_that_a_recipe_drives_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let (port, model_port) = (free_port(), free_port());
    let _service = service(port, model_port);
    let recipe = service_recipe(dir.path(), port, &[]);
    let at = format!("127.0.0.1:{model_port}");
    let last = Run::start(&recipe, &run_dir, &at, &[]).end();
    rises(&run_dir, &last, 0.2);
    let reward = |when: &str| last["eval"][when]["reward"].as_f64().unwrap();
    assert!(reward("after") > reward("before") + 0.2, "{last}");
}

/// A service whose calls go elsewhere, one that is not there, and one whose answer lacks the field.
#[test]
fn a_service_that_cannot_be_trained_is_told_so() {
    let dir = tempfile::tempdir().unwrap();
    let (port, model_port) = (free_port(), free_port());
    let ends = |recipe: &Path, name: &str| {
        let mut command = sinew();
        command
            .arg("train")
            .arg(recipe)
            .arg("--run-dir")
            .arg(dir.path().join(name));
        command.args(["--serve", &format!("127.0.0.1:{model_port}")]);
        failure(&command.output().unwrap(), 1)
    };
    let recipe = service_recipe(dir.path(), port, &[]);
    let told = ends(&recipe, "absent");
    assert!(told.contains("is the service running there"), "{told}");
    let _service = service(port, model_port);
    let recipe = service_recipe(dir.path(), port, &[("\"answer\"", "\"reply.text\"")]);
    let told = ends(&recipe, "field");
    assert!(
        told.contains("harness.output") && told.contains("reply.text"),
        "{told}"
    );
    let recipe = service_recipe(dir.path(), port, &[("{prompt}", "{promt}")]);
    let told = ends(&recipe, "body");
    assert!(
        told.contains("harness.body") && told.contains("topic"),
        "{told}"
    );
}

/// The author's function, called by Sinew in a sandbox.
#[test]
fn a_function_of_the_author_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let mut command = sinew();
    command.args([
        "train",
        "recipes/agent-function.toml",
        "--json",
        "--run-dir",
    ]);
    let last = last_line(&command.arg(&run_dir).output().unwrap());
    rises(&run_dir, &last, 0.2);
    let reward = |when: &str| last["eval"][when]["reward"].as_f64().unwrap();
    assert!(reward("after") > reward("before") + 0.2, "{last}");
}

/// The same function as a separate loop, which works for a run over HTTP until that ends.
#[test]
fn a_loop_on_another_host_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let recipe = root().join("recipes/agent-live.toml");
    let run = Run::start(&recipe, &run_dir, "127.0.0.1:0", &[]);
    let worker = python("examples/function_agent.py")
        .env("SINEW_URL", format!("http://{}", run.address))
        .env("SINEW_TOKEN", &run.token)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let last = run.end();
    let worker = worker.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&worker.stdout).into_owned();
    assert!(
        worker.status.success() && said.contains("rollouts"),
        "{said}"
    );
    rises(&run_dir, &last, 0.2);
}

/// Scores itself in every way that it finds, and ends badly where the answer is another than it should be.
const CLAIMS: &str = r#"
import json, os, sys, urllib.error, urllib.request
base, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def post(url, body):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as e:
        return e.code
said = {"model": "policy", "messages": [{"role": "user", "content": os.environ["SINEW_TASK"]}]}
assert post(base + "/chat/completions", said) == 200
trusted = "SINEW_REWARD_URL" in os.environ
url = os.environ.get("SINEW_REWARD_URL", base + "/reward")
code = post(url, {"reward": 1.0, "success": True})
if code != (200 if trusted else 403):
    sys.exit(f"the reward of its own was answered {code}")
rollout = base.split("/r/")[1].removesuffix("/v1")
for path in ["reward", "finish"]:
    code = post(base.split("/r/")[0] + f"/rollouts/{rollout}/{path}", {"reward": 1.0})
    if code != 401:
        sys.exit(f"the control API answered {code}")
if ("SINEW_TASK_DATA" in os.environ) != trusted:
    sys.exit("the solution is where it does not belong")
print(json.dumps({"reward": 0.5, "success": True, "rewards": [0.25], "metrics": {"claims": 1}}))
"#;

/// Means over the held-out episodes of a program that claims rewards.
fn claimed(more: &str) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("agent/claims.py");
    std::fs::create_dir(program.parent().unwrap()).unwrap();
    std::fs::write(&program, CLAIMS).unwrap();
    let text = std::fs::read_to_string(root().join("recipes/agent-tiny.toml")).unwrap();
    let shipped = "[\".cache/venv/bin/python3\", \"examples/chat_agent.py\"]\n";
    assert!(text.contains(shipped));
    let own = format!("[\"python3\", {:?}]\n{more}", program.display().to_string());
    let recipe = dir.path().join("recipe.toml");
    std::fs::write(&recipe, text.replace(shipped, &own)).unwrap();
    let mut command = sinew();
    command
        .arg("eval")
        .arg(&recipe)
        .args(["--json", "--run-dir"]);
    last_line(&command.arg(dir.path().join("run")).output().unwrap())["eval"].clone()
}

/// The environment scores an agent, whatever the code in the agent's sandbox claims.
#[test]
fn a_forged_reward_is_refused_unless_the_recipe_trusts_the_program() {
    let graded = claimed("");
    assert_eq!(graded["claims"], Value::Null, "{graded}");
    // Some letters of the claim are moves of this world.
    let success = graded["success"].as_f64().unwrap();
    assert!(
        success < 0.5 && graded["reward"].as_f64().unwrap() < 0.5,
        "{graded}"
    );
    let trusted = claimed("scored_by = \"agent\"\n");
    assert_eq!(
        (&trusted["success"], &trusted["claims"]),
        (&json!(1.0), &json!(1.0))
    );
    // The last words replace what was posted before; those of the turn are added.
    assert_eq!(trusted["reward"], json!(0.75), "{trusted}");
}

/// Prints before and after, and returns several lines; the reward of one task is not a reward at all.
const LINES: &str = r#"
import atexit
from openai import AsyncOpenAI

async def solve(task, model):
    client = AsyncOpenAI(**model.openai)
    asked = [{"role": "user", "content": task.prompt}]
    await client.chat.completions.create(model=model.name, messages=asked)
    print("working\non it", end="")
    atexit.register(print, "the end")
    return "first line\nsecond line\n"

async def huge(task, model):
    await solve(task, model)
    return 1e308
"#;

/// Means over the held-out episodes of a function of [`LINES`].
fn function(name: &str, scored_by: &str, more: &str) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("agent/lines.py");
    std::fs::create_dir(file.parent().unwrap()).unwrap();
    std::fs::write(&file, LINES).unwrap();
    let text = std::fs::read_to_string(root().join("recipes/agent-function.toml")).unwrap();
    let shipped = "examples/function_agent.py:solve\"";
    assert!(text.contains(shipped), "{text}");
    let own = format!("{}:{name}\", scored_by = \"{scored_by}\"", file.display());
    let recipe = dir.path().join("recipe.toml");
    std::fs::write(&recipe, text.replace(shipped, &own) + more).unwrap();
    let mut command = sinew();
    command
        .arg("eval")
        .arg(&recipe)
        .args(["--json", "--run-dir"]);
    command.arg(dir.path().join("run")).output().unwrap()
}

/// Own prints of a function do not matter, and an answer of several lines comes whole.
#[test]
fn the_answer_of_a_function_is_its_value_with_all_lines() {
    let reward = "\n[reward]\n'regex(\"(?s)^first line.second line\")' = 1.0\n";
    let output = function("solve", "environment", reward);
    let eval = &last_line(&output)["eval"];
    assert_eq!(eval["reward"], json!(1.0), "{eval}");
}

/// A reward that no sum could take is not a score, with the reason, and ends nothing.
#[test]
fn a_huge_reward_is_no_score_and_ends_no_run() {
    let output = function("huge", "agent", "");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{output:?}");
    assert!(told.contains("\"failed\":0,\"unscored\":9"), "{told}");
}

/// Agents as threads, which continue whatever happens to the server; they note its acknowledgements.
struct Agents {
    stop: Arc<AtomicBool>,
    finished: Arc<Mutex<BTreeSet<String>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Agents {
    fn start(address: &str, token: &str, count: usize, score: fn(&str) -> Option<f64>) -> Self {
        let group = |n: usize, round: usize| format!("g{}-{round}", n / 4);
        Self::grouped(address, token, count, score, group)
    }

    /// Runs agents; `group` names the group of each agent's round.
    fn grouped(
        address: &str,
        token: &str,
        count: usize,
        score: fn(&str) -> Option<f64>,
        group: fn(usize, usize) -> String,
    ) -> Self {
        let stop = Arc::<AtomicBool>::default();
        let finished = Arc::<Mutex<BTreeSet<String>>>::default();
        let agent = |n: usize| {
            let (address, token) = (address.to_owned(), token.to_owned());
            let (stop, finished) = (Arc::clone(&stop), Arc::clone(&finished));
            std::thread::spawn(move || {
                for round in 0_usize.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let group = group(n, round);
                    match rollout(&address, &token, &group, score) {
                        Some(id) => drop(finished.lock().unwrap().insert(id)),
                        None => std::thread::sleep(Duration::from_millis(50)),
                    }
                }
            })
        };
        let threads = (0..count).map(agent).collect();
        Self {
            stop,
            finished,
            threads,
        }
    }

    /// Ids that were acknowledged as finished.
    fn stop(self) -> BTreeSet<String> {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads {
            thread.join().unwrap();
        }
        std::mem::take(&mut *self.finished.lock().unwrap())
    }
}

/// One rollout from its opening to its acknowledged end; `None`: something was refused or cut.
pub(crate) fn rollout(
    address: &str,
    token: &str,
    group: &str,
    score: fn(&str) -> Option<f64>,
) -> Option<String> {
    let post = |path: &str, key: &str, body: &Value| {
        let answer = send("POST", address, path, key, &body.to_string())?;
        (answer.0 < 300).then_some(answer.1)
    };
    let opened = post("/rollouts", token, &json!({"task": "t", "group": group}))?;
    let (id, key) = (opened["id"].as_str()?, opened["api_key"].as_str()?);
    let asked = json!({"model": "m", "messages": [{"role": "user", "content": "A word?"}]});
    let said = post("/v1/chat/completions", key, &asked)?;
    let text = said["choices"][0]["message"]["content"]
        .as_str()
        .unwrap_or_default();
    let scored = score(text).map(|reward| json!({"reward": {"reward": reward}}));
    let finish = scored.unwrap_or_else(|| json!({}));
    post(&format!("/rollouts/{id}/finish"), token, &finish)?;
    Some(id.to_owned())
}

pub(crate) fn letters(text: &str) -> Option<f64> {
    let small = text.chars().filter(char::is_ascii_lowercase).count();
    Some(small as f64 / text.chars().count().max(1) as f64)
}

/// A copy of the live recipe with some of its text replaced.
pub(crate) fn recipe(dir: &Path, changes: &[(&str, &str)]) -> PathBuf {
    agents::recipe(dir, "agent-live.toml", changes)
}

const SMALL: [(&str, &str); 3] = [
    ("group_size = 8", "group_size = 4"),
    ("tasks_per_step = 6", "tasks_per_step = 2"),
    ("steps = 30", "steps = 12\ncheckpoint_every = 4"),
];

/// Killed in the middle and resumed at the same address: agents continue with no restart of their own, every
/// rollout that was acknowledged is in the store, and none was trained twice.
#[test]
fn a_kill_loses_no_live_rollout_and_trains_none_twice() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let recipe = recipe(dir.path(), &SMALL);
    let address = free_address();
    let mut run = Run::start(&recipe, &run_dir, &address, &[]);
    let token = run.token.clone();
    let agents = Agents::start(&address, &token, 8, letters);
    run.steps(6);
    drop(run);
    let run = Run::start(&recipe, &run_dir, &address, &["--resume"]);
    assert_eq!(run.token, token, "agents keep their token");
    let last = run.end();
    let finished = agents.stop();
    assert_eq!(last["samples"]["trained_twice"], 0, "{last}");
    assert_eq!(last["samples"]["lost"], 0, "{last}");
    let count = |what: &str| last["samples"][what].as_u64().unwrap();
    // Groups of equal rewards are dropped, and are spent all the same.
    assert!(
        count("trained") > 0 && count("trained") + count("dropped") >= 12 * 8,
        "{last}"
    );
    let stored = sinew()
        .args([
            "episodes",
            "--purpose",
            "live",
            "--limit",
            "10000",
            "--json",
            "--run-dir",
        ])
        .arg(&run_dir)
        .output()
        .unwrap();
    let stored = String::from_utf8(stored.stdout).unwrap();
    let lost: Vec<&String> = finished
        .iter()
        .filter(|id| !stored.contains(id.as_str()))
        .collect();
    // The kill can cut one answer of each agent whose rollout is stored.
    assert!(
        lost.is_empty() && finished.len() >= 12 * 8 - 8,
        "{lost:?} of {}",
        finished.len()
    );
}

/// Requests of real traffic have no group: each is compared with earlier ones of its task.
#[test]
fn rollouts_without_a_group_train_by_a_running_mean() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let recipe = recipe(dir.path(), &[("tasks_per_step = 6", "tasks_per_step = 48")]);
    let run = Run::start(&recipe, &run_dir, "127.0.0.1:0", &[]);
    let (address, token) = (run.address.clone(), run.token.clone());
    let agents = Agents::grouped(&address, &token, 16, letters, |_, _| "alone".into());
    let last = run.end();
    agents.stop();
    rises(&run_dir, &last, 0.1);
}

/// No score is never 0: a run whose agents give none reports that and ends.
#[test]
fn rollouts_without_rewards_are_unscored_and_end_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("run");
    let run = Run::start(&recipe(dir.path(), &SMALL), &run_dir, "127.0.0.1:0", &[]);
    let agents = Agents::start(&run.address, &run.token, 8, |_| None);
    let mut run = run;
    let lines = std::io::read_to_string(&mut run.out).unwrap();
    assert!(!run.child.wait().unwrap().success(), "{lines}");
    agents.stop();
    assert!(lines.contains("unscored: no reward was given"), "{lines}");
}

/// A rollout that called no model is refused with a hint, and the reward of one is never taken for 0.
#[test]
fn a_rollout_without_a_call_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path(), &SMALL);
    let run = Run::start(&recipe, &dir.path().join("run"), "127.0.0.1:0", &[]);
    let post = |path: &str, key: &str, body: &Value| {
        send("POST", &run.address, path, key, &body.to_string()).unwrap()
    };
    let (status, opened) = post("/rollouts", &run.token, &json!({}));
    assert_eq!(status, 201, "{opened}");
    let id = opened["id"].as_str().unwrap();
    let finish = json!({"reward": {"reward": 1.0}});
    let (status, refused) = post(&format!("/rollouts/{id}/finish"), &run.token, &finish);
    assert_eq!(status, 409, "{refused}");
    assert_eq!(refused["error"]["code"], "no_model_call");
    assert!(
        refused["error"]["message"]
            .as_str()
            .unwrap()
            .contains("sinew.key")
    );
    // The agent's own key may not score, and a key that opens nothing is refused.
    let (_, opened) = post("/rollouts", &run.token, &json!({}));
    let key = opened["api_key"].as_str().unwrap();
    let (status, told) = post("/v1/reward", key, &json!({"reward": 1.0}));
    assert_eq!(
        (status, &told["error"]["code"]),
        (403, &json!("not_trusted"))
    );
    // The opener of the rollout has the control token, and may trust its agent.
    let (_, opened) = post("/rollouts", &run.token, &json!({"agent_scores": true}));
    let trusted = opened["api_key"].as_str().unwrap();
    assert_eq!(post("/v1/reward", trusted, &json!({"reward": 1.0})).0, 200);
    let (status, told) = post("/v1/chat/completions", "sk-nobody", &json!({}));
    assert_eq!(status, 401);
    assert!(
        told["error"]["message"]
            .as_str()
            .unwrap()
            .contains("sinew.key"),
        "{told}"
    );
}

#[test]
fn keys_without_effect_and_missing_addresses_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let live = recipe(dir.path(), &[]);
    let mut command = sinew();
    command
        .arg("train")
        .arg(&live)
        .arg("--run-dir")
        .arg(dir.path().join("a"));
    let told = failure(&command.output().unwrap(), 2);
    assert!(told.contains("--serve 127.0.0.1:8080"), "{told}");
    let mut command = sinew();
    command.args([
        "train",
        "recipes/tiny.toml",
        "--serve",
        "127.0.0.1:0",
        "--run-dir",
    ]);
    let told = failure(&command.arg(dir.path().join("b")).output().unwrap(), 2);
    assert!(
        told.contains("has no effect") && told.contains("live"),
        "{told}"
    );
    for (from, to, needle) in [
        ("[train]", "[eval]\ntasks = 3\n\n[train]", "eval.tasks"),
        (
            "[train]",
            "max_in_flight = 3\n\n[train]",
            "rollout.max_in_flight",
        ),
        ("idle_s = 60.0", "idle_s = 0.0", "harness.idle_s"),
        ("idle_s = 60.0", "idl_s = 0.0", "did you mean `idle_s`"),
        (
            "[train]",
            "[store]\ntype = \"memory\"\n\n[train]",
            "store.type",
        ),
    ] {
        let changed = recipe(dir.path(), &[(from, to)]);
        let told = failure(&sinew().arg("check").arg(changed).output().unwrap(), 1);
        assert!(told.contains(needle), "{to}: {told}");
    }
    let checked = sinew()
        .arg("check")
        .arg(recipe(dir.path(), &[]))
        .output()
        .unwrap();
    assert!(checked.status.success(), "{checked:?}");
}
