//! The owner's desk: facts of the run, orders for workers, and published weights, over HTTP.
//!
//! | route | body | answer |
//! |---|---|---|
//! | `GET /run` | | [`RunTerms`] |
//! | `POST /tickets` | [`WorkerReport`] | [`TicketOrders`] |
//! | `POST /live` | a finished rollout of an agent, packed | `{}` once it is stored |
//! | `GET /weights?seen=HASH&ms=M` | | [`PublishedMark`] once it is another one than `seen`, or `null` |
//! | `GET /weights/{version}/{file}` with `range: bytes=A-B` | | a part of a published file |
//!
//! Each needs the token. Tickets themselves are rows of the queue.

use crate::live::LiveInbox;
use crate::loads::WorkerLoads;
use crate::terms::{PublishedMark, RunTerms, TicketOrders, WorkerReading, WorkerReport};
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path as UrlPath, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::{ACCEPT_RANGES, AUTHORIZATION, CONTENT_RANGE, HeaderMap, RANGE};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use sinew_store::StoreError;
use sinew_store::queue::unpack;
use sinew_types::{Trace, WeightsId};
use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Maximum bytes of one part of a file.
pub(crate) const MAX_PART: u64 = 8 << 20;
/// Parts that are read at the same time; more wait.
const MAX_READS: usize = 16;
/// Maximum time of a wait for weights.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// Maximum bytes of a report.
const MAX_REPORT: usize = 64 << 10;
/// Maximum bytes of a finished rollout, packed.
const MAX_TRACE: usize = 128 << 20;
/// Maximum bytes of a worker's name.
const MAX_NAME: usize = 256;
/// Maximum number of cancelled tickets in one answer; a worker asks again soon.
const MAX_CANCELLED: usize = 10_000;

/// State of all workers, as the owner's thread sets it and requests read it.
#[derive(Debug, Default)]
struct DeskState {
    cancelled: BTreeSet<String>,
    paused: bool,
    ended: bool,
    loads: WorkerLoads,
    /// Workers that learnt of the end.
    reported: BTreeSet<String>,
}

/// Published weights, and their mark where the owner serves them.
type Published = Option<(WeightsId, Option<PublishedMark>)>;

/// The desk of a run. The loop and its listener share it.
pub struct Desk {
    terms: RunTerms,
    /// Folder in which weights are published; `None`: the engines get them in another way.
    weights: Option<PathBuf>,
    origin: Instant,
    state: Mutex<DeskState>,
    published: watch::Sender<Published>,
    /// Takes the rollouts of agents, if the run trains those.
    live: OnceLock<Arc<dyn LiveInbox>>,
}

sinew_types::debug_fields!(Desk as this, run = this.terms.run, fence = this.terms.fence);

impl Desk {
    /// Opens the desk of a run. `weights` is the folder in which it publishes, if it serves them.
    pub fn new(terms: RunTerms, weights: Option<PathBuf>) -> Self {
        Self {
            terms,
            weights,
            origin: Instant::now(),
            state: Mutex::default(),
            published: watch::channel(None).0,
            live: OnceLock::new(),
        }
    }

    /// Lets an inbox take the rollouts of agents from now on; a second one is ignored.
    pub fn receive(&self, inbox: Arc<dyn LiveInbox>) {
        // It is set already, by this run as well.
        let _ = self.live.set(inbox);
    }

    /// Facts of the run.
    pub fn terms(&self) -> &RunTerms {
        &self.terms
    }

    /// The newest published weights.
    pub fn published(&self) -> Option<WeightsId> {
        self.published.borrow().as_ref().map(|(id, _)| *id)
    }

    /// The mark of the newest weights, where the owner serves them or a service has them.
    pub fn mark(&self) -> Option<PublishedMark> {
        self.published.borrow().as_ref()?.1.clone()
    }

    /// Names new weights; `mark` if the owner serves them.
    pub fn publish(&self, id: WeightsId, mark: Option<PublishedMark>) {
        self.published.send_replace(Some((id, mark)));
    }

    /// Replaces the keys of the tickets that workers are to stop.
    pub fn cancel(&self, keys: BTreeSet<String>) {
        self.state().cancelled = keys;
    }

    /// Lets workers lease no tickets, or lets them again.
    pub fn pause(&self, paused: bool) {
        self.state().paused = paused;
    }

    /// Tells workers from now on that the run is over.
    pub fn end(&self) {
        self.state().ended = true;
    }

    /// Whether the run is over.
    pub fn has_ended(&self) -> bool {
        self.state().ended
    }

    /// Number of live workers that did not learn of the end yet.
    pub fn untold(&self) -> usize {
        let state = self.state();
        let live = state.loads.live(self.now_s());
        live.saturating_sub(state.reported.len())
    }

    /// Counters of all workers, and the number of live ones.
    pub fn load(&self) -> (WorkerReading, usize) {
        let (state, now_s) = (self.state(), self.now_s());
        (state.loads.sum(now_s), state.loads.live(now_s))
    }

    /// Seconds since a worker was heard of; since the start, if none was yet.
    pub fn silent_s(&self) -> f64 {
        let now_s = self.now_s();
        self.state().loads.silent_s(now_s).unwrap_or(now_s)
    }

    /// Names workers that were silent for the time of a lease while they held episodes: other workers get
    /// their tickets.
    pub(crate) fn warn_of_silent(&self) {
        let (now_s, lease_s) = (self.now_s(), self.terms.lease_ms as f64 / 1000.0);
        let silent = self.state().loads.newly_silent(lease_s, now_s);
        for worker in silent {
            tracing::warn!(%worker, seconds = lease_s, "a worker is silent: its episodes go to others");
        }
    }

    /// Routes that need `token`.
    pub fn routes(self: &Arc<Self>, token: &str) -> Router {
        let shared = Shared {
            desk: Arc::clone(self),
            secret: blake3::hash(token.as_bytes()),
            reads: Arc::new(Semaphore::new(MAX_READS)),
        };
        Router::new()
            .route("/run", get(terms))
            .route("/tickets", post(report))
            .route("/live", post(live).layer(DefaultBodyLimit::max(MAX_TRACE)))
            .route("/weights", get(newest))
            .route("/weights/{version}/{file}", get(part))
            .layer(DefaultBodyLimit::max(MAX_REPORT))
            .route_layer(from_fn_with_state(shared.clone(), authorized))
            .with_state(shared)
    }

    fn now_s(&self) -> f64 {
        self.origin.elapsed().as_secs_f64()
    }

    /// Every change is one assignment, so a poisoned lock is usable.
    fn state(&self) -> MutexGuard<'_, DeskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a report in, and returns the orders.
    fn orders(&self, report: &WorkerReport) -> TicketOrders {
        let now_s = self.now_s();
        let mut state = self.state();
        let before = state.loads.sum(now_s);
        state.loads.report(&report.worker, report.reading, now_s);
        let after = state.loads.sum(now_s);
        if after.opened > before.opened
            && let Some(inbox) = self.live.get()
        {
            inbox.opened();
        }
        let episodes = after.interrupted - before.interrupted;
        if episodes > 0 {
            let worker = report.worker.as_str();
            tracing::warn!(worker, episodes, "a worker left episodes: they begin again");
        }
        if state.ended {
            state.reported.insert(report.worker.clone());
        }
        TicketOrders {
            id: self.terms.id.clone(),
            fence: self.terms.fence,
            paused: state.paused,
            ended: state.ended,
            cancelled: state
                .cancelled
                .iter()
                .take(MAX_CANCELLED)
                .cloned()
                .collect(),
        }
    }
}

/// State of the requests.
#[derive(Clone)]
struct Shared {
    desk: Arc<Desk>,
    secret: blake3::Hash,
    reads: Arc<Semaphore>,
}

/// A refusal: status, a code for programs, a text for users.
struct Refusal(StatusCode, &'static str, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, code, message) = self;
        let body = json!({"error": {"code": code, "message": message}});
        (status, Json(body)).into_response()
    }
}

/// Refuses requests without the token. The comparison of hashes takes constant time.
async fn authorized(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let given = request.headers().get(AUTHORIZATION);
    let token = given.and_then(|v| v.to_str().ok()?.strip_prefix("Bearer "));
    if token.is_some_and(|t| blake3::hash(t.trim().as_bytes()) == shared.secret) {
        return next.run(request).await;
    }
    let text = "the header `authorization: Bearer TOKEN` must bring the token of the run";
    Refusal(StatusCode::UNAUTHORIZED, "unauthorized", text.into()).into_response()
}

/// `GET /run`.
async fn terms(State(shared): State<Shared>) -> Response {
    Json(&shared.desk.terms).into_response()
}

/// `POST /tickets`.
async fn report(
    State(shared): State<Shared>,
    Json(report): Json<WorkerReport>,
) -> Result<Response, Refusal> {
    if report.worker.is_empty() || report.worker.len() > MAX_NAME {
        let text = format!("worker: allowed: a name of 1 to {MAX_NAME} bytes");
        return Err(Refusal(StatusCode::BAD_REQUEST, "invalid_worker", text));
    }
    Ok(Json(shared.desk.orders(&report)).into_response())
}

/// `POST /live`.
async fn live(State(shared): State<Shared>, body: Bytes) -> Result<Response, Refusal> {
    let Some(inbox) = shared.desk.live.get().map(Arc::clone) else {
        let text = "this run trains no agents that open rollouts by themselves";
        return Err(Refusal(
            StatusCode::NOT_FOUND,
            "no_live_agents",
            text.into(),
        ));
    };
    let trace = shared.desk.rollout(&body)?;
    let stored = tokio::task::spawn_blocking(move || inbox.finished(&trace)).await;
    let failed = |e: &dyn fmt::Display| {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Refusal(status, "not_stored", e.to_string())
    };
    match stored.map_err(|e| failed(&e))? {
        Ok(()) => Ok(Json(json!({})).into_response()),
        Err(error @ StoreError::Row { .. }) => {
            let text = error.to_string();
            Err(Refusal(StatusCode::CONFLICT, "other_rollout", text))
        }
        Err(error) => Err(failed(&error)),
    }
}

impl Desk {
    /// A rollout of an agent of this run, sampled with published weights only.
    fn rollout(&self, body: &[u8]) -> Result<Trace, Refusal> {
        let wrong = |why: String| Refusal(StatusCode::BAD_REQUEST, "invalid_rollout", why);
        let trace: Trace = unpack("live", body).map_err(|e| wrong(e.to_string()))?;
        trace.validate().map_err(|e| wrong(e.to_string()))?;
        if trace.origin.run != self.terms.run {
            let (run, own) = (&trace.origin.run, &self.terms.run);
            return Err(wrong(format!("it is of the run {run:?}, this is {own:?}")));
        }
        let newest = self.published().map(|id| id.version);
        if trace.newest_version() > newest {
            let why = "a token of it was sampled with weights that are not published";
            return Err(wrong(why.to_owned()));
        }
        Ok(trace)
    }
}

/// Parameters of a wait for weights.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wait {
    /// Hash of the manifest that the worker has; empty: none.
    #[serde(default)]
    seen: String,
    /// Milliseconds to wait for another one.
    #[serde(default)]
    ms: u64,
}

/// `GET /weights`: no thread waits, only a task.
async fn newest(State(shared): State<Shared>, Query(asked): Query<Wait>) -> Response {
    let mut published = shared.desk.published.subscribe();
    let mark = |published: &Published| published.as_ref().and_then(|(_, mark)| mark.clone());
    let other = |p: &Published| mark(p).is_some_and(|m| m.manifest != asked.seen);
    let limit = Duration::from_millis(asked.ms).min(MAX_WAIT);
    // Neither the end of the wait nor that of the run is an error: the answer is what there is.
    let _ = tokio::time::timeout(limit, published.wait_for(other)).await;
    let now = mark(&published.borrow());
    Json(now).into_response()
}

/// `GET /weights/{version}/{file}`.
async fn part(
    State(shared): State<Shared>,
    UrlPath((version, file)): UrlPath<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let none = |why: &str| Refusal(StatusCode::NOT_FOUND, "no_such_weights", why.to_owned());
    let Some(root) = &shared.desk.weights else {
        return Err(none("this run serves no weights"));
    };
    let path = published_file(root, &version, &file)
        .ok_or_else(|| none("allowed: the name of published weights, and a file of them"))?;
    let range = headers.get(RANGE).and_then(|v| v.to_str().ok());
    let Some((from, to)) = range.and_then(bounds) else {
        let text = format!("give the header `range: bytes=FROM-TO`, at most {MAX_PART} bytes");
        return Err(Refusal(StatusCode::RANGE_NOT_SATISFIABLE, "range", text));
    };
    let failed =
        |e: &dyn fmt::Display| Refusal(StatusCode::INTERNAL_SERVER_ERROR, "failed", e.to_string());
    let place = shared.reads.acquire().await.map_err(|e| failed(&e))?;
    let read = tokio::task::spawn_blocking(move || stretch(&path, from, to));
    let read = read.await.map_err(|e| failed(&e))?;
    drop(place);
    let (bytes, length) = match read {
        Ok(read) => read,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            return Err(none("these weights were replaced by newer ones"));
        }
        Err(e) => return Err(failed(&e)),
    };
    if bytes.is_empty() {
        let text = format!("the file has {length} bytes");
        return Err(Refusal(StatusCode::RANGE_NOT_SATISFIABLE, "range", text));
    }
    let last = from + bytes.len() as u64 - 1;
    let headers = [
        (CONTENT_RANGE, format!("bytes {from}-{last}/{length}")),
        (ACCEPT_RANGES, "bytes".to_owned()),
    ];
    Ok((StatusCode::PARTIAL_CONTENT, headers, bytes).into_response())
}

/// The path of a file of published weights. `None` for every name that could lead elsewhere.
fn published_file(root: &Path, version: &str, file: &str) -> Option<PathBuf> {
    let id: WeightsId = version.parse().ok()?;
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    let named = !file.is_empty() && !file.starts_with('.') && file.chars().all(plain);
    (named && file.len() <= MAX_NAME).then(|| root.join(id.folder_name()).join(file))
}

/// First and last byte of a range.
fn bounds(range: &str) -> Option<(u64, u64)> {
    let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (from, to): (u64, u64) = (from.parse().ok()?, to.parse().ok()?);
    (from <= to).then_some((from, to))
}

/// A part of a file, at most [`MAX_PART`] bytes, and the length of the file.
fn stretch(path: &Path, from: u64, to: u64) -> std::io::Result<(Vec<u8>, u64)> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let end = to
        .saturating_add(1)
        .min(length)
        .min(from.saturating_add(MAX_PART));
    let mut bytes = vec![0; end.saturating_sub(from) as usize];
    file.read_exact_at(&mut bytes, from)?;
    Ok((bytes, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_published_weights_have_a_path() {
        let root = Path::new("/w");
        let found = published_file(root, "v00000013-9f3c12ab", "model.safetensors");
        assert_eq!(
            found,
            Some("/w/v00000013-9f3c12ab/model.safetensors".into())
        );
        for (version, file) in [
            ("..", "model.safetensors"),
            (".v00000013-9f3c12ab.part", "model.safetensors"),
            ("v13-9f3c12ab", ".."),
            ("v13-9f3c12ab", "a/b"),
            ("v13-9f3c12ab", ""),
            ("v13-9f3c12ab", ".hidden"),
        ] {
            assert_eq!(
                published_file(root, version, file),
                None,
                "{version} {file}"
            );
        }
    }

    #[test]
    fn ranges_are_cut_to_the_file_and_to_a_part() {
        assert_eq!(bounds("bytes=0-9"), Some((0, 9)));
        for wrong in [
            "",
            "bytes=",
            "bytes=5-4",
            "bytes=-5",
            "lines=0-1",
            "bytes=0-",
        ] {
            assert_eq!(bounds(wrong), None, "{wrong}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"0123456789").unwrap();
        assert_eq!(stretch(&path, 3, 5).unwrap(), (b"345".to_vec(), 10));
        assert_eq!(stretch(&path, 8, 99).unwrap(), (b"89".to_vec(), 10));
        assert_eq!(stretch(&path, 10, 12).unwrap(), (Vec::new(), 10));
    }

    #[test]
    fn a_worker_hears_of_stopped_tickets_and_of_the_end() {
        let terms = RunTerms {
            run: "r".into(),
            id: "r-1".into(),
            fence: 4,
            recipe: String::new(),
            build: String::new(),
            parts: Default::default(),
            weights: false,
            lease_ms: 1000,
        };
        let desk = Desk::new(terms, None);
        let report = WorkerReport {
            worker: "a".into(),
            reading: WorkerReading::default(),
        };
        let orders = desk.orders(&report);
        assert_eq!(orders.id, "r-1");
        assert_eq!(
            (orders.fence, orders.paused, orders.ended),
            (4, false, false)
        );
        desk.cancel(BTreeSet::from(["k".to_owned()]));
        desk.pause(true);
        desk.end();
        assert_eq!(desk.untold(), 1);
        let orders = desk.orders(&report);
        assert_eq!((orders.paused, orders.ended), (true, true));
        assert_eq!(orders.cancelled, ["k"]);
        assert_eq!(desk.untold(), 0);
    }
}
