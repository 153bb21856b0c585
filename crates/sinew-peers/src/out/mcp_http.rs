//! MCP over streamable HTTP, and over standard input and output.
//!
//! `POST /mcp` with `initialize` opens a session for the next training task; `/mcp/SPLIT/INDEX` names one.
//! Answers are single JSON objects: the server sends no messages by itself, so it offers no stream.

use super::mcp::{McpSession, fault};
use super::play::{Offer, Pick, Play, Worlds};
use super::{SHUTDOWN_GRACE, clients};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use sinew_bridge::remote::{MAX_BODY, NO_JSON, NO_KEY, ServeKey, lock};
use sinew_env::Split;
use sinew_http::server::{self, Listener, is_json};
use std::collections::HashMap;
use std::future::Future;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Header with the id of a session.
const SESSION: &str = "mcp-session-id";

/// A session with the time of its last request.
struct KeptSession {
    /// Locked during one request: requests of one session run one after another.
    session: tokio::sync::Mutex<McpSession>,
    /// Time from which its lease counts, unless a request is running.
    seen: Mutex<Instant>,
}

/// A server of MCP.
#[derive(Clone)]
pub struct McpServing {
    /// Clones serve the same sessions.
    shared: Arc<Shared>,
}

sinew_types::debug_fields!(McpServing as this, offer = this.shared.offer);

/// State that all requests share.
struct Shared {
    /// Served environments, and their limits.
    offer: Offer,
    /// The key that clients must send.
    key: ServeKey,
    /// Number of the next training task of all sessions.
    next: Arc<AtomicU64>,
    /// Never more than `offer.sessions`.
    sessions: Mutex<HashMap<String, Arc<KeptSession>>>,
}

impl McpServing {
    /// A server of the environments of an offer.
    pub fn new(offer: Offer) -> Self {
        Self {
            shared: Arc::new(Shared {
                key: ServeKey::new(&offer.key),
                next: Arc::default(),
                sessions: Mutex::default(),
                offer,
            }),
        }
    }

    /// The routes. Bodies are bounded by [`MAX_BODY`].
    fn router(&self) -> Router {
        Router::new()
            .route("/mcp", post(first).delete(end))
            .route("/mcp/{split}/{index}", post(named).delete(end))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(Arc::clone(&self.shared))
    }

    /// Ends sessions without a request for the length of a lease, or all.
    async fn sweep(&self, all: bool) {
        let lease = self.shared.offer.lease;
        let over = |k: &Arc<KeptSession>| {
            all || (lock(&k.seen).elapsed() > lease && k.session.try_lock().is_ok())
        };
        let ended: Vec<_> = {
            let mut sessions = lock(&self.shared.sessions);
            let ids = sessions.iter().filter(|(_, k)| over(k));
            let ids: Vec<String> = ids.map(|(id, _)| id.clone()).collect();
            ids.iter().filter_map(|id| sessions.remove(id)).collect()
        };
        for kept in ended {
            kept.session.lock().await.close().await;
        }
    }
}

/// Serves until `shutdown` is ready, then ends all sessions.
pub async fn serve_mcp(
    listener: impl Into<Listener>,
    server: McpServing,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let sweeper = server.clone();
    let sweeping = tokio::spawn(async move {
        loop {
            tokio::time::sleep(sweeper.shared.offer.lease / 4).await;
            sweeper.sweep(false).await;
        }
    });
    let guard = server.shared.key.guard(clients(&server.shared.offer));
    let open = server::serve(listener, server.router(), guard, shutdown).await;
    open.close(SHUTDOWN_GRACE).await;
    sweeping.abort();
    server.sweep(true).await;
}

/// One session over lines of JSON, such as standard input and output.
pub struct McpLines {
    /// The only one: the input has one client.
    session: McpSession,
}

sinew_types::debug_fields!(McpLines);

impl McpLines {
    /// A session with the next training tasks.
    pub fn new(worlds: Worlds) -> Self {
        let play = Play::new(worlds, Arc::default());
        Self {
            session: McpSession::new(play, Pick::Next),
        }
    }

    /// The answer to a line; `None`: there is none.
    pub async fn answer(&mut self, line: &str) -> Option<String> {
        if line.trim().is_empty() {
            return None;
        }
        let answer = match sinew_types::json::from_str::<Value>(line) {
            Ok(message) => self.session.on(&message).await?,
            Err(e) => fault(&Value::Null, -32700, &format!("no JSON: {e}")),
        };
        Some(answer.to_string())
    }

    /// Ends the episode.
    pub async fn close(mut self) {
        self.session.close().await;
    }
}

/// `POST /mcp`.
async fn first(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    on(&shared, Pick::Next, &headers, &body).await
}

/// `POST /mcp/SPLIT/INDEX`.
async fn named(
    State(shared): State<Arc<Shared>>,
    Path((split, index)): Path<(String, usize)>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let split = match split.as_str() {
        "train" => Split::Train,
        "held-out" => Split::HeldOut,
        _ => {
            return refused(
                StatusCode::NOT_FOUND,
                -32600,
                "the split is train or held-out",
            );
        }
    };
    on(&shared, Pick::At(split, index), &headers, &body).await
}

/// An error of the protocol with a status.
fn refused(status: StatusCode, code: i64, text: &str) -> Response {
    (status, axum::Json(fault(&Value::Null, code, text))).into_response()
}

/// The session of a request, if it names one that is open.
fn find(shared: &Shared, headers: &HeaderMap) -> Result<Arc<KeptSession>, Box<Response>> {
    let Some(id) = headers.get(SESSION).and_then(|v| v.to_str().ok()) else {
        let why = "no session: send initialize first, then its mcp-session-id";
        return Err(Box::new(refused(StatusCode::BAD_REQUEST, -32600, why)));
    };
    let found = lock(&shared.sessions).get(id).cloned();
    found.ok_or_else(|| {
        let why = "there is no such session: it has ended";
        Box::new(refused(StatusCode::NOT_FOUND, -32600, why))
    })
}

/// Answers one message: `initialize` opens a session, all others need one.
/// A notification is answered with 202 and no body.
async fn on(shared: &Arc<Shared>, pick: Pick, headers: &HeaderMap, body: &Bytes) -> Response {
    if !shared.key.is_in(headers) {
        return refused(StatusCode::UNAUTHORIZED, -32600, NO_KEY);
    }
    if !is_json(headers) {
        return refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, -32600, NO_JSON);
    }
    let message: Value = match sinew_types::json::from_slice(body) {
        Ok(message) => message,
        Err(e) => return refused(StatusCode::BAD_REQUEST, -32700, &format!("no JSON: {e}")),
    };
    let opens = message["method"] == "initialize";
    let (kept, id) = if opens {
        match open(shared, pick) {
            Ok((kept, id)) => (kept, Some(id)),
            Err(refusal) => return *refusal,
        }
    } else {
        match find(shared, headers) {
            Ok(kept) => (kept, None),
            Err(refusal) => return *refusal,
        }
    };
    *lock(&kept.seen) = Instant::now();
    // A call continues if its client goes away: it may be in the middle of a change.
    let answered = tokio::spawn(async move {
        let answer = kept.session.lock().await.on(&message).await;
        *lock(&kept.seen) = Instant::now();
        answer
    });
    let mut response = match answered.await {
        Ok(Some(answer)) => axum::Json(answer).into_response(),
        Ok(None) => StatusCode::ACCEPTED.into_response(),
        Err(e) => refused(StatusCode::INTERNAL_SERVER_ERROR, -32603, &e.to_string()),
    };
    if let Some(id) = id.and_then(|id| id.parse().ok()) {
        response.headers_mut().insert(SESSION, id);
    }
    response
}

/// Opens a session, whose id no one can guess.
fn open(shared: &Shared, pick: Pick) -> Result<(Arc<KeptSession>, String), Box<Response>> {
    let failed = |text: String| {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Box::new(refused(status, -32000, &text))
    };
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|e| failed(e.to_string()))?;
    let id = format!("{:032x}", u128::from_be_bytes(random));
    let play = Play::new(shared.offer.worlds.clone(), Arc::clone(&shared.next));
    let kept = Arc::new(KeptSession {
        session: tokio::sync::Mutex::new(McpSession::new(play, pick)),
        seen: Mutex::new(Instant::now()),
    });
    let mut sessions = lock(&shared.sessions);
    if sessions.len() >= shared.offer.sessions {
        return Err(failed(format!(
            "all {} sessions are in use",
            sessions.len()
        )));
    }
    sessions.insert(id.clone(), Arc::clone(&kept));
    Ok((kept, id))
}

/// `DELETE /mcp`.
async fn end(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if !shared.key.is_in(&headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let id = headers.get(SESSION).and_then(|v| v.to_str().ok());
    let found = id.and_then(|id| lock(&shared.sessions).remove(id));
    let Some(kept) = found else {
        return (StatusCode::NOT_FOUND, axum::Json(json!({}))).into_response();
    };
    kept.session.lock().await.close().await;
    StatusCode::OK.into_response()
}
