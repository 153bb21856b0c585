//! Clients that occupy connections, and owners that exceed their quotas.

use crate::{ANN, BOB, Server, request, server};
use serde_json::{Value, json};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_sandbox_http::{Egress, EgressError, Service, Tokens};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Timeout of the tests, which only ends a hang. The tested events take about a second.
const TIMEOUT: Duration = Duration::from_secs(120);

async fn server_with_short_timeouts(connections: usize) -> Server {
    let change = |b: &mut sinew_sandbox_http::Bounds| {
        b.connections = connections;
        b.auth_timeout = Duration::from_secs(1);
        b.idle_timeout = Duration::from_secs(1);
        b.body_timeout = Duration::from_secs(1);
    };
    server(change).await
}

/// Reads until the connection is closed.
async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    let read = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut all)).await;
    // A reset also closes the connection.
    let _ = read.expect("the server closes the connection");
    String::from_utf8_lossy(&all).into_owned()
}

#[tokio::test]
async fn incomplete_requests_are_cut_off() {
    let server = server_with_short_timeouts(8).await;
    let body = request(
        "POST",
        "/v1/sandboxes",
        Some(ANN),
        "application/json",
        b"{      }",
    );
    for half in [b"GET /v1/hea".as_slice(), &body[..body.len() - 3]] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(half).await.unwrap();
        let response = read_to_end(&mut stream).await;
        assert!(!response.starts_with("HTTP/1.1 2"), "{response}");
    }
    server.stop().await;
}

#[tokio::test]
async fn clients_that_read_no_responses_are_cut_off() {
    let server = server_with_short_timeouts(1).await;
    let mut stalled = TcpStream::connect(server.address).await.unwrap();
    // Pipelines requests until the buffers of both sides are full. The client reads no response.
    let asked = b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n".repeat(1000);
    let until_full = async { while stalled.write_all(&asked).await.is_ok() {} };
    let _ = tokio::time::timeout(TIMEOUT, until_full).await;
    let ask = server.send(request("GET", "/v1/health", None, "text/plain", b""));
    let answer = tokio::time::timeout(TIMEOUT, ask).await;
    assert_eq!(answer.expect("a free connection").status, 200);
    drop(stalled);
    server.stop().await;
}

/// Sends a request on a persistent connection and returns the status.
async fn ask_on(stream: &mut TcpStream, token: &str) -> String {
    let ask =
        format!("GET /v1/levels HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut start = vec![0; 12];
    let read = stream.read_exact(&mut start);
    let read = tokio::time::timeout(TIMEOUT, read).await;
    read.expect("an answer").expect("a connection");
    // The rest of the response.
    let mut rest = vec![0; 1 << 16];
    let _ = stream.read(&mut rest).await.unwrap();
    String::from_utf8(start[9..].to_vec()).unwrap()
}

#[tokio::test]
async fn connections_without_a_token_do_not_block_owners() {
    let server = server(|b| {
        b.connections = 4;
        b.unauthenticated = 16;
        b.unauthenticated_per_address = 8;
    })
    .await;
    let mut known = TcpStream::connect(server.address).await.unwrap();
    assert_eq!(ask_on(&mut known, ANN).await, "200");
    let mut crowd = Vec::new();
    for _ in 0..60 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(b"GET /v1/hea").await.unwrap();
        crowd.push(stream);
    }
    let ask = server.send(request("GET", "/v1/levels", Some(BOB), "text/plain", b""));
    let answer = tokio::time::timeout(TIMEOUT, ask).await;
    assert_eq!(answer.expect("an answer").status, 200);
    assert_eq!(ask_on(&mut known, ANN).await, "200");
    // The oldest unauthenticated connection was closed without a response.
    assert_eq!(read_to_end(&mut crowd[0]).await, "");
    // A response without a token closes the connection.
    let mut unauthenticated = TcpStream::connect(server.address).await.unwrap();
    let ask = b"GET /v1/levels HTTP/1.1\r\nhost: x\r\n\r\n";
    unauthenticated.write_all(ask).await.unwrap();
    let response = read_to_end(&mut unauthenticated).await;
    assert!(response.starts_with("HTTP/1.1 401"), "{response}");
    let response = response.to_lowercase();
    assert!(response.contains("connection: close"), "{response}");
    server.stop().await;
}

#[tokio::test]
async fn owners_have_separate_connection_quotas() {
    let server = server(|b| b.connections = 2).await;
    let mut held = Vec::new();
    for (token, status) in [(ANN, "200"), (ANN, "200"), (ANN, "429"), (BOB, "200")] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        assert_eq!(ask_on(&mut stream, token).await, status);
        held.push(stream);
    }
    drop(held.remove(0));
    for attempt in 0.. {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        if ask_on(&mut stream, ANN).await == "200" {
            break;
        }
        assert!(attempt < 3000, "no connection became free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    server.stop().await;
}

#[tokio::test]
async fn snapshot_bytes_are_limited() {
    let server = server(|b| b.snapshot_bytes = (3 << 20) - 1).await;
    let snapshot = async |id: &str| {
        let path = format!("/v1/sandboxes/{id}/snapshot");
        server.ask(ANN, "POST", &path, Value::Null).await
    };
    let content = vec![7; 1 << 20];
    let mut kept = Vec::new();
    for n in 0..3 {
        let id = server.create(json!({})).await;
        assert_eq!(server.put(&id, "a", &content).await, 204);
        let made = snapshot(&id).await;
        // A second snapshot of the same files shares their data.
        let again = snapshot(&id).await;
        server
            .ask(ANN, "DELETE", &format!("/v1/sandboxes/{id}"), Value::Null)
            .await;
        if n < 2 {
            assert_eq!(
                (made.status, again.status),
                (201, 201),
                "{:?}",
                again.json()
            );
            kept.push([made, again].map(|a| a.json()["snapshot"].as_str().unwrap().to_owned()));
        } else {
            assert_eq!((made.status, made.code().as_str()), (429, "too_many"));
            let why = made.json()["error"]["message"].to_string();
            assert!(why.contains("the limit is 3145727"), "{why}");
        }
    }
    // A sandbox's base data counts while the sandbox lives, even after its snapshot was deleted.
    let start = server.create(json!({ "snapshot": kept[0][0] })).await;
    for id in &kept[0] {
        let path = format!("/v1/snapshots/{id}");
        assert_eq!(
            server.ask(ANN, "DELETE", &path, Value::Null).await.status,
            204
        );
    }
    let id = server.create(json!({})).await;
    assert_eq!(server.put(&id, "a", &content).await, 204);
    assert_eq!(snapshot(&id).await.status, 429);
    let fork = format!("/v1/sandboxes/{id}/fork");
    assert_eq!(server.ask(ANN, "POST", &fork, json!({})).await.status, 429);
    let path = format!("/v1/sandboxes/{start}");
    assert_eq!(
        server.ask(ANN, "DELETE", &path, Value::Null).await.status,
        204
    );
    assert_eq!(snapshot(&id).await.status, 201);
    server.stop().await;
}

/// Resident memory of this process, which contains the server.
fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

#[tokio::test]
async fn incomplete_bodies_are_on_disk() {
    let server = server(|b| b.transfers = 16).await;
    let id = server.create(json!({})).await;
    let archive = vec![7; 8 << 20];
    let whole = request(
        "POST",
        "/v1/snapshots",
        Some(ANN),
        "application/x-tar",
        &archive,
    );
    let before = resident_bytes();
    let mut under_way = Vec::new();
    for _ in 0..16 {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(&whole[..whole.len() - 1]).await.unwrap();
        under_way.push(stream);
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 48 << 20, "{grown} bytes for 128 MiB");
    // All transfer slots of one owner are in use. Those of other owners are free.
    let import = request(
        "POST",
        "/v1/snapshots",
        Some(BOB),
        "application/x-tar",
        &[0; 1024],
    );
    assert_eq!(server.send(import).await.status, 201);
    drop(under_way);
    assert_eq!(server.put(&id, "a", b"x").await, 204);
    let large = vec![7; (64 << 20) + 1];
    assert_eq!(server.put(&id, "a", &large).await, 413);
    server.stop().await;
}

#[tokio::test]
async fn imported_snapshots_count_against_the_quota() {
    let server = server(|b| b.snapshots = 2).await;
    let id = server.create(json!({})).await;
    let path = format!("/v1/sandboxes/{id}/snapshot");
    let made = server.ask(ANN, "POST", &path, Value::Null).await;
    let path = format!(
        "/v1/snapshots/{}",
        made.json()["snapshot"].as_str().unwrap()
    );
    let archive = server.ask(ANN, "GET", &path, Value::Null).await.body;
    let mut statuses = Vec::new();
    for token in [ANN, ANN, BOB] {
        let import = request(
            "POST",
            "/v1/snapshots",
            Some(token),
            "application/x-tar",
            &archive,
        );
        statuses.push(server.send(import).await.status);
    }
    assert_eq!(statuses, [201, 429, 201]);
    // Concurrent requests must behave the same.
    let one = || {
        request(
            "POST",
            "/v1/snapshots",
            Some(BOB),
            "application/x-tar",
            &archive,
        )
    };
    let answers = futures::future::join_all((0..6).map(|_| server.send(one()))).await;
    assert_eq!(answers.iter().filter(|a| a.status == 201).count(), 1);
    server.stop().await;
}

/// Egress proxy that records owner and name of each call.
#[derive(Default)]
struct Asked(Mutex<Vec<(String, String)>>);

impl Egress for Asked {
    fn port(&self) -> u16 {
        3128
    }

    fn environment(&self) -> Vec<(String, String)> {
        Vec::new()
    }

    fn serve(
        &self,
        owner: &str,
        name: &str,
        listener: TcpListener,
    ) -> Result<Box<dyn Send + Sync>, EgressError> {
        self.0.lock().unwrap().push((owner.into(), name.into()));
        Ok(Box::new(listener))
    }
}

#[tokio::test]
async fn episode_names_are_separate_for_each_owner() {
    let config = ProcessConfig::new("");
    let provider: Arc<dyn SandboxProvider> = Arc::new(ProcessProvider::start(config).unwrap());
    let tokens = Tokens::parse(&format!("ann:{ANN}\nbob:{BOB}")).unwrap();
    let asked = Arc::new(Asked::default());
    let way_out = Arc::clone(&asked) as Arc<dyn Egress>;
    let service = Service::new(vec![provider], tokens, Default::default(), Some(way_out));
    let server = Server::of(service).await;
    for token in [ANN, BOB] {
        let wish = json!({"egress": true, "episode": "e"});
        let made = server.ask(token, "POST", "/v1/sandboxes", wish).await;
        assert_eq!(made.status, 201, "{:?}", made.json());
    }
    let all = asked.0.lock().unwrap().clone();
    let named = |owner: &str| (owner.to_owned(), "e".to_owned());
    assert_eq!(all, [named("ann"), named("bob")]);
    server.stop().await;
}

/// Header of a ustar entry.
fn head(name: &str, kind: u8, size: usize) -> Vec<u8> {
    let mut head = vec![0; 512];
    head[..name.len()].copy_from_slice(name.as_bytes());
    head[100..107].copy_from_slice(b"0000644");
    head[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    head[156] = kind;
    head[257..265].copy_from_slice(b"ustar  \0");
    head[148..156].fill(b' ');
    let sum: u32 = head.iter().map(|b| u32::from(*b)).sum();
    head[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
    head
}

#[tokio::test]
async fn archives_with_endless_names_do_not_block_others() {
    let server = server(|_| {}).await;
    let size = 50 << 20;
    let long = [
        head("././@LongLink", b'L', size),
        vec![b'x'; size],
        head("x", b'0', 0),
        vec![0; 1024],
    ];
    let import = request(
        "POST",
        "/v1/snapshots",
        Some(ANN),
        "application/x-tar",
        &long.concat(),
    );
    let answer = tokio::time::timeout(TIMEOUT, server.send(import)).await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status, 422);
    assert!(answer.body.len() < 1000, "{}", answer.body.len());
    server.create(json!({})).await;
    server.stop().await;
}
