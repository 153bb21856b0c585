//! A service for tests: models are tables of logits by the last token, which learn by plain gradient descent.
//!
//! It keeps the order of commands, their numbers and their results as the protocol wants it, and fails as a
//! test asks for it.

mod model;
mod state;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State as Shared};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use model::Table;
use serde_json::Value;
use state::Command;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

pub(super) use model::VOCAB;
pub(super) use state::State;

/// Name of the only base model.
pub(super) const BASE: &str = "tiny";

/// A fault of the next request to a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// A status, with this text; nothing is done.
    Status(u16, &'static str),
    /// It is done, and the connection breaks in the middle of the answer.
    Lost,
    /// The answer comes after so many milliseconds.
    Late(u64),
    /// The command fails with this category.
    Fails(&'static str),
}

/// A service on a port; gone when it is dropped.
pub(super) struct Fake {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Fake {
    /// A new service.
    pub(super) fn start() -> Self {
        let port = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::listen(port, Arc::new(Mutex::new(State::default())))
    }

    fn listen(address: SocketAddr, state: Arc<Mutex<State>>) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime.block_on(TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let app = Router::new()
            .fallback(answer)
            .with_state(Arc::clone(&state));
        let thread = std::thread::spawn(move || {
            runtime.block_on(async move {
                tokio::select! {
                    served = axum::serve(listener, app).into_future() => served.unwrap(),
                    _ = stopped => {}
                }
            });
            // Connections end with the runtime, in the middle of any data.
        });
        Self {
            address,
            state,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends the process of the service; everything that it took is on its disk.
    pub(super) fn kill(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }

    /// Starts the process again, at the same address.
    pub(super) fn restart(&mut self) {
        self.kill();
        *self = Self::listen(self.address, Arc::clone(&self.state));
    }

    /// Reads or changes its state.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.state.lock().unwrap())
    }

    /// Makes the next request to a path fail; several faults of a path come one after the other.
    pub(super) fn fault(&self, path: &'static str, fault: Fault) {
        self.with(|state| state.faults.push((path, fault)));
    }

    /// The logits of a model.
    pub(super) fn table(&self, model: &str) -> Vec<f32> {
        self.with(|state| state.models[model].table.logits.clone())
    }

    /// The logits of the base model.
    pub(super) fn base(&self) -> Vec<f32> {
        Table::base().logits
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn answer(Shared(state): Shared<Arc<Mutex<State>>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, 64 << 20).await.unwrap_or_default();
    let path = head.uri.path().trim_start_matches("/api/v1/").to_owned();
    let is_zstd = head
        .headers
        .get(header::CONTENT_ENCODING)
        .is_some_and(|encoding| encoding == "zstd");
    let body = if is_zstd {
        Bytes::from(zstd::bulk::decompress(&body, 64 << 20).unwrap())
    } else {
        body
    };
    let wants_protobuf = head
        .headers
        .get(header::ACCEPT)
        .is_some_and(|accept| accept == crate::wire::PROTOBUF);
    let key = head.headers.get("x-api-key").cloned();
    let (fault, answer) = {
        let mut state = state.lock().unwrap();
        let short = path.split('/').next().unwrap_or_default().to_owned();
        let fault = state.fault(&short);
        let refused = key.is_none_or(|key| key != state.key.as_str());
        let answer = match &fault {
            _ if refused => (401, Body::from("{\"detail\": \"unknown key\"}"), false),
            Some(Fault::Status(status, text)) => (*status, Body::from(*text), false),
            _ => {
                let fails = match &fault {
                    Some(Fault::Fails(category)) => Some(*category),
                    _ => None,
                };
                done(&mut state, &path, &body, wants_protobuf, fails)
            }
        };
        (fault, answer)
    };
    match fault {
        Some(Fault::Lost) => {
            let cut = Err::<Bytes, std::io::Error>(std::io::Error::other("lost"));
            Response::new(Body::from_stream(futures::stream::iter([cut])))
        }
        Some(Fault::Late(ms)) => {
            tokio::time::sleep(Duration::from_millis(ms)).await;
            written(answer)
        }
        _ => written(answer),
    }
}

/// Status, body, and whether it is protobuf.
type Answer = (u16, Body, bool);

fn written((status, body, is_protobuf): Answer) -> Response {
    let kind = if is_protobuf {
        crate::wire::PROTOBUF
    } else {
        "application/json"
    };
    let status = StatusCode::from_u16(status).unwrap();
    (status, [(header::CONTENT_TYPE, kind)], body).into_response()
}

fn json(value: &Value) -> Answer {
    (200, Body::from(value.to_string()), false)
}

/// Carries out a request.
fn done(
    state: &mut State,
    path: &str,
    body: &Bytes,
    wants_protobuf: bool,
    fails: Option<&'static str>,
) -> Answer {
    if let Some(rest) = path.strip_prefix("training_runs/") {
        let (model, name) = rest.split_once("/checkpoints/").unwrap();
        let path = format!("tinker://{model}/{name}");
        state.deleted.push(path.clone());
        let found = state.saved.remove(&path).is_some();
        return (if found { 204 } else { 404 }, Body::empty(), false);
    }
    if path == "forward_backward" {
        return submitted(state, Command::train(body.clone()), fails);
    }
    let sent: Value = serde_json::from_slice(body).unwrap_or_default();
    match path {
        "asample" => {
            let command = Command::sample(body, &sent);
            submitted(state, command, fails)
        }
        "optim_step" | "save_weights" | "load_weights" | "save_weights_for_sampler" => {
            submitted(state, Command::json(path, &sent), fails)
        }
        "retrieve_future" => {
            let id = sent["request_id"].as_str().unwrap_or_default();
            state.retrieved(id, wants_protobuf)
        }
        _ => match state.at_once(path, &sent) {
            Some(value) => json(&value),
            None => (404, Body::from("{\"detail\": \"no such path\"}"), false),
        },
    }
}

fn submitted(state: &mut State, command: Command, fails: Option<&'static str>) -> Answer {
    match state.submit(command, fails) {
        Ok(id) => json(&serde_json::json!({ "request_id": id })),
        Err((status, text)) => {
            let detail = serde_json::json!({ "detail": text });
            (status, Body::from(detail.to_string()), false)
        }
    }
}
