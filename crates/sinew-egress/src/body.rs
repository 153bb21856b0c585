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
    #[error("egress failed: {0}")]
    Failed(String),
}

pub(crate) fn failed(what: impl std::fmt::Display) -> Problem {
    Problem::Failed(what.to_string())
}

/// A body that is there already.
pub(crate) fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed()
}

/// What the sandbox gets instead of an answer.
pub(crate) fn refusal(problem: &Problem) -> Response<Body> {
    let (status, mark) = match problem {
        Problem::Denied(d) => match d.reason {
            Reason::Malformed => (StatusCode::BAD_REQUEST, "denied"),
            Reason::Quota => (StatusCode::TOO_MANY_REQUESTS, "denied"),
            Reason::NotRecorded => (StatusCode::GATEWAY_TIMEOUT, "denied"),
            _ => (StatusCode::FORBIDDEN, "denied"),
        },
        Problem::Failed(_) => (StatusCode::BAD_GATEWAY, "failed"),
    };
    let mut response = Response::new(full(format!("{problem}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(MARK, HeaderValue::from_static(mark));
    headers.insert(
        CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    response
}
