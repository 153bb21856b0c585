//! Executions: to their end, or with output as it comes.

use crate::api::{self, ExecBody, seconds};
use crate::book::Service;
use crate::error::{ApiError, bad};
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
use tokio::sync::mpsc;

/// Pieces of output between a program and its reader; a full queue holds the program back.
const QUEUE: usize = 16;

/// Runs a program. If the future is dropped, it is killed.
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

async fn run(
    service: &Service,
    owner: &str,
    id: &str,
    body: &ExecBody,
    output: Option<mpsc::Sender<OutputChunk>>,
) -> Result<Value, ApiError> {
    let bounds = &service.bounds;
    let deadline = seconds(
        "timeout_s",
        body.timeout_s,
        bounds.timeout,
        bounds.longest_timeout,
    )?;
    let request = ExecRequest {
        program: body.program()?,
        stdin: body.stdin()?,
        deadline,
    };
    let options = ExecOptions {
        env: api::env(&body.env)?,
        output,
    };
    let (entry, mut place) = service.enter(owner, id, deadline)?;
    let sandbox = place.as_mut().ok_or(ApiError::Gone)?;
    let result = tokio::select! {
        result = sandbox.exec_with(request, options) => result?,
        () = entry.ended() => return Err(ApiError::Gone),
    };
    Ok(api::result(&result, body.binary))
}

/// One JSON object a line: output, then `{"result": ...}` or `{"error": ...}`.
fn streamed(
    service: Arc<Service>,
    owner: String,
    id: String,
    body: ExecBody,
) -> Result<Response, ApiError> {
    // What can be refused at once is refused with a status.
    body.program()?;
    body.stdin()?;
    if service.look(&owner, &id)?.busy {
        return Err(ApiError::Busy);
    }
    let (sender, mut chunks) = mpsc::channel::<OutputChunk>(QUEUE);
    let (lines, receiver) = mpsc::channel::<Value>(QUEUE);
    let binary = body.binary;
    let task = tokio::spawn(async move {
        let forward = async {
            while let Some(chunk) = chunks.recv().await {
                let line =
                    json!({ "stream": chunk.stream, "data": api::text(&chunk.bytes, binary) });
                if lines.send(line).await.is_err() {
                    break;
                }
            }
        };
        let (ended, ()) = tokio::join!(run(&service, &owner, &id, &body, Some(sender)), forward);
        let last = ended.map_or_else(|e| e.json(), |result| json!({ "result": result }));
        let _ = lines.send(last).await;
    });
    // A client that goes away drops the body, the body drops the guard, the guard kills.
    let guard = AbortOnDrop(task);
    let body = stream::unfold((receiver, guard), |(mut receiver, guard)| async {
        let mut line = receiver.recv().await?.to_string();
        line.push('\n');
        Some((Ok::<_, Infallible>(Bytes::from(line)), (receiver, guard)))
    });
    let headers = [(CONTENT_TYPE, "application/x-ndjson")];
    Ok((headers, Body::from_stream(body)).into_response())
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Reads a file of a sandbox.
pub(crate) async fn read(
    service: &Service,
    owner: &str,
    id: &str,
    path: &str,
) -> Result<Vec<u8>, ApiError> {
    let (entry, mut place) = service.enter(owner, id, std::time::Duration::from_secs(10))?;
    let sandbox = place.as_mut().ok_or(ApiError::Gone)?;
    tokio::select! {
        read = sandbox.read_file(path, service.bounds.file_bytes as u64) => Ok(read?),
        () = entry.ended() => Err(ApiError::Gone),
    }
}

/// What the server could not do with its own files.
pub(crate) fn failed(operation: &str, e: &std::io::Error) -> ApiError {
    ApiError::Sandbox(SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    })
}

/// Writes a file of a sandbox.
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
    let content = transfer::apart(move || unspool(&content, max)).await;
    let content = content.map_err(|e| failed("write", &e))?;
    let (entry, mut place) = service.enter(owner, id, std::time::Duration::from_secs(10))?;
    let sandbox = place.as_mut().ok_or(ApiError::Gone)?;
    tokio::select! {
        written = sandbox.write_file(path, &content) => Ok(written?),
        () = entry.ended() => Err(ApiError::Gone),
    }
}
