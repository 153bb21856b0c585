//! Executions on a terminal: `POST /v1/sandboxes/ID/exec` streams the output, and separate requests carry the
//! input. So a session needs only plain requests, which any proxy lets through.

use crate::api::{self, ExecBody, TerminalBody};
use crate::error::{ApiError, bad};
use crate::exec::{self, QUEUE};
use crate::registry::{Entry, Service};
use axum::response::Response;
use serde_json::json;
use sinew_sandbox::{ExecRequest, Program, Terminal, TerminalInput};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Time that a program may take to read what was typed before.
const TYPING_TIME: Duration = Duration::from_secs(30);

/// The terminal of a sandbox, which is gone with this.
struct Open(Arc<Entry>);

impl Drop for Open {
    fn drop(&mut self) {
        *self.0.terminal() = None;
    }
}

/// Starts a program on a terminal. The sandbox is locked and the terminal there before this returns, so that
/// a client can type as soon as it has the head of the response.
pub(crate) fn start(
    service: Arc<Service>,
    owner: String,
    id: String,
    body: ExecBody,
) -> Result<Response, ApiError> {
    let size = body
        .terminal
        .ok_or_else(|| bad("terminal", "missing", "rows and columns"))?;
    if !body.stream {
        return Err(bad("stream", "false", "true, where there is a terminal"));
    }
    let program = body.program()?;
    if matches!(program, Program::Python(_)) || !body.stdin()?.is_empty() {
        return Err(bad(
            "terminal",
            "given",
            "nothing, where there is python or stdin",
        ));
    }
    let deadline = exec::deadline(&service, &body)?;
    let env = api::env(&body.env)?;
    let (entry, mut guard) = service.lock_sandbox(&owner, &id, deadline)?;
    let (typing, input) = mpsc::channel(QUEUE);
    *entry.terminal() = Some(typing);
    let open = Open(entry);
    let binary = body.binary;
    Ok(exec::lines(async move |lines| {
        let (output, mut shown) = mpsc::channel::<Vec<u8>>(QUEUE);
        let forward = async {
            while let Some(bytes) = shown.recv().await {
                let line = json!({ "stream": "stdout", "data": api::text(&bytes, binary) });
                if lines.send(line).await.is_err() {
                    break;
                }
            }
        };
        let request = ExecRequest::new(program, deadline);
        let terminal = Terminal {
            size,
            env,
            input,
            output,
        };
        let sandbox = guard.as_mut().ok_or(ApiError::Gone)?;
        let run = async {
            tokio::select! {
                result = sandbox.exec_on_terminal(request, terminal) => Ok(result?),
                () = open.0.ended() => Err(ApiError::Gone),
            }
        };
        let (result, ()) = tokio::join!(run, forward);
        Ok(api::result(&result?, binary))
    }))
}

/// Types bytes at the terminal of a sandbox, or sets its size.
pub(crate) async fn input(
    service: &Service,
    owner: &str,
    id: &str,
    body: TerminalBody,
) -> Result<(), ApiError> {
    let entry = service.entry(owner, id)?;
    let input: TerminalInput = body.input()?;
    let none = || ApiError::NotFound {
        what: "terminal of sandbox",
        id: id.into(),
    };
    let typing = entry.terminal().clone().ok_or_else(none)?;
    match tokio::time::timeout(TYPING_TIME, typing.send(input)).await {
        Ok(sent) => sent.map_err(|_| none()),
        Err(_) => Err(ApiError::Busy),
    }
}
