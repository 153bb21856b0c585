//! API errors: an HTTP status and a JSON object `{"error": {"code", "message"}}`.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use sinew_sandbox::SandboxError;
use std::error::Error;
use std::io;

/// Error of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// The token is missing or unknown (401).
    #[error("no valid token; send `authorization: Bearer TOKEN`")]
    Unauthorized,
    /// The object does not exist or belongs to another owner (404).
    #[error("no {what} {id:?}: never made, destroyed, or its lease ended")]
    NotFound {
        /// `sandbox` or `snapshot`.
        what: &'static str,
        /// Id in the request.
        id: String,
    },
    /// The path does not exist (404).
    #[error("there is no {0}; docs/sandbox-http.md lists the paths, all below /v1/")]
    Route(String),
    /// The path does not support the method (405).
    #[error("{0} is no method of this path; docs/sandbox-http.md lists them")]
    Method(String),
    /// The body cannot be read.
    #[error(
        "the body: {problem}; \
             allowed: JSON as docs/sandbox-http.md says, or the bytes of a file or archive"
    )]
    Body {
        /// Status of the response.
        status: StatusCode,
        /// Description of the problem.
        problem: String,
    },
    /// Another operation uses the sandbox (409).
    #[error("something runs in this sandbox: wait for its end, or destroy the sandbox")]
    Busy,
    /// A field has an invalid value (400).
    #[error("{field} is {value}; allowed: {allowed}")]
    Request {
        /// Name of the field.
        field: String,
        /// The value, at most 100 characters.
        value: String,
        /// Allowed values.
        allowed: String,
    },
    /// The owner has reached a count limit (429).
    #[error(
        "{what}: {live} are live, the limit is {limit}; destroy some or wait for a lease to end"
    )]
    TooMany {
        /// Kind of the counted objects.
        what: &'static str,
        /// Current number.
        live: usize,
        /// Maximum number.
        limit: usize,
    },
    /// The owner's snapshots need too many bytes (429).
    #[error(
        "snapshots, and those that sandboxes started from: {held} bytes are kept, the limit is {limit}; \
         delete snapshots that are not needed, and sandboxes that started from them"
    )]
    TooMuch {
        /// Bytes including the requested ones.
        held: u64,
        /// Maximum bytes.
        limit: u64,
    },
    /// The sandbox was destroyed during the request (410).
    #[error("the sandbox was destroyed")]
    Gone,
    /// Error of the sandbox level.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
}

/// Reasons for which the egress proxy does not serve a sandbox.
#[derive(Debug, thiserror::Error)]
pub enum EgressError {
    /// The name becomes the name of a file.
    #[error("episode {0:?}: allowed: 1 to 128 of a-z, A-Z, 0-9, -, _ and . inside")]
    Name(String),
    #[error("audit log: {0}")]
    Log(#[from] io::Error),
    #[error("recordings of {episode}: {error}")]
    Recordings { episode: String, error: io::Error },
    /// The proxy's own error.
    #[error(transparent)]
    Proxy(Box<dyn Error + Send + Sync>),
}

/// Creates an [`ApiError::Request`]. Values are cut to 100 characters.
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
    /// HTTP status and the `code` of the JSON object.
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
                SandboxError::Busy { .. } | SandboxError::NoRoom { .. } => {
                    (StatusCode::SERVICE_UNAVAILABLE, "no_room")
                }
                SandboxError::Unavailable { .. } => {
                    (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
                }
                SandboxError::Unsupported { .. } => (StatusCode::NOT_IMPLEMENTED, "unsupported"),
                // Errors of file operations concern the client's path.
                SandboxError::Io { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "failed"),
                _ => (StatusCode::INTERNAL_SERVER_ERROR, "died"),
            },
        }
    }

    /// The JSON object of the response body.
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
