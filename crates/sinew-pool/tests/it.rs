//! The pool through its requests: what it admits, what it holds back and why, what a restart keeps.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "it/flow.rs"]
mod flow;
#[path = "it/hostile.rs"]
mod hostile;
#[path = "it/spans.rs"]
mod spans;

use serde_json::{Value, json};
use sinew_pool::http::{Request, answer};
use sinew_pool::{Folder, Pool, PoolConfig};
use sinew_render::TinyRenderer;
use std::path::Path;
use std::sync::Arc;

/// Ids: five control tokens, then the characters.
const ALPHABET: &str = ".A<>lr";

fn config(toml: Value) -> PoolConfig {
    let config: PoolConfig = serde_json::from_value(toml).unwrap();
    config.check().unwrap();
    config
}

fn open(folder: Option<&Path>, config: PoolConfig) -> Pool {
    let folder = folder.map(|path| Folder {
        path,
        accept_loss: false,
    });
    Pool::open(folder, config, Arc::new(TinyRenderer::new(ALPHABET)), None).unwrap()
}

fn pool() -> Pool {
    open(None, PoolConfig::default())
}

fn call(pool: &Pool, now_s: f64, method: &str, target: &str, body: &Value) -> (u16, Value) {
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let request = Request {
        method,
        path,
        query,
        content_type: "application/json",
        body: if body.is_null() {
            Vec::new()
        } else {
            body.to_string().into_bytes()
        },
    };
    let told = answer(pool, request, now_s);
    (told.status, serde_json::from_slice(&told.body).unwrap())
}

/// One turn in the tiny world: `A>`, then `r` and the end.
fn trajectory(id: &str) -> Value {
    json!({
        "id": id, "task": "t", "task_kind": "corridor-1", "reward": 1.0,
        "nodes": [
            {"kind": "prompt", "tokens": [2, 6, 8, 0, 3],
             "messages": [{"role": "user", "content": "A>"}]},
            {"parent": 0, "kind": "sampled", "tokens": [10, 0], "logprobs": [-0.5, -0.25], "version": 3,
             "messages": [{"role": "assistant", "content": "r"}]},
        ],
    })
}

fn push_of(pool: &Pool, now_s: f64, trajectories: &[Value]) -> (u16, Value) {
    let body = json!({
        "version": 1, "tokenizer": pool.tokenizer(), "source": "test", "trajectories": trajectories,
    });
    call(pool, now_s, "POST", "/pool/trajectories", &body)
}

fn items(pool: &Pool, trajectories: &[Value]) -> Vec<Value> {
    let (status, told) = push_of(pool, 10.0, trajectories);
    assert_eq!(status, 200, "{told}");
    told["items"].as_array().unwrap().clone()
}

fn lease(pool: &Pool, now_s: f64, more: Value) -> Value {
    let mut body = json!({
        "consumer": "run", "kind": "rl", "groups": 8, "ttl_s": 60, "version": 3, "seed": 0,
    });
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    let (status, told) = call(pool, now_s, "POST", "/pool/lease", &body);
    assert_eq!(status, 200, "{told}");
    told
}

fn leased_ids(loan: &Value) -> Vec<String> {
    let groups = loan["groups"].as_array().unwrap().iter();
    let rows = groups.flat_map(|g| g.as_array().unwrap());
    let mut ids: Vec<String> = rows
        .map(|r| r["trace"]["episode"].as_str().unwrap().to_owned())
        .collect();
    ids.sort_unstable();
    ids
}
