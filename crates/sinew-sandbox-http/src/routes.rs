//! HTTP routes.
//!
//! | path below `/v1` | methods |
//! |---|---|
//! | `/health`, `/levels`, `/status` | GET; `/health` needs no token |
//! | `/sandboxes` | GET: list, POST: create |
//! | `/sandboxes/ID` | GET: state, DELETE: destroy |
//! | `/sandboxes/ID/exec`, `/reset`, `/snapshot`, `/fork` | POST |
//! | `/sandboxes/ID/stats` | GET |
//! | `/sandboxes/ID/terminal` | POST: type at the terminal of what runs |
//! | `/sandboxes/ID/files/PATH` | GET: read, PUT: write |
//! | `/snapshots` | POST: import a tar file |
//! | `/snapshots/ID` | GET: export, DELETE |
//!
//! A handler checks the body, calls the [`Service`] with the owner of the token, and writes the answer.
//! Objects of other owners do not exist for it.

use crate::api::{CreateRequest, ExecBody, ForkRequest, TerminalBody};
use crate::error::{ApiError, bad};
use crate::exec;
use crate::registry::Service;
use crate::terminal;
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
use sinew_sandbox::SandboxError;
use std::sync::Arc;

/// Maximum bytes of a JSON body.
const MAX_JSON_BYTES: usize = 1 << 20;

/// State of the handlers.
type Api = State<Arc<Service>>;
/// Result of a handler.
type HandlerResult = Result<Response, ApiError>;

/// Owner of the request's token. Requests without a valid token are refused.
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

/// Builds the routes. The maximum body is [`crate::Bounds::file_bytes`] for files and archives, 1 MiB for
/// all others.
pub fn router(service: Arc<Service>) -> Router {
    Router::new()
        .route("/v1/health", get(health))
        .route("/v1/levels", get(levels))
        .route("/v1/status", get(status))
        .route("/v1/sandboxes", post(create).get(list))
        .route("/v1/sandboxes/{id}", get(view).delete(destroy))
        .route("/v1/sandboxes/{id}/exec", post(run))
        .route("/v1/sandboxes/{id}/stats", get(stats))
        .route("/v1/sandboxes/{id}/terminal", post(typed))
        .route("/v1/sandboxes/{id}/reset", post(reset))
        .route("/v1/sandboxes/{id}/snapshot", post(snapshot))
        .route("/v1/sandboxes/{id}/fork", post(fork))
        .layer(DefaultBodyLimit::max(MAX_JSON_BYTES))
        .route("/v1/sandboxes/{id}/files/{*path}", get(read).put(write))
        .route("/v1/snapshots", post(import))
        .route("/v1/snapshots/{id}", get(export).delete(delete_snapshot))
        .method_not_allowed_fallback(async |method: Method, uri: Uri| {
            ApiError::Method(format!("{method} {}", uri.path()))
        })
        .fallback(async |uri: Uri| ApiError::Route(uri.path().into()))
        .with_state(service)
}

/// Parses a JSON object. An empty body yields the defaults.
fn json_body<T: Default + DeserializeOwned>(
    body: Result<Json<Value>, JsonRejection>,
    headers: &HeaderMap,
) -> Result<T, ApiError> {
    let empty = headers.get(header::CONTENT_LENGTH).is_none_or(|l| l == "0");
    match body {
        // serde would accept a list for a struct.
        Ok(Json(body)) if !body.is_object() => Err(ApiError::Body {
            status: StatusCode::BAD_REQUEST,
            problem: "it is no JSON object".into(),
        }),
        Ok(Json(body)) => serde_json::from_value(body).map_err(|e| ApiError::Body {
            status: StatusCode::BAD_REQUEST,
            problem: e.to_string(),
        }),
        // `curl -X POST` without a body selects the defaults.
        Err(_) if empty && !headers.contains_key(header::TRANSFER_ENCODING) => Ok(T::default()),
        Err(e) => Err(ApiError::Body {
            status: e.status(),
            problem: e.body_text(),
        }),
    }
}

/// Health check without a token: the levels that cannot create sandboxes now. The reason is not public.
async fn health(State(service): Api) -> Response {
    let broken = service.roots.providers().filter(|p| p.health().is_err());
    let broken: Vec<&str> = broken.map(|p| p.level()).collect();
    if broken.is_empty() {
        Json(json!({ "status": "ok" })).into_response()
    } else {
        let body = Json(json!({ "status": "unavailable", "levels": broken }));
        (StatusCode::SERVICE_UNAVAILABLE, body).into_response()
    }
}

/// `GET /v1/levels`: names and protections of all levels, and the names of images.
async fn levels(State(service): Api, _owner: Owner) -> Json<Value> {
    let levels: Vec<Value> = service
        .roots
        .levels()
        .map(|p| json!({ "level": p.level(), "protections": *p.protections() }))
        .collect();
    let images: Vec<&str> = service.roots.images().collect();
    Json(json!({ "levels": levels, "images": images }))
}

/// `GET /v1/status`: room, levels, images and price, for clients of several servers.
async fn status(State(service): Api, Owner(owner): Owner) -> Response {
    Json(service.status(&owner)).into_response()
}

/// `POST /v1/sandboxes`: creates a sandbox.
async fn create(
    State(service): Api,
    Owner(owner): Owner,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> HandlerResult {
    let request = json_body::<CreateRequest>(body, &headers)?;
    let view = service.create(&owner, &request).await?;
    Ok((StatusCode::CREATED, Json(view)).into_response())
}

/// `GET /v1/sandboxes`: all sandboxes of the owner.
async fn list(State(service): Api, Owner(owner): Owner) -> Json<Value> {
    Json(json!({ "sandboxes": service.list(&owner) }))
}

/// `GET /v1/sandboxes/ID`: state of a sandbox. Renews its lease.
async fn view(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> HandlerResult {
    Ok(Json(service.view(&owner, &id)?).into_response())
}

/// `DELETE /v1/sandboxes/ID`: destroys a sandbox.
async fn destroy(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
) -> HandlerResult {
    service.destroy(&owner, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /v1/sandboxes/ID/exec`: runs a program.
async fn run(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> HandlerResult {
    let body = json_body::<ExecBody>(body, &headers)?;
    match body.terminal {
        Some(_) => terminal::start(service, owner, id, body),
        None => exec::exec(service, owner, id, body).await,
    }
}

/// `POST /v1/sandboxes/ID/terminal`: types at the terminal of what runs, or sets its size.
async fn typed(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> HandlerResult {
    let body = json_body::<TerminalBody>(body, &headers)?;
    terminal::input(&service, &owner, &id, body).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `GET /v1/sandboxes/ID/stats`: resource use of a sandbox.
async fn stats(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> HandlerResult {
    Ok(Json(service.stats(&owner, &id).await?).into_response())
}

/// `POST /v1/sandboxes/ID/reset`: restores the state at creation.
async fn reset(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> HandlerResult {
    service.reset(&owner, &id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /v1/sandboxes/ID/snapshot`: takes a snapshot.
async fn snapshot(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
) -> HandlerResult {
    let id = service.snapshot(&owner, &id).await?;
    Ok((StatusCode::CREATED, Json(json!({ "snapshot": id }))).into_response())
}

/// `POST /v1/sandboxes/ID/fork`: creates sandboxes with the same files.
async fn fork(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Result<Json<Value>, JsonRejection>,
) -> HandlerResult {
    let request = json_body::<ForkRequest>(body, &headers)?;
    let views = service.fork(&owner, &id, &request).await?;
    Ok((StatusCode::CREATED, Json(json!({ "sandboxes": views }))).into_response())
}

/// `GET /v1/sandboxes/ID/files/PATH`: content of a file.
async fn read(
    State(service): Api,
    Owner(owner): Owner,
    Path((id, path)): Path<(String, String)>,
) -> HandlerResult {
    let slot = service.transfer_slot(&owner).await?;
    let content = exec::read(&service, &owner, &id, &path).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::CONTENT_LENGTH, content.len().to_string()),
    ];
    Ok((headers, transfer::send_bytes(content, slot)).into_response())
}

/// `PUT /v1/sandboxes/ID/files/PATH`: writes a file.
async fn write(
    State(service): Api,
    Owner(owner): Owner,
    Path((id, path)): Path<(String, String)>,
    body: Body,
) -> HandlerResult {
    service.entry(&owner, &id)?;
    let _slot = service.transfer_slot(&owner).await?;
    let received = transfer::receive(body, service.bounds.file_bytes).await?;
    exec::write(&service, &owner, &id, &path, received.file).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Query of `POST /v1/snapshots`.
#[derive(Debug, Deserialize)]
struct ImportQuery {
    /// Sandbox level. Default: the server's first level.
    level: Option<String>,
    /// Name of the image of the sandboxes that will start from it. Default: none.
    image: Option<String>,
    /// Expected digest of the body, `sha256:HEX`.
    digest: Option<String>,
}

/// `POST /v1/snapshots`: imports a tar archive.
async fn import(
    State(service): Api,
    Owner(owner): Owner,
    Query(query): Query<ImportQuery>,
    body: Body,
) -> HandlerResult {
    let _slot = service.transfer_slot(&owner).await?;
    let received = transfer::receive(body, service.bounds.file_bytes).await?;
    let digest = received.digest;
    if query
        .digest
        .as_ref()
        .is_some_and(|expected| *expected != digest)
    {
        let expected = query.digest.unwrap_or_default();
        return Err(bad(
            "digest",
            expected,
            format!("that of the body, {digest}"),
        ));
    }
    let (level, image) = (query.level.as_deref(), query.image.as_deref());
    let id = service.import(&owner, level, image, received.file).await?;
    let response = json!({ "snapshot": id, "digest": digest });
    Ok((StatusCode::CREATED, Json(response)).into_response())
}

/// `GET /v1/snapshots/ID`: exports a tar archive. The `etag` header is its digest.
async fn export(State(service): Api, Owner(owner): Owner, Path(id): Path<String>) -> HandlerResult {
    let slot = service.transfer_slot(&owner).await?;
    let archive = service.export(&owner, &id).await?;
    let measured = transfer::measure(archive).await;
    let (archive, bytes, digest) = measured.map_err(|e| SandboxError::io("export", e))?;
    let headers = [
        (header::CONTENT_TYPE, "application/x-tar".to_owned()),
        (header::CONTENT_LENGTH, bytes.to_string()),
        (header::ETAG, format!("\"{digest}\"")),
    ];
    Ok((headers, transfer::send_file(archive, slot)).into_response())
}

/// `DELETE /v1/snapshots/ID`: deletes a snapshot.
async fn delete_snapshot(
    State(service): Api,
    Owner(owner): Owner,
    Path(id): Path<String>,
) -> HandlerResult {
    service.delete_snapshot(&owner, &id)?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
