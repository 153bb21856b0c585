//! State of all requests, and the parts that handlers take from a request.

use super::ServerLimits;
use super::TinkerServerConfig;
use super::auth::Keys;
use super::body::Reader;
use super::error::ApiError;
use super::signer::Signer;
use crate::desk::Desk;
use crate::desk::types::{Page, Tenant};
use crate::error::TinkerError;
use crate::wire;
use axum::extract::{FromRequest, FromRequestParts, Query, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::{Semaphore, watch};

/// Most entries of one page of a list.
pub(crate) const MAX_PAGE: u64 = 1000;

/// Files that are sent at the same time. Each holds a thread.
const DOWNLOADS: usize = 16;

/// State of all requests.
#[derive(Clone, Debug)]
pub(crate) struct Api {
    pub(crate) desk: Desk,
    pub(crate) keys: Keys,
    pub(crate) limits: ServerLimits,
    pub(crate) reader: Reader,
    pub(crate) signer: Signer,
    /// Files that are sent at the same time; more wait.
    pub(crate) downloads: Arc<Semaphore>,
    pub(crate) public_url: Option<String>,
    /// `https` or `http`.
    pub(crate) scheme: &'static str,
    /// True when the server ends: waits for results end, too.
    pub(crate) stopped: watch::Receiver<bool>,
    /// Events of clients, which are counted and dropped.
    telemetry: Arc<AtomicU64>,
}

impl Api {
    /// For a desk.
    pub(crate) fn new(
        desk: Desk,
        config: TinkerServerConfig,
        stopped: watch::Receiver<bool>,
    ) -> std::io::Result<Self> {
        let limits = config.limits;
        Ok(Self {
            desk,
            keys: config.keys,
            reader: Reader::new(limits.body_bytes, limits.bodies_bytes),
            limits,
            signer: Signer::new()?,
            downloads: Arc::new(Semaphore::new(DOWNLOADS)),
            scheme: config.listen.scheme(),
            public_url: config.public_url,
            stopped,
            telemetry: Arc::default(),
        })
    }

    /// Counts events of clients; returns how many there were since the start.
    pub(crate) fn count_events(&self, events: u64) -> u64 {
        self.telemetry.fetch_add(events, Ordering::Relaxed) + events
    }
}

/// The tenant of a request's key.
#[derive(Clone, Debug)]
pub(crate) struct Caller(pub(crate) Tenant);

impl FromRequestParts<Api> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let tenant = api.keys.tenant(&parts.headers);
        let tenant = tenant.ok_or_else(ApiError::unauthorized)?;
        Ok(Self(tenant.clone()))
    }
}

/// A body in JSON. Handlers take it after [`Caller`], so that nothing is read without a key.
#[derive(Clone, Debug)]
pub(crate) struct Sent<T>(pub(crate) T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<Api> for Sent<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, api: &Api) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        let arrived = api.reader.read(&parts.headers, body).await?;
        let read = arrived.parse(|bytes| wire::request(&bytes)).await?;
        Ok(Self(read))
    }
}

/// Parameters of a list. The SDK sends more, which mean nothing where a key sees only its own.
#[derive(Debug, Deserialize)]
struct PageQuery {
    #[serde(default)]
    limit: Option<u64>,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    project_id: Option<String>,
}

/// The part of a list that a request asks for; at most 1000 entries, 20 if it does not say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paged(pub(crate) Page);

impl FromRequestParts<Api> for Paged {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, api: &Api) -> Result<Self, ApiError> {
        let query = Query::<PageQuery>::from_request_parts(parts, api).await;
        let Query(query) = query
            .map_err(|error| ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error.body_text()))?;
        if query.project_id.is_some() {
            return Err(no_projects("project_id"));
        }
        let limit = query.limit.unwrap_or(20);
        if !(1..=MAX_PAGE).contains(&limit) {
            let text = format!("limit is {limit}, allowed: 1 to {MAX_PAGE}");
            return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        let offset = query.offset;
        Ok(Self(Page { offset, limit }))
    }
}

/// The refusal of projects.
pub(crate) fn no_projects(field: &str) -> ApiError {
    ApiError::not_served(
        field,
        "this server has no projects: leave it out, and unset TINKER_PROJECT_ID; all of a key is together",
    )
}

/// The refusal of tokens for the weights of others.
pub(crate) fn no_access_tokens() -> TinkerError {
    TinkerError::not_served(
        "weights_access_token",
        "a checkpoint is seen by the tenant that wrote it: use that tenant's key",
    )
}
