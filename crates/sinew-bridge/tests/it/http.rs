//! Environments behind HTTP: the client against our server, and against servers that fail and lie.

use crate::support::{Sizes, call, calls, task};
use serde_json::{Value, json};
use sinew_bridge::{
    CaseOutcome, ConformanceOptions, EnvServer, Http, HttpEnvFactory, PythonEnvFactory,
    ServeOptions, conformance, serve_env,
};
use sinew_env::{Action, EnvConfig, EnvFactory};
use sinew_types::{FailureKind, Role};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const SHOP: &str = r#"
from sinew import Env, Done, Step, ToolError, tool

class E(Env):
    system = "You are a shopper."

    def start(self, task):
        if task.get("broken"):
            raise RuntimeError("no stock")
        self.cart = []

    @tool
    def add(self, item: str):
        "Put an item in the cart."
        if item == "gold":
            raise ToolError("no such item")
        if item == "crash":
            return 1 / 0
        self.cart.append(item)
        return Step("%d items" % len(self.cart), reward=0.25, fresh=item == "bread")

    @tool
    def pay(self):
        return Done("paid")

    def state(self):
        return self.cart

    def reward(self, task):
        if self.cart == ["unscored"]:
            return None
        return {"reward": self.cart == task.want, "items": len(self.cart)}
"#;

/// Our server of a class, and its address with the key. It ends with the runtime of the test.
async fn served(max_episodes: usize, lease_s: u64) -> (String, EnvServer, TempDir) {
    let (workers, dir) = tokio::task::spawn_blocking(|| {
        let target = (sinew_bridge::TargetKind::Env, "E");
        crate::support::workers(SHOP, target, Sizes::default()).unwrap()
    })
    .await
    .unwrap();
    let factory = PythonEnvFactory::new(workers, 0, "user.py:E").unwrap();
    let options = ServeOptions {
        tools: factory.specs().to_vec(),
        max_episodes,
        lease: Duration::from_secs(lease_s),
        key: "secret".into(),
        example: Some(task(json!({"want": ["tea"]}))),
        tasks: None,
    };
    let server = EnvServer::new(Arc::new(factory), options).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://env:secret@{}", listener.local_addr().unwrap());
    tokio::spawn(serve_env(listener, server.clone(), std::future::pending()));
    (url, server, dir)
}

async fn connect(keys: Http) -> Result<HttpEnvFactory, String> {
    let connected = tokio::task::spawn_blocking(move || HttpEnvFactory::connect(&keys));
    connected.await.unwrap().map_err(|e| e.to_string())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_class_behind_http_is_the_class() {
    let (url, _server, _dir) = served(4, 60).await;
    let factory = connect(Http::new(&url)).await.unwrap();
    assert_eq!(factory.name(), "http:user.py:E");
    let mut env = factory
        .create(&task(json!({"want": ["tea", "milk", "bread"]})))
        .unwrap();
    let reset = env.reset().await.unwrap();
    assert_eq!(reset.messages[0].role, Role::System);
    assert_eq!(reset.messages[1].content.text(), "Buy tea.");
    let names: Vec<_> = reset.tools.iter().map(|t| t.name.as_str()).collect();
    assert_eq!(names, ["add", "pay"]);
    // Calls of one turn run in order, with an observation each.
    let turn = calls(vec![
        call("a", "add", json!({"item": "tea"})),
        call("b", "add", json!({"item": "gold"})),
        call("c", "add", json!({"item": "milk"})),
    ]);
    let step = env.step(turn).await.unwrap();
    assert_eq!((step.process_reward, step.done), (0.5, false));
    assert_ne!(step.state_hash, reset.state_hash);
    let observation = step.observation.unwrap();
    assert!(observation.is_error);
    let said: Vec<_> = env
        .format_observation(&observation)
        .iter()
        .map(|m| {
            (
                m.tool_call_id.clone().unwrap(),
                m.content.text().into_owned(),
            )
        })
        .collect();
    let expected = [
        ("a", "1 items"),
        ("b", "Error: no such item"),
        ("c", "2 items"),
    ];
    assert_eq!(
        said,
        expected.map(|(id, text)| (id.to_owned(), text.to_owned()))
    );
    assert_eq!(env.renewed(), None);
    let turn = calls(vec![
        call("f", "add", json!({"item": "bread"})),
        call("g", "add", json!({"item": "gold"})),
    ]);
    env.step(turn).await.unwrap();
    let renewed = env.renewed().unwrap();
    let said = renewed.iter().map(|m| m.content.text().into_owned());
    let expected = ["You are a shopper.", "3 items", "Error: no such item"];
    assert_eq!(said.collect::<Vec<_>>(), expected);
    let turn = calls(vec![
        call("d", "pay", json!({})),
        call("e", "add", json!({"item": "tea"})),
    ]);
    let outcome = env.step(turn).await.unwrap().outcome.unwrap();
    assert_eq!((outcome.reward, outcome.success), (1.0, true));
    assert_eq!(
        (outcome.metrics["items"], outcome.metrics["tool_errors"]),
        (3.0, 2.0)
    );
    env.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_are_typed_and_no_score_is_never_0() {
    let (url, server, _dir) = served(1, 60).await;
    let factory = connect(Http::new(&url)).await.unwrap();
    let mut env = factory.create(&task(json!({"broken": true}))).unwrap();
    let error = env.reset().await.unwrap_err();
    assert_eq!(error.failure_kind(), FailureKind::Environment);
    assert!(
        error.to_string().contains("RuntimeError: no stock"),
        "{error}"
    );
    env.close().await.unwrap();
    let mut env = factory.create(&task(json!({"want": []}))).unwrap();
    env.reset().await.unwrap();
    let crash = calls(vec![call("a", "add", json!({"item": "crash"}))]);
    let error = env.step(crash).await.unwrap_err().to_string();
    assert!(error.contains("ZeroDivisionError"), "{error}");
    let add = calls(vec![call("b", "add", json!({"item": "unscored"}))]);
    env.step(add).await.unwrap();
    let outcome = env.score().await.unwrap();
    assert_eq!(outcome.unscored_reason.as_deref(), Some("it returned None"));
    env.close().await.unwrap();
    // A server that forgot the episode: no new one is begun in secret.
    let mut env = factory.create(&task(json!({"want": []}))).unwrap();
    env.reset().await.unwrap();
    assert_eq!(server.sweep(true).await, 1);
    let error = env.step(Action::say("x")).await.unwrap_err().to_string();
    assert!(
        error.contains("does not know the episode any more"),
        "{error}"
    );
    let outcome = env.score().await.unwrap();
    assert!(outcome.unscored && outcome.reward == 0.0);
    env.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_are_obeyed_and_leases_are_renewed() {
    let (url, server, _dir) = served(2, 2).await;
    let keys = Http {
        wait_s: 2.0,
        ..Http::new(&url)
    };
    let factory = connect(keys).await.unwrap();
    let mut envs = Vec::new();
    for _ in 0..2 {
        let mut env = factory.create(&task(json!({"want": []}))).unwrap();
        env.reset().await.unwrap();
        envs.push(env);
    }
    let mut third = factory.create(&task(json!({"want": []}))).unwrap();
    let error = third.reset().await.unwrap_err().to_string();
    assert!(
        error.contains("no place of the server's 2 was free"),
        "{error}"
    );
    third.close().await.unwrap();
    // Longer than two leases: the client renews them, and the server frees what no one renews.
    tokio::time::sleep(Duration::from_millis(4500)).await;
    assert!(envs[0].score().await.is_ok_and(|o| !o.unscored));
    drop(envs.pop());
    let mut again = factory.create(&task(json!({"want": []}))).unwrap();
    again.reset().await.unwrap();
    again.close().await.unwrap();
    envs.remove(0).close().await.unwrap();
    assert_eq!(server.sweep(true).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn our_server_keeps_the_protocol() {
    let (url, server, _dir) = served(3, 2).await;
    let url = url.replace("env:secret@", "");
    let options = ConformanceOptions {
        url: url.clone(),
        key: Some("secret".into()),
        task: serde_json::Map::new(),
        group: 8,
        timeout: Duration::from_secs(60),
    };
    let rows = conformance(&options).await.unwrap();
    assert_eq!(rows.len(), 15);
    for row in &rows {
        assert_eq!(row.outcome, CaseOutcome::Passed, "{row:?}");
    }
    assert_eq!(server.sweep(true).await, 0, "all episodes were ended");
    let error = connect(Http::new(&url)).await.unwrap_err();
    assert!(error.contains("401"), "{error}");
}

/// The first line of the answer to a request with the key.
async fn asked(url: &str, request: &str) -> String {
    let address = url.rsplit('@').next().unwrap();
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8_lossy(&answer);
    answer.lines().next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn web_pages_of_other_sites_reach_nothing() {
    let (url, server, _dir) = served(3, 60).await;
    let at = url.rsplit('@').next().unwrap().to_owned();
    let body = json!({"episode": "e", "task": task(json!({"want": []}))}).to_string();
    let post = |host: &str, kind: &str, more: &str| {
        let length = body.len();
        format!(
            "POST /episodes HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer secret\r\n{more}connection: \
             close\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}"
        )
    };
    for (request, status) in [
        (post("evil.example", "application/json", ""), "403"),
        (
            post(&at, "application/json", "origin: http://evil.example\r\n"),
            "403",
        ),
        (post(&at, "text/plain", ""), "415"),
    ] {
        let answer = asked(&url, &request).await;
        assert!(answer.contains(status), "{answer}: {request}");
    }
    assert_eq!(server.sweep(true).await, 0, "no episode was opened");
    let own = format!("origin: http://{at}\r\n");
    let answer = asked(&url, &post(&at, "application/json; charset=utf-8", &own)).await;
    assert!(answer.contains("200"), "{answer}");
    assert_eq!(server.sweep(true).await, 1);
}

/// A server that answers `GET /sinew` well, and everything else with `rest`, which may be no HTTP at all.
async fn liar(rest: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let mut head = [0; 4096];
                let read = stream.read(&mut head).await.unwrap_or(0);
                let described = json!({
                    "name": "liar", "protocol": 1, "max_episodes": 1, "lease_s": 60, "tools": [],
                });
                let body = described.to_string();
                let good = format!(
                    "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                );
                let answer = if head[..read].starts_with(b"GET /sinew") {
                    good.as_bytes()
                } else {
                    rest
                };
                let _ = stream.write_all(answer).await;
            });
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_fail_or_lie_fail_the_episode() {
    for (rest, said) in [
        (&b""[..], "no answer within 2 s"),
        (b"what?\r\n\r\n", "no answer within 2 s"),
        (
            b"HTTP/1.1 500 Oh\r\ncontent-length: 3\r\n\r\nbad",
            "500: bad",
        ),
        (
            b"HTTP/1.1 302 Go\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
            "answered 302",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7",
            "not as expected",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"messages\": 7}",
            "not as expected",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 16\r\n\r\n{\"messages\": []}",
            "list of messages is empty",
        ),
        (
            b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n{",
            "no answer within",
        ),
    ] {
        let url = liar(rest).await;
        let late = said.starts_with("no answer");
        let keys = Http {
            timeout_s: if late { 2.0 } else { 60.0 },
            ..Http::new(&url)
        };
        let factory = connect(keys).await.unwrap();
        let mut env = factory.create(&task(json!({}))).unwrap();
        let error = env.reset().await.unwrap_err();
        assert_eq!(error.failure_kind(), FailureKind::Environment);
        assert!(error.to_string().contains(said), "{said}: {error}");
        let _ = env.close().await;
    }
}

#[test]
fn keys_of_http_are_checked() {
    for (keys, said) in [
        (json!({"url": "ftp://x"}), "must start with http://"),
        (json!({"url": "http://x?a=1"}), "must not have a query"),
        (
            json!({"url": "http://x", "key_env": "se cret"}),
            "not the key itself",
        ),
        (
            json!({"url": "http://x", "timeout_s": 0.0}),
            "0.01 to 86400",
        ),
    ] {
        let keys: Http = serde_json::from_value::<Http>(keys).unwrap();
        let error = keys.check().unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
    let unset = Http {
        key_env: "SINEW_NO_SUCH_KEY".into(),
        ..Http::new("http://127.0.0.1:1")
    };
    let error = HttpEnvFactory::connect(&unset).unwrap_err().to_string();
    assert!(error.contains("is not set"), "{error}");
    let _: Value = json!(unset);
}
