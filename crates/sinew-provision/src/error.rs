//! What goes wrong, as a status and a JSON object `{"error": {"code", "message"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use sinew_sandbox::SandboxError;

/// A refusal or a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// No token, or one that nobody has.
    #[error("no valid token; send `authorization: Bearer TOKEN`")]
    Unauthorized,
    /// No such thing, or not of this owner.
    #[error("no {what} {id:?}: never made, destroyed, or its lease ended")]
    NotFound {
        /// `sandbox` or `snapshot`.
        what: &'static str,
        /// As asked for.
        id: String,
    },
    /// No such path.
    #[error("there is no {0}; docs/sandbox.md lists the paths, all below /v1/")]
    Route(String),
    /// A path that has other methods.
    #[error("{0} is no method of this path; docs/sandbox.md lists them")]
    Method(String),
    /// A body that cannot be read.
    #[error(
        "the body: {problem}; allowed: JSON as docs/sandbox.md says, or the bytes of a file or archive"
    )]
    Body {
        /// What it is told with.
        status: StatusCode,
        /// What is wrong with it.
        problem: String,
    },
    /// Something runs in the sandbox.
    #[error("something runs in this sandbox: wait for its end, or destroy the sandbox")]
    Busy,
    /// A value that cannot be taken.
    #[error("{field} is {value}; allowed: {allowed}")]
    Request {
        /// Its name.
        field: String,
        /// As sent, shortened.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The owner or the server has too many.
    #[error(
        "{what}: {live} are live, the limit is {limit}; destroy some or wait for a lease to end"
    )]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many there are.
        live: usize,
        /// How many there may be.
        limit: usize,
    },
    /// An owner keeps too much.
    #[error(
        "snapshots, and those that sandboxes started from: {held} bytes are kept, the limit is {limit}; \
         delete snapshots that are not needed, and sandboxes that started from them"
    )]
    TooMuch {
        /// Bytes, with what was asked for.
        held: u64,
        /// Bytes that there may be.
        limit: u64,
    },
    /// The sandbox was destroyed while it was used.
    #[error("the sandbox was destroyed")]
    Gone,
    /// The level of the sandbox.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// A [`ApiError::Request`].
pub(crate) fn bad(
    field: impl Into<String>,
    value: impl ToString,
    allowed: impl Into<String>,
) -> ApiError {
    let mut value = value.to_string();
    if let Some((at, _)) = value.char_indices().nth(100) {
        value.truncate(at);
    }
    ApiError::Request {
        field: field.into(),
        value,
        allowed: allowed.into(),
    }
}

impl ApiError {
    fn status_and_code(&self) -> (StatusCode, &'static str) {
        match self {
            Self::Unauthorized => (StatusCode::UNAUTHORIZED, "unauthorized"),
            Self::Route(_) => (StatusCode::NOT_FOUND, "not_found"),
            Self::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, "method"),
            Self::Body { status, .. } => (*status, "request"),
            Self::NotFound { .. } => (StatusCode::NOT_FOUND, "not_found"),
            Self::Busy => (StatusCode::CONFLICT, "busy"),
            Self::Request { .. } => (StatusCode::BAD_REQUEST, "request"),
            Self::TooMany { .. } | Self::TooMuch { .. } => {
                (StatusCode::TOO_MANY_REQUESTS, "too_many")
            }
            Self::Gone => (StatusCode::GONE, "gone"),
            Self::Sandbox(e) => match e {
                SandboxError::Request { .. } => (StatusCode::BAD_REQUEST, "request"),
                SandboxError::NotEnforced { .. } => (StatusCode::CONFLICT, "not_enforced"),
                SandboxError::Busy { .. } => (StatusCode::SERVICE_UNAVAILABLE, "no_room"),
                SandboxError::Unavailable { .. } => {
                    (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
                }
                SandboxError::Unsupported { .. } => (StatusCode::NOT_IMPLEMENTED, "unsupported"),
                // What a file operation says of a path is the client's business.
                SandboxError::Io { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "failed"),
                _ => (StatusCode::INTERNAL_SERVER_ERROR, "died"),
            },
        }
    }

    /// The object that goes over the wire.
    pub(crate) fn json(&self) -> serde_json::Value {
        let (_, code) = self.status_and_code();
        json!({ "error": { "code": code, "message": self.to_string() } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let (status, _) = self.status_and_code();
        (status, Json(self.json())).into_response()
    }
}
