//! The routes, and the server around them.

use crate::api::{CreateRequest, ExecBody, ForkRequest};
use crate::book::Service;
use crate::error::{ApiError, bad};
use crate::exec;
use crate::transfer;
use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, FromRequestParts, Path, Query, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;

/// Largest JSON body.
const MAX_JSON_BYTES: usize = 1 << 20;

type Api = State<Arc<Service>>;
type Answer = Result<Response, ApiError>;

/// Who asks, as the token says.
struct Owner(String);

impl FromRequestParts<Arc<Service>> for Owner {
    type Rejection = ApiError;

    async fn from_request_parts(
        parts: &mut Parts,
        service: &Arc<Service>,
    ) -> Result<Self, ApiError> {
        let header = parts
            .headers
            .get(header::AUTHORIZATION)
            .and_then(|h| h.to_str().ok());
        let owner = service.tokens.owner(header).ok_or(ApiError::Unauthorized)?;
        Ok(Self(owner.into()))
    }
}

/// All routes. Bodies of files may have [`crate::Bounds::file_bytes`], all others 1 MiB.
pub fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/levels", get(levels))
        .route("/v1/sandboxes", post(create).get(list))
        .route("/v1/sandboxes/{id}", get(look).delete(destroy))
        .route("/v1/sandboxes/{id}/exec", post(run))
        .route("/v1/sandboxes/{id}/stats", get(stats))
        .route("/v1/sandboxes/{id}/reset", post(reset))
        .route("/v1/sandboxes/{id}/snapshot", post(snapshot))
        .route("/v1/sandboxes/{id}/fork", post(fork))
        .layer(DefaultBodyLimit::max(MAX_JSON_BYTES))
        .route("/v1/sandboxes/{id}/files/{*path}", get(read).put(write))
        .route("/v1/snapshots", post(import))
        .route("/v1/snapshots/{id}", get(export).delete(forget))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::Method(format!("{method} {}", uri.path()))
        })
        .fallback(async |uri: Uri| ApiError::Route(uri.path().into()))
        .with_state(service)
}

fn json_body<T: Default + DeserializeOwned>(
    body: Result<Json<Value>, JsonRejection>,
    headers: &HeaderMap,
) -> Result<T, ApiError> {
    let empty = headers.get(header::CONTENT_LENGTH).is_none_or(|l| l == "0");
    match body {
        // A list would do for a struct, its fields unnamed.
        Ok(Json(body)) if !body.is_object() => Err(ApiError::Body {
            status: StatusCode::BAD_REQUEST,
            problem: "it is no JSON object".into(),
        }),
        Ok(Json(body)) => serde_json::from_value(body).map_err(|e| ApiError::Body {
            status: StatusCode::BAD_REQUEST,
            problem: e.to_string(),
        }),
        // `curl -X POST` without a body means: all defaults.
        Err(_) if empty && !headers.contains_key(header::TRANSFER_ENCODING) => Ok(T::default()),
        Err(e) => Err(ApiError::Body {
            status: e.status(),
            problem: e.body_text(),
        }),
    }
}

/// For anybody: which levels can make no sandboxes now; why is for those that have a token.
async fn health(State(service): Api) -> Response {
    let broken = service.levels().filter(|p| p.health().is_err());
    let broken: Vec<&str> = broken.map(|p| p.level()).collect();
    match broken.is_empty() {
        true => Json(json!({ "status": "ok" })).into_response(),
        false => {
            let said = Json(json!({ "status": "unavailable", "levels": broken }));
            (StatusCode::SERVICE_UNAVAILABLE, said).into_response()
        }
    }
}

async fn levels(State(service): Api, _owner: Owner) -> Json<Value> {
    let levels: Vec<Value> = service
        .levels()
        .map(|p| json!({ "level": p.level(), "protections": *p.protections() }))
        .collect();
    Json(json!({ "levels": levels }))
}

async fn create(
    State(service): Api,
    Owner(owner): Owner,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> Answer {
    let request = json_body::<CreateRequest>(body, &headers)?;
    let view = service.create(&owner, &request).await?;
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

async fn list(State(service): Api, Owner(owner): Owner) -> Json<Value> {
    Json(json!({ "sandboxes": service.list(&owner) }))
}

async fn look(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    Ok(Json(service.look(&owner, &id)?).into_response())
}

async fn destroy(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    service.destroy(&owner, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn run(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> Answer {
    let body = json_body::<ExecBody>(body, &headers)?;
    exec::exec(service, owner, id, body).await
}

async fn stats(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    Ok(Json(service.stats(&owner, &id).await?).into_response())
}

async fn reset(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    service.reset(&owner, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn snapshot(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    let id = service.snapshot(&owner, &id).await?;
    Ok((StatusCode::CREATED, Json(json!({ "snapshot": id }))).into_response())
}

async fn fork(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> Answer {
    let request = json_body::<ForkRequest>(body, &headers)?;
    let views = service.fork(&owner, &id, &request).await?;
    Ok((StatusCode::CREATED, Json(json!({ "sandboxes": views }))).into_response())
}

async fn read(
    State(service): Api,
    Owner(owner): Owner,
    Path((id, path)): Path<(String, String)>,
) -> Answer {
    let turn = service.turn(&owner).await?;
    let content = exec::read(&service, &owner, &id, &path).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, content.len().to_string()),
    ];
    Ok((headers, transfer::give_bytes(content, turn)).into_response())
}

async fn write(
    State(service): Api,
    Owner(owner): Owner,
    Path((id, path)): Path<(String, String)>,
    body: Body,
) -> Answer {
    service.entry(&owner, &id)?;
    let _turn = service.turn(&owner).await?;
    let taken = transfer::take(body, service.bounds.file_bytes).await?;
    exec::write(&service, &owner, &id, &path, taken.file).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[derive(Debug, Deserialize)]
struct ImportQuery {
    level: Option<String>,
    /// What the body must have.
    digest: Option<String>,
}

async fn import(
    State(service): Api,
    Owner(owner): Owner,
    Query(query): Query<ImportQuery>,
    body: Body,
) -> Answer {
    let _turn = service.turn(&owner).await?;
    let taken = transfer::take(body, service.bounds.file_bytes).await?;
    let digest = taken.digest;
    if query.digest.as_ref().is_some_and(|named| *named != digest) {
        let named = query.digest.unwrap_or_default();
        return Err(bad("digest", named, format!("that of the body, {digest}")));
    }
    let id = service
        .import(&owner, query.level.as_deref(), taken.file)
        .await?;
    let answer = json!({ "snapshot": id, "digest": digest });
    Ok((StatusCode::CREATED, Json(answer)).into_response())
}

async fn export(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    let turn = service.turn(&owner).await?;
    let archive = service.export(&owner, &id).await?;
    let measured = transfer::measure(archive).await;
    let (archive, bytes, digest) = measured.map_err(|e| exec::failed("export", &e))?;
    let headers = [
        (header::CONTENT_TYPE, "application/x-tar".to_owned()),
        (header::CONTENT_LENGTH, bytes.to_string()),
        (header::ETAG, format!("\"{digest}\"")),
    ];
    Ok((headers, transfer::give(archive, turn)).into_response())
}

async fn forget(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> Answer {
    service.forget(&owner, &id)?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
