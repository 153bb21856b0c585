//! The HTTP around a mock.

use super::{Kind, State, openai, sglang, vllm};
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

pub(super) type Body = UnsyncBoxBody<Bytes, std::io::Error>;
pub(super) type Answer = Response<Body>;

/// Ends the server when it is dropped.
pub(super) struct Thread {
    stop: Option<oneshot::Sender<()>>,
    handle: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(handle) = self.handle.take() {
            handle.join().unwrap();
        }
    }
}

/// A request, read.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) query: String,
    pub(super) body: Value,
}

pub(super) fn start(state: Arc<State>, address: SocketAddr) -> (Thread, SocketAddr) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let listener = runtime.block_on(async { listen(address) });
    let address = listener.local_addr().unwrap();
    let (stop, mut stopped) = oneshot::channel::<()>();
    let handle = std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                let stream = tokio::select! {
                    accepted = listener.accept() => accepted.unwrap().0,
                    _ = &mut stopped => return,
                };
                tokio::spawn(connection(Arc::clone(&state), stream));
            }
        });
        // Connections end with the runtime, in the middle of any data.
    });
    let thread = Thread {
        stop: Some(stop),
        handle: Some(handle),
    };
    (thread, address)
}

fn listen(address: SocketAddr) -> TcpListener {
    let socket = TcpSocket::new_v4().unwrap();
    // A new process may take the port of the old one.
    socket.set_reuseaddr(true).unwrap();
    socket.bind(address).unwrap();
    socket.listen(256).unwrap()
}

async fn connection(state: Arc<State>, stream: tokio::net::TcpStream) {
    let service = service_fn(move |request| {
        let state = Arc::clone(&state);
        async move { Ok::<_, Infallible>(answer(state, request).await) }
    });
    // Clients may go away at any time.
    let _ = hyper::server::conn::http1::Builder::new()
        .serve_connection(TokioIo::new(stream), service)
        .await;
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Answer {
    if state.starting.load(Ordering::SeqCst) {
        return error(503, "Loading model");
    }
    let (head, body) = request.into_parts();
    let bytes = body.collect().await.map(|b| b.to_bytes());
    let Ok(bytes) = bytes else {
        return error(400, "the body was cut");
    };
    let body = if bytes.is_empty() {
        Value::Null
    } else {
        match serde_json::from_slice(&bytes) {
            Ok(body) => body,
            Err(e) => return error(400, &e.to_string()),
        }
    };
    let call = Call {
        method: head.method,
        path: head.uri.path().to_owned(),
        query: head.uri.query().unwrap_or_default().to_owned(),
        body,
    };
    let path = call.path.clone();
    let answer = match state.kind {
        Kind::Vllm | Kind::VllmProcessed => {
            slow_load(&state, &call).await;
            vllm::answer(&state, call)
        }
        Kind::Sglang | Kind::SglangIncremental => sglang::answer(&state, call),
        Kind::Openai | Kind::OpenaiWithIds => openai::answer(&state, call),
    };
    let is = |of: &std::sync::Mutex<Option<String>>| {
        let mut of = of.lock().unwrap();
        of.take_if(|p| *p == path).is_some()
    };
    if is(&state.restarts_after) {
        state.become_another();
    }
    if is(&state.loses) {
        return lost();
    }
    answer
}

/// Waits as long as a load takes.
async fn slow_load(state: &State, call: &Call) {
    if call.path == "/collective_rpc" {
        let ms = *state.load_ms.lock().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(ms)).await;
    }
}

/// An answer that breaks off.
fn lost() -> Answer {
    let cut = Err::<Frame<Bytes>, _>(std::io::Error::other("lost"));
    let cut = futures::stream::iter([cut]);
    Response::new(StreamBody::new(cut).boxed_unsync())
}

pub(super) fn whole(status: u16, kind: &str, text: String) -> Answer {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {});
    Response::builder()
        .status(StatusCode::from_u16(status).unwrap())
        .header("content-type", kind)
        .body(body.boxed_unsync())
        .unwrap()
}

pub(super) fn json_answer(value: &Value) -> Answer {
    whole(200, "application/json", value.to_string())
}

pub(super) fn error(status: u16, message: &str) -> Answer {
    let body = json!({ "error": {
        "message": message, "type": "Error", "param": null, "code": status,
    }});
    whole(status, "application/json", body.to_string())
}

/// The first field of `body` that is not in `known`.
pub(super) fn unknown_field(body: &Value, known: &[&str]) -> Option<String> {
    let fields = body.as_object()?.keys();
    fields
        .into_iter()
        .find(|k| !known.contains(&k.as_str()))
        .cloned()
}
