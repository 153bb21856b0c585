//! The data pool end to end: outside systems push into a real server, a real run trains on it.

use crate::live::send;
use crate::queue::until;
use crate::resume::{done, train};
use crate::{Running, failure, last_line, root, sinew, steps};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Serving {
    child: Running,
    url: String,
}

const TOKEN: &str = "control-token-of-the-tests";

fn token(dir: &Path) -> PathBuf {
    let path = dir.join("token");
    std::fs::write(&path, TOKEN).unwrap();
    path
}

fn serve(dir: &Path) -> Serving {
    let mut command = sinew();
    command
        .args([
            "serve",
            "--engine",
            "fake",
            "--model",
            "recipe:recipes/pool.toml",
        ])
        .args([
            "--listen",
            "127.0.0.1:0",
            "--json",
            "--pool",
            "examples/pool.toml",
        ])
        .arg("--store")
        .arg(dir.join("store"))
        .arg("--control-token-file")
        .arg(token(dir));
    let (child, told) = until(&mut command, |_| true);
    Serving {
        child,
        url: told["url"].as_str().unwrap().to_owned(),
    }
}

fn python(served: &Serving, program: &str, args: &[&str]) -> String {
    let done = Command::new(crate::python3())
        .arg(root().join("python/tests").join(program))
        .args(args)
        .env("PYTHONPATH", root().join("python/src"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("SINEW_URL", &served.url)
        .env("SINEW_TOKEN", TOKEN)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{program}: {errors}");
    String::from_utf8_lossy(&done.stdout).into_owned()
}

fn pool(served: &Serving, dir: &Path, args: &[&str]) -> Output {
    let mut command = sinew();
    command.arg("pool").args(args).args(["--url", &served.url]);
    command
        .arg("--token-file")
        .arg(token(dir))
        .output()
        .unwrap()
}

fn json_of(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The recipe with another address, shortened.
fn recipe(dir: &Path, url: &str) -> PathBuf {
    let text = std::fs::read_to_string(root().join("recipes/pool.toml")).unwrap();
    let changed = text
        .replace("http://127.0.0.1:8086", url)
        .replace("\"token\"", &format!("{:?}", token(dir)))
        .replace("wait_s = 5", "wait_s = 1")
        .replace("checkpoint_every = 10", "checkpoint_every = 3");
    let path = dir.join("pool.toml");
    std::fs::write(&path, changed).unwrap();
    path
}

#[test]
fn what_outside_systems_push_is_trained_once_whoever_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut before = serve(dir.path());
    let said = python(&before, "against_pool.py", &["320"]);
    assert_eq!(said.trim(), "ok 2560");
    before.child.kill();
    let served = serve(dir.path());
    let status = json_of(&pool(&served, dir.path(), &["status"]));
    assert_eq!(status["trajectories"]["ready"], 2560, "{status}");
    assert_eq!(status["groups"]["whole"], 320);
    let (recipe, run) = (recipe(dir.path(), &served.url), dir.path().join("run"));
    let mut child = train(&recipe, &run, &[])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while !run.join("checkpoints/LATEST").exists() && begun.elapsed() < Duration::from_secs(120) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "it ended before it was killed"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let result = done(&recipe, &run, &["--resume"]);
    let samples = &result["samples"];
    let count = |name: &str| samples[name].as_u64().unwrap();
    assert_eq!((count("trained_twice"), count("lost")), (0, 0), "{result}");
    assert!(count("trained") > 0, "{result}");
    let status = json_of(&pool(&served, dir.path(), &["status"]));
    // A kill between the lease and the run's own store leaves a step's groups leased: they come
    // back when the lease ends, and are not lost either.
    let leased = status["trajectories"]["leased"].as_u64().unwrap();
    assert_eq!(
        count("trained") + count("dropped") + leased,
        2560,
        "{result} {status}"
    );
    assert_eq!(status["trajectories"]["ready"], 0, "{status}");
    let success = |when: &str| result["eval"][when]["success"].as_f64().unwrap();
    assert!(success("after") > success("before") + 0.15, "{result}");
    // Other weights sampled them, and the loss was corrected for that.
    let steps = steps(&run).into_iter();
    let corrected = |s: &Value| s["metrics"]["correction_mean"].as_f64();
    let corrections: Vec<f64> = steps.filter_map(|s| corrected(&s)).collect();
    let off_policy = |c: &&f64| **c > 0.0 && (**c - 1.0).abs() > 0.05;
    assert!(
        corrections.iter().any(|c| off_policy(&c)),
        "{corrections:?}"
    );
}

/// A run that is killed after the pool gave it groups, and before it stored them, gives them back when it
/// continues: they are not acknowledged, and do not wait for the end of their lease.
#[test]
fn groups_of_a_run_that_was_killed_before_it_stored_them_are_given_out_again() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path());
    python(&served, "against_pool.py", &["3", "first"]);
    let (recipe, run) = (recipe(dir.path(), &served.url), dir.path().join("run"));
    let text = std::fs::read_to_string(&recipe).unwrap();
    // A step of eight groups waits for the other five.
    let text = text.replace("wait_s = 1\n", "wait_s = 600\n");
    std::fs::write(&recipe, text.replace("steps = 40", "steps = 1")).unwrap();
    let counts = || json_of(&pool(&served, dir.path(), &["status"]))["trajectories"].clone();
    let mut child = train(&recipe, &run, &[])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    // The file is there a moment before its line.
    let noted = || std::fs::metadata(run.join("pool.jsonl")).is_ok_and(|file| file.len() > 0);
    while !noted() && begun.elapsed() < Duration::from_secs(120) {
        let ended = child.try_wait().unwrap();
        assert!(ended.is_none(), "it ended before it was killed");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let held = counts();
    assert_eq!((&held["leased"], &held["ready"]), (&json!(24), &json!(0)));
    python(&served, "against_pool.py", &["5", "then"]);
    let result = done(&recipe, &run, &["--resume"]);
    let samples = &result["samples"];
    let count = |name: &str| samples[name].as_u64().unwrap();
    assert_eq!((count("trained_twice"), count("lost")), (0, 0), "{result}");
    assert_eq!(count("trained") + count("dropped"), 64, "{result}");
    let left = counts();
    assert_eq!((&left["leased"], &left["ready"]), (&json!(0), &json!(0)));
}

#[test]
fn a_group_that_an_algorithm_cannot_use_does_not_end_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path());
    let (recipe, run) = (recipe(dir.path(), &served.url), dir.path().join("run"));
    let train = |more: &[&str]| train(&recipe, &run, more).output().unwrap();
    let status = |dir: &Path| json_of(&pool(&served, dir, &["status"]));
    // The page of the pool pushes this: a group of one, which nothing can be compared with.
    let alone = serde_json::json!({
        "version": 1, "tokenizer": status(dir.path())["tokenizer"], "source": "test",
        "trajectories": [{
            "id": "walk-1", "task": "corridor-7", "task_kind": "corridor-1", "reward": 1.0,
            "nodes": [{"kind": "prompt", "tokens": [2, 6, 8, 0, 3]},
                      {"parent": 0, "kind": "sampled", "tokens": [10, 0], "logprobs": [-0.6, -0.1], "version": 0}],
        }],
    });
    let batch = dir.path().join("batch.json");
    std::fs::write(&batch, alone.to_string()).unwrap();
    json_of(&pool(
        &served,
        dir.path(),
        &["push", batch.to_str().unwrap()],
    ));
    let dry = failure(&train(&[]), 2);
    assert!(
        dry.contains("1 groups with fewer than 2 trajectories"),
        "{dry}"
    );
    assert_eq!(
        status(dir.path())["trajectories"]["ready"],
        1,
        "nobody took it"
    );
    assert_eq!(python(&served, "against_pool.py", &["32"]).trim(), "ok 256");
    let result = last_line(&train(&["--resume"]));
    let samples = &result["samples"];
    let count = |name: &str| samples[name].as_u64().unwrap();
    assert_eq!(count("trained") + count("dropped"), 256, "{result}");
    assert_eq!((count("trained_twice"), count("lost")), (0, 0), "{result}");
    assert_eq!(status(dir.path())["trajectories"]["ready"], 1);
    // GiGPO compares states, which none of them has: quarantine, and no training.
    let text = std::fs::read_to_string(&recipe).unwrap();
    let by_state = text.replace("type = \"grpo\"", "type = \"gigpo\"");
    let path = dir.path().join("gigpo.toml");
    std::fs::write(&path, by_state).unwrap();
    assert_eq!(
        python(&served, "against_pool.py", &["2", "more"]).trim(),
        "ok 16"
    );
    let mut command = sinew();
    command.arg("train").arg(&path).arg("--run-dir");
    let told = failure(&command.arg(dir.path().join("other")).output().unwrap(), 2);
    assert!(told.contains("no turn has a state_hash"), "{told}");
    let reasons = status(dir.path())["quarantine"]["reasons"].clone();
    assert_eq!(reasons, serde_json::json!({"unusable": 16}));
}

/// CISPO bounds the ratio itself: it learns from other weights' samples without a correction.
#[test]
fn a_loss_that_bounds_the_ratio_trains_on_a_pool_without_a_correction() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path());
    assert_eq!(python(&served, "against_pool.py", &["32"]).trim(), "ok 256");
    let path = recipe(dir.path(), &served.url);
    let text = std::fs::read_to_string(&path).unwrap();
    let bounded = text.replace("type = \"grpo\"", "type = \"cispo\"");
    let bounded = bounded.replace("correction = {", "# {");
    // The policy without a correction is ruined at ten times this rate, and the run reports it.
    let bounded = bounded.replace("learning_rate = 3e-3", "learning_rate = 0.0003");
    std::fs::write(&path, bounded).unwrap();
    let run = dir.path().join("run");
    let result = done(&path, &run, &[]);
    let count = |name: &str| result["samples"][name].as_u64().unwrap();
    assert_eq!(count("trained") + count("dropped"), 256, "{result}");
    assert!(count("trained") > 0, "{result}");
    let steps = steps(&run).into_iter();
    let ratios: Vec<f64> = steps
        .filter_map(|s| s["metrics"]["ratio_max"].as_f64())
        .collect();
    assert!(
        ratios.iter().any(|r| (r - 1.0).abs() > 0.05),
        "other weights sampled them: {ratios:?}"
    );
}

#[test]
fn spans_of_the_opentelemetry_sdk_are_held_back_until_someone_says_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path());
    assert_eq!(python(&served, "otel_to_pool.py", &[]).trim(), "ok");
    let held = json_of(&pool(&served, dir.path(), &["quarantine"]));
    assert_eq!(held["reason"]["code"], "text_only", "{held}");
    assert_eq!(held["source"], "walker");
    let id = held["quarantine"].as_str().unwrap();
    let refused = json_of(&pool(&served, dir.path(), &["release", id]));
    assert_eq!(refused["status"], "quarantined");
    let told = json_of(&pool(
        &served,
        dir.path(),
        &["release", id, "--kind", "sft"],
    ));
    assert_eq!(told["status"], "admitted", "{told}");
    let status = json_of(&pool(&served, dir.path(), &["status"]));
    assert_eq!(status["quarantine"]["rows"], 0);
    assert_eq!(status["task_kinds"]["default"]["successes"], 1, "{status}");
    let gone = pool(&served, dir.path(), &["delete", id]);
    assert!(failure(&gone, 2).contains("404"));
}

#[test]
fn what_cannot_be_pooled_is_refused_before_it_runs() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("pool.toml");
    for (text, needle) in [
        ("[pool]\nmax_rowz = 1\n", "did you mean `max_rows`"),
        (
            "[pool.sampling]\ntype = \"fifo\"\nfloor = 0.1\n",
            "unknown field `floor`",
        ),
        ("[pool]\nmax_rows = 0\n", "pool.max_rows = 0"),
        ("[pool.filters.x]\nturns = [4, 1]\n", "pool.filters.x.turns"),
        ("[pool.filters.x]\nturns = [0, 0]\n", "most above 0"),
        (
            "[pool]\nsampling = { type = \"adaptive\", floor = 2.0 }\n",
            "pool.sampling.floor",
        ),
        (
            "[pool]\nsampling = { type = \"adaptive\", flor = 2.0 }\n",
            "did you mean `floor`",
        ),
    ] {
        std::fs::write(&config, text).unwrap();
        let mut serve = sinew();
        serve.args([
            "serve",
            "--engine",
            "fake",
            "--listen",
            "127.0.0.1:0",
            "--pool",
        ]);
        let errors = failure(&serve.arg(&config).output().unwrap(), 2);
        assert!(errors.contains(needle), "{text}: {errors}");
    }
    let good = std::fs::read_to_string(root().join("recipes/pool.toml")).unwrap();
    let plain = crate::small_tiny();
    let uncorrected = good.replace("correction = {", "# {");
    for (text, needle) in [
        (uncorrected, "data.type = \"pool\""),
        (good.replace("http://127.0.0.1:8086", "ftp://a"), "data.url"),
        (good.replace("wait_s = 5", "wait_s = -1"), "data.wait_s"),
        (good.clone() + "[store]\ntype = \"memory\"\n", "store.type"),
        (
            good.clone() + "[tasks]\nsampling = \"adaptive\"\n",
            "tasks.sampling",
        ),
        (
            plain.clone() + "[tasks]\nsampling = \"adaptive\"\nfloor = 3.0\n",
            "tasks.floor",
        ),
        (
            plain + "[tasks]\nsampling = \"adaptive\"\nflor = 0.1\n",
            "did you mean `floor`",
        ),
    ] {
        let path = dir.path().join("r.toml");
        std::fs::write(&path, &text).unwrap();
        let check = sinew().arg("check").arg(&path).output().unwrap();
        let errors = failure(&check, 1);
        assert!(errors.contains(needle), "{needle}: {errors}");
    }
}

#[test]
fn adaptive_tasks_follow_what_is_learned_and_a_resumed_run_draws_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = crate::small_tiny();
    let text = tiny.replace("checkpoint_every = 20", "checkpoint_every = 2")
        + "[tasks]\nsampling = \"adaptive\"\nfloor = 0.1\n";
    let shares = |name: &str, parts: &[&str]| -> Vec<Value> {
        let run = dir.path().join(name);
        for (n, steps) in parts.iter().enumerate() {
            let recipe = dir.path().join("r.toml");
            std::fs::write(
                &recipe,
                text.replace("steps = 60", &format!("steps = {steps}")),
            )
            .unwrap();
            let resume: &[&str] = if n > 0 { &["--resume"] } else { &[] };
            done(&recipe, &run, resume);
        }
        let shares = |step: &Value| step["task_shares"].clone();
        steps(&run).iter().map(shares).collect()
    };
    let whole = shares("whole", &["4"]);
    let sum: f64 = whole[3]
        .as_object()
        .unwrap()
        .values()
        .map(|v| v.as_f64().unwrap())
        .sum();
    assert!(
        (sum - 1.0).abs() < 1e-9 && whole[3]["corridor-1"] != whole[3]["corridor-2"],
        "{whole:?}"
    );
    assert_eq!(shares("parts", &["2", "4"]), whole);
}

/// Rollouts that agents finish at the gateway of the pool wait there as trajectories, the unscored in
/// quarantine.
#[test]
fn finished_rollouts_of_the_gateway_wait_in_the_pool() {
    let dir = tempfile::tempdir().unwrap();
    let served = serve(dir.path());
    let address = served.url.strip_prefix("http://").unwrap();
    let post = |path: &str, key: &str, body: &Value| {
        let (status, answer) = send("POST", address, path, key, &body.to_string()).unwrap();
        assert!(status < 300, "{path}: {status} {answer}");
        answer
    };
    for finish in [json!({"reward": {"reward": 1.0}}), json!({})] {
        let opened = post(
            "/rollouts",
            TOKEN,
            &json!({"task": "corridor-7", "task_kind": "corridor-1"}),
        );
        let (id, key) = (
            opened["id"].as_str().unwrap(),
            opened["api_key"].as_str().unwrap(),
        );
        let ask = json!({"model": "m", "messages": [{"role": "user", "content": "A.>"}]});
        post("/v1/chat/completions", key, &ask);
        post(&format!("/rollouts/{id}/finish"), TOKEN, &finish);
    }
    let told = |args: &[&str]| String::from_utf8(pool(&served, dir.path(), args).stdout).unwrap();
    let status: Value = serde_json::from_str(&told(&["status"])).unwrap();
    assert_eq!(status["groups"]["whole"], 1, "{status}");
    let held = told(&["quarantine"]);
    assert!(
        held.lines().count() == 1 && held.contains("reward"),
        "{held}"
    );
}
