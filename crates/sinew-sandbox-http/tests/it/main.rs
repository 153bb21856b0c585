//! The API over HTTP, with sandboxes of the process level.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod client;
mod hostile;
mod hosts;
mod terminal;
mod watch;

use serde_json::{Value, json};
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_sandbox_http::{Bounds, Service, Tokens, serve};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const ANN: &str = "ann-0123456789abcdef";
const BOB: &str = "bob-0123456789abcdef";

struct Server {
    address: SocketAddr,
    service: Arc<Service>,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

async fn server(change: impl FnOnce(&mut Bounds)) -> Server {
    let config = ProcessConfig::new("");
    let provider: Arc<dyn SandboxProvider> = Arc::new(ProcessProvider::start(config).unwrap());
    let mut bounds = Bounds {
        sandboxes: 8,
        ..Bounds::default()
    };
    change(&mut bounds);
    let tokens = Tokens::parse(&format!("ann:{ANN}\nbob:{BOB}")).unwrap();
    Server::of(Service::new(vec![provider], tokens, bounds, None)).await
}

struct Answer {
    status: u16,
    body: Vec<u8>,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    fn code(&self) -> String {
        self.json()["error"]["code"]
            .as_str()
            .unwrap_or_default()
            .into()
    }
}

fn request(method: &str, path: &str, token: Option<&str>, kind: &str, body: &[u8]) -> Vec<u8> {
    let auth = token
        .map(|t| format!("authorization: Bearer {t}\r\n"))
        .unwrap_or_default();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{auth}\
         content-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Decodes a chunked body.
fn unchunk(head: &str, mut rest: &[u8]) -> Vec<u8> {
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return rest.to_vec();
    }
    let mut out = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        out.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 4 + size..];
    }
    out
}

impl Server {
    async fn of(service: Service) -> Self {
        let service = Arc::new(service);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let own = Arc::clone(&service);
        let task = tokio::spawn(async move {
            let stopped = async { drop(stopped.await) };
            serve(listener, own, stopped).await.unwrap();
        });
        Self {
            address,
            service,
            stop: Some(stop),
            task,
        }
    }

    async fn send(&self, bytes: Vec<u8>) -> Answer {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut all = Vec::new();
        stream.read_to_end(&mut all).await.unwrap();
        let split = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
        let head = String::from_utf8(all[..split].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer {
            status,
            body: unchunk(&head, &all[split + 4..]),
        }
    }

    async fn ask(&self, token: &str, method: &str, path: &str, body: Value) -> Answer {
        let body = if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        };
        self.send(request(
            method,
            path,
            Some(token),
            "application/json",
            &body,
        ))
        .await
    }

    async fn create(&self, body: Value) -> String {
        let answer = self.ask(ANN, "POST", "/v1/sandboxes", body).await;
        assert_eq!(answer.status, 201, "{:?}", answer.json());
        answer.json()["id"].as_str().unwrap().into()
    }

    async fn exec(&self, id: &str, body: Value) -> Answer {
        self.ask(ANN, "POST", &format!("/v1/sandboxes/{id}/exec"), body)
            .await
    }

    /// A connection whose answer is that of an execution.
    async fn begin_exec(&self, id: &str, body: &Value) -> TcpStream {
        let (path, body) = (format!("/v1/sandboxes/{id}/exec"), body.to_string());
        let kind = "application/json";
        let bytes = request("POST", &path, Some(ANN), kind, body.as_bytes());
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream
    }

    async fn put(&self, id: &str, path: &str, content: &[u8]) -> u16 {
        let path = format!("/v1/sandboxes/{id}/files/{path}");
        self.send(request(
            "PUT",
            &path,
            Some(ANN),
            "application/octet-stream",
            content,
        ))
        .await
        .status
    }

    async fn until_live(&self, wanted: (usize, usize)) {
        for _ in 0..1200 {
            if self.service.live() == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{:?} are live, not {wanted:?}", self.service.live());
    }

    async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(60), &mut self.task)
            .await
            .unwrap()
            .unwrap();
        assert_eq!(self.service.live(), (0, 0));
    }
}

#[tokio::test]
async fn create_run_files_and_destroy() {
    let server = server(|_| {}).await;
    let id = server
        .create(
            json!({ "env": { "GREETING": "hello" }, "limits": { "memory_bytes": 134_217_728 } }),
        )
        .await;
    let shell = "echo $GREETING $MORE; cat; exit 3";
    let env = json!({ "MORE": "world" });
    let body = json!({ "shell": shell, "stdin": "in", "env": env });
    let answer = server.exec(&id, body).await;
    let result = answer.json();
    assert_eq!(
        result["ending"],
        json!({ "type": "exited", "code": 3 }),
        "{result}"
    );
    assert_eq!(result["stdout"], "hello world\nin");
    assert!(result["protections"].as_array().unwrap().len() > 5);
    let bytes: Vec<u8> = (0..=255).collect();
    assert_eq!(server.put(&id, "dir/data.bin", &bytes).await, 204);
    let python = "import sys; sys.stdout.buffer.write(open('dir/data.bin','rb').read())";
    let body = json!({ "python": python, "binary": true });
    let answer = server.exec(&id, body).await;
    assert!(
        answer.json()["stdout"]
            .as_str()
            .unwrap()
            .starts_with("AAECAwQ"),
        "{:?}",
        answer.json()
    );
    let path = format!("/v1/sandboxes/{id}/files/dir/data.bin");
    assert_eq!(server.ask(ANN, "GET", &path, Value::Null).await.body, bytes);
    let listed = server
        .ask(ANN, "GET", "/v1/sandboxes", Value::Null)
        .await
        .json();
    assert_eq!(listed["sandboxes"][0]["id"], json!(id));
    assert_eq!(
        listed["sandboxes"][0]["limits"]["memory_bytes"],
        134_217_728
    );
    let path = format!("/v1/sandboxes/{id}");
    assert_eq!(
        server.ask(ANN, "DELETE", &path, Value::Null).await.status,
        204
    );
    assert_eq!(
        server.ask(ANN, "DELETE", &path, Value::Null).await.code(),
        "not_found"
    );
    server.stop().await;
}

#[tokio::test]
async fn tokens_are_required_and_owners_are_separate() {
    let server = server(|_| {}).await;
    let id = server.create(json!({})).await;
    for (method, path) in [
        ("GET", "/v1/sandboxes".to_string()),
        ("POST", "/v1/sandboxes".into()),
        ("GET", "/v1/levels".into()),
        ("GET", format!("/v1/sandboxes/{id}")),
        ("POST", format!("/v1/sandboxes/{id}/exec")),
        ("GET", format!("/v1/sandboxes/{id}/files/x")),
        ("POST", "/v1/snapshots".into()),
    ] {
        for token in [None, Some("wrong-0123456789abcdef"), Some("")] {
            let answer = server
                .send(request(method, &path, token, "application/json", b"{}"))
                .await;
            assert_eq!(
                (answer.status, answer.code().as_str()),
                (401, "unauthorized"),
                "{method} {path}"
            );
        }
    }
    assert_eq!(
        server
            .send(request("GET", "/v1/health", None, "text/plain", b""))
            .await
            .status,
        200
    );
    for (method, path) in [
        ("GET", format!("/v1/sandboxes/{id}")),
        ("DELETE", format!("/v1/sandboxes/{id}")),
        ("POST", format!("/v1/sandboxes/{id}/snapshot")),
        ("GET", format!("/v1/sandboxes/{id}/files/x")),
    ] {
        assert_eq!(
            server.ask(BOB, method, &path, Value::Null).await.status,
            404,
            "{method} {path}"
        );
    }
    let run = json!({ "shell": "true" });
    assert_eq!(
        server
            .ask(BOB, "POST", &format!("/v1/sandboxes/{id}/exec"), run)
            .await
            .status,
        404
    );
    let listed = server
        .ask(BOB, "GET", "/v1/sandboxes", Value::Null)
        .await
        .json();
    assert_eq!(listed["sandboxes"], json!([]));
    server.stop().await;
}

#[tokio::test]
async fn invalid_requests_are_refused_with_the_field() {
    let server = server(|b| b.file_bytes = 1000).await;
    let id = server.create(Value::Null).await;
    let create = "/v1/sandboxes".to_string();
    let exec = format!("/v1/sandboxes/{id}/exec");
    let cases = [
        (&create, json!({ "level": "moon" }), "level"),
        (
            &create,
            json!({ "limits": { "memory_bytes": 1u64 << 50 } }),
            "limits.memory_bytes",
        ),
        (
            &create,
            json!({ "limits": { "processes": 0 } }),
            "limits.processes",
        ),
        (
            &create,
            json!({ "limits": { "cpu_s": -1.0 } }),
            "limits.cpu_s",
        ),
        (&create, json!({ "lease_s": 0 }), "lease_s"),
        (&create, json!({ "lease_s": 1e9 }), "lease_s"),
        (&create, json!({ "egress": true }), "egress"),
        (&create, json!({ "env": { "A=B": "x" } }), "env"),
        (&create, json!({ "levle": "process" }), "levle"),
        (&create, json!([]), "no JSON object"),
        (&create, json!({ "level": "vm" }), "allowed: "),
        (&exec, json!({}), "exactly one"),
        (&exec, json!({ "shell": "x", "python": "y" }), "exactly one"),
        (
            &exec,
            json!({ "shell": "x", "timeout_s": 1e9 }),
            "timeout_s",
        ),
        (
            &exec,
            json!({ "shell": "x", "stdin_base64": "!" }),
            "stdin_base64",
        ),
        (&exec, json!({ "argv": [] }), "program"),
    ];
    for (path, body, word) in cases {
        let answer = server.ask(ANN, "POST", path, body.clone()).await;
        let message = answer.json()["error"]["message"].to_string();
        assert!(
            answer.status == 400 && message.contains(word),
            "{body}: {} {message}",
            answer.status
        );
    }
    assert_eq!(server.put(&id, "big", &[0; 1001]).await, 413);
    assert_eq!(server.put(&id, "%2e%2e/escape", b"x").await, 422);
    assert_eq!(
        server
            .ask(
                ANN,
                "POST",
                "/v1/sandboxes",
                json!({ "snapshot": "snap-0" })
            )
            .await
            .status,
        404
    );
    assert_eq!(server.ask(ANN, "GET", "/v2", Value::Null).await.status, 404);
    server.stop().await;
}

async fn read_until(stream: &mut TcpStream, seen: &mut Vec<u8>, word: &str) {
    let mut chunk = [0; 4096];
    while !String::from_utf8_lossy(seen).contains(word) {
        let n = stream.read(&mut chunk).await.unwrap();
        assert!(n > 0, "no {word:?} in {}", String::from_utf8_lossy(seen));
        seen.extend_from_slice(&chunk[..n]);
    }
}

#[tokio::test]
async fn output_is_streamed_while_the_program_runs() {
    // A folder of the host, in which the program sees what it may write next.
    let folder = tempfile::tempdir().unwrap();
    let mut config = ProcessConfig::new("");
    let shown = (folder.path().to_owned(), "/volumes/go".into());
    config.shows.push(shown);
    let provider: Arc<dyn SandboxProvider> = Arc::new(ProcessProvider::start(config).unwrap());
    let tokens = Tokens::parse(&format!("ann:{ANN}")).unwrap();
    let service = Service::new(vec![provider], tokens, Bounds::default(), None);
    let server = Server::of(service).await;
    let id = server.create(json!({})).await;
    let shell = "go() { while [ ! -e /volumes/go/$1 ]; do sleep 0.05; done; }\n\
                 echo one; go two; echo two >&2; go three; echo three; exit 4";
    let body = json!({ "shell": shell, "stream": true, "timeout_s": 120 });
    let mut stream = server.begin_exec(&id, &body).await;
    let mut seen = Vec::new();
    read_until(&mut stream, &mut seen, "one").await;
    assert_eq!(
        server.exec(&id, json!({ "shell": "true" })).await.code(),
        "busy"
    );
    std::fs::write(folder.path().join("two"), "").unwrap();
    read_until(&mut stream, &mut seen, "two").await;
    std::fs::write(folder.path().join("three"), "").unwrap();
    stream.read_to_end(&mut seen).await.unwrap();
    let split = seen.windows(4).position(|w| w == b"\r\n\r\n").unwrap();
    let head = String::from_utf8_lossy(&seen[..split]).into_owned();
    let lines = String::from_utf8(unchunk(&head, &seen[split + 4..])).unwrap();
    let lines: Vec<Value> = lines
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines[0], json!({ "stream": "stdout", "data": "one\n" }));
    assert_eq!(lines[1], json!({ "stream": "stderr", "data": "two\n" }));
    let result = &lines.last().unwrap()["result"];
    assert_eq!(result["ending"], json!({ "type": "exited", "code": 4 }));
    assert_eq!(result["stdout"], "one\nthree\n");
    server.stop().await;
}

#[tokio::test]
async fn leases_expire_but_not_during_an_execution() {
    let server = server(|_| {}).await;
    let id = server.create(json!({ "lease_s": 2 })).await;
    let answer = server
        .exec(
            &id,
            json!({ "shell": "sleep 3; echo done", "timeout_s": 60 }),
        )
        .await;
    assert_eq!(answer.json()["stdout"], "done\n", "{:?}", answer.json());
    server.until_live((1, 0)).await;
    // The execution renewed the lease by its timeout.
    let view = server
        .ask(ANN, "GET", &format!("/v1/sandboxes/{id}"), Value::Null)
        .await
        .json();
    assert!(view["expires_in_s"].as_f64().unwrap() > 10.0, "{view}");
    let vanishing = server.create(json!({ "lease_s": 0.3 })).await;
    let listed = async || server.ask(ANN, "GET", "/v1/sandboxes", Value::Null).await;
    while listed().await.json().to_string().contains(&vanishing) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    server.stop().await;
}

/// True if a process on the host has `marker` in its command line.
fn lives(marker: &str) -> bool {
    let marker = marker.as_bytes();
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        line.windows(marker.len()).any(|w| w == marker)
    })
}

#[tokio::test]
async fn disconnecting_clients_kill_their_programs() {
    let server = server(|_| {}).await;
    let id = server.create(json!({})).await;
    for (stream_it, marker) in [(false, "sleep\09871.25"), (true, "sleep\09872.25")] {
        let seconds = marker.split('\0').nth(1).unwrap();
        let body =
            json!({ "argv": ["/bin/sleep", seconds], "timeout_s": 3000, "stream": stream_it });
        let stream = server.begin_exec(&id, &body).await;
        for _ in 0..1200 {
            if lives(marker) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(lives(marker));
        drop(stream);
        for _ in 0..1200 {
            if !lives(marker) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(!lives(marker), "stream = {stream_it}");
        // The sandbox is free again.
        let mut answer = server.exec(&id, json!({ "shell": "echo again" })).await;
        for _ in 0..1200 {
            if answer.status != 409 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            answer = server.exec(&id, json!({ "shell": "echo again" })).await;
        }
        assert_eq!(answer.json()["stdout"], "again\n");
    }
    server.stop().await;
}

#[tokio::test]
async fn destroy_ends_executions_and_stop_destroys_everything() {
    let server = Arc::new(server(|_| {}).await);
    let id = server.create(json!({})).await;
    let own = (Arc::clone(&server), id.clone());
    let running = tokio::spawn(async move {
        own.0
            .exec(
                &own.1,
                json!({ "argv": ["/bin/sleep", "9873.25"], "timeout_s": 3000 }),
            )
            .await
    });
    while !lives("sleep\09873.25") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(
        server
            .ask(ANN, "DELETE", &format!("/v1/sandboxes/{id}"), Value::Null)
            .await
            .status,
        204
    );
    assert_eq!(running.await.unwrap().code(), "gone");
    assert!(!lives("sleep\09873.25"));
    server.create(json!({})).await;
    Arc::into_inner(server).unwrap().stop().await;
}

#[tokio::test]
async fn owners_have_quotas() {
    let server = server(|b| b.sandboxes = 2).await;
    let first = server.create(json!({})).await;
    server.create(json!({})).await;
    assert_eq!(
        server
            .ask(ANN, "POST", "/v1/sandboxes", json!({}))
            .await
            .code(),
        "too_many"
    );
    assert_eq!(
        server
            .ask(BOB, "POST", "/v1/sandboxes", json!({}))
            .await
            .status,
        201
    );
    assert_eq!(
        server
            .ask(
                ANN,
                "POST",
                &format!("/v1/sandboxes/{first}/fork"),
                json!({})
            )
            .await
            .code(),
        "too_many"
    );
    assert_eq!(
        server
            .ask(
                ANN,
                "DELETE",
                &format!("/v1/sandboxes/{first}"),
                Value::Null
            )
            .await
            .status,
        204
    );
    server.create(json!({})).await;
    server.stop().await;
}

#[tokio::test]
async fn snapshots_forks_and_archives_carry_files() {
    let server = server(|_| {}).await;
    let id = server.create(json!({})).await;
    assert_eq!(server.put(&id, "state.txt", b"one").await, 204);
    let path = format!("/v1/sandboxes/{id}/snapshot");
    let answer = server.ask(ANN, "POST", &path, Value::Null).await;
    assert_eq!(answer.status, 201, "{:?}", answer.json());
    let snapshot = answer.json()["snapshot"].as_str().unwrap().to_string();
    assert_eq!(server.put(&id, "state.txt", b"two").await, 204);
    let old = server.create(json!({ "snapshot": snapshot })).await;
    let forks = server
        .ask(
            ANN,
            "POST",
            &format!("/v1/sandboxes/{id}/fork"),
            json!({ "count": 2 }),
        )
        .await
        .json();
    let read = async |id: &str| {
        let answer = server
            .exec(id, json!({ "shell": "cat state.txt" }))
            .await
            .json();
        answer["stdout"].as_str().unwrap_or_default().to_string()
    };
    assert_eq!(read(&old).await, "one");
    for fork in forks["sandboxes"].as_array().unwrap() {
        let fork = fork["id"].as_str().unwrap();
        assert_eq!(read(fork).await, "two");
        assert_eq!(server.put(fork, "state.txt", b"mine").await, 204);
    }
    assert_eq!(read(&id).await, "two");
    server.stop().await;
}

#[tokio::test]
async fn archives_have_digests_and_can_be_imported() {
    let server = server(|_| {}).await;
    let id = server.create(json!({})).await;
    assert_eq!(server.put(&id, "state.txt", b"one").await, 204);
    let path = format!("/v1/sandboxes/{id}/snapshot");
    let answer = server.ask(ANN, "POST", &path, Value::Null).await;
    let snapshot = answer.json()["snapshot"].as_str().unwrap().to_string();
    let archive = server
        .ask(
            ANN,
            "GET",
            &format!("/v1/snapshots/{snapshot}"),
            Value::Null,
        )
        .await;
    assert_eq!(archive.status, 200);
    let imported = server
        .send(request(
            "POST",
            "/v1/snapshots",
            Some(ANN),
            "application/x-tar",
            &archive.body,
        ))
        .await;
    assert_eq!(imported.status, 201, "{:?}", imported.json());
    let digest = imported.json()["digest"].as_str().unwrap().to_string();
    assert!(
        digest.starts_with("sha256:") && digest.len() == 71,
        "{digest}"
    );
    for (named, status) in [(digest.as_str(), 201), ("sha256:0", 400)] {
        let path = format!("/v1/snapshots?digest={named}");
        let asked = request("POST", &path, Some(ANN), "application/x-tar", &archive.body);
        assert_eq!(server.send(asked).await.status, status, "{named}");
    }
    let imported = imported.json()["snapshot"].as_str().unwrap().to_string();
    let again = server.create(json!({ "snapshot": imported })).await;
    let read = server.exec(&again, json!({ "shell": "cat state.txt" }));
    assert_eq!(read.await.json()["stdout"], "one");
    let path = format!("/v1/snapshots/{snapshot}");
    assert_eq!(
        server.ask(BOB, "DELETE", &path, Value::Null).await.status,
        404
    );
    let path = format!("/v1/snapshots/{snapshot}");
    assert_eq!(
        server.ask(ANN, "DELETE", &path, Value::Null).await.status,
        204
    );
    server.stop().await;
}

#[tokio::test]
async fn sandboxes_report_stats_and_reset() {
    let server = server(|_| {}).await;
    let id = server.create(json!({})).await;
    assert_eq!(server.put(&id, "state.txt", b"one").await, 204);
    let read = async |id: &str| {
        let answer = server.exec(id, json!({ "shell": "cat state.txt" })).await;
        answer.json()["stdout"]
            .as_str()
            .unwrap_or_default()
            .to_string()
    };
    assert_eq!(read(&id).await, "one");
    let path = format!("/v1/sandboxes/{id}/reset");
    assert_eq!(
        server.ask(ANN, "POST", &path, Value::Null).await.status,
        204
    );
    assert_eq!(read(&id).await, "");
    let stats = server
        .ask(
            ANN,
            "GET",
            &format!("/v1/sandboxes/{id}/stats"),
            Value::Null,
        )
        .await;
    assert_eq!(stats.status, 200);
    assert!(
        stats.json()["executions"].as_u64().unwrap() >= 1,
        "{:?}",
        stats.json()
    );
    server.stop().await;
}
