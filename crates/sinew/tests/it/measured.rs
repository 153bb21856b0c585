//! Recipes that are measured with servers that return only text, and runs on a terminal that does not answer.

use crate::{failure, request, sinew, small_tiny};
use serde_json::{Value, json};
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;

/// The server's answer to every request, in characters of the world's alphabet.
const SAID: &str = "..";

/// A server of OpenAI's form that has one answer.
fn server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // A connection that is tried and left needs no answer.
            std::thread::spawn(move || stream.ok().and_then(answer));
        }
    });
    url
}

fn answer(mut stream: TcpStream) -> Option<()> {
    let (head, _) = request(&stream)?;
    let (kind, text) = if head.starts_with("GET") {
        (
            "application/json",
            json!({ "data": [{ "id": "m" }] }).to_string(),
        )
    } else {
        let chunk = json!({ "choices": [{ "text": SAID, "finish_reason": "stop" }] });
        (
            "text/event-stream",
            format!("data: {chunk}\n\ndata: [DONE]\n\n"),
        )
    };
    write!(
        stream,
        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    )
    .ok()
}

/// A recipe whose engine is a server, in a folder.
fn recipe(folder: &Path) -> PathBuf {
    let recipe = folder.join("text.toml");
    let text = small_tiny();
    let (others, _) = text.split_once("[engine]").unwrap();
    let engine = format!("[engine]\ntype = \"openai\"\nurl = \"{}\"\n", server());
    std::fs::write(&recipe, others.to_owned() + &engine).unwrap();
    recipe
}

#[test]
fn a_server_that_says_text_is_measured_and_never_trained_on() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    let run = dir.path().join("run");
    let command = |name: &str, more: &[&str]| {
        let mut command = sinew();
        command.arg(name).arg(&recipe).args(more);
        if name != "check" {
            command.arg("--run-dir").arg(&run);
        }
        command.output().unwrap()
    };
    for (name, more, code) in [
        ("train", &[][..], 2),
        ("collect", &["--episodes", "4"], 2),
        ("check", &[], 1),
    ] {
        let errors = failure(&command(name, more), code);
        assert!(
            errors.contains("`sinew eval RECIPE` measures"),
            "{name}: {errors}"
        );
        assert!(!run.exists(), "{name} left a folder");
    }
    let output = command("eval", &["--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(last["eval"]["success"].is_number(), "{last} {errors}");
    let mut show = sinew();
    let rows = show
        .args(["episodes", "--json", "--run-dir"])
        .arg(&run)
        .output()
        .unwrap();
    let rows = String::from_utf8_lossy(&rows.stdout).into_owned();
    let first: Value = serde_json::from_str(rows.lines().next().unwrap()).unwrap();
    assert_ne!(first["end"], "failed", "{first}");
    let id = first["episode"].as_str().unwrap();
    let mut show = sinew();
    let shown = show
        .args(["show", id, "--run-dir"])
        .arg(&run)
        .output()
        .unwrap();
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let turn = shown.split("sampled ").nth(1).unwrap();
    let said = turn.lines().nth(1).unwrap();
    assert_eq!(said.trim(), format!("{SAID}<end>"), "{shown}");
    // Such a server reports no log-probabilities: nothing shows that it was certain.
    assert!(shown.contains("log-probs unknown"), "{shown}");
    assert!(!shown.contains("mean log-prob"), "{shown}");
}

/// A terminal that shows what it is given, and answers nothing.
const TERMINAL: &str = r#"
import fcntl, os, pty, struct, subprocess, sys, termios
user, own = pty.openpty()
fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("4H", int(sys.argv[1]), 80, 0, 0))
def take():
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
child = subprocess.Popen(sys.argv[2:], stdin=own, stdout=own, stderr=own, preexec_fn=take)
os.close(own)
try:
    while part := os.read(user, 65536):
        sys.stdout.buffer.write(part)
except OSError:
    pass
sys.exit(child.wait())
"#;

#[test]
fn a_run_is_printed_on_a_terminal_that_does_not_answer() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    // A terminal that nobody looks at has no size; another one has one and does not report its cursor.
    for rows in ["0", "24"] {
        let run = dir.path().join(format!("run-{rows}"));
        let mut command = Command::new("/usr/bin/python3");
        command.args(["-c", TERMINAL, rows, env!("CARGO_BIN_EXE_sinew"), "eval"]);
        command.arg(&recipe).args(["--view", "--run-dir"]).arg(&run);
        let output = command
            .current_dir(crate::root())
            .env("TERM", "xterm")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines = text.lines().map(str::trim_end);
        let lines: Vec<&str> = lines.collect();
        let has = |part: &str| lines.iter().any(|l| l.contains(part));
        assert!(
            has("kernels ") && has("held-out now: success"),
            "{rows}: {text}"
        );
        // The link is one line, which the terminal wraps and does not break.
        let link = lines.iter().find(|l| l.contains("/?token=")).unwrap();
        let token = link.split("?token=").nth(1).unwrap();
        assert!(
            token.len() >= 32 && token.chars().all(|c| c.is_ascii_hexdigit()),
            "{link}"
        );
        assert_eq!(
            text.contains("no live view, lines follow"),
            rows == "24",
            "{text}"
        );
    }
}
