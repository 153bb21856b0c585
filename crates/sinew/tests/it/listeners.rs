//! Strangers at every listener: connections that never end their request take no file that the process needs,
//! and no place of a client with the key.

use crate::first::free_address;
use crate::serve::signal;
use crate::{Running, root, sinew, small_tiny};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Files that a server may open.
const FILES: usize = 256;
/// Connections of strangers: more than that.
const STRANGERS: usize = 300;
const TOKEN: &str = "a-token-of-this-test-that-is-long-enough";

/// The program with few files.
fn limited(files: usize) -> Command {
    let mut command = Command::new("sh");
    command.current_dir(root());
    command.args(["-c", &format!("ulimit -n {files}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_sinew"));
    command
}

/// Starts a server; gives the lines that it prints first.
fn start(mut command: Command, lines: usize) -> (Running, Vec<String>) {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    let lines = out.lines().take(lines).map(Result::unwrap).collect();
    (Running(child), lines)
}

/// Requests that never end, once the server listens.
fn strangers(address: &str) -> Vec<TcpStream> {
    while TcpStream::connect(address).is_err() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let half = |_| {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(b"GET / HTTP/1.1\r\nhost: local");
        stream
    };
    (0..STRANGERS).map(half).collect()
}

/// Status of the answer to a request, which may be asked again: a connection that came in the middle of a
/// crowd can lose its place.
fn status(address: &str, path: &str, more: &str) -> u16 {
    for _ in 0..50 {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let request =
            format!("{path} HTTP/1.1\r\nhost: {address}\r\n{more}connection: close\r\n\r\n");
        let mut text = Vec::new();
        let asked = stream.write_all(request.as_bytes());
        let read = asked.and_then(|()| stream.read_to_end(&mut text));
        let text = String::from_utf8_lossy(&text);
        match (read, text.split(' ').nth(1)) {
            (Ok(_), Some(status)) => return status.parse().unwrap(),
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
    }
    panic!("{address}: no answer to {path}");
}

/// A crowd before a server, and then its clients.
fn crowded(name: &str, running: &mut Running, address: &str, path: &str, key: &str) {
    let header = format!("authorization: Bearer {key}\r\n");
    assert_eq!(status(address, path, &header), 200, "{name}");
    let crowd = strangers(address);
    for _ in 0..3 {
        assert_eq!(status(address, path, &header), 200, "{name}");
    }
    drop(crowd);
    assert!(running.0.try_wait().unwrap().is_none(), "{name} has ended");
}

/// The address of a line that ends with a URL.
fn address(line: &str) -> String {
    let url = line.rsplit(' ').next().unwrap();
    let rest = url.strip_prefix("http://").unwrap();
    rest.split('/').next().unwrap().to_owned()
}

fn json(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"))
}

#[test]
fn half_requests_cost_no_server_its_files_or_its_clients() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let any = ["--listen", "127.0.0.1:0"];
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut command = limited(FILES);
            command.args([
                "serve",
                "--engine",
                "fake",
                "--json",
                "--control-token-file",
            ]);
            command.arg(&token).args(any);
            let (mut running, lines) = start(command, 1);
            let at = json(&lines[0])["listening"].as_str().unwrap().to_owned();
            crowded("gateway", &mut running, &at, "GET /metrics", TOKEN);
        });
        threads.spawn(|| {
            let mut command = limited(FILES);
            command
                .args(["serve", "--sandbox-only", "--json"])
                .args(any);
            let (mut running, lines) = start(command, 1);
            let told = json(&lines[0]);
            let (at, key) = (
                told["listening"].as_str().unwrap(),
                told["token"].as_str().unwrap(),
            );
            crowded("sandboxes", &mut running, at, "GET /v1/levels", key);
        });
        threads.spawn(|| {
            let mut command = limited(FILES);
            command
                .args(["queue", "serve", "--json", "--token-file"])
                .arg(&token);
            command
                .arg("--store")
                .arg(dir.path().join("queue"))
                .args(any);
            let (mut running, lines) = start(command, 1);
            let at = address(json(&lines[0])["url"].as_str().unwrap());
            crowded("queue", &mut running, &at, "GET /queue", TOKEN);
        });
        for (protocol, path) in [
            ("sinew", "GET /sinew"),
            ("openenv", "GET /metadata"),
            ("mcp", "DELETE /mcp"),
        ] {
            threads.spawn(move || {
                let mut command = limited(FILES);
                command
                    .args(["env", "serve", "tiny", "--protocol", protocol])
                    .args(any);
                let (mut running, lines) = start(command, 2);
                let at = address(&lines[0]);
                let key = lines[1].strip_prefix("key: ").unwrap();
                let header = format!("authorization: Bearer {key}\r\n");
                let crowd = strangers(&at);
                // No session exists that could be ended.
                let expected = if protocol == "mcp" { 404 } else { 200 };
                assert_eq!(status(&at, path, &header), expected, "{protocol}");
                drop(crowd);
                assert!(running.0.try_wait().unwrap().is_none());
            });
        }
    });
}

#[cfg(feature = "pool")]
#[test]
fn half_requests_cost_no_pool_its_files_or_its_clients() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, TOKEN).unwrap();
    let mut command = limited(FILES);
    command.args([
        "serve",
        "--engine",
        "fake",
        "--model",
        "recipe:recipes/pool.toml",
    ]);
    command.args([
        "--listen",
        "127.0.0.1:0",
        "--json",
        "--pool",
        "examples/pool.toml",
    ]);
    command.arg("--store").arg(dir.path().join("store"));
    command.arg("--control-token-file").arg(&token);
    let (mut running, lines) = start(command, 1);
    let at = json(&lines[0])["listening"].as_str().unwrap().to_owned();
    crowded("pool", &mut running, &at, "GET /pool", TOKEN);
}

/// Listeners of a run share its process.
#[test]
fn half_requests_do_not_end_a_run() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = dir.path().join("seen.toml");
    let text = small_tiny().replace("steps = 60", "steps = 100000");
    std::fs::write(&recipe, text).unwrap();
    let metrics_at = free_address();
    let signals = dir.path().join("signals.toml");
    std::fs::write(
        &signals,
        format!("[prometheus]\nlisten = \"{metrics_at}\"\n"),
    )
    .unwrap();
    let mut command = limited(FILES);
    command
        .args(["train", "--json", "--view", "--signals"])
        .arg(&signals);
    command
        .arg(&recipe)
        .arg("--run-dir")
        .arg(dir.path().join("seen"));
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let url = lines
        .find_map(|line| Some(json(&line)["view"].as_str()?.to_owned()))
        .unwrap();
    let view_at = address(&url);
    let crowds = [strangers(&view_at), strangers(&metrics_at)];
    let token = url.rsplit("token=").next().unwrap();
    let header = format!("authorization: Bearer {token}\r\n");
    assert_eq!(status(&view_at, "GET /api/runs", &header), 200);
    assert_eq!(status(&metrics_at, "GET /metrics", ""), 200);
    // The run works until it is asked to end, and the crowds do not stop it.
    let steps = lines.by_ref().filter(|line| line.starts_with("{\"step\""));
    assert_eq!(steps.take(2).count(), 2, "it has ended");
    signal(child.id(), "INT");
    let last = lines.last();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{last:?}");
    drop(crowds);
}

/// `sinew view` over folders.
#[test]
fn half_requests_cost_no_dashboard_its_files_or_its_clients() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = limited(FILES);
    command.args(["view", "--json"]).arg(dir.path());
    let (mut running, lines) = start(command, 1);
    let told = json(&lines[0]);
    let (at, key) = (
        told["listen"].as_str().unwrap(),
        told["token"].as_str().unwrap(),
    );
    crowded("dashboard", &mut running, at, "GET /api/runs", key);
    // A link does not lead to another host, and the cookie is not the key.
    let location = location(at, &format!("//evil.example/?token={key}&run=a"));
    assert_eq!(location, "/evil.example/?run=a");
}

/// Target of an answer's redirect.
fn location(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n"
    )
    .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let text = text.to_lowercase();
    let line = text.lines().find_map(|l| l.strip_prefix("location: "));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn environments_for_other_hosts_need_a_chosen_key() {
    let refused = sinew()
        .args(["env", "serve", "tiny", "--listen", "0.0.0.0:0"])
        .output()
        .unwrap();
    assert!(crate::failure(&refused, 2).contains("--key-env"));
}
