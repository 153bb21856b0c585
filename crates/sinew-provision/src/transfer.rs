//! Bodies of files and archives: on disk, not in memory, on their way in and out.

use crate::error::ApiError;
use axum::body::{Body, Bytes};
use axum::http::StatusCode;
use futures::{StreamExt, stream};
use sha2::Digest;
use sinew_sandbox::archive::spool;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use tokio::sync::OwnedSemaphorePermit;

/// Bytes that are written or read at once.
const PIECE: usize = 256 << 10;

/// A body that came.
#[derive(Debug)]
pub(crate) struct Taken {
    /// Read from its beginning.
    pub(crate) file: File,
    /// Of its bytes.
    pub(crate) digest: String,
}

/// Work with files, on a thread that may wait.
pub(crate) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|e| Err(io::Error::other(e)))
}

fn named(digest: sha2::Sha256) -> String {
    let digits: String = digest
        .finalize()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("sha256:{digits}")
}

/// Takes a body of at most `max_bytes`.
pub(crate) async fn take(body: Body, max_bytes: usize) -> Result<Taken, ApiError> {
    let failed = |status, problem: String| ApiError::Body { status, problem };
    let disk = |e: io::Error| failed(StatusCode::INSUFFICIENT_STORAGE, e.to_string());
    let mut state = (spool(&[]).map_err(disk)?, sha2::Sha256::new());
    let (mut pieces, mut waiting, mut bytes) = (body.into_data_stream(), Vec::new(), 0);
    loop {
        let piece = pieces.next().await;
        let last = piece.is_none();
        if let Some(piece) = piece {
            let piece = piece.map_err(|e| {
                let problem = e.to_string();
                failed(StatusCode::BAD_REQUEST, problem)
            })?;
            bytes += piece.len();
            if bytes > max_bytes {
                let problem = format!("it is larger than the {max_bytes} bytes that are taken");
                return Err(failed(StatusCode::PAYLOAD_TOO_LARGE, problem));
            }
            waiting.extend_from_slice(&piece);
        }
        if waiting.len() >= PIECE || last {
            let (mut file, mut digest) = state;
            let written = std::mem::take(&mut waiting);
            let write = move || {
                file.write_all(&written)?;
                digest.update(&written);
                Ok((file, digest))
            };
            state = apart(write).await.map_err(disk)?;
        }
        if last {
            let (mut file, digest) = state;
            file.rewind().map_err(disk)?;
            let digest = named(digest);
            return Ok(Taken { file, digest });
        }
    }
}

/// Size and digest of a file, which is read from its beginning afterwards.
pub(crate) async fn measure(mut file: File) -> io::Result<(File, u64, String)> {
    apart(move || {
        let mut digest = sha2::Sha256::new();
        file.rewind()?;
        let (mut bytes, mut piece) = (0, vec![0; PIECE]);
        loop {
            let read = file.read(&mut piece)?;
            if read == 0 {
                break;
            }
            digest.update(&piece[..read]);
            bytes += read as u64;
        }
        file.rewind()?;
        Ok((file, bytes, named(digest)))
    })
    .await
}

/// The rest of a file as a body; its owner's turn ends with it.
pub(crate) fn give(file: File, turn: OwnedSemaphorePermit) -> Body {
    let pieces = stream::try_unfold((file, turn), |(mut file, turn)| async move {
        let read = apart(move || {
            let mut piece = vec![0; PIECE];
            let bytes = file.read(&mut piece)?;
            piece.truncate(bytes);
            Ok((file, piece))
        });
        let (file, piece) = read.await?;
        let more = (!piece.is_empty()).then(|| (Bytes::from(piece), (file, turn)));
        Ok::<_, io::Error>(more)
    });
    Body::from_stream(pieces)
}

/// Bytes as a body; its owner's turn ends with it.
pub(crate) fn give_bytes(content: Vec<u8>, turn: OwnedSemaphorePermit) -> Body {
    let once = stream::unfold((Some(content), turn), |(content, turn)| async move {
        let content = content?;
        Some((Ok::<_, io::Error>(Bytes::from(content)), (None, turn)))
    });
    Body::from_stream(once)
}
