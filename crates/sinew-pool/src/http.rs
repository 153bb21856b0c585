//! The pool as requests and answers; who may ask, and how bytes come and go, is the server's part.

use crate::arrow;
use crate::otlp;
use crate::pool::{Answer, LeaseRequest, Pool, PoolError};
use crate::schema::{Batch, Kind, SCHEMA_VERSION};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sinew_store::{QueueError, StoreError};

/// Most rows of one page of the quarantine.
const MAX_PAGE: usize = 1000;

/// A request.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub method: &'a str,
    /// Without the query.
    pub path: &'a str,
    pub query: &'a str,
    /// In lower case, without parameters.
    pub content_type: &'a str,
    pub body: Vec<u8>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    pub status: u16,
    pub content_type: &'static str,
    pub body: Vec<u8>,
}

/// The methods that `path` has; `None`: it is not one of the pool's.
pub fn methods(path: &str) -> Option<&'static [&'static str]> {
    let segments: Vec<&str> = path.trim_start_matches('/').split('/').collect();
    Some(match segments.as_slice() {
        ["pool"] | ["pool", "quarantine"] => &["GET"],
        ["pool", "quarantine", _] => &["DELETE"],
        ["v1", "traces"]
        | [
            "pool",
            "trajectories" | "lease" | "ack" | "release" | "reject",
        ]
        | ["pool", "quarantine", _, "release"] => &["POST"],
        _ => return None,
    })
}

/// A refusal: status, a word that programs match, a text.
struct Refusal(u16, &'static str, String);

impl From<PoolError> for Refusal {
    fn from(error: PoolError) -> Self {
        let text = error.to_string();
        match &error {
            PoolError::Argument { .. } => Self(400, "invalid_value", text),
            PoolError::Unknown { .. } => Self(404, "not_found", text),
            PoolError::Store(StoreError::Queue(QueueError::Full { .. })) => {
                Self(429, "pool_full", text)
            }
            PoolError::Store(StoreError::DiskFull { .. } | StoreError::Full { .. }) => {
                Self(507, "no_space", text)
            }
            _ => Self(500, "pool_failed", text),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Leased {
    lease: u64,
    ids: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rejected {
    lease: u64,
    ids: Vec<String>,
    reason: String,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Released {
    kind: Option<Kind>,
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let body = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|e| Refusal(400, "invalid_body", e.to_string()))
}

/// Answers a request at `now_s`, seconds since 1970. Blocks.
pub fn answer(pool: &Pool, request: Request<'_>, now_s: f64) -> Response {
    let protobuf = request.content_type == "application/x-protobuf";
    let json = |status, value: &Value| Response {
        status,
        content_type: "application/json",
        body: value.to_string().into_bytes(),
    };
    match route(pool, request, now_s) {
        Ok((status, value)) if protobuf => Response {
            status,
            content_type: "application/x-protobuf",
            body: otlp::export_answer(&value),
        },
        Ok((status, value)) => json(status, &value),
        Err(Refusal(status, code, message)) => {
            let error = json!({"error": {"code": code, "message": message}});
            json(status, &error)
        }
    }
}

fn route(pool: &Pool, request: Request<'_>, now_s: f64) -> Result<(u16, Value), Refusal> {
    let path: Vec<&str> = request.path.trim_start_matches('/').split('/').collect();
    Ok(match (request.method, path.as_slice()) {
        ("GET", ["pool"]) => {
            pool.sweep(now_s)?;
            (200, pool.status()?)
        }
        ("POST", ["pool", "trajectories"]) => (200, push(pool, request, now_s)?),
        ("POST", ["v1", "traces"]) => (200, spans(pool, &request, now_s)?),
        ("POST", ["pool", "lease"]) => {
            let asked: LeaseRequest = parse(&request.body)?;
            (200, json!(pool.lease(&asked, now_s)?))
        }
        ("POST", ["pool", "ack"]) => {
            let Leased { lease, ids } = parse(&request.body)?;
            (200, json!({"lost": pool.ack(lease, &ids)?}))
        }
        ("POST", ["pool", "release"]) => {
            let Leased { lease, ids } = parse(&request.body)?;
            (200, json!({"released": pool.release(lease, &ids)?}))
        }
        ("POST", ["pool", "reject"]) => {
            let Rejected { lease, ids, reason } = parse(&request.body)?;
            let rejected = pool.reject(lease, &ids, &reason, now_s)?;
            (200, json!({"rejected": rejected}))
        }
        ("GET", ["pool", "quarantine"]) => (200, quarantine(pool, request.query)?),
        ("POST", ["pool", "quarantine", id, "release"]) => {
            let Released { kind } = parse(&request.body)?;
            (200, json!(pool.revalidate(id, kind, now_s)?))
        }
        ("DELETE", ["pool", "quarantine", id]) => {
            pool.discard(id)?;
            (200, json!({"deleted": id}))
        }
        _ => {
            let text = format!("there is no {} {}", request.method, request.path);
            return Err(Refusal(404, "not_found", text));
        }
    })
}

fn push(pool: &Pool, request: Request<'_>, now_s: f64) -> Result<Value, Refusal> {
    let batch: Batch = match request.content_type {
        "application/json" | "" => parse(&request.body)?,
        "application/vnd.apache.arrow.stream" => {
            let limit = pool.config().max_batch;
            arrow::batch(request.body, limit)
                .map_err(|e| Refusal(400, "invalid_body", e.to_string()))?
        }
        other => {
            let text = format!(
                "content type {other:?}: expected application/json or \
                 application/vnd.apache.arrow.stream"
            );
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
    let count = |wanted: fn(&Answer) -> bool| answers.iter().filter(|a| wanted(a)).count();
    Ok(json!({
        "admitted": count(|a| matches!(a, Answer::Admitted { .. })),
        "duplicates": count(|a| matches!(a, Answer::Duplicate { .. })),
        "quarantined": count(|a| matches!(a, Answer::Quarantined { .. })),
        "items": answers,
    }))
}

/// OTLP's answer: what was refused is told as a partial success, so that it is not sent again.
fn spans(pool: &Pool, request: &Request<'_>, now_s: f64) -> Result<Value, Refusal> {
    let read = match request.content_type {
        "application/x-protobuf" => otlp::from_protobuf(&request.body),
        "application/json" => otlp::from_json(&request.body),
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

fn quarantine(pool: &Pool, query: &str) -> Result<Value, Refusal> {
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
    let row = |(id, held): &(String, crate::quarantine::Held)| {
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
