//! `sinew serve --sandbox-only` with network access: from code inside to servers outside, and no further.

use crate::queue::until;
use crate::{Running, json_lines, sinew, wait_until};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

pub(crate) struct Api {
    _child: Running,
    pub(crate) address: String,
    pub(crate) token: String,
}

impl Api {
    pub(crate) fn start(more: &[&str]) -> Self {
        let mut command = sinew();
        command
            .args([
                "serve",
                "--sandbox-only",
                "--listen",
                "127.0.0.1:0",
                "--json",
            ])
            .args(more);
        command.env("SINEW_TEST_KEY", "sk-0123456789abcdef");
        let (child, said) = until(&mut command, |_| true);
        let text = |key: &str| said[key].as_str().unwrap().to_string();
        Self {
            _child: child,
            address: text("listening"),
            token: text("token"),
        }
    }

    fn post(&self, path: &str, body: &Value) -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            self.token, body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1)
            .unwrap_or_else(|e| panic!("{e}: {answer}"))
    }

    fn sandbox(&self, body: &Value) -> String {
        let made = self.post("/v1/sandboxes", body);
        made["id"]
            .as_str()
            .unwrap_or_else(|| panic!("{made}"))
            .into()
    }

    fn python(&self, id: &str, code: &str) -> String {
        let result = self.post(
            &format!("/v1/sandboxes/{id}/exec"),
            &json!({ "python": code, "timeout_s": 120 }),
        );
        result["stdout"]
            .as_str()
            .unwrap_or_else(|| panic!("{result}"))
            .to_string()
            + result["stderr"].as_str().unwrap_or_default()
    }
}

/// A server that counts its requests and returns them.
fn server() -> (u16, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&seen);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = Vec::new();
            let mut byte = [0];
            while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).unwrap_or(0) == 1 {
                head.push(byte[0]);
            }
            let mut seen = own.lock().unwrap();
            seen.push(String::from_utf8_lossy(&head).into_owned());
            let body = format!("answer {}", seen.len());
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
                body.len()
            );
        }
    });
    (port, seen)
}

fn rules(dir: &Path, port: u16, mode: &str) -> String {
    let path = dir.join(format!("{mode}.toml"));
    let folder = if mode == "live" {
        String::new()
    } else {
        format!("folder = {:?}\n", dir.join("recordings"))
    };
    let text = format!(
        "mode = \"{mode}\"\n{folder}[[rules]]\nhost = \"127.0.0.1\"\nscheme = \"http\"\nports = [{port}]\npaths = [\"/open/*\"]\naddresses = [\"127.0.0.1/32\"]\n"
    );
    std::fs::write(&path, text).unwrap();
    path.to_string_lossy().into_owned()
}

const FETCH: &str = "
import urllib.request, urllib.error
def fetch(url):
    try:
        return urllib.request.urlopen(url, timeout=60).read().decode()
    except urllib.error.HTTPError as e:
        return f'{e.code} {e.read().decode().strip()}'
    except Exception as e:
        return type(e).__name__
";

#[test]
fn code_inside_reaches_what_a_rule_opens_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (port, seen) = server();
    let audit = dir.path().join("audit");
    let api = Api::start(&[
        "--egress",
        &rules(dir.path(), port, "live"),
        "--egress-audit",
        &audit.to_string_lossy(),
    ]);
    let id = api.sandbox(&json!({ "egress": true, "episode": "e1" }));
    let out = api.python(
        &id,
        &format!("{FETCH}\nprint(fetch('http://127.0.0.1:{port}/open/x'))"),
    );
    assert_eq!(out, "answer 1\n");
    let code = format!(
        "{FETCH}
import socket
for url in ['http://127.0.0.1:{port}/closed', 'http://127.0.0.1:{other}/open/x', 'http://169.254.169.254/', 'https://127.0.0.1:{port}/open/x', 'http://2130706433:{port}/open/x']:
    print(fetch(url)[:3])
for where in [('127.0.0.1', {port}), ('10.0.0.1', 80), ('8.8.8.8', 53), ('::1', {port})]:
    try:
        socket.create_connection(where, 2); print('ESCAPED', where)
    except OSError as e: print('no')
for kind in [(socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW)]:
    try:
        socket.socket(*kind); print('ESCAPED', kind)
    except OSError: print('no')
",
        other = port ^ 1
    );
    let out = api.python(&id, &code);
    assert_eq!(
        out,
        "403\n403\n403\nOSE\n400\n".replace("OSE", "URL") + &"no\n".repeat(7),
        "{out}"
    );
    assert_eq!(seen.lock().unwrap().len(), 1);
    // A line is written after the last byte of its answer.
    let log = || std::fs::read_to_string(audit.join("default.e1.jsonl")).unwrap();
    let whole = |log: String| log.ends_with('\n') && log.lines().count() >= 6;
    wait_until("six decisions", || whole(log()));
    let log = log();
    let decisions = json_lines(&log);
    assert_eq!(decisions.len(), 6, "{log}");
    assert_eq!(decisions[0]["decision"], "allowed");
    assert!(
        decisions[1..].iter().all(|d| d["decision"] == "denied"),
        "{log}"
    );
    // Another sandbox of the same server, without a way out.
    let closed = api.sandbox(&json!({}));
    let out = api.python(
        &closed,
        &format!("{FETCH}\nprint(fetch('http://127.0.0.1:{port}/open/x'))"),
    );
    assert_eq!(out, "URLError\n");
}

#[test]
fn an_episode_is_answered_again_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (port, seen) = server();
    let code = format!(
        "{FETCH}\nfor n in range(3): print(fetch('http://127.0.0.1:{port}/open/same'))\nprint(fetch('http://127.0.0.1:{port}/open/other'))"
    );
    let run = |mode: &str| {
        let api = Api::start(&["--egress", &rules(dir.path(), port, mode)]);
        let id = api.sandbox(&json!({ "egress": true, "episode": "e1" }));
        api.python(&id, &code)
    };
    let recorded = run("record");
    assert_eq!(recorded, "answer 1\nanswer 2\nanswer 3\nanswer 4\n");
    assert_eq!(run("replay"), recorded);
    assert_eq!(seen.lock().unwrap().len(), 4);
}
