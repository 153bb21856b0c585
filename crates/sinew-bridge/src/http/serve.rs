//! Serves any environment over HTTP by the environment protocol.
//!
//! An episode is opened once for its id, and a call runs once for its id: repeats get the stored answer. A
//! call continues if its client goes away, so that a repeat finds the whole answer. Episodes without a
//! request for the length of a lease are closed. Places, bodies, stored answers and requests at once are
//! bounded.

use super::protocol::{
    AskScore, Call, CallReply, Fault, FaultKind, MAX_BODY, MAX_ID, OpenReply, OpenRequest,
    PROTOCOL, Refusal, ScoreReply, ServerInfo, Status, Tool, cut,
};
use crate::error::SetupError;
use crate::lock::lock;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde::de::DeserializeOwned;
use sinew_env::{Action, Env, EnvError, EnvFactory, Split, Taskset};
use sinew_http::server::{self, ConnectionLimits, Guard, Key, Listener, is_json};
use sinew_types::{Outcome, Task, ToolCall, ToolSpec, is_reward};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// Stored answers of one episode. A client repeats the last request, not older ones.
const ANSWERS: usize = 16;
/// Requests at once, in addition to two for each place.
const SPARE_REQUESTS: usize = 64;
/// Time for calls that run when the server stops.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(10);
/// Reason for refusing a request without the key.
pub const NO_KEY: &str = "the key is missing or wrong: send `Authorization: Bearer KEY`";
/// Reason for refusing a body of another type.
pub const NO_JSON: &str = "the body must be JSON: send `Content-Type: application/json`";

/// Declaration and key of a server.
#[derive(Clone)]
pub struct ServeOptions {
    /// Tools of the environment.
    pub tools: Vec<ToolSpec>,
    /// Episodes at once, 1 to 100,000.
    pub max_episodes: usize,
    /// Time after which an episode without a request is freed, 1 s to 24 hours.
    pub lease: Duration,
    /// Key that every request must have.
    pub key: String,
    /// A task to try the server with.
    pub example: Option<Task>,
    /// Tasks that clients can ask for. `None`: they bring their own.
    pub tasks: Option<Arc<dyn Taskset>>,
}

sinew_types::debug_fields!(ServeOptions, max_episodes, lease);

/// An environment as a server.
#[derive(Clone)]
pub struct EnvServer {
    shared: Arc<Shared>,
}

/// State of a server that its requests share.
struct Shared {
    /// Makes the environment of each episode.
    factory: Arc<dyn EnvFactory>,
    /// Tasks for `GET /tasks`, if the server has some.
    tasks: Option<Arc<dyn Taskset>>,
    /// The answer to `GET /sinew`.
    described: ServerInfo,
    key: ServeKey,
    /// Episodes by id, at most `described.max_episodes`.
    episodes: Mutex<HashMap<String, Arc<Episode>>>,
    /// One permit for each request at once.
    requests: Arc<Semaphore>,
}

sinew_types::debug_fields!(EnvServer as this, name = this.shared.described.name);

/// One episode. Its requests take turns.
struct Episode {
    /// The task that it was opened with: another one for the same id is a conflict.
    task: Task,
    /// Held during a request, so that a repeat waits for the first one.
    world: tokio::sync::Mutex<World>,
    /// Time of the last request.
    seen: Mutex<Instant>,
}

/// State of an episode.
#[derive(Default)]
struct World {
    /// `None` before the first request and after the end.
    env: Option<Box<dyn Env>>,
    /// Answer to the request that opened it.
    opened: Option<OpenReply>,
    /// The episode was deleted or freed.
    closed: bool,
    /// Score of an episode that the environment ended.
    outcome: Option<Outcome>,
    /// Answers to the last calls.
    answers: VecDeque<(String, CallReply)>,
}

/// An answer with a status of 400 or more.
fn refused(status: StatusCode, text: impl Into<String>) -> Response {
    let kind = FaultKind::Infra;
    let error = Fault {
        kind,
        text: text.into(),
    };
    (status, axum::Json(Refusal { error })).into_response()
}

/// An answer with status 200.
fn json<T: Serialize>(value: &T) -> Response {
    axum::Json(value).into_response()
}

/// Parses a body, or returns the response that refuses it.
fn parsed<T: DeserializeOwned>(body: &Bytes) -> Result<T, Box<Response>> {
    sinew_types::json::from_slice(body).map_err(|e| {
        let why = format!("the body is not as expected: {e}");
        Box::new(refused(StatusCode::BAD_REQUEST, why))
    })
}

impl EnvServer {
    /// A server of the environments of `factory`.
    ///
    /// # Errors
    /// The fault of the options.
    pub fn new(factory: Arc<dyn EnvFactory>, options: ServeOptions) -> Result<Self, SetupError> {
        let described = ServerInfo {
            name: cut(factory.name(), MAX_ID - 32),
            version: factory.version().to_owned(),
            protocol: PROTOCOL,
            tools: options.tools.iter().map(Tool::from).collect(),
            max_episodes: options.max_episodes,
            lease_s: options.lease.as_secs_f64(),
            states: factory.capabilities().states(),
            example: options.example,
            tasks: options.tasks.as_ref().map(|tasks| {
                let count = |split: Split| (split.as_str().to_owned(), tasks.len(split));
                [Split::Train, Split::HeldOut].map(count).into()
            }),
        };
        if let Some(why) = described.wrong() {
            return Err(SetupError::Options(why));
        }
        let requests = 2 * described.max_episodes + SPARE_REQUESTS;
        Ok(Self {
            shared: Arc::new(Shared {
                factory,
                tasks: options.tasks,
                described,
                key: ServeKey::new(&options.key),
                episodes: Mutex::default(),
                requests: Arc::new(Semaphore::new(requests)),
            }),
        })
    }

    /// The routes.
    pub fn router(&self) -> Router {
        let state = Arc::clone(&self.shared);
        Router::new()
            .route("/sinew", get(describe))
            .route("/tasks/{split}/{index}", get(task))
            .route("/episodes", post(open))
            .route("/episodes/{id}/calls/{call}", post(call))
            .route("/episodes/{id}/score", post(score))
            .route("/episodes/{id}/lease", post(lease))
            .route("/episodes/{id}", delete(close))
            .layer(middleware::from_fn_with_state(Arc::clone(&state), admit))
            .layer(DefaultBodyLimit::max(MAX_BODY))
            .with_state(state)
    }

    /// Closes episodes whose lease has expired, or all of them. Returns their number.
    pub async fn sweep(&self, all: bool) -> usize {
        let lease = Duration::from_secs_f64(self.shared.described.lease_s);
        // An episode with a request in progress is in use, however long it takes.
        let over = |e: &Arc<Episode>| {
            all || (lock(&e.seen).elapsed() > lease && e.world.try_lock().is_ok())
        };
        let ended: Vec<_> = {
            let mut episodes = lock(&self.shared.episodes);
            let ids = episodes.iter().filter(|(_, e)| over(e));
            let ids: Vec<String> = ids.map(|(id, _)| id.clone()).collect();
            ids.iter().filter_map(|id| episodes.remove(id)).collect()
        };
        for episode in &ended {
            episode.close().await;
        }
        ended.len()
    }
}

/// Serves until `shutdown` is ready, then closes all episodes.
pub async fn serve_env(
    listener: impl Into<Listener>,
    server: EnvServer,
    shutdown: impl Future<Output = ()> + Send + 'static,
) {
    let sweeper = server.clone();
    let each = Duration::from_secs_f64(server.shared.described.lease_s / 4.0);
    let sweeping = tokio::spawn(async move {
        loop {
            tokio::time::sleep(each).await;
            sweeper.sweep(false).await;
        }
    });
    let requests = 2 * server.shared.described.max_episodes + SPARE_REQUESTS;
    let guard = server.shared.key.guard(requests);
    let open = server::serve(listener, server.router(), guard, shutdown).await;
    open.close(SHUTDOWN_GRACE).await;
    sweeping.abort();
    server.sweep(true).await;
}

impl Episode {
    /// Ends the environment. Errors of its end change nothing: the episode is over.
    async fn close(&self) {
        let mut world = self.world.lock().await;
        world.closed = true;
        if let Some(mut env) = world.env.take()
            && let Err(e) = env.close().await
        {
            tracing::debug!(error = %e, "an episode did not close");
        }
    }
}

/// Checks the key, and that there is room for one more request.
async fn admit(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if !shared.key.is_in(request.headers()) {
        return refused(StatusCode::UNAUTHORIZED, NO_KEY);
    }
    if !is_json(request.headers()) {
        return refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, NO_JSON);
    }
    let Ok(_room) = Arc::clone(&shared.requests).try_acquire_owned() else {
        return busy("too many requests at once");
    };
    next.run(request).await
}

/// The key of a server of environments, as its hash.
#[derive(Clone, Copy, Debug)]
pub struct ServeKey(blake3::Hash);

impl ServeKey {
    /// The key of this text.
    pub fn new(key: &str) -> Self {
        Self(blake3::hash(key.as_bytes()))
    }

    /// Whether a request has the key: as `Bearer KEY`, or as the password of `Basic`, which clients take
    /// from an address `http://NAME:KEY@HOST`. Comparing hashes takes the same time for every wrong key.
    pub fn is_in(&self, headers: &HeaderMap) -> bool {
        let sent = headers.get(header::AUTHORIZATION).map(|v| v.as_bytes());
        let is = |key: &[u8]| blake3::hash(key) == self.0;
        let basic = |sent: &[u8]| {
            let decoded = STANDARD.decode(sent.strip_prefix(b"Basic ")?).ok()?;
            let colon = decoded.iter().position(|b| *b == b':')?;
            Some(is(&decoded[colon + 1..]))
        };
        sent.is_some_and(|sent| {
            sent.strip_prefix(b"Bearer ").is_some_and(is) || basic(sent) == Some(true)
        })
    }

    /// Returns a guard for the connections: at most `clients` with the key, and none from web pages of other
    /// sites.
    pub fn guard(self, clients: usize) -> Guard {
        let limits = ConnectionLimits {
            with_key: clients,
            ..ConnectionLimits::default()
        };
        let key = move |parts: &Parts| self.is_in(&parts.headers).then_some(Key::Operator);
        Guard::new(limits, key).without_pages().refusing(full)
    }
}

/// The answer above the number of connections.
fn full(limit: usize) -> Response {
    busy(&format!("{limit} connections are open, which is the limit"))
}

/// An answer that asks for a repeat in a second.
fn busy(text: &str) -> Response {
    let mut response = refused(StatusCode::SERVICE_UNAVAILABLE, text);
    let second = header::HeaderValue::from_static("1");
    response.headers_mut().insert(header::RETRY_AFTER, second);
    response
}

/// `GET /sinew`.
async fn describe(State(shared): State<Arc<Shared>>) -> Response {
    json(&shared.described)
}

/// `GET /tasks/{split}/{index}`.
async fn task(
    State(shared): State<Arc<Shared>>,
    Path((split, index)): Path<(String, usize)>,
) -> Response {
    let split = [Split::Train, Split::HeldOut]
        .into_iter()
        .find(|s| s.as_str() == split);
    let (Some(tasks), Some(split)) = (&shared.tasks, split) else {
        return refused(
            StatusCode::NOT_FOUND,
            "this server has no tasks of that split: `GET /sinew` says which it has",
        );
    };
    match tasks.get(split, index) {
        Ok(task) => json(&task),
        Err(e) => refused(StatusCode::NOT_FOUND, e.to_string()),
    }
}

/// The task of a request that must not be cut: it continues if the client goes away.
async fn whole(work: impl Future<Output = Response> + Send + 'static) -> Response {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|e| refused(StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))
}

/// The open episode of an id, whose lease begins again.
fn find(shared: &Shared, id: &str) -> Result<Arc<Episode>, Box<Response>> {
    let found = lock(&shared.episodes).get(id).cloned();
    let Some(episode) = found else {
        return Err(Box::new(unknown()));
    };
    *lock(&episode.seen) = Instant::now();
    Ok(episode)
}

/// The answer for an id that is not open.
fn unknown() -> Response {
    refused(
        StatusCode::NOT_FOUND,
        "no such episode: it was never opened, or it has ended",
    )
}

/// `POST /episodes`: takes a place, or finds the one that the id has already.
async fn open(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    let asked: OpenRequest = match parsed(&body) {
        Ok(asked) => asked,
        Err(refusal) => return *refusal,
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if asked.episode.is_empty() || asked.episode.len() > MAX_ID || !asked.episode.chars().all(plain)
    {
        let why = "episode: allowed: 1 to 128 letters, digits, `-`, `_` and `.`";
        return refused(StatusCode::BAD_REQUEST, why);
    }
    let episode = {
        let mut episodes = lock(&shared.episodes);
        let max = shared.described.max_episodes;
        match episodes.get(&asked.episode) {
            Some(known) if known.task != asked.task => {
                return refused(
                    StatusCode::CONFLICT,
                    "the episode is open with another task",
                );
            }
            Some(known) => Arc::clone(known),
            None if episodes.len() >= max => {
                return busy(&format!("all {max} places are in use"));
            }
            None => {
                let made = Arc::new(Episode {
                    task: asked.task,
                    world: tokio::sync::Mutex::default(),
                    seen: Mutex::new(Instant::now()),
                });
                episodes.insert(asked.episode.clone(), Arc::clone(&made));
                made
            }
        }
    };
    *lock(&episode.seen) = Instant::now();
    whole(async move { begin(&shared, &asked.episode, &episode).await }).await
}

/// Starts an episode, or repeats the answer of the one that started it.
async fn begin(shared: &Shared, id: &str, episode: &Episode) -> Response {
    let mut world = episode.world.lock().await;
    if world.closed {
        return unknown();
    }
    if let Some(opened) = &world.opened {
        return json(opened);
    }
    let started = match shared.factory.create(&episode.task) {
        Ok(mut env) => {
            let reset = env.reset().await;
            world.env = Some(env);
            reset
        }
        Err(e) => Err(e),
    };
    let reset = match started {
        Ok(reset) => reset,
        Err(e) => {
            world.closed = true;
            if let Some(mut env) = world.env.take() {
                let _ = env.close().await;
            }
            lock(&shared.episodes).remove(id);
            let status = match e {
                EnvError::Task { .. } => StatusCode::UNPROCESSABLE_ENTITY,
                _ => StatusCode::FAILED_DEPENDENCY,
            };
            return refused(status, e.to_string());
        }
    };
    *lock(&episode.seen) = Instant::now();
    let opened = OpenReply {
        messages: Some(reset.messages),
        tools: Some(reset.tools.iter().map(Tool::from).collect()),
        state: reset.state_hash.map(|h| format!("{h:016x}")),
    };
    let answer = json(&opened);
    world.opened = Some(opened);
    answer
}

/// `POST /episodes/{id}/calls/{call}`.
async fn call(
    State(shared): State<Arc<Shared>>,
    Path((id, call_id)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let (episode, asked) = match (find(&shared, &id), parsed::<Call>(&body)) {
        (Ok(episode), Ok(asked)) => (episode, asked),
        (Err(refusal), _) | (_, Err(refusal)) => return *refusal,
    };
    if call_id.len() > MAX_ID || asked.tool.is_some() == asked.text.is_some() {
        let why = "a call has an id of at most 128 characters, and either `tool` or `text`";
        return refused(StatusCode::BAD_REQUEST, why);
    }
    whole(async move {
        let mut world = episode.world.lock().await;
        let answer = world.call(&call_id, asked).await;
        *lock(&episode.seen) = Instant::now();
        answer
    })
    .await
}

impl World {
    /// The answer to a call: the stored one, if it ran before.
    async fn call(&mut self, id: &str, asked: Call) -> Response {
        if let Some((_, stored)) = self.answers.iter().find(|(known, _)| known == id) {
            return json(stored);
        }
        if self.closed {
            return unknown();
        }
        if self.outcome.is_some() {
            return refused(
                StatusCode::CONFLICT,
                "the episode is done: ask for its score",
            );
        }
        let Some(env) = &mut self.env else {
            return unknown();
        };
        let called = match env.step(action(asked)).await {
            Ok(step) => {
                self.outcome = step.outcome;
                let (mut text, mut error) = (String::new(), None);
                if let Some(observation) = step.observation {
                    text = observation.content.text().into_owned();
                    if observation.is_error {
                        let bare = text.strip_prefix("Error: ").unwrap_or(&text).to_owned();
                        error = Some(Fault {
                            kind: FaultKind::Tool,
                            text: bare,
                        });
                    }
                }
                CallReply {
                    content: text.into(),
                    done: step.done,
                    reward: step.process_reward,
                    error,
                    state: step.state_hash.map(|h| format!("{h:016x}")),
                    renewed: env.renewed().filter(|_| !step.done),
                }
            }
            Err(e) => CallReply {
                error: Some(Fault {
                    kind: FaultKind::Infra,
                    text: e.to_string(),
                }),
                ..CallReply::default()
            },
        };
        if self.answers.len() >= ANSWERS {
            self.answers.pop_front();
        }
        let answer = json(&called);
        self.answers.push_back((id.to_owned(), called));
        answer
    }
}

/// A turn with one call, or with none.
fn action(asked: Call) -> Action {
    let mut action = Action::say(asked.text.unwrap_or_default());
    action.tool_calls.extend(asked.tool.map(|name| ToolCall {
        id: "call-0".into(),
        name,
        arguments: asked.args,
    }));
    action
}

/// `POST /episodes/{id}/score`: the outcome, made once.
async fn score(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: Bytes) -> Response {
    let episode = match (find(&shared, &id), parsed::<AskScore>(&body)) {
        (Ok(episode), Ok(_)) => episode,
        (Err(refusal), _) | (_, Err(refusal)) => return *refusal,
    };
    whole(async move {
        let mut world = episode.world.lock().await;
        if world.outcome.is_none() {
            let Some(env) = &mut world.env else {
                return unknown();
            };
            match env.score().await {
                Ok(outcome) => world.outcome = Some(outcome),
                Err(e) => {
                    return json(&ScoreReply {
                        rewards: BTreeMap::new(),
                        status: Status::Unscored,
                        reason: Some(e.to_string()),
                    });
                }
            }
        }
        let outcome = world.outcome.clone().unwrap_or_default();
        *lock(&episode.seen) = Instant::now();
        json(&scored(outcome))
    })
    .await
}

/// A score as the protocol has it: the reward, whether the task is solved, and the metrics.
fn scored(outcome: Outcome) -> ScoreReply {
    let finite = outcome.metrics.into_iter().filter(|(_, v)| is_reward(*v));
    let mut rewards: BTreeMap<_, _> = finite.map(|(name, value)| (name, Some(value))).collect();
    let status = if outcome.unscored || !is_reward(outcome.reward) {
        Status::Unscored
    } else {
        Status::Scored
    };
    let value = (status == Status::Scored).then_some(outcome.reward);
    rewards.insert("reward".into(), value);
    if status == Status::Scored {
        let success = f64::from(u8::from(outcome.success));
        rewards.insert("success".into(), Some(success));
    }
    ScoreReply {
        rewards,
        status,
        reason: outcome.unscored_reason,
    }
}

/// `POST /episodes/{id}/lease`.
async fn lease(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Response {
    match find(&shared, &id) {
        Ok(_) => StatusCode::NO_CONTENT.into_response(),
        Err(refusal) => *refusal,
    }
}

/// `DELETE /episodes/{id}`. The id is free at once; the environment ends in the background of the request.
async fn close(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Response {
    let Some(episode) = lock(&shared.episodes).remove(&id) else {
        return unknown();
    };
    whole(async move {
        episode.close().await;
        StatusCode::NO_CONTENT.into_response()
    })
    .await
}
