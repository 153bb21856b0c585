//! Reasons why a request has no answer.

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

/// Reason why a request has no answer; a text for users, and a status.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ViewError {
    /// The requested thing is not there.
    #[error("{0}")]
    Missing(String),
    /// The request is wrong.
    #[error("{0}")]
    Request(String),
    /// A file cannot be read.
    #[error("{0}")]
    System(String),
}

/// Reason why a run has no tokenizer. It is shown in place of the text of tokens.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoRenderer(pub String);

/// Reason why the episodes of a run cannot be read.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoStore(pub String);

impl ViewError {
    /// The requested thing is not there.
    pub(crate) fn missing(text: impl std::fmt::Display) -> Self {
        Self::Missing(text.to_string())
    }

    /// The request is wrong; the text names the parameter.
    pub(crate) fn request(text: impl std::fmt::Display) -> Self {
        Self::Request(text.to_string())
    }

    /// A file cannot be read.
    pub(crate) fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }
}

impl From<QueryRejection> for ViewError {
    fn from(e: QueryRejection) -> Self {
        Self::request(e.body_text())
    }
}

impl IntoResponse for ViewError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Missing(_) => StatusCode::NOT_FOUND,
            Self::Request(_) => StatusCode::BAD_REQUEST,
            Self::System(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, Json(json!({ "error": self.to_string() }))).into_response()
    }
}
