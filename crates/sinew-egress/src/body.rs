//! Bodies and the proxy's own answers.

use crate::policy::{Denial, Reason};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};

/// A body that is whole, or comes in pieces and may break.
pub(crate) type Body = BoxBody<Bytes, std::io::Error>;

/// Header of answers that the proxy itself gives.
pub(crate) const MARK: &str = "x-sinew-egress";

/// Why a request got no answer from a server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Problem {
    #[error(transparent)]
    Denied(#[from] Denial),
    /// The network, the server, or a limit of time.
    #[error("egress failed: {detail}")]
    Failed {
        /// What the sandbox may know of it.
        told: String,
        /// What the audit log says.
        detail: String,
    },
}

pub(crate) fn failed(what: impl std::fmt::Display) -> Problem {
    failed_with(what.to_string(), what)
}

/// A failure of which only `told` is for the sandbox.
pub(crate) fn failed_with(told: impl Into<String>, detail: impl std::fmt::Display) -> Problem {
    Problem::Failed {
        told: told.into(),
        detail: detail.to_string(),
    }
}

/// A body that is there already.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed()
}

/// What the sandbox gets instead of an answer.
pub(crate) fn refusal(problem: &Problem) -> Response<Body> {
    let text = match problem {
        Problem::Denied(denial) => denial.told(),
        Problem::Failed { told, .. } => format!("egress failed: {told}"),
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
    headers.insert(MARK, HeaderValue::from_static(mark));
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
