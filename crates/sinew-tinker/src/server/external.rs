//! External weights: addresses of their files that need no key, and the files.
//!
//! An address holds tenant, end of its time, checkpoint and file, and a keyed hash over all of them. The key
//! of the hash is made at the server's start: an address does not outlive the server. A client asks for new
//! ones then.

use super::api::{Api, Caller};
use super::date::iso;
use super::error::{Answer, ApiError};
use super::signer::{CheckpointParts, Place, SIGNED, SignedParts, tinker_path};
use crate::desk::now_ms;
use crate::desk::types::Tenant;
use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST, HeaderMap};
use axum::response::IntoResponse;
use bytes::Bytes;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use tokio::sync::mpsc;

/// Bytes that are read from a file at a time.
const PIECE: usize = 256 << 10;
/// Pieces that are ready before the client takes them.
const AHEAD: usize = 2;

/// `GET training_runs/{id}/checkpoints/external_weights/{name}/external_weights_urls`.
pub(crate) async fn urls(
    State(api): State<Api>,
    Caller(tenant): Caller,
    Path(parts): Path<CheckpointParts>,
    headers: HeaderMap,
) -> Answer {
    let checkpoint = tinker_path(&parts);
    let files = api.desk.external_files(&tenant, &checkpoint).await?;
    let base = base(&api, &headers)?;
    let valid = u64::try_from(api.limits.url_time.as_millis()).unwrap_or(u64::MAX);
    let until_ms = now_ms().saturating_add(valid);
    let (model, _, name) = &parts;
    let url = |file: &str| {
        let place = Place {
            tenant: &tenant.name,
            until_ms,
            checkpoint: &checkpoint,
            file,
        };
        let signature = api.signer.sign(place).to_hex();
        let owner = &tenant.name;
        format!("{base}{SIGNED}{owner}/{until_ms}/{signature}/{model}/{name}/{file}")
    };
    let urls: Map<String, Value> = files
        .iter()
        .map(|file| (file.name.clone(), Value::String(url(&file.name))))
        .collect();
    Ok(Json(json!({"urls": urls, "expires": iso(until_ms)})).into_response())
}

/// Address at which the client reaches this server.
fn base(api: &Api, headers: &HeaderMap) -> Result<String, ApiError> {
    if let Some(url) = &api.public_url {
        return Ok(url.trim_end_matches('/').to_owned());
    }
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = host.filter(|host| !host.is_empty());
    let host = host.ok_or_else(|| {
        let text = "the request has no Host: the addresses of the files begin with it, unless the server has \
                    a public_url";
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, text)
    })?;
    Ok(format!("{}://{host}", api.scheme))
}

/// `GET external_weights/{tenant}/{until}/{signature}/{model}/{name}/{file}`: a file, without a key.
pub(crate) async fn download(State(api): State<Api>, Path(parts): Path<SignedParts>) -> Answer {
    let forbidden = |text: &str| ApiError::new(StatusCode::FORBIDDEN, text);
    let Some(checkpoint) = api.signer.checkpoint(&parts) else {
        return Err(forbidden(
            "the address was not signed by this server since its start; ask for new ones",
        ));
    };
    let (tenant, until_ms, _, _, _, file) = parts;
    if now_ms() > until_ms {
        return Err(forbidden(
            "the time of this address is over; ask for new ones",
        ));
    }
    let owner = Tenant { name: tenant };
    let files = api.desk.external_files(&owner, &checkpoint).await?;
    let found = files.into_iter().find(|found| found.name == file);
    let found = found.ok_or_else(|| {
        let text = format!("{checkpoint} has no file {file:?}");
        ApiError::new(StatusCode::NOT_FOUND, text)
    })?;
    let place = Arc::clone(&api.downloads).acquire_owned().await;
    let place = place.map_err(ApiError::failed)?;
    let (pieces, mut arriving) = mpsc::channel(AHEAD);
    let opened = tokio::task::spawn_blocking(move || File::open(found.file)).await;
    let opened = opened
        .map_err(ApiError::failed)?
        .map_err(ApiError::failed)?;
    let length = opened.metadata().map_err(ApiError::failed)?.len();
    // Ends when the file does, or the client.
    tokio::task::spawn_blocking(move || {
        let _held = place;
        read(opened, &pieces);
    });
    let stream = futures::stream::poll_fn(move |context| arriving.poll_recv(context));
    let headers = [
        (CONTENT_TYPE, "application/octet-stream".to_owned()),
        (CONTENT_LENGTH, length.to_string()),
    ];
    Ok((headers, Body::from_stream(stream)).into_response())
}

/// Sends a file in pieces; each waits until the client takes it, at most as long as its connection lives.
fn read(mut file: File, pieces: &mpsc::Sender<std::io::Result<Bytes>>) {
    loop {
        let mut piece = Vec::with_capacity(PIECE);
        let read = file.by_ref().take(PIECE as u64).read_to_end(&mut piece);
        let sent = match read {
            Ok(0) => return,
            Ok(_) => pieces.blocking_send(Ok(piece.into())),
            Err(error) => {
                // The client sees a body that is too short.
                let _ = pieces.blocking_send(Err(error));
                return;
            }
        };
        if sent.is_err() {
            return;
        }
    }
}
