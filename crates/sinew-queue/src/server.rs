//! A queue over HTTP.
//!
//! | route | body | answer |
//! |---|---|---|
//! | `GET /health` | | `{"status": "ok"}`, without a token |
//! | `GET /queue` | | how many rows stand where, as JSON |
//! | `GET /queue/wait?seen=N&ms=M` | | `{"change": N}` after a change, or when the time is over |
//! | `POST /queue` | a call of the client, in MessagePack | its answer |
//!
//! Refusals of the queue are answers with status 409. Others are `{"error": {"code", "message"}}`: 400 for a
//! body that is not a call, 401 without the token, 404, 405, 408, 413, 429 for too many waits, 507 when the
//! disk is full, 500 for all else.

use crate::replies::{Replies, Reply};
use crate::wire::{
    self, Answer, CALL_ID, Call, MAX_CALL_ID, MAX_LEASE, MAX_PAGE, MAX_REQUEST, MAX_WAIT_MS,
    MESSAGE_PACK, WireError,
};
use axum::body::Bytes;
use axum::extract::{Query, Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Deserialize;
use serde_json::json;
use sinew_http::server::{self, ConnectionLimits, Endpoint, Guard, Key};
use sinew_store::StoreError;
use sinew_store::queue::{Queue, RowRequest, RowSelection, Sample};
use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

/// Calls that are read and answered at the same time; more wait. Their bodies may be large.
const MAX_CALLS: usize = 4;
/// Waits at the same time; more are refused. One costs little.
const MAX_WAITS: usize = 4096;
/// Time for a body to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval of checks whether the server stops, while nothing changes.
const LOOK: Duration = Duration::from_millis(500);
/// Time that running calls get when the server stops.
const GRACE: Duration = Duration::from_secs(10);

/// Milliseconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The clock of the system.
pub fn system_clock() -> Clock {
    use std::time::{SystemTime, UNIX_EPOCH};
    let now = || SystemTime::now().duration_since(UNIX_EPOCH);
    Arc::new(move || now().map_or(0, |d| d.as_millis() as u64))
}

/// Settings of the server.
#[derive(Clone)]
pub struct QueueServerConfig {
    /// Address, with or without TLS. Port 0 takes a free one.
    pub listen: Endpoint,
    /// Every call but `GET /health` must bring it.
    pub token: String,
    /// Clock of all leases.
    pub clock: Clock,
    /// Takes back leases that ended, and forgets rows that are done beyond a number, so often; `None`: never.
    pub sweep: Option<(Duration, usize)>,
}

sinew_types::debug_fields!(QueueServerConfig, listen, sweep);

/// Routes of a queue, for a listener that may have others, too. Waits end and the queue is not watched any
/// more once the value is dropped.
pub struct QueueRoutes {
    api: Api,
    stop: watch::Sender<bool>,
    watcher: Option<std::thread::JoinHandle<()>>,
}

sinew_types::debug_fields!(QueueRoutes);

impl QueueRoutes {
    /// Watches the queue from now on. Every call must bring `token`; `clock` is that of all leases; `sweep`
    /// is described at [`QueueServerConfig::sweep`].
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(
        queue: Arc<dyn Queue>,
        token: &str,
        clock: Clock,
        sweep: Option<(Duration, usize)>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = watch::channel(false);
        let (changes, changed) = watch::channel(0);
        let base = system_clock()().wrapping_mul(1000);
        let sweep = sweep.map(|(every, keep)| (every, keep, Arc::clone(&clock)));
        let watcher = watch_changes(Arc::clone(&queue), sweep, base, changes, stopped.clone())?;
        let api = Api {
            queue,
            secret: blake3::hash(token.as_bytes()),
            clock,
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
            waits: Arc::new(Semaphore::new(MAX_WAITS)),
            replies: Arc::default(),
            base,
            changed,
            stopped,
        };
        Ok(Self {
            api,
            stop,
            watcher: Some(watcher),
        })
    }

    /// The routes `/queue` and `/queue/wait`.
    pub fn router(&self) -> Router {
        router(Router::new(), self.api.clone())
    }

    /// Ends all waits. Calls are still answered.
    pub fn end_waits(&self) {
        // Nobody waits if nobody receives it.
        let _ = self.stop.send(true);
    }

    /// Ends waits, and returns when nothing watches the queue any more.
    pub async fn stop(mut self) {
        self.end_waits();
        if let Some(watcher) = self.watcher.take() {
            let _ = tokio::task::spawn_blocking(|| watcher.join()).await;
        }
    }
}

impl Drop for QueueRoutes {
    fn drop(&mut self) {
        self.end_waits();
    }
}

/// A queue that is served until it is stopped or dropped.
#[derive(Debug)]
pub struct QueueServer {
    address: SocketAddr,
    routes: QueueRoutes,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl QueueServer {
    /// Listens, and serves from now on.
    ///
    /// # Errors
    /// If the address cannot be taken.
    pub async fn start(queue: Arc<dyn Queue>, serving: QueueServerConfig) -> std::io::Result<Self> {
        let listener = serving.listen.clone().bind().await?;
        let address = listener.local_addr()?;
        let routes = QueueRoutes::start(queue, &serving.token, serving.clock, serving.sweep)?;
        let (stop, mut ending) = watch::channel(false);
        let healthy = get(async || Json(json!({"status": "ok"})));
        let router = router(Router::new().route("/health", healthy), routes.api.clone());
        let guard = guard(routes.api.clone());
        let task = tokio::spawn(async move {
            // An error means that the server was dropped.
            let stop = async { drop(ending.wait_for(|stop| *stop).await) };
            let open = server::serve(listener, router, guard, stop).await;
            if !open.close(GRACE).await {
                tracing::warn!("calls of the queue were cut when it stopped");
            }
        });
        Ok(Self {
            address,
            routes,
            stop,
            task: Some(task),
        })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends waits, lets running calls end, and returns when nothing uses the queue any more.
    pub async fn stop(mut self) {
        self.routes.end_waits();
        // It is gone if nothing listens, which is what is wanted.
        let _ = self.stop.send(true);
        if let Some(task) = self.task.take() {
            let _ = task.await;
        }
        if let Some(watcher) = self.routes.watcher.take() {
            let _ = tokio::task::spawn_blocking(|| watcher.join()).await;
        }
    }
}

impl Drop for QueueServer {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// A thread that wakes waits at the queue's changes, so that they take no thread each, and sweeps it.
fn watch_changes(
    queue: Arc<dyn Queue>,
    sweep: Option<(Duration, usize, Clock)>,
    base: u64,
    changes: watch::Sender<u64>,
    stopped: watch::Receiver<bool>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    let watch = move || {
        let (mut seen, mut swept) = (0, Instant::now());
        // An error means that the server was dropped.
        while !*stopped.borrow() && stopped.has_changed().is_ok() {
            let due = sweep.as_ref();
            let due = due.filter(|(every, ..)| swept.elapsed() >= *every);
            if let Some((_, keep, clock)) = due {
                swept = Instant::now();
                if let Err(error) = queue.sweep(*keep, clock()) {
                    tracing::error!(%error, "the queue cannot be swept");
                }
            }
            match queue.wait(seen, LOOK) {
                Ok(now) => {
                    seen = now;
                    changes.send_replace(base.wrapping_add(now));
                }
                Err(error) => {
                    tracing::error!(%error, "the queue cannot be watched");
                    return;
                }
            }
        }
    };
    std::thread::Builder::new()
        .name("queue-watch".into())
        .spawn(watch)
}

/// Shared state of all requests.
#[derive(Clone)]
struct Api {
    queue: Arc<dyn Queue>,
    secret: blake3::Hash,
    clock: Clock,
    calls: Arc<Semaphore>,
    waits: Arc<Semaphore>,
    replies: Arc<Replies>,
    /// Number at which change numbers begin.
    base: u64,
    /// Number of the queue's last change.
    changed: watch::Receiver<u64>,
    stopped: watch::Receiver<bool>,
}

/// Connections with the token have all places but a few.
fn guard(api: Api) -> Guard {
    let limits = ConnectionLimits {
        with_key: MAX_WAITS + MAX_CALLS,
        // A call has its own.
        body_time: None,
        ..ConnectionLimits::default()
    };
    let key = move |parts: &axum::http::request::Parts| {
        let authorized = api.authorize(&parts.headers).is_ok();
        authorized.then_some(Key::Operator)
    };
    Guard::new(limits, key)
}

/// The routes of the queue, in addition to others.
fn router(others: Router<Api>, api: Api) -> Router {
    others
        .route("/queue", get(stats))
        .route("/queue", post(call))
        .route("/queue/wait", get(wait))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            let text = format!(
                "{method} {}: the header `allow` names the methods",
                uri.path()
            );
            Refusal(405, "method_not_allowed", text)
        })
        .with_state(api)
}

/// A refusal: status, a code for programs, a text for users.
struct Refusal(u16, &'static str, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, code, message) = self;
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (
            status,
            Json(json!({"error": {"code": code, "message": message}})),
        )
            .into_response()
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::DiskFull { .. } => Self(507, "no_space", error.to_string()),
            _ => Self(500, "queue_failed", error.to_string()),
        }
    }
}

impl Api {
    /// Refuses a request without the token. The comparison of hashes takes constant time.
    fn authorize(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let given = headers.get(AUTHORIZATION).and_then(|v| v.to_str().ok());
        let token = given.and_then(|v| v.strip_prefix("Bearer "));
        if token.is_some_and(|t| blake3::hash(t.trim().as_bytes()) == self.secret) {
            Ok(())
        } else {
            let text = "the header `authorization: Bearer TOKEN` must bring the queue's token";
            Err(Refusal(401, "unauthorized", text.into()))
        }
    }

    /// Number of the last change. Numbers of an earlier process are none of this one's.
    async fn now(&self) -> Result<u64, Refusal> {
        let now = self.blocking(|queue| queue.wait(0, Duration::ZERO)).await?;
        Ok(self.base.wrapping_add(now))
    }

    /// Runs what blocks on a separate thread.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Queue) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let queue = Arc::clone(&self.queue);
        let done = tokio::task::spawn_blocking(move || work(queue.as_ref())).await;
        let failed = |e: tokio::task::JoinError| Refusal(500, "queue_failed", e.to_string());
        Ok(done.map_err(failed)??)
    }
}

/// `GET /queue`.
async fn stats(State(api): State<Api>, headers: HeaderMap) -> Result<Response, Refusal> {
    api.authorize(&headers)?;
    let stats = api.blocking(|queue| queue.stats()).await?;
    Ok(Json(stats).into_response())
}

/// Parameters of a wait.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    /// The last change that the client knows.
    seen: u64,
    /// Milliseconds; more than the server allows are cut.
    ms: u64,
}

/// `GET /queue/wait`: no thread waits, only a task.
async fn wait(
    State(api): State<Api>,
    headers: HeaderMap,
    Query(asked): Query<Wait>,
) -> Result<Response, Refusal> {
    api.authorize(&headers)?;
    let Ok(_place) = Arc::clone(&api.waits).try_acquire_owned() else {
        let text = format!("{MAX_WAITS} waits are open; close some, or ask again later");
        return Err(Refusal(429, "too_many_waits", text));
    };
    let answer = |change: u64| Ok(Json(json!({"change": change})).into_response());
    let now = api.now().await?;
    if now != asked.seen {
        return answer(now);
    }
    let (mut changed, mut stopped) = (api.changed.clone(), api.stopped.clone());
    let limit = Duration::from_millis(asked.ms.min(MAX_WAIT_MS));
    tokio::select! {
        // The watcher may be behind. An error means that the server ends, which is a reason to answer.
        _ = changed.wait_for(|now| *now > asked.seen) => {}
        _ = stopped.wait_for(|stop| *stop) => {}
        () = tokio::time::sleep(limit) => {}
    }
    answer(api.now().await?)
}

/// Handles `POST /queue`. A call that began is finished, whether or not the client waits for it.
async fn call(State(api): State<Api>, request: Request) -> Result<Response, Refusal> {
    api.authorize(request.headers())?;
    let id = request.headers().get(CALL_ID);
    let id = id.and_then(|v| v.to_str().ok()).map(str::to_owned);
    if id.as_ref().is_some_and(|id| id.len() > MAX_CALL_ID) {
        let text = format!("{CALL_ID}: allowed: up to {MAX_CALL_ID} bytes");
        return Err(Refusal(400, "invalid_call_id", text));
    }
    let failed = |e: &dyn fmt::Display| Refusal(500, "queue_failed", e.to_string());
    let place = Arc::clone(&api.calls).acquire_owned().await;
    let place = place.map_err(|e| failed(&e))?;
    let body = read(request).await?;
    let work = tokio::spawn(async move {
        let _place = place;
        match id {
            None => reply(&api, body).await,
            Some(id) => {
                let kept = api.replies.place(&id);
                let made = kept.get_or_try_init(async || reply(&api, body).await).await;
                let made = made.cloned()?;
                api.replies.filled(&id, made.1.len());
                Ok(made)
            }
        }
    });
    let (status, body): Reply = work.await.map_err(|e| failed(&e))??;
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    Ok((status, [(CONTENT_TYPE, MESSAGE_PACK)], body).into_response())
}

/// Reads a whole body within its limits of size and time.
async fn read(request: Request) -> Result<Bytes, Refusal> {
    let body = Limited::new(request.into_body(), MAX_REQUEST).collect();
    match tokio::time::timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => {
            let text = format!("the body is larger than {MAX_REQUEST} bytes: put fewer rows");
            Err(Refusal(413, "body_too_large", text))
        }
        Ok(Err(e)) => Err(Refusal(400, "body_unreadable", e.to_string())),
        Err(_) => Err(Refusal(
            408,
            "deadline",
            "the body did not arrive in time".into(),
        )),
    }
}

/// Executes a call. Failures of the queue are refusals that are not stored, since they may be temporary.
async fn reply(api: &Api, body: Bytes) -> Result<Reply, Refusal> {
    let now_ms = (api.clock)();
    let invalid = |why: WireError| Refusal(400, "invalid_body", why.to_string());
    let made = api.blocking(move |queue| {
        let call: Call<'static> = match wire::decode(&body) {
            Ok(call) => call,
            Err(why) => return Ok(Err(why)),
        };
        drop(body);
        let (status, answer) = match answer(queue, call, now_ms) {
            Err(StoreError::Queue(refused)) => (409, Answer::Refused(refused)),
            other => (200, other?),
        };
        Ok(wire::encode(&answer).map(|bytes| (status, Bytes::from(bytes))))
    });
    made.await?.map_err(invalid)
}

/// Carries out a call on the queue.
fn answer(queue: &dyn Queue, call: Call<'static>, now_ms: u64) -> Result<Answer, StoreError> {
    Ok(match call {
        Call::Put(rows) => Answer::Put(queue.put(&rows)?),
        Call::Fill(rows) => Answer::Count(queue.fill(&rows)?),
        Call::Join(consumer) => {
            queue.join(&consumer)?;
            Answer::Done
        }
        Call::Lease(ask) => Answer::Loan(queue.lease(&bounded(ask.into_owned()), now_ms)?),
        Call::Ack(consumer, lease, rows) => Answer::Settled(queue.ack(&consumer, lease, &rows)?),
        Call::Release(consumer, lease, keys) => {
            Answer::Settled(queue.release(&consumer, lease, &keys)?)
        }
        Call::Fail(consumer, lease, keys, why) => {
            Answer::Settled(queue.fail(&consumer, lease, &keys, &why)?)
        }
        Call::Renew(consumer, lease, keys, ttl_ms) => {
            Answer::Settled(queue.renew(&consumer, lease, &keys, ttl_ms, now_ms)?)
        }
        Call::Revive(consumer, keys) => Answer::Count(queue.revive(&consumer, &keys)?),
        Call::Remove(keys) => Answer::Count(queue.remove(&keys)?),
        Call::Sweep(keep) => Answer::Count(queue.sweep(keep, now_ms)?),
        Call::Read(key, field) => {
            let value = queue.read(&key, &field)?;
            Answer::Value(value.map(|value| wire::Value::new(Cow::into_owned(field), value)))
        }
        Call::State(consumer, key) => Answer::State(queue.state(&consumer, &key)?),
        Call::Rows(after, limit) => Answer::Rows(queue.rows(after, limit.min(MAX_PAGE))?),
        Call::Stats => Answer::Stats(queue.stats()?),
    })
}

/// A lease whose rows fit an answer.
fn bounded(ask: RowRequest) -> RowRequest {
    let take = match ask.take {
        RowSelection::Sample(sample) => RowSelection::Sample(Sample {
            bytes: sample.bytes.min(MAX_LEASE),
            ..sample
        }),
        keys => keys,
    };
    RowRequest { take, ..ask }
}
