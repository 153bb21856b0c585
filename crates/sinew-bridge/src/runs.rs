//! Runs code of a model for an environment or a reward: each time in a fresh sandbox, which shows nothing of
//! the worker, the user's folder or the packages of the interpreter.

use crate::code::PythonCode;
use crate::error::{ProtocolError, StartError};
use crate::frame::encode;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_sandbox::{Ending, ExecRequest, Program, SandboxError, SandboxProvider, SandboxSpec};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OnceCell, Semaphore, mpsc};
use tokio::task::JoinHandle;

/// Maximum number of sandboxes of a pool at once; further runs wait.
const MAX_LIVE: usize = 64;

/// A worker's request to run code.
#[derive(Deserialize)]
pub(crate) struct CodeRun {
    /// Number of the request, which the answer repeats.
    number: u64,
    code: String,
    /// Names and texts.
    files: Vec<(String, String)>,
    stdin: String,
    timeout_s: f64,
}

/// Sandboxes for code, made when the first is needed.
pub(crate) struct CodeSandboxes {
    code: PythonCode,
    spec: SandboxSpec,
    provider: OnceCell<Arc<dyn SandboxProvider>>,
}

impl CodeSandboxes {
    /// Sandboxes with the interpreter of `code` and the limits of a recipe.
    pub(crate) fn new(code: PythonCode, spec: SandboxSpec) -> Self {
        Self {
            code,
            spec,
            provider: OnceCell::new(),
        }
    }

    async fn provider(&self) -> Result<&Arc<dyn SandboxProvider>, StartError> {
        let start = || async {
            let code = self.code.clone();
            let started = tokio::task::spawn_blocking(move || code.bare_provider(MAX_LIVE)).await;
            started.map_err(|e| StartError::Worker(e.to_string()))?
        };
        self.provider.get_or_try_init(start).await
    }

    async fn run(&self, run: CodeRun, limit: Duration) -> Result<Value, String> {
        let provider = self.provider().await.map_err(|e| e.to_string())?;
        let failed = |e: SandboxError| e.to_string();
        let mut sandbox = provider.acquire(&self.spec).await.map_err(failed)?;
        for (name, text) in &run.files {
            let written = sandbox.write_file(name, text.as_bytes()).await;
            written.map_err(failed)?;
        }
        let deadline = Duration::try_from_secs_f64(run.timeout_s).map_err(|e| e.to_string())?;
        let request = ExecRequest {
            program: Program::Python(run.code),
            stdin: run.stdin.into_bytes(),
            deadline: deadline.min(limit),
        };
        let result = sandbox.exec(request).await.map_err(failed)?;
        sandbox.destroy().await.map_err(failed)?;
        let exit = match result.ending {
            Ending::Exited { code } => Some(code),
            _ => None,
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(json!({
            "exit": exit,
            "ending": result.ending.to_string(),
            "stdout": text(&result.stdout),
            "stderr": text(&result.stderr),
            "cut": result.truncated,
        }))
    }
}

/// Runs of one worker.
pub(crate) struct Runs {
    pub(crate) sandboxes: Arc<CodeSandboxes>,
    /// Deadline of a call, which no run exceeds.
    pub(crate) limit: Duration,
    /// Runs at once: each has a thread of the worker that waits.
    pub(crate) room: Arc<Semaphore>,
    /// Frames to the worker.
    pub(crate) frames: mpsc::Sender<Vec<u8>>,
}

impl Runs {
    /// Begins a run; its answer goes to the worker.
    ///
    /// # Errors
    /// If the worker asks for more at once than it has threads.
    pub(crate) fn start(&self, run: CodeRun) -> Result<JoinHandle<()>, ProtocolError> {
        let room = Arc::clone(&self.room).try_acquire_owned();
        let room = room.map_err(|_| ProtocolError::TooManyRuns)?;
        let (sandboxes, frames, limit) =
            (Arc::clone(&self.sandboxes), self.frames.clone(), self.limit);
        Ok(tokio::spawn(async move {
            let number = run.number;
            let mut answer = match sandboxes.run(run, limit).await {
                Ok(answer) => answer,
                Err(why) => json!({ "error": why }),
            };
            for (key, value) in [
                ("op", json!("ran")),
                ("id", json!(0)),
                ("number", json!(number)),
            ] {
                answer[key] = value;
            }
            drop(room);
            let frame_of = |answer: &Value| encode(answer.to_string().as_bytes());
            let long = |e| json!({"op": "ran", "id": 0, "number": number, "error": format!("{e}")});
            let frame = frame_of(&answer).or_else(|e| frame_of(&long(e)));
            if let Ok(frame) = frame {
                // A worker that is gone waits for nothing.
                let _ = frames.send(frame).await;
            }
        }))
    }
}
