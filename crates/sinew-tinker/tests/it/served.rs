//! The service over a real desk: a tiny decoder trains and samples, without a listener.

use axum::Router;
use axum::body::Body;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{Request, StatusCode};
use bytes::Bytes;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward};
use sinew_model::{InferModel, Keep};
use sinew_tinker::desk::types::ServedModel;
use sinew_tinker::desk::{
    Desk, DeskConfig, DeskLimits, DeskParts, Embedded, EmbeddedConfig, Residents, RunningDesk,
    wall_clock,
};
use sinew_tinker::server::{Keys, ServerLimits, TinkerServerConfig, router};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::watch;
use tower::ServiceExt;

/// Key of the tenant ann.
pub(crate) const ANN: &str = "tml-ann-0123456789abcdef";
/// Key of the tenant bob.
pub(crate) const BOB: &str = "tml-bob-0123456789abcdef";
/// Name of the model.
pub(crate) const MODEL: &str = "tiny/model";
/// Longest sequence.
pub(crate) const CONTEXT: usize = 64;

/// Tokens of key-value memory.
const KV_TOKENS: usize = 4096;

/// A service in this process.
pub(crate) struct Served {
    router: Router,
    desk: Desk,
    running: RunningDesk,
    stop: watch::Sender<bool>,
    _folder: TempDir,
}

/// Opens a desk whose files lie in a folder. Blocks.
fn open(folder: &Path) -> (Desk, RunningDesk) {
    let base = Arc::new(crate::params());
    let inference = InferModel::new(&crate::device(), base.config(), &*base, CONTEXT).unwrap();
    let forward = ModelForward::new(crate::device(), inference, KV_TOKENS).unwrap();
    let engine = EmbeddedEngine::new(forward, EngineConfig::default(), None, Box::new(|| 0.0));
    let limits = DeskLimits::default();
    let trainer = EmbeddedConfig {
        base_name: MODEL.into(),
        context: CONTEXT,
        keep: Keep::All,
        lora_alpha: limits.lora_alpha,
        capacity: limits.resident_models,
    };
    let config = DeskConfig {
        state: folder.to_owned(),
        limits,
        tenants: Vec::new(),
        served: vec![ServedModel {
            name: MODEL.into(),
            max_context: CONTEXT,
            trainable: true,
            sampleable: true,
            tokenizer: None,
            arch: "llama".into(),
        }],
        vocab: base.config().vocab,
        stop_ids: base.config().eos_ids.clone(),
        support: Embedded::support(),
        samples_adapters: true,
    };
    let parts = DeskParts {
        residents: Box::new(move || {
            let base = Arc::clone(&base);
            let made = Embedded::new(base, trainer.clone(), crate::device());
            Ok(Box::new(made) as Box<dyn Residents>)
        }),
        engine: Arc::new(engine.unwrap()),
        full_engines: None,
        clock: wall_clock(),
    };
    Desk::open(config, parts).unwrap()
}

impl Served {
    /// A service whose waits are short.
    pub(crate) async fn new() -> Self {
        Self::waiting(Duration::from_millis(20)).await
    }

    /// A service whose waits for a result last so long.
    pub(crate) async fn waiting(poll: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        let opened = tokio::task::spawn_blocking(move || open(&state)).await;
        let (desk, running) = opened.unwrap();
        let (stop, stopped) = watch::channel(false);
        let config = TinkerServerConfig {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into(),
            keys: Keys::parse(&format!("ann:{ANN}\nbob:{BOB}")).unwrap(),
            limits: ServerLimits {
                poll,
                inline_bytes: 1,
                ..ServerLimits::default()
            },
            public_url: Some("http://train.example/".into()),
        };
        Self {
            router: router(desk.clone(), config, stopped).unwrap(),
            desk,
            running,
            stop,
            _folder: folder,
        }
    }

    /// Ends waits for results.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Ends the desk as an operator would.
    pub(crate) async fn end(self) {
        self.desk.drain().await.unwrap();
        let running = self.running;
        tokio::task::spawn_blocking(move || drop(running))
            .await
            .unwrap();
    }

    /// Sends a request, and returns status, content type and body.
    async fn call(&self, request: Request<Body>) -> (StatusCode, String, Bytes) {
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let status = answer.status();
        let kind = answer.headers().get(CONTENT_TYPE);
        let kind = kind.map_or("", |kind| kind.to_str().unwrap()).to_owned();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, kind, body)
    }

    /// Sends a request with a key, if there is one; the body of the answer is null if it is not JSON.
    pub(crate) async fn send(
        &self,
        key: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> (StatusCode, Value) {
        let mut request = Request::builder().method(method).uri(path);
        if !key.is_empty() {
            request = request.header("x-api-key", key);
        }
        let body = match body {
            Some(value) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Body::from(serde_json::to_vec(value).unwrap())
            }
            None => Body::empty(),
        };
        let (status, _, bytes) = self.call(request.body(body).unwrap()).await;
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    /// `GET`.
    pub(crate) async fn get(&self, key: &str, path: &str) -> (StatusCode, Value) {
        self.send(key, "GET", path, None).await
    }

    /// `POST`.
    pub(crate) async fn post(&self, key: &str, path: &str, body: &Value) -> (StatusCode, Value) {
        self.send(key, "POST", path, Some(body)).await
    }

    /// `POST` that must be answered with 200.
    pub(crate) async fn ok(&self, key: &str, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(key, path, body).await;
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    /// The result of a command in JSON.
    pub(crate) async fn result(&self, key: &str, made: &Value) -> Value {
        let ask = json!({"request_id": made["request_id"]});
        loop {
            let (status, answer) = self.post(key, "/api/v1/retrieve_future", &ask).await;
            if status != StatusCode::REQUEST_TIMEOUT {
                assert_eq!(status, StatusCode::OK, "{answer}");
                assert!(answer.get("error").is_none(), "{answer}");
                return answer;
            }
        }
    }

    /// The result of a command as the SDK asks for it: content type and body.
    pub(crate) async fn protobuf(&self, key: &str, ask: &Value) -> (String, Bytes) {
        let request = Request::post("/api/v1/retrieve_future")
            .header("x-api-key", key)
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "application/x-protobuf")
            .body(Body::from(serde_json::to_vec(ask).unwrap()))
            .unwrap();
        let (status, kind, body) = self.call(request).await;
        assert_eq!(status, StatusCode::OK, "{body:?}");
        (kind, body)
    }

    /// Makes a session.
    pub(crate) async fn session(&self, key: &str) -> String {
        let new = json!({"tags": [], "sdk_version": "0.38.0", "user_metadata": null});
        let made = self.ok(key, "/api/v1/create_session", &new).await;
        made["session_id"].as_str().unwrap().to_owned()
    }

    /// Makes a model with adapters of rank 2.
    pub(crate) async fn model(&self, key: &str, session: &str, seq: u64) -> String {
        let ask = json!({
            "session_id": session, "model_seq_id": seq, "base_model": MODEL,
            "lora_config": {"rank": 2, "seed": 1},
        });
        let made = self.ok(key, "/api/v1/create_model", &ask).await;
        let model = self.result(key, &made).await["model_id"].clone();
        model.as_str().unwrap().to_owned()
    }
}
