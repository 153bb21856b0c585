//! Bodies, and responses of the proxy itself.

use crate::policy::{Denial, Reason};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// A complete or streamed body.
pub(crate) type Body = BoxBody<Bytes, std::io::Error>;

/// Header of responses that the proxy itself creates.
pub(crate) const EGRESS_HEADER: &str = "x-sinew-egress";

/// Reason why a request has no response from a server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    /// Refused by the policy, a quota or a mode.
    #[error(transparent)]
    Denied(#[from] Denial),
    /// Failure of the network or the server, or a timeout.
    #[error("egress failed: {detail}")]
    Failed {
        /// Message for the sandbox.
        message: String,
        /// Message for the audit log.
        detail: String,
    },
}

/// A failure with one message for the sandbox and the log.
pub(crate) fn failed(what: impl std::fmt::Display) -> Problem {
    failed_with(what.to_string(), what)
}

/// A failure with separate messages for the sandbox and the log.
pub(crate) fn failed_with(message: impl Into<String>, detail: impl std::fmt::Display) -> Problem {
    Problem::Failed {
        message: message.into(),
        detail: detail.to_string(),
    }
}

/// A complete body.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed()
}

/// Response of the proxy in place of the server's.
pub(crate) fn refusal(problem: &Problem) -> Response<Body> {
    let text = match problem {
        Problem::Denied(denial) => denial.public_message(),
        Problem::Failed { message, .. } => format!("egress failed: {message}"),
    };
    let (status, mark) = match problem {
        Problem::Denied(d) => match d.reason {
            Reason::Malformed => (StatusCode::BAD_REQUEST, "denied"),
            Reason::Quota => (StatusCode::TOO_MANY_REQUESTS, "denied"),
            Reason::NotRecorded => (StatusCode::GATEWAY_TIMEOUT, "denied"),
            _ => (StatusCode::FORBIDDEN, "denied"),
        },
        Problem::Failed { .. } => (StatusCode::BAD_GATEWAY, "failed"),
    };
    let mut response = Response::new(full(format!("{text}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(EGRESS_HEADER, HeaderValue::from_static(mark));
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
