//! Bodies of requests: read within limits of bytes and time, and unpacked within the same limit of bytes.
//!
//! | limit | what it bounds |
//! |---|---|
//! | `body_bytes` | bytes of one body, as sent and unpacked |
//! | `bodies_bytes` | bytes of all bodies that are being read |
//! | [`READ_TIME`] | the time for a body to arrive, so that a slow client does not hold its share |
//! | [`UNPACKERS`] | bodies that are unpacked and parsed at the same time |

use super::error::ApiError;
use crate::error::TinkerError;
use axum::body::Body;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName};
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Time for a body to arrive.
const READ_TIME: Duration = Duration::from_secs(60);
/// Bodies that are unpacked and parsed at the same time; more wait. Each takes a thread, and its messages
/// several times the bytes of the body.
const UNPACKERS: usize = 4;
/// Bytes up to which a body is parsed on the calling thread.
const SMALL: usize = 64 << 10;
/// Unit of the shares of `bodies_bytes`.
const UNIT: usize = 4 << 10;
/// Exponent of the largest window of zstd, which an unpacker keeps in memory: what levels up to 19 need.
const WINDOW_LOG: u32 = 23;

/// Packing of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Packing {
    Plain,
    Zstd,
    Gzip,
}

/// Reads bodies.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    limit: usize,
    bytes: Arc<Semaphore>,
    units: usize,
    unpackers: Arc<Semaphore>,
}

/// A body that arrived, and its share of the bytes.
#[derive(Debug)]
pub(crate) struct Arrived {
    bytes: Bytes,
    packing: Packing,
    limit: usize,
    unpackers: Arc<Semaphore>,
    share: OwnedSemaphorePermit,
}

impl Reader {
    /// For bodies of at most `limit` bytes, `all` bytes of them at the same time.
    pub(crate) fn new(limit: usize, all: usize) -> Self {
        let units = (all.max(limit) / UNIT).clamp(1, Semaphore::MAX_PERMITS);
        Self {
            limit,
            bytes: Arc::new(Semaphore::new(units)),
            units,
            unpackers: Arc::new(Semaphore::new(UNPACKERS)),
        }
    }

    /// Reads a body as it was sent.
    ///
    /// # Errors
    /// 413 for a body that is too large, 408 for one that is too slow, 415 for a packing that is not known.
    pub(crate) async fn read(&self, headers: &HeaderMap, body: Body) -> Result<Arrived, ApiError> {
        let packing = packing(headers)?;
        let declared = text(headers, &CONTENT_LENGTH).and_then(|n| n.parse::<usize>().ok());
        if declared.is_some_and(|bytes| bytes > self.limit) {
            return Err(self.too_large());
        }
        // A body of unknown length may take all that one body may.
        let units = declared.unwrap_or(self.limit).div_ceil(UNIT);
        let units = u32::try_from(units.clamp(1, self.units)).unwrap_or(u32::MAX);
        let read = async {
            let share = Arc::clone(&self.bytes).acquire_many_owned(units).await;
            let share = share.map_err(ApiError::failed)?;
            match Limited::new(body, self.limit).collect().await {
                Ok(body) => Ok((body.to_bytes(), share)),
                Err(error) if error.is::<LengthLimitError>() => Err(self.too_large()),
                Err(error) => {
                    let text = format!("the body could not be read: {error}");
                    Err(ApiError::new(StatusCode::BAD_REQUEST, text))
                }
            }
        };
        let Ok(read) = tokio::time::timeout(READ_TIME, read).await else {
            let text = "the body did not arrive in time";
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, text));
        };
        let (bytes, share) = read?;
        Ok(Arrived {
            bytes,
            packing,
            limit: self.limit,
            unpackers: Arc::clone(&self.unpackers),
            share,
        })
    }

    fn too_large(&self) -> ApiError {
        too_large(self.limit)
    }
}

fn too_large(limit: usize) -> ApiError {
    let text = format!(
        "the body is larger than {limit} bytes (tinker.body_bytes): send fewer datums in one request"
    );
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, text)
}

impl Arrived {
    /// Unpacks the body and has `parse` read it, on a thread that may block if the body is large.
    ///
    /// # Errors
    /// 413 if it is too large once unpacked, 422 if it cannot be unpacked, and those of `parse`.
    pub(crate) async fn parse<T: Send + 'static>(
        self,
        parse: impl FnOnce(Bytes) -> Result<T, TinkerError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if self.packing == Packing::Plain && self.bytes.len() <= SMALL {
            return Ok(parse(self.bytes)?);
        }
        let place = Arc::clone(&self.unpackers).acquire_owned().await;
        let place = place.map_err(ApiError::failed)?;
        let work = move || -> Result<T, ApiError> {
            let _held = (place, self.share);
            let bytes = unpacked(self.bytes, self.packing, self.limit)?;
            Ok(parse(bytes)?)
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.map_err(ApiError::failed)?
    }
}

fn unpacked(bytes: Bytes, packing: Packing, limit: usize) -> Result<Bytes, ApiError> {
    let wrong = |error: std::io::Error| {
        let text = format!("the body cannot be unpacked as its content-encoding says: {error}");
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text)
    };
    let mut out = Vec::new();
    // One byte more than allowed shows that there is more.
    let most = limit as u64 + 1;
    match packing {
        Packing::Plain => return Ok(bytes),
        Packing::Zstd => {
            let mut unpacker = zstd::stream::read::Decoder::new(bytes.as_ref()).map_err(wrong)?;
            unpacker.window_log_max(WINDOW_LOG).map_err(wrong)?;
            unpacker.take(most).read_to_end(&mut out).map_err(wrong)?;
        }
        Packing::Gzip => {
            let unpacker = flate2::read::MultiGzDecoder::new(bytes.as_ref());
            unpacker.take(most).read_to_end(&mut out).map_err(wrong)?;
        }
    }
    if out.len() > limit {
        return Err(too_large(limit));
    }
    Ok(out.into())
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn packing(headers: &HeaderMap) -> Result<Packing, ApiError> {
    match text(headers, &CONTENT_ENCODING).map(str::to_ascii_lowercase) {
        None => Ok(Packing::Plain),
        Some(name) => match name.as_str() {
            "identity" => Ok(Packing::Plain),
            "zstd" => Ok(Packing::Zstd),
            "gzip" | "x-gzip" => Ok(Packing::Gzip),
            other => {
                let text = format!("content-encoding {other:?}: allowed: zstd, gzip, identity");
                Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, text))
            }
        },
    }
}

/// Content type of a body, in lower case and without parameters; empty if there is none.
pub(crate) fn content_type(headers: &HeaderMap) -> String {
    let kind = text(headers, &CONTENT_TYPE).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default();
    kind.trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::response::IntoResponse;
    use std::io::Write;

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        zstd::encode_all(bytes, 1).unwrap()
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let level = flate2::Compression::default();
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), level);
        packer.write_all(bytes).unwrap();
        packer.finish().unwrap()
    }

    /// The bytes of a body as parsed, or the status of its refusal.
    async fn sent(encoding: Option<&str>, bytes: Vec<u8>, limit: usize) -> Result<usize, u16> {
        let mut headers = HeaderMap::new();
        if let Some(encoding) = encoding {
            headers.insert(CONTENT_ENCODING, encoding.parse().unwrap());
        }
        let refused = |error: ApiError| error.into_response().status().as_u16();
        let reader = Reader::new(limit, limit);
        let arrived = reader.read(&headers, Body::from(bytes));
        let arrived = arrived.await.map_err(refused)?;
        let length = arrived.parse(|bytes| Ok(bytes.len()));
        length.await.map_err(refused)
    }

    #[tokio::test]
    async fn packed_bodies_are_unpacked_up_to_the_limit() {
        let zeros = vec![0; 100_000];
        for (encoding, packed) in [("zstd", zstd(&zeros)), ("gzip", gzip(&zeros))] {
            assert!(packed.len() < 1000);
            assert_eq!(
                sent(Some(encoding), packed.clone(), 100_000).await,
                Ok(100_000)
            );
            let bomb = sent(Some(encoding), packed.clone(), 99_999).await;
            assert_eq!(bomb, Err(413), "{encoding}");
            let broken = packed[..packed.len() / 2].to_vec();
            assert_eq!(sent(Some(encoding), broken, 100_000).await, Err(422));
        }
        assert_eq!(
            sent(Some("identity"), zeros.clone(), 100_000).await,
            Ok(100_000)
        );
        assert_eq!(sent(None, zeros.clone(), 99_999).await, Err(413));
        assert_eq!(sent(Some("br"), zeros, 100_000).await, Err(415));
    }
}
