//! The queue of episodes end to end: real processes that fill it, score it and train from it, all of them
//! killed during the test.

use crate::first::free_address;
use crate::resume::{done, train};
use crate::{Running, failure, json_lines, last_line, root, run_ok, sinew};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const TOKEN: &str = "token-of-the-queue-tests";

/// A queue that is served at an address which stays over restarts.
pub(crate) struct Served {
    dir: PathBuf,
    at: String,
    server: Option<Running>,
}

impl Served {
    pub(crate) fn start(dir: &Path) -> Self {
        std::fs::write(dir.join("token"), TOKEN).unwrap();
        let mut served = Self {
            dir: dir.to_owned(),
            at: free_address(),
            server: None,
        };
        served.serve();
        served
    }

    pub(crate) fn token(&self) -> PathBuf {
        self.dir.join("token")
    }

    fn serve(&mut self) {
        let mut command = sinew();
        command.args(["queue", "serve", "--json", "--listen", &self.at]);
        command.arg("--store").arg(self.dir.join("store"));
        command.arg("--token-file").arg(self.token());
        self.server = Some(until(&mut command, |_| true).0);
    }

    fn restart(&mut self) {
        self.server.as_mut().unwrap().kill();
        self.serve();
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.at)
    }

    /// `sinew queue` with a sub-command, the queue, and more.
    pub(crate) fn ask(&self, command: &str, more: &[&str]) -> String {
        let mut asked = sinew();
        asked.args(["queue", command, &self.url(), "--json", "--token-file"]);
        asked.arg(self.token()).args(more);
        run_ok(&mut asked)
    }

    pub(crate) fn stats(&self) -> Value {
        serde_json::from_str(&self.ask("stats", &[])).unwrap()
    }

    /// Rows in a state for a consumer.
    pub(crate) fn count(&self, consumer: &str, state: &str) -> u64 {
        self.sum(consumer, &[state])
    }

    /// Rows in one of some states for a consumer, all at the same time.
    fn sum(&self, consumer: &str, states: &[&str]) -> u64 {
        let stats = self.stats();
        let all = stats["consumers"].as_array().unwrap();
        let of = all.iter().find(|c| c["name"] == consumer);
        of.map_or(0, |c| states.iter().map(|s| c[s].as_u64().unwrap()).sum())
    }

    /// The recipe with this queue, shortened.
    pub(crate) fn recipe(&self) -> PathBuf {
        let text = std::fs::read_to_string(root().join("recipes/queue.toml")).unwrap();
        let changed = text
            .replace("http://127.0.0.1:8091", &self.url())
            .replace("\"token\"", &format!("{:?}", self.token()))
            .replace("wait_s = 5", "wait_s = 1\nlease_s = 10")
            .replace("checkpoint_every = 6", "checkpoint_every = 3");
        let path = self.dir.join("queue.toml");
        std::fs::write(&path, changed).unwrap();
        path
    }
}

/// Starts a command, and reads its JSON lines until one is what is waited for.
pub(crate) fn until(command: &mut Command, wanted: impl Fn(&Value) -> bool) -> (Running, Value) {
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut running = Running(child);
    let mut lines = BufReader::new(running.0.stdout.take().unwrap()).lines();
    loop {
        let line = lines.next().expect("it ended first").unwrap();
        let value: Value = serde_json::from_str(&line).unwrap();
        if wanted(&value) {
            // Whoever writes more must not be stopped by a pipe that nothing reads.
            std::thread::spawn(move || lines.for_each(drop));
            return (running, value);
        }
    }
}

/// Episodes of the chain: as many as its trainer's steps take.
const EPISODES: u64 = 24 * 64;

/// Fills the queue by a producer that is killed, over a server that is killed.
fn collected(served: &mut Served, recipe: &Path) {
    let run = served.dir.join("collected");
    let collect = |more: &[&str]| {
        let mut command = sinew();
        command
            .arg("collect")
            .arg(recipe)
            .args(["--json", "--score-apart"]);
        command.args(["--episodes", &EPISODES.to_string()]);
        command.args(more).arg("--run-dir").arg(&run);
        command
    };
    let some = |v: &Value| v["collected"]["episodes"].as_u64().is_some_and(|n| n > 0);
    let (mut producer, _) = until(&mut collect(&[]), some);
    producer.kill();
    served.restart();
    let collected = last_line(&collect(&["--resume"]).output().unwrap());
    assert_eq!(collected["collected"]["unscored"], EPISODES, "{collected}");
    assert_eq!(served.stats()["rows"], EPISODES);
}

/// Scores the rows by a scorer that is killed with rows in its hands, then by two at once.
fn scored(served: &mut Served, recipe: &Path) {
    let score = |more: &[&str]| {
        let mut command = sinew();
        command.args(["queue", "score"]).arg(recipe).arg("--json");
        command.args(["--rows", "16", "--lease-s", "1"]).args(more);
        command.stdout(Stdio::piped());
        command
    };
    let begun = |v: &Value| v["scoring"]["scored"].as_u64().is_some_and(|n| n > 0);
    let (mut scorer, _) = until(&mut score(&[]), begun);
    scorer.kill();
    served.restart();
    let both = [(), ()].map(|()| score(&["--until-empty"]).spawn().unwrap());
    for scorer in both {
        let done = last_line(&scorer.wait_with_output().unwrap());
        let done = &done["scored"];
        let none: Value = 0.into();
        assert_eq!(
            (&done["unscored"], &done["failed"]),
            (&none, &none),
            "{done}"
        );
    }
    let known = served.count("scorer", "acked") + served.count("scorer", "waiting");
    assert_eq!(known, EPISODES);
}

#[test]
fn what_is_collected_and_scored_apart_is_trained_once_whoever_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let mut served = Served::start(dir.path());
    let recipe = served.recipe();
    collected(&mut served, &recipe);
    scored(&mut served, &recipe);
    // Trained by a run that is killed, over a server that is killed.
    let run = dir.path().join("run");
    let stepped = |v: &Value| v["step"]["step"].as_u64().is_some_and(|n| n >= 4);
    let (mut trainer, _) = until(&mut train(&recipe, &run, &[]), stepped);
    trainer.kill();
    served.restart();
    let result = done(&recipe, &run, &["--resume"]);
    let samples = &result["samples"];
    let of = |name: &str| samples[name].as_u64().unwrap();
    assert_eq!((of("trained_twice"), of("lost")), (0, 0), "{result}");
    // Rows that a kill left leased come back when the lease ends, and are not lost either.
    let open = served.sum("trainer", &["leased", "ready"]);
    assert_eq!(of("trained") + of("dropped") + open, EPISODES, "{result}");
    assert!(of("trained") > 0, "{result}");
    let success = |when: &str| result["eval"][when]["success"].as_f64().unwrap();
    assert!(success("after") > success("before") + 0.15, "{result}");
    // Every row has one end: acked by the trainer, or still in the queue.
    let done = served.stats()["done"].as_u64().unwrap();
    assert_eq!(done, served.count("trainer", "acked"));
    assert_eq!(done + open, EPISODES);
}

#[test]
fn rows_are_listed_put_out_of_the_way_revived_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let served = Served::start(dir.path());
    let recipe = served.recipe();
    let mut collect = sinew();
    collect
        .arg("collect")
        .arg(&recipe)
        .args(["--json", "--episodes", "16"]);
    collect.args(["--queue-source", "teacher", "--run-dir"]);
    last_line(&collect.arg(dir.path().join("c")).output().unwrap());
    let mut score = sinew();
    score.args(["queue", "score", "--until-empty"]).arg(&recipe);
    assert!(
        run_ok(&mut score).starts_with("0 rows scored"),
        "they have their rewards"
    );
    let rows = served.ask("rows", &["--limit", "3"]);
    let rows = json_lines(&rows);
    let keys: BTreeSet<&str> = rows.iter().map(|r| r["key"].as_str().unwrap()).collect();
    assert_eq!(keys.len(), 3);
    assert!(keys.iter().all(|k| k.starts_with("teacher:d0")), "{keys:?}");
    assert_eq!(rows[0]["states"]["scorer"]["state"], "waiting");
    assert_eq!(rows[0]["fields"], serde_json::json!(["trace", "reward"]));
    let key = rows[0]["key"].as_str().unwrap();
    let ask = |command: &str, more: &[&str]| -> Value {
        serde_json::from_str(&served.ask(command, more)).unwrap()
    };
    // A row that waits blocks no other row yet.
    let mut fail = sinew();
    fail.args(["queue", "fail", &served.url(), key, "--consumer", "scorer"]);
    fail.args(["--reason", "wrong", "--token-file"])
        .arg(served.token());
    let refused = failure(&fail.output().unwrap(), 2);
    assert!(refused.contains("not ready"), "{refused}");
    assert_eq!(ask("remove", &[key])["removed"], 1);
    let all = served.ask("rows", &["--state", "waiting", "--consumer", "scorer"]);
    assert_eq!(all.lines().count(), 15);
    fail_and_revive(&served, &recipe);
}

/// Fails a row, so that its group is not whole and stays.
fn fail_and_revive(served: &Served, recipe: &Path) {
    let ask = |command: &str, more: &[&str]| -> Value {
        serde_json::from_str(&served.ask(command, more)).unwrap()
    };
    // A step of a run leaves its consumer behind.
    let text = std::fs::read_to_string(recipe).unwrap();
    std::fs::write(recipe, text.replace("steps = 24", "steps = 1")).unwrap();
    done(recipe, &served.dir.join("run"), &[]);
    let left = served.ask("rows", &["--state", "ready", "--consumer", "trainer"]);
    let left = json_lines(&left);
    assert_eq!(left.len(), 7);
    let key = left[0]["key"].as_str().unwrap();
    let trainer = ["--consumer", "trainer"];
    let failed = ask(
        "fail",
        &[&[key, "--reason", "a wrong task"], &trainer[..]].concat(),
    );
    assert_eq!(failed["failed"], 1);
    let dead = served.ask("rows", &["--dead"]);
    assert!(
        dead.contains("a wrong task") && dead.contains(key),
        "{dead}"
    );
    assert_eq!(
        ask("revive", &[&["--all"], &trainer[..]].concat())["revived"],
        1
    );
    assert!(served.ask("rows", &["--dead"]).is_empty());
}

#[test]
fn what_cannot_work_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |args: &[&str], code: i32| {
        let output = sinew().args(args).output().unwrap();
        failure(&output, code)
    };
    let store = dir.path().join("q");
    let store = store.to_str().unwrap();
    let open = refused(
        &["queue", "serve", "--store", store, "--listen", "0.0.0.0:0"],
        2,
    );
    assert!(open.contains("--token-file"), "{open}");
    let named = refused(&["queue", "serve", "--store", store, "--name", "../x"], 2);
    assert!(named.contains("letters, digits"), "{named}");
    let bare = refused(&["queue", "stats", "http://127.0.0.1:1"], 2);
    assert!(bare.contains("--token-file"), "{bare}");
    let apart = [
        "collect",
        "recipes/tiny.toml",
        "--episodes",
        "8",
        "--score-apart",
    ];
    let run = dir.path().join("run");
    let run = ["--run-dir", run.to_str().unwrap()];
    let none = refused(&[&apart[..], &run].concat(), 2);
    assert!(none.contains("--queue"), "{none}");
    // The tiny world scores its episodes itself: nothing else could.
    let own = refused(&[&apart[..], &["--queue", store], &run].concat(), 2);
    assert!(own.contains("no reward of its own"), "{own}");
    let served = Served::start(dir.path());
    let inner = dir.path().join("store");
    let used = refused(&["queue", "stats", inner.to_str().unwrap()], 2);
    assert!(used.contains("sinew queue serve"), "{used}");
    let token = dir.path().join("other");
    std::fs::write(&token, "another-token-of-the-tests").unwrap();
    let wrong = ["queue", "stats", &served.url(), "--token-file"];
    let wrong = refused(&[&wrong[..], &[token.to_str().unwrap()]].concat(), 3);
    assert!(wrong.contains("401"), "{wrong}");
}
