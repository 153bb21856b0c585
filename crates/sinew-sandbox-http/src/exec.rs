//! Executions, with one response at the end or with streamed output.

use crate::api::{self, ExecBody, seconds};
use crate::error::{ApiError, bad};
use crate::registry::Service;
use crate::transfer;
use axum::body::{Body, Bytes};
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures::stream;
use serde_json::{Value, json};
use sinew_sandbox::archive::unspool;
use sinew_sandbox::{ExecOptions, ExecRequest, OutputChunk, SandboxError};
use std::convert::Infallible;
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Output chunks buffered between a program and its reader. A full queue blocks the program.
pub(crate) const QUEUE: usize = 16;

/// Runs a program. Dropping the future kills it. The response is JSON, or NDJSON with `stream`.
pub(crate) async fn exec(
    service: Arc<Service>,
    owner: String,
    id: String,
    body: ExecBody,
) -> Result<Response, ApiError> {
    if body.stream {
        return streamed(service, owner, id, body);
    }
    let value = run(&service, &owner, &id, &body, None).await?;
    Ok(axum::Json(value).into_response())
}

/// Wall time of an execution, which the server bounds.
pub(crate) fn deadline(service: &Service, body: &ExecBody) -> Result<Duration, ApiError> {
    let bounds = &service.bounds;
    let (default, max) = (bounds.timeout, bounds.max_timeout);
    seconds("timeout_s", body.timeout_s, default, max)
}

/// Runs a program to its end. Sends output chunks to `output` as they arrive.
async fn run(
    service: &Service,
    owner: &str,
    id: &str,
    body: &ExecBody,
    output: Option<mpsc::Sender<OutputChunk>>,
) -> Result<Value, ApiError> {
    let deadline = deadline(service, body)?;
    let request = ExecRequest {
        program: body.program()?,
        stdin: body.stdin()?,
        deadline,
    };
    let options = ExecOptions {
        env: api::env(&body.env)?,
        output,
        ..ExecOptions::default()
    };
    let (entry, mut guard) = service.lock_sandbox(owner, id, deadline)?;
    let sandbox = guard.as_mut().ok_or(ApiError::Gone)?;
    let result = tokio::select! {
        result = sandbox.exec_with(request, options) => result?,
        () = entry.ended() => return Err(ApiError::Gone),
    };
    Ok(api::result(&result, body.binary))
}

/// NDJSON response: one object per output chunk, then `{"result": ...}` or `{"error": ...}`.
fn streamed(
    service: Arc<Service>,
    owner: String,
    id: String,
    body: ExecBody,
) -> Result<Response, ApiError> {
    // Errors that are known before the execution get their own status.
    body.program()?;
    body.stdin()?;
    if service.view(&owner, &id)?.busy {
        return Err(ApiError::Busy);
    }
    Ok(lines(async move |lines| {
        let (sender, mut chunks) = mpsc::channel::<OutputChunk>(QUEUE);
        let binary = body.binary;
        let forward = async {
            while let Some(chunk) = chunks.recv().await {
                let line =
                    json!({ "stream": chunk.stream, "data": api::text(&chunk.bytes, binary) });
                if lines.send(line).await.is_err() {
                    break;
                }
            }
        };
        tokio::join!(run(&service, &owner, &id, &body, Some(sender)), forward).0
    }))
}

/// NDJSON response of an execution: what `run` sends, then `{"result": ...}` or `{"error": ...}`. A client
/// that disconnects ends `run`.
pub(crate) fn lines<F>(run: impl FnOnce(mpsc::Sender<Value>) -> F) -> Response
where
    F: Future<Output = Result<Value, ApiError>> + Send + 'static,
{
    let (lines, receiver) = mpsc::channel::<Value>(QUEUE);
    let ended = run(lines.clone());
    let task = tokio::spawn(async move {
        let last = ended
            .await
            .map_or_else(|e| e.json(), |result| json!({ "result": result }));
        let _ = lines.send(last).await;
    });
    // A disconnected client drops the body, which drops the guard, which kills the program.
    let guard = AbortOnDrop(task);
    let body = stream::unfold((receiver, guard), |(mut receiver, guard)| async {
        let mut line = receiver.recv().await?.to_string();
        line.push('\n');
        Some((Ok::<_, Infallible>(Bytes::from(line)), (receiver, guard)))
    });
    let headers = [(CONTENT_TYPE, "application/x-ndjson")];
    (headers, Body::from_stream(body)).into_response()
}

/// Aborts the task when dropped.
struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Reads a file of a sandbox, at most [`crate::Bounds::file_bytes`].
pub(crate) async fn read(
    service: &Service,
    owner: &str,
    id: &str,
    path: &str,
) -> Result<Vec<u8>, ApiError> {
    let (entry, mut guard) = service.lock_sandbox(owner, id, std::time::Duration::from_secs(10))?;
    let sandbox = guard.as_mut().ok_or(ApiError::Gone)?;
    tokio::select! {
        read = sandbox.read_file(path, service.bounds.file_bytes as u64) => Ok(read?),
        () = entry.ended() => Err(ApiError::Gone),
    }
}

/// Writes a file of a sandbox. `path` is relative to the work folder.
pub(crate) async fn write(
    service: &Service,
    owner: &str,
    id: &str,
    path: &str,
    content: File,
) -> Result<(), ApiError> {
    if path.is_empty() {
        return Err(bad(
            "path",
            "empty",
            "a relative path below the work folder",
        ));
    }
    let max = service.bounds.file_bytes as u64;
    let content = transfer::blocking(move || unspool(&content, max)).await;
    let content = content.map_err(|e| SandboxError::io("write", e))?;
    let (entry, mut guard) = service.lock_sandbox(owner, id, std::time::Duration::from_secs(10))?;
    let sandbox = guard.as_mut().ok_or(ApiError::Gone)?;
    tokio::select! {
        written = sandbox.write_file(path, &content) => Ok(written?),
        () = entry.ended() => Err(ApiError::Gone),
    }
}
