//! Request bodies: their limits, and the thread that processes them.

use crate::archive::blocking;
use axum::extract::Request;
use axum::http::header::CONTENT_LENGTH;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use sinew_dialect::ApiError;
use sinew_dialect::fields::{Fields, Notes};
use std::time::Duration;

/// Bodies with more bytes are parsed, rendered and tokenized on a separate thread. The largest take up to a
/// second.
const LARGE_BYTES: usize = 128 << 10;

/// Reads the whole body of a request within the limits on size and time.
///
/// # Errors
/// Status 413 (too large), 408 (too slow) or 400 (connection failed).
pub(crate) async fn read(
    request: Request,
    limit: usize,
    timeout: Duration,
) -> Result<Bytes, ApiError> {
    let length = request.headers().get(CONTENT_LENGTH);
    let length = length.and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if length.is_some_and(|n| n > limit) {
        return Err(ApiError::too_large(limit));
    }
    let body = Limited::new(request.into_body(), limit).collect();
    match tokio::time::timeout(timeout, body).await {
        Err(_) => Err(ApiError {
            status: 408,
            ..ApiError::deadline("the request body did not arrive in time")
        }),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(e)) if e.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
        Ok(Err(e)) => Err(ApiError::bad_request(
            "body_unreadable",
            format!("the request body could not be read: {e}"),
        )),
    }
}

/// A request body of any size.
#[derive(Debug)]
pub(crate) struct LargeBody(pub(crate) Bytes);

impl LargeBody {
    /// Runs `work` with the body: on the calling thread if the body is small, otherwise on a thread that may
    /// block.
    pub(crate) async fn with<T: Send + 'static>(
        self,
        work: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.0.len() <= LARGE_BYTES {
            return work(&self.0);
        }
        blocking("call_failed", move || work(&self.0)).await
    }
}

/// Parses a body of the control API; an empty body counts as an empty object.
pub(crate) fn control<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let bytes = if bytes.is_empty() { b"{}" } else { bytes };
    // Syntax first, so that its errors differ from those of wrong fields.
    Fields::parse(bytes, &Notes::new(true))?;
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut reader).map_err(|e| {
        let path = e.path().to_string();
        let why = plain_words(&e.into_inner().to_string());
        match path.as_str() {
            "." => ApiError::bad_request("invalid_value", why),
            path => ApiError::invalid(path, format!("{path}: {why}")),
        }
    })
}

/// Rewords an error of serde, without Rust types and the position in the body.
fn plain_words(error: &str) -> String {
    let end = error.rfind(" at line ").unwrap_or(error.len());
    let mut text = error[..end].to_owned();
    for (rust, plain) in [
        ("invalid type: ", ""),
        ("invalid value: ", ""),
        ("u32", "a whole number from 0 to 4294967295"),
        ("u64", "a whole number from 0 on"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("a boolean", "true or false"),
        ("a map", "an object"),
        ("sequence", "an array"),
        ("struct SamplingDefaults", "an object"),
        ("struct Reward", "an object"),
        (
            "internally tagged enum EpisodeEnd",
            "an object whose type is terminated, truncated or failed",
        ),
        ("variant", "value"),
    ] {
        text = text.replace(rust, plain);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a body of so many bytes is read on the calling thread.
    async fn blocks_this_thread(bytes: usize) -> bool {
        let here = std::thread::current().id();
        let same = move |body: &[u8]| Ok((body.len(), std::thread::current().id() == here));
        let (read, same) = LargeBody(vec![b' '; bytes].into())
            .with(same)
            .await
            .unwrap();
        assert_eq!(read, bytes);
        same
    }

    #[tokio::test(flavor = "current_thread")]
    async fn large_bodies_are_read_on_another_thread() {
        assert!(blocks_this_thread(LARGE_BYTES).await);
        assert!(!blocks_this_thread(LARGE_BYTES + 1).await);
    }

    #[tokio::test(flavor = "current_thread")]
    async fn a_panic_over_a_large_body_is_an_answer() {
        let body = vec![b' '; LARGE_BYTES + 1];
        let panics = |_: &[u8]| -> Result<(), ApiError> { panic!("on purpose") };
        let error = LargeBody(body.into()).with(panics).await.unwrap_err();
        assert_eq!((error.status, error.code), (500, "call_failed"));
    }
}
