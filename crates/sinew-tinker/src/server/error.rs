//! Refusals over HTTP: a status that makes the SDK do the right thing, and `{"detail": TEXT}`.
//!
//! The SDK sends a request again after 408, 409, 429 and 5xx, for minutes; after 410 of a future it samples
//! again; all else ends the caller's program with the text. So 409 is never used, and a request that cannot
//! succeed as it is has 422.

use crate::desk::types::Refusal;
use crate::error::{Category, TinkerError};
use axum::Json;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::fmt;
use std::time::Duration;

/// A refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    status: StatusCode,
    text: String,
    retry_after: Option<Duration>,
}

/// Result of a handler.
pub(crate) type Answer = Result<Response, ApiError>;

impl ApiError {
    /// A refusal with a status.
    pub(crate) fn new(status: StatusCode, text: impl Into<String>) -> Self {
        Self {
            status,
            text: text.into(),
            retry_after: None,
        }
    }

    /// The request has no key that the server knows.
    pub(crate) fn unauthorized() -> Self {
        let text = "no valid key: send the header `X-API-Key: tml-...` or `authorization: Bearer tml-...`; \
                    the SDK takes it from TINKER_API_KEY";
        Self::new(StatusCode::UNAUTHORIZED, text)
    }

    /// A part of the SDK's API that is not served.
    pub(crate) fn not_served(feature: &str, hint: &str) -> Self {
        TinkerError::not_served(feature, hint).into()
    }

    /// A method that a path does not have.
    pub(crate) fn method(method: &Method, path: &str) -> Self {
        let text = format!("{method} {path}: the header `allow` names the methods");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, text)
    }

    /// A failure inside the server.
    pub(crate) fn failed(error: impl fmt::Display) -> Self {
        let text = format!("the server failed: {error}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, text)
    }

    /// The same request may succeed after a time.
    pub(crate) fn busy(text: impl Into<String>, after: Duration) -> Self {
        Self {
            status: StatusCode::TOO_MANY_REQUESTS,
            text: text.into(),
            retry_after: Some(after),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = Json(json!({"detail": self.text}));
        let mut response = (self.status, body).into_response();
        if let Some(after) = self.retry_after {
            // Whole seconds, at least one: 0 would be sent again at once.
            let seconds = after.as_secs_f64().ceil().max(1.0) as u64;
            if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
                response.headers_mut().insert(RETRY_AFTER, value);
            }
        }
        response
    }
}

impl From<TinkerError> for ApiError {
    fn from(error: TinkerError) -> Self {
        let status = match (&error, error.category()) {
            (TinkerError::Limit { .. }, _) => StatusCode::PAYLOAD_TOO_LARGE,
            (_, Category::User) => StatusCode::UNPROCESSABLE_ENTITY,
            (_, Category::Server) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        let (status, retry_after) = match &refusal {
            Refusal::Invalid { .. } | Refusal::Conflict(_) | Refusal::Unsupported { .. } => {
                (StatusCode::UNPROCESSABLE_ENTITY, None)
            }
            Refusal::NotFound { .. } => (StatusCode::NOT_FOUND, None),
            Refusal::Gone { .. } => (StatusCode::GONE, None),
            Refusal::Quota {
                retry_after: Some(after),
                ..
            } => (StatusCode::TOO_MANY_REQUESTS, Some(*after)),
            Refusal::Quota { .. } => (StatusCode::FORBIDDEN, None),
            Refusal::Draining => (
                StatusCode::SERVICE_UNAVAILABLE,
                Some(Duration::from_secs(1)),
            ),
            Refusal::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        if status.is_server_error() {
            tracing::warn!(error = %text, "the desk refused a request");
        }
        Self {
            status,
            text,
            retry_after,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(error: impl Into<ApiError>) -> u16 {
        error.into().into_response().status().as_u16()
    }

    #[test]
    fn the_sdk_repeats_only_what_can_succeed() {
        let quota = |retry_after| Refusal::Quota {
            limit: "tokens_per_day",
            tenant: "a".into(),
            used: 2,
            allowed: 1,
            advice: "wait".into(),
            retry_after,
        };
        assert_eq!(status(Refusal::Conflict("other content".into())), 422);
        assert_eq!(status(Refusal::Draining), 503);
        assert_eq!(status(quota(None)), 403);
        assert_eq!(status(TinkerError::value("rank", 0, "1 or more")), 422);
        assert_eq!(status(TinkerError::Internal("no".into())), 500);
        let wait = ApiError::from(quota(Some(Duration::from_millis(1500)))).into_response();
        assert_eq!(wait.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(wait.headers()[RETRY_AFTER], "2");
    }
}
