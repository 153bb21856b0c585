//! Benchmarks of models behind servers that only chat, and a user that such a server plays.

use crate::evals::interpreter;
use crate::{failure, last_line, request, root, sinew};
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// The answer to a request: a message, the reason of its end, and whether its tokens are counted.
type Answer = dyn Fn(&Value) -> (Value, &'static str, bool) + Send + Sync;

/// Bodies of requests, in order.
type Seen = Arc<Mutex<Vec<Value>>>;

/// A server of chats. It lists one model, and counts 100 and 10 tokens for each answer.
fn server(
    answer: impl Fn(&Value) -> (Value, &'static str, bool) + Send + Sync + 'static,
) -> (String, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    let (seen, answer) = (Seen::default(), Arc::new(answer));
    let kept = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (seen, answer) = (Arc::clone(&kept), Arc::clone(&answer));
            // A connection that is tried and left needs no answer.
            std::thread::spawn(move || stream.ok().and_then(|s| one(s, answer.as_ref(), &seen)));
        }
    });
    (url, seen)
}

fn one(mut stream: TcpStream, answer: &Answer, seen: &Seen) -> Option<()> {
    let (head, body) = request(&stream)?;
    let said = if head.starts_with("POST /v1/chat/completions ") {
        let body: Value = serde_json::from_slice(&body).ok()?;
        let (message, finish, counted) = answer(&body);
        seen.lock().unwrap().push(body);
        let mut said = json!({"choices": [{"message": message, "finish_reason": finish}]});
        if counted {
            said["usage"] = json!({"prompt_tokens": 100, "completion_tokens": 10});
        }
        said
    } else {
        json!({"data": [{"id": "listed"}]})
    };
    let said = said.to_string();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{said}",
        said.len()
    )
    .ok()
}

fn says(text: &str) -> (Value, &'static str, bool) {
    (json!({"role": "assistant", "content": text}), "stop", true)
}

/// `sinew eval --bench NAME` of a server, into a folder.
fn bench(name: &str, url: &str, run: &Path, more: &[&str]) -> Command {
    let mut command = sinew();
    command.args(["eval", "--bench", name, "--json", "--model", url]);
    command.args(more).arg("--run-dir").arg(run);
    command
}

/// The rows of the repository, each with its question and the number of its answer.
fn rows() -> Vec<(String, String)> {
    let text = fs::read_to_string(root().join("data/gsm8k-200.jsonl")).unwrap();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let answer = row["answer"]
            .as_str()
            .unwrap()
            .rsplit("#### ")
            .next()
            .unwrap();
        (
            row["question"].as_str().unwrap().to_owned(),
            answer.to_owned(),
        )
    };
    text.lines().map(row).collect()
}

/// A server that answers the first half of the rows right; the last task is cut and not counted.
fn half_right() -> (String, Seen) {
    let rows = rows();
    server(move |body| {
        let asked = body["messages"][0]["content"].as_str().unwrap();
        let known = |(question, _): &(String, String)| asked.contains(question.as_str());
        let at = rows.iter().position(known).unwrap();
        match at {
            0..100 => says(&format!("The answer is {}.", rows[at].1)),
            150.. => (
                json!({"role": "assistant", "content": "It is -17"}),
                "length",
                false,
            ),
            _ => says("The answer is -17."),
        }
    })
}

#[test]
fn a_model_that_only_chats_is_measured_with_the_counts_of_its_server() {
    let (url, seen) = half_right();
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("eval");
    let short = "--data data/gsm8k-200.jsonl --tasks 4 --samples 2 --price 1,2";
    let short: Vec<&str> = short.split(' ').collect();
    let last = last_line(&bench("gsm8k", &url, &run, &short).output().unwrap());
    let result = &last["results"][0];
    assert_eq!(result["greedy"]["success"]["mean"], 0.5, "{result}");
    assert_eq!(result["sampled"]["all_at"]["2"]["mean"], 0.5, "{result}");
    let truncated = &result["greedy"]["counts"]["truncated"];
    assert_eq!(truncated, &json!({"server": 1}), "{result}");
    assert_eq!(result["is_text_only"], true);
    let served = &result["served"];
    let counts = (&served["requests"], &served["uncounted"]);
    assert_eq!(counts, (&json!(12), &json!(3)), "{result}");
    assert!(served["prompt"].as_u64().unwrap() > 900);
    assert_eq!(result["tokens"]["prompt"], served["prompt"]);
    assert!(result["tokens"]["cost"].as_f64().unwrap() > 0.0);
    let why = &result["contamination"]["why"];
    assert_eq!(why, "the model is behind a server");
    let report = fs::read_to_string(run.join("report.md")).unwrap();
    assert!(
        report.contains("neither token ids nor log-probs"),
        "{report}"
    );
    for body in seen.lock().unwrap().iter() {
        let sent = (&body["model"], &body["max_tokens"]);
        assert_eq!(sent, (&json!("listed"), &json!(512)), "{body}");
        assert!(body.get("tools").is_none(), "{body}");
    }
    // The folder has the messages, and a result that is there is not measured again.
    let mut show = sinew();
    let show = show
        .args(["episodes", "--json", "--run-dir"])
        .arg(run.join("gsm8k"));
    let shown = show.output().unwrap().stdout;
    assert_eq!(String::from_utf8_lossy(&shown).lines().count(), 12);
    let before = seen.lock().unwrap().len();
    let again = [&short[..], &["--resume"]].concat();
    let repeated = last_line(&bench("gsm8k", &url, &run, &again).output().unwrap());
    assert_eq!((last, seen.lock().unwrap().len()), (repeated, before));
}

#[test]
fn tools_are_sent_and_calls_are_carried_out() {
    let (url, seen) = server(|body| {
        let tool = &body["tools"][0]["function"]["name"];
        let called = body["messages"]
            .as_array()
            .unwrap()
            .iter()
            .any(|m| m["role"] == "tool");
        if called {
            return says("Done.");
        }
        let call =
            json!({"id": "a", "type": "function", "function": {"name": tool, "arguments": "{}"}});
        let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        (message, "tool_calls", true)
    });
    let dir = tempfile::tempdir().unwrap();
    let python = interpreter("bfcl").unwrap_or_else(|| panic!("run scripts/bridges.sh bfcl"));
    let more = [
        "--samples",
        "0",
        "--tasks",
        "4",
        "--python",
        python.to_str().unwrap(),
    ];
    let last = last_line(
        &bench("bfcl", &url, &dir.path().join("eval"), &more)
            .output()
            .unwrap(),
    );
    let counts = &last["results"][0]["greedy"]["counts"];
    assert_eq!(
        (&counts["samples"], &counts["failed"]),
        (&json!(4), &json!(0)),
        "{last}"
    );
    let seen = seen.lock().unwrap();
    assert!(
        seen.iter()
            .all(|body| body["tools"][0]["function"]["parameters"].is_object())
    );
    for body in seen
        .iter()
        .filter(|b| b["messages"].as_array().unwrap().len() > 2)
    {
        let messages = body["messages"].as_array().unwrap();
        let call = messages
            .iter()
            .find(|m| m["tool_calls"].is_array())
            .unwrap();
        let result = messages.iter().find(|m| m["role"] == "tool").unwrap();
        assert_eq!(
            call["tool_calls"][0]["id"], result["tool_call_id"],
            "{body}"
        );
    }
}

#[test]
fn a_user_is_played_by_another_model_where_tau2_is_installed() {
    let Some(python) = interpreter("tau2") else {
        return;
    };
    let (model, _) = server(|_| says("I did it."));
    let (user, asked) = server(|body| match body["messages"].as_array().unwrap().len() {
        2 => says("Hello, I want to change my flight."),
        _ => says("Thanks! ###STOP###"),
    });
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("eval");
    let python = [
        "--samples",
        "0",
        "--tasks",
        "2",
        "--python",
        python.to_str().unwrap(),
    ];
    let played = ["--user", "u", "--user-url", &user, "--user-price", "1,2"];
    let more = [&python[..], &played].concat();
    let last = last_line(&bench("tau2-airline", &model, &run, &more).output().unwrap());
    let result = &last["results"][0];
    assert_eq!(result["greedy"]["counts"]["failed"], 0, "{result}");
    // Two answers in each episode; the check before the first one asks once more.
    assert_eq!(
        (&result["user"]["calls"], &result["user"]["model"]),
        (&json!(4), &json!("u")),
        "{result}"
    );
    assert!(result["user"]["cost"].as_f64().unwrap() > 0.0, "{result}");
    assert_eq!(result["settings"]["user.model"], "u");
    let asked = asked.lock().unwrap();
    assert!(
        asked[0]["messages"][0]["content"]
            .as_str()
            .unwrap()
            .contains("<scenario>")
    );
    // Without a user the benchmark says what is missing.
    let refused = bench("tau2", &model, &dir.path().join("x"), &python).output();
    let text = failure(&refused.unwrap(), 2);
    assert!(text.contains("--user is missing"), "{text}");
}

/// A task folder whose answer is a file with a word.
fn harbor_task(folder: &Path, word: &str) {
    let files = [
        ("instruction.md", format!("Write {word} into answer.txt.")),
        ("task.toml", "version = \"1.0\"\n".to_owned()),
        (
            "environment/Dockerfile",
            "FROM docker.io/library/python:3.12-slim\nWORKDIR /app\n".to_owned(),
        ),
        (
            "tests/test.sh",
            format!(
                "#!/bin/sh\nif [ \"$(cat answer.txt)\" = {word} ]; then echo 1; else echo 0; fi \
                 > \"${{VERIFIER_LOGS:-/logs/verifier}}/reward.txt\"\n"
            ),
        ),
    ];
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

#[test]
fn a_folder_of_tasks_of_harbor_is_a_benchmark() {
    let (url, seen) = server(|body| {
        let messages = body["messages"].as_array().unwrap();
        if messages.iter().any(|m| m["role"] == "tool") {
            return says("Done.");
        }
        // It knows one word only.
        let arguments = json!({"command": "echo tea > answer.txt"}).to_string();
        let name = &body["tools"][0]["function"]["name"];
        let call = json!({"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}});
        let message = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        (message, "tool_calls", true)
    });
    let dir = tempfile::tempdir().unwrap();
    let tasks = dir.path().join("words");
    harbor_task(&tasks.join("drink-1"), "tea");
    harbor_task(&tasks.join("drink-2"), "milk");
    let name = format!("harbor:{}", tasks.display());
    let run = dir.path().join("eval");
    let more = ["--samples", "0", "--level", "process"];
    let last = last_line(&bench(&name, &url, &run, &more).output().unwrap());
    let result = &last["results"][0];
    assert_eq!(result["bench"], "harbor:words", "{result}");
    assert_eq!(result["greedy"]["success"]["mean"], 0.5, "{result}");
    assert_eq!(result["greedy"]["counts"]["failed"], 0, "{result}");
    assert!(run.join("harbor-words/result.json").is_file());
    assert!(!seen.lock().unwrap().is_empty());
}
