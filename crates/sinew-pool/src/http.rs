//! The pool over HTTP: an axum router. The server that merges it does the authorization.
//!
//! | route | body | answer |
//! |---|---|---|
//! | `GET /pool` | | counts by task type and reason, the tokenizer's hash |
//! | `POST /pool/trajectories` | a batch | `admitted`, `duplicates`, `quarantined`, `items` |
//! | `POST /v1/traces` | OTLP spans, protobuf or JSON | OTLP's answer in the same encoding |
//! | `POST /pool/lease` | a [`LeaseRequest`] | groups, the number of the lease |
//! | `POST /pool/ack` | `lease`, `ids` | `lost`: ids that the lease no longer holds |
//! | `POST /pool/release` | `lease`, `ids` | `released` |
//! | `POST /pool/reject` | `lease`, `ids`, `reason` | `rejected` |
//! | `GET /pool/quarantine` | query: `after`, `limit` | `rows`, `next` |
//! | `POST /pool/quarantine/{id}/release` | `kind`, optional | the item's new status |
//! | `DELETE /pool/quarantine/{id}` | | `deleted` |
//!
//! Refusals are `{"error": {"code", "message"}}`: 400 for a wrong body or value, 404, 405, 408, 413,
//! 415 for a wrong content type or encoding, 429 when the pool is full, 507 when the disk is.

use crate::otlp;
use crate::pool::{Answer, LeaseRequest, Pool, PoolError};
use crate::schema::{Batch, Kind, SCHEMA_VERSION};
use axum::Json;
use axum::Router;
use axum::body::Bytes;
use axum::extract::{Path, Request, State};
use axum::http::header::{
    CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};
use axum::http::{Method, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_store::StoreError;
use sinew_store::queue::QueueError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Maximum requests that are read and answered at the same time; more wait. Their bodies are large.
const MAX_REQUESTS: usize = 8;

/// Maximum rows of one page of the quarantine. Default of the parameter `limit`: 100.
const MAX_PAGE: usize = 1000;

/// Maximum time for a body to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(30);

/// Content type of OTLP in protobuf.
const PROTOBUF: &str = "application/x-protobuf";

/// Seconds since 1970.
pub type Clock = Arc<dyn Fn() -> f64 + Send + Sync>;

/// The routes of a pool, below `/pool` and `/v1/traces`. Bodies have at most
/// [`crate::PoolConfig::max_body_bytes`] and 30 seconds to arrive. The caller adds authorization.
pub fn router(pool: Arc<Pool>, clock: Clock) -> Router {
    Router::new()
        .route("/pool", get(status))
        .route("/pool/trajectories", post(push))
        .route("/pool/lease", post(lease))
        .route("/pool/ack", post(ack))
        .route("/pool/release", post(release))
        .route("/pool/reject", post(reject))
        .route("/pool/quarantine", get(quarantine))
        .route("/pool/quarantine/{id}", delete(discard))
        .route("/pool/quarantine/{id}/release", post(revalidate))
        .route("/v1/traces", post(spans))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            let text = format!(
                "{method} {}: the header `allow` names the methods",
                uri.path()
            );
            Refusal(405, "method_not_allowed", text)
        })
        .with_state(Api {
            pool,
            clock,
            places: Arc::new(Semaphore::new(MAX_REQUESTS)),
        })
}

/// Shared state of all requests.
#[derive(Clone)]
struct Api {
    pool: Arc<Pool>,
    clock: Clock,
    places: Arc<Semaphore>,
}

sinew_types::debug_fields!(Api, pool);

/// A request that has been read.
struct PoolRequest {
    /// Lower case, without parameters.
    content_type: String,
    body: Bytes,
}

/// The JSON of an answer, or a refusal.
type Reply = Result<Value, Refusal>;

impl Api {
    /// Reads a request and runs `work`, which can block, on a separate thread.
    async fn answer(
        self,
        request: Request,
        work: impl FnOnce(&Pool, PoolRequest, f64) -> Reply + Send + 'static,
    ) -> Result<Json<Value>, Refusal> {
        check_encoding(request.headers())?;
        let content_type = content_type(request.headers());
        let closed = |e: &dyn fmt::Display| Refusal(500, "pool_failed", e.to_string());
        // The place is taken before the body is read, and kept until the answer is there, whether or not the
        // client waits.
        let place = Arc::clone(&self.places).acquire_owned().await;
        let place = place.map_err(|e| closed(&e))?;
        let body = read(request, self.pool.config().max_body_bytes).await?;
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            work(
                &self.pool,
                PoolRequest { content_type, body },
                (self.clock)(),
            )
        });
        done.await.map_err(|e| closed(&e))?.map(Json)
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|v| v.to_str().ok())
}

fn content_type(headers: &HeaderMap) -> String {
    let kind = text(headers, &CONTENT_TYPE).unwrap_or_default();
    kind.split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_lowercase()
}

/// Refuses compressed bodies: a short one could unpack to any size.
fn check_encoding(headers: &HeaderMap) -> Result<(), Refusal> {
    match text(headers, &CONTENT_ENCODING) {
        None | Some("identity") => Ok(()),
        Some(encoding) => {
            let why = format!("content-encoding {encoding:?}: send the body as it is");
            Err(Refusal(415, "content_encoding", why))
        }
    }
}

/// Reads a whole body within its limits of size and time.
///
/// # Errors
/// 413 for a body that is too large, 408 for one that is too slow.
async fn read(request: Request, limit: usize) -> Result<Bytes, Refusal> {
    let body = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(READ_TIMEOUT, body).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => {
            let text = format!("the request body is larger than {limit} bytes");
            Err(Refusal(413, "body_too_large", text))
        }
        Ok(Err(e)) => {
            let text = format!("the request body could not be read: {e}");
            Err(Refusal(400, "body_unreadable", text))
        }
        Err(_) => {
            let text = "the request body did not arrive in time".to_owned();
            Err(Refusal(408, "deadline", text))
        }
    }
}

/// A refusal: status, a code for programs, a text for users.
struct Refusal(u16, &'static str, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, code, message) = self;
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let error = json!({"error": {"code": code, "message": message}});
        let mut response = (status, Json(error)).into_response();
        if status == StatusCode::TOO_MANY_REQUESTS {
            let wait = HeaderValue::from_static("1");
            response.headers_mut().insert(RETRY_AFTER, wait);
        }
        response
    }
}

impl From<PoolError> for Refusal {
    fn from(error: PoolError) -> Self {
        let text = error.to_string();
        match &error {
            PoolError::Argument { .. } => Self(400, "invalid_value", text),
            PoolError::Unknown { .. } => Self(404, "not_found", text),
            PoolError::Store(StoreError::Queue(QueueError::Full { .. })) => {
                Self(429, "pool_full", text)
            }
            PoolError::Store(StoreError::Queue(QueueError::TooLarge { .. })) => {
                Self(413, "too_many_rows", text)
            }
            PoolError::Store(StoreError::Queue(QueueError::Argument { .. })) => {
                Self(400, "invalid_value", text)
            }
            PoolError::Store(StoreError::DiskFull { .. } | StoreError::Full { .. }) => {
                Self(507, "no_space", text)
            }
            _ => Self(500, "pool_failed", text),
        }
    }
}

/// Body of `ack` and `release`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LeaseReturn {
    lease: u64,
    ids: Vec<String>,
}

/// Body of `reject`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RejectBody {
    lease: u64,
    ids: Vec<String>,
    reason: String,
}

/// Body of a release from quarantine.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ReleaseBody {
    kind: Option<Kind>,
}

/// Parses a JSON body; an empty one counts as an empty object.
fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let body = if body.is_empty() { b"{}" } else { body };
    sinew_types::json::from_slice(body).map_err(|e| Refusal(400, "invalid_body", e.to_string()))
}

type PoolReply = Result<Json<Value>, Refusal>;

/// `GET /pool`. Also ends leases, groups and traces whose time is over, so that the counts are
/// current.
async fn status(State(api): State<Api>, request: Request) -> PoolReply {
    let work = |pool: &Pool, _: PoolRequest, now_s| {
        pool.sweep(now_s)?;
        Ok(pool.status()?)
    };
    api.answer(request, work).await
}

/// `POST /pool/trajectories`. 200 even if every item went to quarantine: `items` has each one's
/// status.
async fn push(State(api): State<Api>, request: Request) -> PoolReply {
    api.answer(request, pushed).await
}

/// `POST /pool/lease`. `lease` is null if no group is ready; the trainer asks again later.
async fn lease(State(api): State<Api>, request: Request) -> PoolReply {
    let work = |pool: &Pool, asked: PoolRequest, now_s| {
        let asked: LeaseRequest = parse(&asked.body)?;
        Ok(json!(pool.lease(&asked, now_s)?))
    };
    api.answer(request, work).await
}

/// `POST /pool/ack`. Can be repeated: acknowledging again changes nothing.
async fn ack(State(api): State<Api>, request: Request) -> PoolReply {
    let work = |pool: &Pool, asked: PoolRequest, _| {
        let LeaseReturn { lease, ids } = parse(&asked.body)?;
        Ok(json!({"lost": pool.ack(lease, &ids)?}))
    };
    api.answer(request, work).await
}

/// `POST /pool/release`.
async fn release(State(api): State<Api>, request: Request) -> PoolReply {
    let work = |pool: &Pool, asked: PoolRequest, _| {
        let LeaseReturn { lease, ids } = parse(&asked.body)?;
        Ok(json!({"released": pool.release(lease, &ids)?}))
    };
    api.answer(request, work).await
}

/// `POST /pool/reject`. The reason is for the people who look at the quarantine.
async fn reject(State(api): State<Api>, request: Request) -> PoolReply {
    let work = |pool: &Pool, asked: PoolRequest, now_s| {
        let RejectBody { lease, ids, reason } = parse(&asked.body)?;
        let rejected = pool.reject(lease, &ids, &reason, now_s)?;
        Ok(json!({"rejected": rejected}))
    };
    api.answer(request, work).await
}

/// `GET /pool/quarantine`, page by page: `next` is the `after` of the next page, or null.
async fn quarantine(State(api): State<Api>, request: Request) -> PoolReply {
    let query = request.uri().query().unwrap_or_default().to_owned();
    api.answer(request, move |pool, _, _| page(pool, &query))
        .await
}

/// `POST /pool/quarantine/{id}/release`.
async fn revalidate(State(api): State<Api>, Path(id): Path<String>, request: Request) -> PoolReply {
    let work = move |pool: &Pool, asked: PoolRequest, now_s| {
        let ReleaseBody { kind } = parse(&asked.body)?;
        Ok(json!(pool.revalidate(&id, kind, now_s)?))
    };
    api.answer(request, work).await
}

/// `DELETE /pool/quarantine/{id}`.
async fn discard(State(api): State<Api>, Path(id): Path<String>, request: Request) -> PoolReply {
    let work = move |pool: &Pool, _: PoolRequest, _| {
        pool.discard(&id)?;
        Ok(json!({"deleted": id}))
    };
    api.answer(request, work).await
}

/// Receives spans by OTLP: a request in protobuf is answered in protobuf.
async fn spans(State(api): State<Api>, request: Request) -> Response {
    let protobuf = content_type(request.headers()) == PROTOBUF;
    match api.answer(request, received).await {
        Ok(Json(value)) if protobuf => {
            ([(CONTENT_TYPE, PROTOBUF)], otlp::export_answer(&value)).into_response()
        }
        other => other.into_response(),
    }
}

/// Admits or quarantines a batch.
fn pushed(pool: &Pool, asked: PoolRequest, now_s: f64) -> Reply {
    let batch: Batch = match asked.content_type.as_str() {
        "application/json" | "" => parse(&asked.body)?,
        other => {
            let text = format!("content type {other:?}: expected application/json");
            return Err(Refusal(415, "content_type", text));
        }
    };
    if batch.version != SCHEMA_VERSION {
        let text = format!(
            "version is {}, this server reads {SCHEMA_VERSION}",
            batch.version
        );
        return Err(Refusal(400, "schema_version", text));
    }
    let answers = pool.push(batch.pushed(), now_s)?;
    let count = |of: fn(&Answer) -> bool| answers.iter().filter(|a| of(a)).count();
    Ok(json!({
        "admitted": count(|a| matches!(a, Answer::Admitted { .. })),
        "duplicates": count(|a| matches!(a, Answer::Duplicate { .. })),
        "quarantined": count(|a| matches!(a, Answer::Quarantined { .. })),
        "items": answers,
    }))
}

/// OTLP's answer: refused spans are reported as a partial success, so that they are not sent again.
fn received(pool: &Pool, asked: PoolRequest, now_s: f64) -> Reply {
    let read = match asked.content_type.as_str() {
        PROTOBUF => otlp::from_protobuf(&asked.body),
        "application/json" => otlp::from_json(&asked.body),
        other => {
            let text = format!(
                "content type {other:?}: expected application/x-protobuf or application/json"
            );
            return Err(Refusal(415, "content_type", text));
        }
    };
    let spans = read.map_err(|e| Refusal(400, "invalid_body", e.to_string()))?;
    let (_, refused) = pool.push_spans(spans, now_s)?;
    Ok(match refused.first() {
        None => json!({}),
        Some(first) => json!({"partialSuccess": {
            "rejectedSpans": refused.len().to_string(),
            "errorMessage": first.to_string(),
        }}),
    })
}

/// A page of the quarantine: `after` an id, `limit` rows (100).
fn page(pool: &Pool, query: &str) -> Reply {
    let (mut after, mut limit) = (None, 100);
    for pair in query.split('&').filter(|p| !p.is_empty()) {
        match pair.split_once('=') {
            Some(("after", id)) => after = Some(id),
            Some(("limit", n)) => {
                let allowed = n.parse().ok().filter(|n| (1..=MAX_PAGE).contains(n));
                limit = allowed.ok_or_else(|| {
                    let text = format!("limit is {n:?}, allowed: 1 to {MAX_PAGE}");
                    Refusal(400, "invalid_value", text)
                })?;
            }
            _ => {
                let text = format!("unknown parameter {pair:?}: allowed: after, limit");
                return Err(Refusal(400, "invalid_value", text));
            }
        }
    }
    let rows = pool.quarantined(after, limit)?;
    let next = (rows.len() == limit).then(|| rows.last().map(|(id, _)| id.clone()));
    let row = |(id, held): &(String, crate::quarantine_row::QuarantineRow)| {
        json!({
            "quarantine": id,
            "reason": held.reason,
            "message": held.reason.to_string(),
            "source": held.item.source,
            "at_unix_s": held.at_unix_s,
            "item": serde_json::from_str::<Value>(&held.item.raw).unwrap_or_default(),
        })
    };
    Ok(json!({"rows": rows.iter().map(row).collect::<Vec<_>>(), "next": next.flatten()}))
}
