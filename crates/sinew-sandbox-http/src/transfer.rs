//! Bodies of files and archives, buffered on disk in both directions.

use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use futures::{StreamExt, stream};
use sha2::Digest;
use sinew_sandbox::archive::spool;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use tokio::sync::OwnedSemaphorePermit;

/// Bytes per read and write.
const CHUNK_BYTES: usize = 256 << 10;

/// A received body.
#[derive(Debug)]
pub(crate) struct ReceivedBody {
    /// The content, positioned at the start.
    pub(crate) file: File,
    /// `sha256:` and the hash of the content in hexadecimal digits.
    pub(crate) digest: String,
}

/// Runs file I/O on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(io::Error::other(e)))
}

/// Formats a hash as `sha256:HEX`.
fn format_digest(digest: sha2::Sha256) -> String {
    let digits: String = digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{digits}")
}

/// Receives a body of at most `max_bytes` into an unnamed file.
pub(crate) async fn receive(body: Body, max_bytes: usize) -> Result<ReceivedBody, ApiError> {
    let failed = |status, problem: String| ApiError::Body { status, problem };
    let disk = |e: io::Error| failed(StatusCode::INSUFFICIENT_STORAGE, e.to_string());
    let mut state = (spool(&[]).map_err(disk)?, sha2::Sha256::new());
    let (mut chunks, mut waiting, mut bytes) = (body.into_data_stream(), Vec::new(), 0);
    loop {
        let chunk = chunks.next().await;
        let last = chunk.is_none();
        if let Some(chunk) = chunk {
            let chunk = chunk.map_err(|e| {
                let problem = e.to_string();
                failed(StatusCode::BAD_REQUEST, problem)
            })?;
            bytes += chunk.len();
            if bytes > max_bytes {
                let problem = format!("it is larger than the limit of {max_bytes} bytes");
                return Err(failed(StatusCode::PAYLOAD_TOO_LARGE, problem));
            }
            waiting.extend_from_slice(&chunk);
        }
        if waiting.len() >= CHUNK_BYTES || last {
            let (mut file, mut digest) = state;
            let written = std::mem::take(&mut waiting);
            let write = move || {
                file.write_all(&written)?;
                digest.update(&written);
                Ok((file, digest))
            };
            state = blocking(write).await.map_err(disk)?;
        }
        if last {
            let (mut file, digest) = state;
            file.rewind().map_err(disk)?;
            let digest = format_digest(digest);
            return Ok(ReceivedBody { file, digest });
        }
    }
}

/// Returns the file positioned at the start, its size in bytes and its digest.
pub(crate) async fn measure(mut file: File) -> io::Result<(File, u64, String)> {
    blocking(move || {
        let mut digest = sha2::Sha256::new();
        file.rewind()?;
        let (mut bytes, mut chunk) = (0, vec![0; CHUNK_BYTES]);
        loop {
            let read = file.read(&mut chunk)?;
            if read == 0 {
                break;
            }
            digest.update(&chunk[..read]);
            bytes += read as u64;
        }
        file.rewind()?;
        Ok((file, bytes, format_digest(digest)))
    })
    .await
}

/// Streams the rest of a file as a body. `slot` is released at the end of the body.
pub(crate) fn send_file(file: File, slot: OwnedSemaphorePermit) -> Body {
    let chunks = stream::try_unfold((file, slot), |(mut file, slot)| async move {
        let read = blocking(move || {
            let mut chunk = vec![0; CHUNK_BYTES];
            let bytes = file.read(&mut chunk)?;
            chunk.truncate(bytes);
            Ok((file, chunk))
        });
        let (file, chunk) = read.await?;
        let more = (!chunk.is_empty()).then(|| (Bytes::from(chunk), (file, slot)));
        Ok::<_, io::Error>(more)
    });
    Body::from_stream(chunks)
}

/// Sends bytes as a body. `slot` is released at the end of the body.
pub(crate) fn send_bytes(content: Vec<u8>, slot: OwnedSemaphorePermit) -> Body {
    let once = stream::unfold((Some(content), slot), |(content, slot)| async move {
        let content = content?;
        Some((Ok::<_, io::Error>(Bytes::from(content)), (None, slot)))
    });
    Body::from_stream(once)
}
