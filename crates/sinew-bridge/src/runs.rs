//! Help of the host for code in workers: code of a model runs each time in a fresh sandbox, which shows
//! nothing of the worker, the user's folder or the packages of the interpreter, and a simulated user is
//! asked.

use crate::code::PythonCode;
use crate::error::{ProtocolError, StartError};
use crate::frame::encode;
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_env::{SimulatedUser, UserError};
use sinew_sandbox::{Ending, ExecRequest, Program, SandboxError, SandboxProvider, SandboxSpec};
use sinew_types::Message;
use std::future::Future;
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

/// A worker's question to the simulated user.
#[derive(Deserialize)]
pub(crate) struct UserQuestion {
    /// Number of the question, which the answer repeats.
    number: u64,
    /// The conversation, in which the user is the assistant.
    messages: Vec<Message>,
    seed: u64,
}

/// The help that workers of a pool may ask for: sandboxes for code, made when the first is needed, and the
/// simulated user.
pub(crate) struct HostHelp {
    code: PythonCode,
    spec: SandboxSpec,
    provider: OnceCell<Arc<dyn SandboxProvider>>,
    user: Option<Arc<dyn SimulatedUser>>,
}

impl HostHelp {
    /// Sandboxes with the interpreter of `code` and the limits of a recipe, and its user.
    pub(crate) fn new(
        code: PythonCode,
        spec: SandboxSpec,
        user: Option<Arc<dyn SimulatedUser>>,
    ) -> Self {
        Self {
            code,
            spec,
            provider: OnceCell::new(),
            user,
        }
    }

    /// The next message of the user, within `limit`.
    async fn ask(&self, question: UserQuestion, limit: Duration) -> Result<Value, String> {
        let user = self
            .user
            .as_ref()
            .ok_or_else(|| UserError::Missing.to_string())?;
        let said = user.say(&question.messages, question.seed);
        let said = tokio::time::timeout(limit, said).await;
        let late = |_| {
            format!(
                "the simulated user said nothing within {} s",
                limit.as_secs_f64()
            )
        };
        let text = said.map_err(late)?.map_err(|e| e.to_string())?;
        Ok(json!({ "text": text }))
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

/// Requests of one worker that the host carries out.
pub(crate) struct Runs {
    pub(crate) help: Arc<HostHelp>,
    /// Deadline of a call, which no request exceeds.
    pub(crate) limit: Duration,
    /// Requests at once: each has a thread of the worker that waits.
    pub(crate) room: Arc<Semaphore>,
    /// Frames to the worker.
    pub(crate) frames: mpsc::Sender<Vec<u8>>,
}

impl Runs {
    /// Begins a run of code; its answer goes to the worker.
    ///
    /// # Errors
    /// If the worker asks for more at once than it has threads.
    pub(crate) fn start(&self, run: CodeRun) -> Result<JoinHandle<()>, ProtocolError> {
        let (help, limit, number) = (Arc::clone(&self.help), self.limit, run.number);
        self.answer(number, async move { help.run(run, limit).await })
    }

    /// Asks the simulated user; what it says goes to the worker.
    ///
    /// # Errors
    /// If the worker asks for more at once than it has threads.
    pub(crate) fn ask(&self, question: UserQuestion) -> Result<JoinHandle<()>, ProtocolError> {
        let (help, limit, number) = (Arc::clone(&self.help), self.limit, question.number);
        self.answer(number, async move { help.ask(question, limit).await })
    }

    /// Sends the result of `work` to the worker, as the answer to the request `number`.
    fn answer(
        &self,
        number: u64,
        work: impl Future<Output = Result<Value, String>> + Send + 'static,
    ) -> Result<JoinHandle<()>, ProtocolError> {
        let room = Arc::clone(&self.room).try_acquire_owned();
        let room = room.map_err(|_| ProtocolError::TooManyRuns)?;
        let frames = self.frames.clone();
        Ok(tokio::spawn(async move {
            let mut answer = match work.await {
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
