//! Sessions over WebSocket, for OpenEnv's clients: one socket is one session, and holds one episode.
//!
//! An action is `{"tool": NAME, "arguments": {...}}` or `{"text": ...}`. OpenEnv's own actions for tools
//! (`list_tools`, `call_tool`) are answered in their form. HTTP routes keep no session in that protocol: here
//! they answer with that.

use super::play::{ActionResult, EpisodeStart, Offer, Pick, Play, PlayError, whole_text};
use super::{SHUTDOWN_GRACE, clients};
use axum::extract::State;
use axum::extract::ws::{Message as Frame, WebSocket, WebSocketUpgrade};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};
use sinew_bridge::remote::{MAX_BODY, NO_KEY, ServeKey};
use sinew_env::Split;
use sinew_http::server::{self, Listener, Place};
use sinew_types::ToolSpec;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Time in which a client without a session must send a message.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);

/// State that all sessions share.
struct Shared {
    /// Served environments, and their limits.
    offer: Offer,
    /// The key that clients must send.
    key: ServeKey,
    /// One permit for each session.
    places: Arc<Semaphore>,
    /// Number of the next training task.
    next: Arc<AtomicU64>,
}

/// Serves until `shutdown` is ready.
pub async fn serve_openenv(
    listener: impl Into<Listener>,
    offer: Offer,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let key = ServeKey::new(&offer.key);
    let guard = key.guard(clients(&offer));
    let shared = Arc::new(Shared {
        key,
        places: Arc::new(Semaphore::new(offer.sessions)),
        next: Arc::default(),
        offer,
    });
    let router = Router::new()
        .route(
            "/health",
            get(async || axum::Json(json!({"status": "healthy"}))),
        )
        .route("/metadata", get(metadata))
        .route("/schema", get(async || axum::Json(schemas())))
        .route("/ws", get(upgrade))
        .route("/reset", post(no_session))
        .route("/step", post(no_session))
        .route("/state", get(no_session))
        .with_state(shared);
    let open = server::serve(listener, router, guard, shutdown).await;
    open.close(SHUTDOWN_GRACE).await;
}

/// `GET /metadata`.
async fn metadata(State(shared): State<Arc<Shared>>) -> Response {
    let envs = &shared.offer.worlds.envs;
    let description = "An environment of Sinew: actions are calls of its tools, or text.";
    axum::Json(json!({
        "name": envs.name(), "description": description, "version": envs.version(),
    }))
    .into_response()
}

/// The forms of actions, observations and states.
fn schemas() -> Value {
    let text = json!({"type": "string"});
    json!({
        "action": {
            "title": "SinewAction", "type": "object",
            "properties": {
                "tool": text, "arguments": {"type": "object"}, "text": text,
                "type": {"enum": ["list_tools", "call_tool"]}, "tool_name": text,
            },
        },
        "observation": {
            "title": "SinewObservation", "type": "object",
            "properties": {
                "text": text, "error": {"type": "boolean"}, "task": text, "score": {"type": "object"},
                "messages": {"type": "array"}, "functions": {"type": "array"},
            },
        },
        "state": {
            "title": "State", "type": "object",
            "properties": {"episode_id": text, "step_count": {"type": "integer"}},
        },
    })
}

/// The routes of HTTP without a session.
async fn no_session() -> Response {
    let why = "HTTP requests have no session in this protocol: connect to /ws";
    (StatusCode::CONFLICT, axum::Json(json!({"detail": why}))).into_response()
}

/// `GET /ws`.
async fn upgrade(
    State(shared): State<Arc<Shared>>,
    Extension(place): Extension<Place>,
    headers: HeaderMap,
    socket: WebSocketUpgrade,
) -> Response {
    if !shared.key.is_in(&headers) {
        return (StatusCode::UNAUTHORIZED, NO_KEY).into_response();
    }
    let socket = socket.max_message_size(MAX_BODY).max_frame_size(MAX_BODY);
    socket.on_upgrade(async move |socket| {
        session(socket, shared).await;
        drop(place);
    })
}

/// One session, until the client closes it or is silent for the length of a lease.
async fn session(mut socket: WebSocket, shared: Arc<Shared>) {
    let Ok(place) = Arc::clone(&shared.places).try_acquire_owned() else {
        // Clients look for the reason only after their first message.
        let _ = tokio::time::timeout(FIRST_MESSAGE, socket.recv()).await;
        let why = format!("all {} sessions are in use", shared.offer.sessions);
        let _ = send(&mut socket, &error("CAPACITY_REACHED", why)).await;
        let _ = socket.send(Frame::Close(None)).await;
        return;
    };
    let mut session = Session {
        play: Play::new(shared.offer.worlds.clone(), Arc::clone(&shared.next)),
        episode: Value::Null,
    };
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(shared.offer.lease, socket.recv()).await {
        let text = match frame {
            Frame::Text(text) => text,
            Frame::Ping(_) | Frame::Pong(_) => continue,
            Frame::Binary(_) | Frame::Close(_) => break,
        };
        let Some(answer) = session.answer(&text).await else {
            break;
        };
        if send(&mut socket, &answer).await.is_err() {
            break;
        }
    }
    session.play.close().await;
    // A client whose session is closed may begin the next one at once.
    drop(place);
    let _ = socket.send(Frame::Close(None)).await;
}

/// Sends an answer as one text frame.
///
/// # Errors
/// If the client is gone.
async fn send(socket: &mut WebSocket, answer: &Value) -> Result<(), axum::Error> {
    socket.send(Frame::Text(answer.to_string().into())).await
}

/// An answer of the type `error`.
fn error(code: &str, message: impl Into<String>) -> Value {
    json!({"type": "error", "data": {"message": message.into(), "code": code}})
}

/// State of a session.
struct Session {
    /// Episodes of the session, one after another.
    play: Play,
    /// Id that the client gave the episode.
    episode: Value,
}

impl Session {
    /// The answer to a message. `None`: the client closes.
    async fn answer(&mut self, text: &str) -> Option<Value> {
        let message: Value = match sinew_types::json::from_str(text) {
            Ok(message) => message,
            Err(e) => return Some(error("INVALID_JSON", format!("Invalid JSON: {e}"))),
        };
        let data = message.get("data").cloned().unwrap_or_else(|| json!({}));
        let answered = match message["type"].as_str().unwrap_or_default() {
            "reset" => self.reset(&data).await,
            "step" => self.step(&data).await,
            "state" => {
                let steps = self.play.steps;
                let state = json!({"episode_id": self.episode, "step_count": steps});
                return Some(json!({"type": "state", "data": state}));
            }
            "close" => return None,
            other => {
                let why = format!("Unknown message type {other:?}: reset, step, state or close");
                return Some(error("UNKNOWN_TYPE", why));
            }
        };
        Some(match answered {
            Ok(data) => json!({"type": "observation", "data": data}),
            Err(PlayError::Client(why)) => error("VALIDATION_ERROR", why),
            Err(e @ PlayError::Env(_)) => error("EXECUTION_ERROR", e.to_string()),
        })
    }

    /// Begins the next episode. The observation has the prompt as messages and as one text, and the tools.
    async fn reset(&mut self, data: &Value) -> Result<Value, PlayError> {
        let begun = self.play.begin(pick(data)?).await?;
        self.episode = match &data["episode_id"] {
            Value::Null => begun.task.clone().into(),
            id => id.clone(),
        };
        let EpisodeStart { task, messages } = begun;
        let tools = functions(self.play.tools(), "parameters");
        let text = whole_text(&messages);
        // Clients for tools keep only the metadata of an observation.
        let observation = json!({
            "text": text, "error": false, "task": task, "messages": messages, "functions": tools,
            "metadata": {"task": task, "prompt": text},
        });
        Ok(json!({"observation": observation, "reward": null, "done": false}))
    }

    /// An action in either form. `list_tools` begins an episode if none is open, and is not a turn.
    ///
    /// # Errors
    /// [`PlayError::Client`] for an action of another form: the session continues.
    async fn step(&mut self, data: &Value) -> Result<Value, PlayError> {
        if data["type"] == "list_tools" {
            if !self.play.is_open() {
                self.play.begin(Pick::Next).await?;
            }
            let tools = functions(self.play.tools(), "input_schema");
            return Ok(json!({"observation": {"tools": tools}, "reward": null, "done": false}));
        }
        let own_form = data["type"] == "call_tool";
        let name = if own_form {
            &data["tool_name"]
        } else {
            &data["tool"]
        };
        let acted = match (name.as_str(), data["text"].as_str()) {
            (Some(name), None) => {
                let arguments = data.get("arguments").cloned();
                let arguments = arguments.unwrap_or_else(|| json!({}));
                self.play.call(name, arguments).await?
            }
            (None, Some(text)) => self.play.say(text).await?,
            _ => {
                let why = "an action has either `tool`, with `arguments`, or `text`";
                return Err(PlayError::Client(why.into()));
            }
        };
        let ActionResult {
            text,
            error,
            reward,
            done,
        } = acted;
        let observation = if own_form {
            let fault = json!({"error_type": "execution_error", "message": text});
            let fault = if error { fault } else { Value::Null };
            json!({"tool_name": name, "result": text, "error": fault})
        } else {
            json!({"text": text, "error": error, "score": self.play.scored()})
        };
        Ok(json!({"observation": observation, "reward": reward, "done": done}))
    }
}

/// Tools as OpenEnv describes them, with the schema below `key`.
fn functions(tools: &[ToolSpec], key: &str) -> Vec<Value> {
    let described =
        |t: &ToolSpec| json!({"name": t.name, "description": t.description, key: t.parameters});
    tools.iter().map(described).collect()
}

/// The task that a reset asks for: by `split` and `index`, by `seed`, or the next.
fn pick(data: &Value) -> Result<Pick, PlayError> {
    let number = |key: &str| match &data[key] {
        Value::Null => Ok(None),
        value => value
            .as_u64()
            .map(Some)
            .ok_or_else(|| PlayError::Client(format!("{key} is {value}: allowed: 0 or more"))),
    };
    let split = match data["split"].as_str() {
        None | Some("train") => Split::Train,
        Some("held-out") => Split::HeldOut,
        Some(other) => {
            let why = format!("split is {other:?}: allowed: train, held-out");
            return Err(PlayError::Client(why));
        }
    };
    Ok(match (number("index")?, number("seed")?) {
        (Some(index), _) => Pick::At(split, usize::try_from(index).unwrap_or(usize::MAX)),
        (None, Some(seed)) => Pick::Seed(seed),
        (None, None) => Pick::Next,
    })
}
