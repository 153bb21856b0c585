//! The owner's side over HTTP: the registry behind a lock, with a clock.
//!
//! | route | body | answer |
//! |---|---|---|
//! | `GET /roles`, `GET /roles?kind=engine` | | [`RolesPage`] |
//! | `POST /roles` | [`Registration`] | [`Lease`](crate::Lease) |
//! | `POST /roles?outside=true` | [`Registration`] with an address | `{"id"}`: a server without heartbeats |
//! | `POST /roles/stop` | | `{}`: the run is to end |
//! | `POST /roles/{id}/beat` | [`Heartbeat`] | [`Orders`](crate::Orders) |
//! | `POST /roles/{id}/drain` | | `{}` |
//! | `DELETE /roles/{id}` | | `{}` |
//! | `PUT /roles/{kind}` | `{"count": 4, "dry_run": false}` | [`ScalePlan`] |
//!
//! Every call has the token. Calls of roles have the header `sinew-fence` with the fence of their lease; of
//! another generation they are refused with status 409. Refusals are `{"error": {"code", "message"}}`.

use crate::autoscale::AutoscaleInputs;
use crate::error::ControlError;
use crate::registry::{ControlLimits, Registry};
use crate::role::{Heartbeat, Registration, RoleId, RoleKind, RoleView, ScalePlan};
use crate::token::Token;
use crate::wanted;
use crate::wire::{Added, FENCE, RoleEvent, RolesPage, ScaleBody};
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Maximum bytes of a body.
const MAX_BODY_BYTES: usize = 64 << 10;

/// The registry of a run with its clock, shared by server, supervisor and the loop that trains.
#[derive(Debug)]
pub struct ControlDesk {
    registry: Mutex<Registry>,
    started: Instant,
    stopping: AtomicBool,
    /// Work that waits before the roles of a kind.
    waiting: Mutex<BTreeMap<RoleKind, u32>>,
    /// File in which the wanted counts outlive the owner.
    kept: Mutex<Option<PathBuf>>,
}

impl ControlDesk {
    /// An empty registry for the owner with this fence.
    pub fn new(run: &str, fence: u64, limits: ControlLimits) -> Self {
        Self {
            registry: Mutex::new(Registry::new(run, fence, limits)),
            started: Instant::now(),
            stopping: AtomicBool::new(false),
            waiting: Mutex::default(),
            kept: Mutex::new(None),
        }
    }

    /// Routes of the server, for callers with the token.
    pub fn router(self: &Arc<Self>, token: Token) -> Router {
        let authorized = middleware::from_fn(move |request: Request, next: Next| {
            let token = token.clone();
            async move {
                let header = request.headers().get(AUTHORIZATION);
                if token.is_in(header.and_then(|value| value.to_str().ok())) {
                    return next.run(request).await;
                }
                let text =
                    "the header `authorization: Bearer TOKEN` must bring the token of the run";
                refusal(StatusCode::UNAUTHORIZED, "unauthorized", text, json!({}))
            }
        });
        Router::new()
            .route("/roles", get(list).post(register))
            .route("/roles/stop", post(stop))
            // One name for both, since a path may have only one at a place.
            .route("/roles/{role}", put(scale).delete(leave))
            .route("/roles/{role}/beat", post(beat))
            .route("/roles/{role}/drain", post(drain))
            .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
            .route_layer(authorized)
            .with_state(Arc::clone(self))
    }

    /// All roles that are there, and the last one of each place that failed.
    pub fn views(&self) -> Vec<RoleView> {
        self.lock().views(self.now_ms())
    }

    /// Everything that people see.
    pub fn page(&self, kind: Option<RoleKind>) -> RolesPage {
        RolesPage {
            stopping: self.is_stopping(),
            ..self.lock().page(kind, self.now_ms())
        }
    }

    /// Generation of the owner.
    pub fn fence(&self) -> u64 {
        self.lock().fence()
    }

    /// Sets version and checksum of the weights that engines shall serve. An engine of this version with
    /// another checksum is quarantined; without one, only versions are compared.
    pub fn set_wanted_weights(&self, version: u64, checksum: Option<String>) {
        self.lock().set_weights(version, checksum, self.now_ms());
    }

    /// The state of a server that sends no heartbeats, as the owner found it.
    pub fn observe(&self, id: &RoleId, heartbeat: Heartbeat) {
        self.lock().observe(id.as_str(), heartbeat, self.now_ms());
    }

    /// Takes in a server that sends no heartbeats.
    ///
    /// # Errors
    /// If it has no address, or the registry is full.
    pub fn add_outside(&self, registration: &Registration) -> Result<RoleId, ControlError> {
        self.lock().add_outside(registration, self.now_ms())
    }

    /// Sets a wanted count.
    ///
    /// # Errors
    /// If the count is above the limit, or cannot be kept.
    pub fn scale(
        &self,
        kind: RoleKind,
        count: u32,
        dry_run: bool,
    ) -> Result<ScalePlan, ControlError> {
        let mut registry = self.lock();
        let plan = registry.scale(kind, count, dry_run, self.now_ms())?;
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = kept.as_ref().filter(|_| !dry_run) {
            wanted::write(path, registry.wanted())?;
        }
        Ok(plan)
    }

    /// Sets the wanted counts from a file, where it exists, else from `first`, and keeps them in it.
    ///
    /// # Errors
    /// If the file cannot be read or written, or a count is above the limit.
    pub fn keep_wanted(
        &self,
        path: PathBuf,
        first: &[(RoleKind, u32)],
    ) -> Result<(), ControlError> {
        let counts = wanted::read(&path)?;
        let counts = counts.unwrap_or_else(|| first.iter().copied().collect());
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
        for (kind, count) in counts {
            self.scale(kind, count, false)?;
        }
        Ok(())
    }

    /// Removes roles whose leases ended, and gives them. An owner without a supervisor calls it from time to
    /// time; a supervisor does the same by itself.
    pub fn expire(&self) -> Vec<RoleId> {
        self.lock().expire(self.now_ms())
    }

    /// Events after a number, oldest first, as far as they are kept.
    pub fn events_after(&self, seq: u64) -> Vec<RoleEvent> {
        self.lock().events_after(seq)
    }

    /// Sets the work that waits before the roles of a kind, such as tickets that nobody took.
    pub fn set_waiting(&self, kind: RoleKind, work: u32) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.insert(kind, work);
    }

    /// The roles of a kind, for the autoscaler.
    pub fn load(&self, kind: RoleKind) -> AutoscaleInputs {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let waiting = waiting.get(&kind).copied().unwrap_or(0);
        self.lock().load(kind, waiting, self.now_ms())
    }

    /// Asks the run to end.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// Whether the run was asked to end.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Milliseconds since this owner started.
    pub(crate) fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Desk = State<Arc<ControlDesk>>;

/// Parameters of a list and of a registration.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    kind: Option<RoleKind>,
    #[serde(default)]
    outside: bool,
}

async fn list(State(desk): Desk, Query(asked): Query<Asked>) -> Json<RolesPage> {
    Json(desk.page(asked.kind))
}

async fn register(
    State(desk): Desk,
    Query(asked): Query<Asked>,
    headers: HeaderMap,
    body: Result<Json<Registration>, JsonRejection>,
) -> Result<Response, Refusal> {
    let registration = body?.0;
    if asked.outside {
        let id = desk.add_outside(&registration)?;
        return Ok(Json(Added { id }).into_response());
    }
    let known = fence(&headers)?;
    let now_ms = desk.now_ms();
    let lease = desk.lock().register(&registration, known, now_ms)?;
    Ok(Json(lease).into_response())
}

async fn stop(State(desk): Desk) -> Json<Value> {
    desk.stop();
    Json(json!({}))
}

async fn beat(
    State(desk): Desk,
    Path(role): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Heartbeat>, JsonRejection>,
) -> Result<Response, Refusal> {
    let (heartbeat, fence) = (body?.0, needed_fence(&headers)?);
    let now_ms = desk.now_ms();
    let orders = desk.lock().beat(&role, fence, heartbeat, now_ms)?;
    Ok(Json(orders).into_response())
}

async fn drain(
    State(desk): Desk,
    Path(role): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, Refusal> {
    let fence = fence(&headers)?;
    let now_ms = desk.now_ms();
    desk.lock().drain(&role, fence, now_ms)?;
    Ok(Json(json!({})))
}

async fn leave(
    State(desk): Desk,
    Path(role): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, Refusal> {
    let fence = needed_fence(&headers)?;
    let now_ms = desk.now_ms();
    desk.lock().leave(&role, fence, now_ms)?;
    Ok(Json(json!({})))
}

async fn scale(
    State(desk): Desk,
    Path(role): Path<String>,
    body: Result<Json<ScaleBody>, JsonRejection>,
) -> Result<Json<ScalePlan>, Refusal> {
    let kind: RoleKind = role.parse()?;
    let body = body?.0;
    Ok(Json(desk.scale(kind, body.count, body.dry_run)?))
}

/// The fence of a call, if it has one.
fn fence(headers: &HeaderMap) -> Result<Option<u64>, ControlError> {
    let Some(value) = headers.get(FENCE) else {
        return Ok(None);
    };
    let number = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || ControlError::field(FENCE, format!("{value:?}"), "the number of the lease");
    number.map(Some).ok_or_else(wrong)
}

fn needed_fence(headers: &HeaderMap) -> Result<u64, ControlError> {
    let missing = || ControlError::field(FENCE, "missing", "the number of the lease");
    fence(headers)?.ok_or_else(missing)
}

/// A refusal as an answer.
#[derive(Debug)]
enum Refusal {
    Control(ControlError),
    Body(JsonRejection),
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        Self::Control(error)
    }
}

impl From<JsonRejection> for Refusal {
    fn from(error: JsonRejection) -> Self {
        Self::Body(error)
    }
}

fn refusal(status: StatusCode, code: &str, message: &str, facts: Value) -> Response {
    let mut error = json!({"code": code, "message": message});
    if let (Some(error), Value::Object(facts)) = (error.as_object_mut(), facts) {
        error.extend(facts);
    }
    (status, Json(json!({ "error": error }))).into_response()
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let error = match self {
            Self::Body(error) => {
                return refusal(error.status(), "body", &error.body_text(), json!({}));
            }
            Self::Control(error) => error,
        };
        let (status, code, facts) = match &error {
            ControlError::Gone(id) => (StatusCode::GONE, "gone", json!({"id": id})),
            ControlError::Superseded(id) => (StatusCode::CONFLICT, "superseded", json!({"id": id})),
            ControlError::Fenced { given, own } => {
                let facts = json!({"given": given, "own": own});
                (StatusCode::CONFLICT, "fenced", facts)
            }
            ControlError::Full(limit) => (
                StatusCode::TOO_MANY_REQUESTS,
                "full",
                json!({"limit": limit}),
            ),
            ControlError::Kind(_) | ControlError::Field { .. } => {
                (StatusCode::BAD_REQUEST, "request", json!({}))
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "failed", json!({})),
        };
        refusal(status, code, &error.to_string(), facts)
    }
}
