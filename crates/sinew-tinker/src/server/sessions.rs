//! Sessions: what a client made, and whether it lives.

use super::api::{Api, Caller, Paged, Sent, no_projects};
use super::date::iso;
use super::error::{Answer, ApiError};
use crate::desk::types::{
    FinishReason, Metadata, NewSession, Page, SessionId, SessionInfo, SessionStatus,
};
use crate::wire::requests::{CreateSession, Finish, Heartbeat, SearchSessions, StatusQuery};
use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use serde_json::{Map, Value, json};

/// Sessions that a search reads at a time.
const SEARCH_PAGE: u64 = 200;
/// Most sessions of one page of a search.
const MAX_FOUND: usize = 200;

/// `POST create_session`.
pub(crate) async fn create(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<CreateSession>,
) -> Answer {
    if sent.project_id.is_some() {
        return Err(no_projects("project_id"));
    }
    let about = NewSession {
        tags: sent.tags,
        metadata: sent.user_metadata.unwrap_or_default(),
        display_name: sent.display_name,
        sdk_version: sent.sdk_version,
    };
    let session = api.desk.create_session(&tenant, about).await?;
    let body = json!({"type": "create_session", "session_id": session.as_str()});
    Ok(Json(body).into_response())
}

/// `POST session_heartbeat`. After the session's end 410, so that the SDK stops.
pub(crate) async fn heartbeat(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<Heartbeat>,
) -> Answer {
    let session = SessionId::from(sent.session_id);
    api.desk.heartbeat(&tenant, &session).await?;
    Ok(Json(json!({"type": "session_heartbeat"})).into_response())
}

/// `POST sessions/{id}/finish`.
pub(crate) async fn finish(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(session): Path<String>,
    Sent(sent): Sent<Finish>,
) -> Answer {
    let session = SessionId::from(session);
    let reason = FinishReason::from(sent.reason);
    let finished = api
        .desk
        .finish_session(&tenant, &session, reason, sent.detail);
    finished.await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `GET sessions`.
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Paged(page): Paged,
) -> Answer {
    let found = api.desk.sessions(&tenant, page).await?;
    let ids = found.items.iter().map(|info| info.session.as_str());
    Ok(Json(json!({"sessions": ids.collect::<Vec<_>>()})).into_response())
}

/// `GET sessions/{id}`.
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(session): Path<String>,
) -> Answer {
    let session = SessionId::from(session);
    let info = api.desk.session(&tenant, &session).await?;
    let models = info.models.iter().map(|id| id.as_str());
    let samplers = info.samplers.iter().map(|id| id.as_str());
    let body = json!({
        "training_run_ids": models.collect::<Vec<_>>(),
        "sampler_ids": samplers.collect::<Vec<_>>(),
        "user_metadata": texts(&info.about.metadata),
        "display_name": info.about.display_name,
    });
    Ok(Json(body).into_response())
}

/// Values of a client as texts: the SDK reads only these back.
pub(crate) fn texts(metadata: &Metadata) -> Option<Map<String, Value>> {
    let text = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        (name.clone(), Value::String(value))
    };
    (!metadata.is_empty()).then(|| metadata.iter().map(text).collect())
}

/// `POST sessions/search`, newest first.
pub(crate) async fn search(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Sent(sent): Sent<SearchSessions>,
) -> Answer {
    check(&sent)?;
    let mut found = Vec::new();
    let mut page = Page {
        offset: 0,
        limit: SEARCH_PAGE,
    };
    let after = sent.cursor.as_ref().map(|cursor| &cursor.last_session_id);
    let mut begun = after.is_none();
    let mut more = false;
    'pages: loop {
        let listing = api.desk.sessions(&tenant, page).await?;
        let count = listing.items.len() as u64;
        for info in listing.items {
            if !begun {
                begun = after.is_some_and(|id| id == info.session.as_str());
            } else if matches(&sent, &info) {
                if found.len() == sent.limit {
                    more = true;
                    break 'pages;
                }
                found.push(info);
            }
        }
        page.offset += count;
        if count == 0 || page.offset >= listing.total {
            break;
        }
    }
    let next = found.last().filter(|_| more).map(|info| {
        json!({"last_created_at": iso(info.created_ms), "last_session_id": info.session.as_str()})
    });
    let summaries = found.iter().map(|info| summary(&tenant.name, info));
    let body = json!({"sessions": summaries.collect::<Vec<_>>(), "next_cursor": next});
    Ok(Json(body).into_response())
}

fn check(sent: &SearchSessions) -> Result<(), ApiError> {
    let refused = |text: String| ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text);
    if sent.project_ids.is_some() {
        return Err(no_projects("project_ids"));
    }
    if !(1..=MAX_FOUND).contains(&sent.limit) {
        return Err(refused(format!(
            "limit is {}, allowed: 1 to {MAX_FOUND}",
            sent.limit
        )));
    }
    let owner = sent.owner.as_ref().and_then(|owner| owner.get("type"));
    match owner {
        None => Ok(()),
        Some(kind) if kind == "own" || kind == "accessible" => Ok(()),
        Some(other) => Err(refused(format!(
            "owner.type is {other}, allowed: own, accessible: a key sees its own sessions"
        ))),
    }
}

/// Whether a session is asked for. Of id and name, either is enough.
fn matches(sent: &SearchSessions, info: &SessionInfo) -> bool {
    let id = sent.session_id.as_deref();
    let same_id = id.is_some_and(|id| id == info.session.as_str());
    let same_name = sent.display_name.as_deref().is_some_and(|words| {
        let name = info.about.display_name.as_deref().unwrap_or_default();
        let name = name.to_lowercase();
        words
            .split_whitespace()
            .all(|word| name.contains(&word.to_lowercase()))
    });
    let named = (id.is_none() && sent.display_name.is_none()) || same_id || same_name;
    let mut wanted = sent.user_metadata.iter();
    let has_all = wanted.all(|(name, value)| info.about.metadata.get(name) == Some(value));
    let statuses = sent.statuses.as_deref();
    let has_status = statuses.is_none_or(|all| all.iter().any(|one| has(one, &info.status)));
    named && has_all && has_status
}

fn has(query: &StatusQuery, status: &SessionStatus) -> bool {
    match (query, status) {
        (StatusQuery::Active, SessionStatus::Active) => true,
        (StatusQuery::ClientFinished { reasons }, SessionStatus::Finished { reason, .. }) => {
            let named = |reasons: &Vec<String>| reasons.iter().any(|r| r == reason_name(*reason));
            reasons.as_ref().is_none_or(named)
        }
        _ => false,
    }
}

fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Success => "success",
        FinishReason::Errored => "errored",
        FinishReason::Interrupted => "interrupted",
    }
}

fn summary(owner: &str, info: &SessionInfo) -> Value {
    let status = match &info.status {
        SessionStatus::Active => json!({"type": "active"}),
        SessionStatus::Silent => Value::Null,
        SessionStatus::Finished { reason, detail } => json!({
            "type": "client_finished",
            "reason": {"type": reason_name(*reason)},
            "detail": detail,
        }),
    };
    json!({
        "session_id": info.session.as_str(),
        "created_at": iso(info.created_ms),
        "owner": owner,
        "project_id": "",
        "status": status,
        "checkpoints_count": info.checkpoints,
        "display_name": info.about.display_name,
        "user_metadata": texts(&info.about.metadata),
        "checkpoint_storage_bytes": info.checkpoint_bytes,
    })
}
