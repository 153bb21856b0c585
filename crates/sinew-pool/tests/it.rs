//! The pool through its requests: admission, quarantine with reasons, and restarts.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "it/admission.rs"]
mod admission;
#[path = "it/hostile.rs"]
mod hostile;
#[path = "it/spans.rs"]
mod spans;

use axum::body::{Body, to_bytes};
use axum::http::Request;
use serde_json::{Value, json};
use sinew_pool::http::router;
use sinew_pool::{Folder, Pool, PoolConfig};
use sinew_render::TinyRenderer;
use std::path::Path;
use std::sync::Arc;
use tower::ServiceExt;

/// Ids: five control tokens, then the characters.
const ALPHABET: &str = ".A<>lr";

fn config(toml: Value) -> PoolConfig {
    let config: PoolConfig = serde_json::from_value(toml).unwrap();
    config.check().unwrap();
    config
}

fn open(folder: Option<&Path>, config: PoolConfig) -> Arc<Pool> {
    let folder = folder.map(|path| Folder {
        path,
        accept_loss: false,
    });
    let pool = Pool::open(folder, config, Arc::new(TinyRenderer::new(ALPHABET)), None);
    Arc::new(pool.unwrap())
}

fn pool() -> Arc<Pool> {
    open(None, PoolConfig::default())
}

/// The status, the content type and the body that a request at `now_s` is answered with.
fn send(
    pool: &Arc<Pool>,
    now_s: f64,
    (method, target): (&str, &str),
    content_type: &str,
    body: Vec<u8>,
) -> (u16, String, Vec<u8>) {
    let request = Request::builder().method(method).uri(target);
    let request = request.header("content-type", content_type);
    let request = request.body(Body::from(body)).unwrap();
    let router = router(Arc::clone(pool), Arc::new(move || now_s));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.unwrap().block_on(async move {
        let response = router.oneshot(request).await.unwrap();
        let kind = response.headers().get("content-type").unwrap();
        let kind = kind.to_str().unwrap().to_owned();
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
        (status, kind, Vec::from(body))
    })
}

fn call(pool: &Arc<Pool>, now_s: f64, method: &str, target: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() {
        Vec::new()
    } else {
        body.to_string().into_bytes()
    };
    let (status, _, body) = send(pool, now_s, (method, target), "application/json", body);
    (status, serde_json::from_slice(&body).unwrap())
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

fn push_of(pool: &Arc<Pool>, now_s: f64, trajectories: &[Value]) -> (u16, Value) {
    let body = json!({
        "version": 1, "tokenizer": pool.tokenizer(), "source": "test", "trajectories": trajectories,
    });
    call(pool, now_s, "POST", "/pool/trajectories", &body)
}

fn items(pool: &Arc<Pool>, trajectories: &[Value]) -> Vec<Value> {
    let (status, told) = push_of(pool, 10.0, trajectories);
    assert_eq!(status, 200, "{told}");
    told["items"].as_array().unwrap().clone()
}

fn lease(pool: &Arc<Pool>, now_s: f64, more: Value) -> Value {
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
