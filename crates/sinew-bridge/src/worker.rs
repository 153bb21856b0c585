//! One worker process: its start, its calls and its end.
//!
//! Start: acquire a sandbox, listen on its loopback interface, run the program, accept one connection, close
//! the listener, send the hello frame, wait for the descriptions of the targets.
//!
//! Three tasks belong to a worker: one runs the process and owns the sandbox, one writes frames, one reads
//! them. The worker ends when the process ends, the connection closes, an answer breaks the protocol (no
//! JSON, too long, an id that does not wait), a call passes its deadline, or the handle is dropped. All calls
//! that wait then fail with the first reason, and the sandbox is destroyed with everything in it.

use crate::error::{CallError, ProtocolError, StartError};
use crate::frame::{FrameReader, MAX_FRAME, encode};
use crate::lock::lock;
use crate::plan::Plan;
use crate::runs::{CodeRun, Runs, UserQuestion};
use serde::Deserialize;
use serde_json::{Value, json};
use sinew_sandbox::{
    ExecOptions, ExecRequest, ExecResult, Limits, Network, PYTHON_GUARD, Program, Sandbox,
    SandboxError, SandboxSpec,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;

/// Program of a worker, after [`PYTHON_GUARD`].
const PROGRAM: &str = concat!(
    "\n\n",
    include_str!("schema.py"),
    "\n\n",
    include_str!("rows.py"),
    "\n\n",
    include_str!("worker.py")
);
/// The module `sinew` of user code.
const ENV_SOURCE: &str = include_str!("../../../python/src/sinew/env.py");
/// Port inside on which the worker finds the host.
const PORT: u16 = 4200;
/// Longest life of a worker.
const LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// Weight of all calls that a worker takes at once. A call that must run without others has this weight.
pub(crate) const ALONE: u32 = 64;
/// Weight of an environment call, which holds a thread: 16 of them fit into the budget at once.
pub(crate) const THREADED: u32 = 4;
/// Weight of a call of a coroutine: 64 at once.
pub(crate) const COROUTINE: u32 = 1;
/// Threads of a worker with environments.
const THREADS: u32 = ALONE / THREADED;
/// And one that takes frames while all of these are in calls.
const READER: u32 = 1;
/// Added to the deadline of a call, so that coroutines are ended by the worker itself, which then continues.
const GRACE: Duration = Duration::from_millis(500);
/// Bytes of one read.
const CHUNK: usize = 64 << 10;
/// Maximum characters of a text in a message, or of what a call printed.
const MAX_TEXT: usize = 4096;

/// A call without a value.
#[derive(Debug)]
pub(crate) enum RefusedCall {
    /// The worker ended before the call was sent. Another worker can take it.
    Unsent(CallError),
    /// The call was sent, or no worker could take it.
    Failed(CallError),
}

impl RefusedCall {
    /// The error, for calls that only this worker can take.
    pub(crate) fn into_error(self) -> CallError {
        match self {
            Self::Unsent(error) | Self::Failed(error) => error,
        }
    }
}

/// An answer as it comes from the worker.
#[derive(Deserialize)]
struct Reply {
    /// Id of the call. 0 is the hello frame.
    id: u64,
    /// Value of the call, if it has no error.
    ok: Option<Value>,
    error: Option<PythonError>,
    /// Text that the call printed.
    #[serde(default)]
    printed: String,
    /// Code that is to run in a separate sandbox. It answers no call.
    run: Option<CodeRun>,
    /// Question to the simulated user. It answers no call.
    ask: Option<UserQuestion>,
    /// Whether code that the author did not write ran in the worker or in one of its processes.
    #[serde(default)]
    code: bool,
}

#[derive(Deserialize)]
struct PythonError {
    /// Class of the exception.
    #[serde(rename = "type")]
    kind: String,
    /// Text of the exception, with paths of the host.
    message: String,
    /// `file:line` on the host.
    place: Option<String>,
    /// The worker is of no use any more.
    fatal: bool,
}

/// Calls that wait for their answers.
#[derive(Default)]
struct WaitingCalls {
    /// Reason why the worker ended. No call is added after that.
    dead: Option<String>,
    /// Calls by id.
    calls: HashMap<u64, oneshot::Sender<Reply>>,
}

/// State of a worker that its tasks share.
#[derive(Default)]
struct Shared {
    waiting: Mutex<WaitingCalls>,
    /// Tasks that end with the worker. One owns the sandbox.
    tasks: Mutex<Vec<AbortHandle>>,
    /// Code ran in it: nothing else may.
    spent: AtomicBool,
}

/// A running worker. Dropping it ends the process.
pub(crate) struct Worker {
    shared: Arc<Shared>,
    /// Queue of frames for the task that writes to the worker process. Callers hold permits of `room`
    /// meanwhile, which bounds its length.
    frames: mpsc::Sender<Vec<u8>>,
    /// Id of the next call. The host chooses ids, so that code inside cannot answer a call of another worker.
    next: AtomicU64,
    /// [`ALONE`] permits; each call holds as many as its weight.
    room: Semaphore,
    /// Descriptions of the targets, in their order.
    pub(crate) targets: Vec<Value>,
}

impl Shared {
    /// Ends the worker. All calls that wait fail with the reason.
    fn end(&self, reason: impl Into<String>) {
        {
            let mut waiting = lock(&self.waiting);
            waiting.dead.get_or_insert_with(|| reason.into());
            waiting.calls.clear();
        }
        for task in lock(&self.tasks).drain(..) {
            task.abort();
        }
    }

    /// Reason why the worker ended, if it did.
    fn dead(&self) -> Option<String> {
        lock(&self.waiting).dead.clone()
    }

    /// The error of a call whose worker ended.
    fn lost(&self) -> CallError {
        CallError::Lost {
            reason: self.dead().unwrap_or_else(|| "it is gone".into()),
        }
    }

    /// Has a task end with the worker.
    fn own(&self, task: tokio::task::JoinHandle<()>) {
        let mut tasks = lock(&self.tasks);
        tasks.retain(|task| !task.is_finished());
        tasks.push(task.abort_handle());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.end("it is not needed any more");
    }
}

impl Worker {
    /// Starts a worker and waits until it has loaded the user's code.
    ///
    /// # Errors
    /// [`StartError::Load`] if the code raises an error, else [`StartError::Worker`] with the reason.
    pub(crate) async fn start(plan: &Plan) -> Result<Self, StartError> {
        let seconds = plan.startup_timeout.as_secs_f64();
        let late = |_| {
            StartError::Worker(format!(
                "its imports took longer than {seconds} s; raise startup_timeout_s"
            ))
        };
        tokio::time::timeout(plan.startup_timeout, Self::launch(plan))
            .await
            .map_err(late)?
    }

    /// Starts the process, accepts its connection and waits for the descriptions of the targets.
    async fn launch(plan: &Plan) -> Result<Self, StartError> {
        let failed = |e: SandboxError| StartError::Worker(e.to_string());
        let io = |e: std::io::Error| StartError::Worker(e.to_string());
        let spec = sandbox_spec(plan);
        let mut sandbox = plan.provider.acquire(&spec).await.map_err(failed)?;
        let inside = sandbox.listen_inside(PORT).await.map_err(failed)?;
        inside.set_nonblocking(true).map_err(io)?;
        let listener = TcpListener::from_std(inside).map_err(io)?;
        let shared = Arc::new(Shared::default());
        let (ended, mut end) = oneshot::channel();
        shared.own(tokio::spawn(run(
            sandbox,
            plan.code.python.clone(),
            Arc::clone(&shared),
            ended,
        )));
        // Dropping this ends the process, until the worker exists.
        let mut guard = EndOnDrop(Some(Arc::clone(&shared)));
        let connection = tokio::select! {
            accepted = listener.accept() => accepted.map_err(io)?.0,
            why = &mut end => return Err(StartError::Worker(why.unwrap_or_default())),
        };
        // Nothing else inside can connect.
        drop(listener);
        connection.set_nodelay(true).map_err(io)?;
        let (read, write) = connection.into_split();
        let (frames, queue) = mpsc::channel(ALONE as usize);
        let (ready, described) = oneshot::channel();
        lock(&shared.waiting).calls.insert(0, ready);
        shared.own(tokio::spawn(write_all(write, queue)));
        let runs = Runs {
            help: Arc::clone(&plan.help),
            limit: plan.timeout,
            room: Arc::new(Semaphore::new(THREADS as usize)),
            frames: frames.clone(),
        };
        shared.own(tokio::spawn(read_all(read, Arc::clone(&shared), runs)));
        let hello = hello(plan).map_err(|e| StartError::Worker(e.to_string()))?;
        let _ = frames.send(hello).await;
        let targets = match described.await {
            Ok(reply) => loaded(reply)?,
            Err(_) => return Err(StartError::Worker(shared.dead().unwrap_or_default())),
        };
        guard.0 = None;
        Ok(Self {
            shared,
            frames,
            next: AtomicU64::new(1),
            room: Semaphore::new(ALONE as usize),
            targets,
        })
    }

    /// True if code ran in it: it must not serve another episode or score.
    pub(crate) fn is_spent(&self) -> bool {
        self.shared.spent.load(Ordering::Relaxed)
    }

    /// Ends it if code ran in it, with all that the code left.
    pub(crate) fn retire(&self) {
        if self.is_spent() {
            self.shared.end("code ran in it, and its episode is over");
        }
    }

    /// True if it takes calls.
    pub(crate) fn is_alive(&self) -> bool {
        self.shared.dead().is_none()
    }

    /// Calls the worker. The deadline counts from the moment at which the worker has room for the call.
    /// Dropping the future ends a call that has all of the worker together with it, and cancels a coroutine.
    pub(crate) async fn call(
        &self,
        mut request: Value,
        weight: u32,
        timeout: Duration,
    ) -> Result<Value, RefusedCall> {
        let Ok(_room) = self.room.acquire_many(weight).await else {
            return Err(RefusedCall::Unsent(self.shared.lost()));
        };
        // A function waits for a worker in which no code ran. An episode stays in its own.
        if weight != THREADED {
            self.retire();
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        request["id"] = id.into();
        let frame = frame_of(&request).map_err(RefusedCall::Failed)?;
        let (sender, answer) = oneshot::channel();
        {
            let mut waiting = lock(&self.shared.waiting);
            if let Some(reason) = waiting.dead.clone() {
                return Err(RefusedCall::Unsent(CallError::Lost { reason }));
            }
            waiting.calls.insert(id, sender);
        }
        let exchange = async {
            let _ = self.frames.send(frame).await;
            answer.await
        };
        let mut in_flight = InFlight {
            worker: self,
            id,
            weight,
            over: false,
        };
        let ended = tokio::time::timeout(timeout + GRACE, exchange).await;
        in_flight.over = true;
        let called = match ended {
            Ok(Ok(reply)) => self.value(reply),
            Ok(Err(_)) => Err(self.shared.lost()),
            Err(_) => {
                let seconds = timeout.as_secs_f64();
                self.shared
                    .end(format!("a call took longer than {seconds} s"));
                Err(CallError::Deadline { seconds })
            }
        };
        called.map_err(RefusedCall::Failed)
    }

    /// The value of an answer. The output of the call goes to the log.
    fn value(&self, reply: Reply) -> Result<Value, CallError> {
        self.shared.spent.fetch_or(reply.code, Ordering::Relaxed);
        if !reply.printed.is_empty() {
            tracing::debug!(printed = cut(reply.printed), "python");
        }
        let Some(raised) = reply.error else {
            let value = reply.ok.unwrap_or_default();
            if value["fatal"] == true {
                self.end_full();
            }
            return Ok(value);
        };
        if raised.fatal {
            self.end_full();
        }
        Err(CallError::Raised {
            kind: cut(raised.kind),
            message: cut(raised.message),
            place: raised.place.map(cut),
        })
    }

    /// Ends a worker whose code cannot start another thread or process.
    fn end_full(&self) {
        self.shared
            .end("a call reached the limit of processes and threads of the sandbox");
    }
}

/// Text of a worker for messages, cut to [`MAX_TEXT`] characters: code inside can write what it likes.
fn cut(mut text: String) -> String {
    if let Some((at, _)) = text.char_indices().nth(MAX_TEXT) {
        text.truncate(at);
    }
    text
}

/// A call that was sent. Dropped before its end, it does not continue.
struct InFlight<'a> {
    worker: &'a Worker,
    id: u64,
    weight: u32,
    over: bool,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        match self.weight {
            _ if self.over => {}
            ALONE => self.worker.shared.end("the caller of a function gave up"),
            COROUTINE => {
                // The id waits on: the worker answers it. A full queue leaves the call to its deadline.
                let cancel = json!({"op": "cancel", "id": 0, "call": self.id});
                if let Ok(frame) = frame_of(&cancel) {
                    let _ = self.worker.frames.try_send(frame);
                }
            }
            _ => {}
        }
    }
}

/// Ends a worker whose start is not awaited any more.
struct EndOnDrop(Option<Arc<Shared>>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            shared.end("its start was given up");
        }
    }
}

/// Limits of a worker: the recipe's, except for what a process that lives long and serves many sessions
/// needs.
fn sandbox_spec(plan: &Plan) -> SandboxSpec {
    let given = &plan.spec.limits;
    let mut env = plan.spec.env.clone();
    let fixed = [
        // Sets and dicts have the same order in every worker.
        ("PYTHONHASHSEED", "0"),
        ("PYTHONDONTWRITEBYTECODE", "1"),
        ("PYTHONUTF8", "1"),
        ("PYTHONNOUSERSITE", "1"),
    ];
    env.extend(fixed.map(|(k, v)| (k.to_owned(), v.to_owned())));
    SandboxSpec {
        limits: Limits {
            // Deadlines bound each call.
            cpu_s: 1e8,
            processes: given.processes + u64::from(THREADS + READER) + 2,
            open_files: given.open_files.max(1024),
            ..given.clone()
        },
        env,
        strict: plan.spec.strict,
        network: Network::Loopback,
        ..SandboxSpec::default()
    }
}

/// The first frame: what to load, and the limits.
fn hello(plan: &Plan) -> Result<Vec<u8>, CallError> {
    let threads = if plan.has_env() { THREADS + READER } else { 1 };
    frame_of(&json!({
        "env_source": ENV_SOURCE,
        "worlds": crate::worlds::sources(),
        "path": plan.code.path,
        "places": plan.code.places,
        "targets": plan.code.loads,
        "threads": threads,
        "max_frame": MAX_FRAME,
        "timeout_s": plan.timeout.as_secs_f64(),
        "shared": plan.shared && plan.has_env(),
    }))
}

/// A request as a frame.
fn frame_of(request: &Value) -> Result<Vec<u8>, CallError> {
    encode(request.to_string().as_bytes())
        .map_err(|e| CallError::Protocol(format!("the request is {e}")))
}

/// Descriptions of the targets, or the error of the user's code.
fn loaded(reply: Reply) -> Result<Vec<Value>, StartError> {
    if let Some(e) = reply.error {
        return Err(StartError::Load {
            kind: e.kind,
            message: e.message,
            place: e.place,
        });
    }
    let targets = |mut ok: Value| ok.get_mut("targets").map(Value::take);
    match reply.ok.and_then(targets) {
        Some(Value::Array(targets)) => Ok(targets),
        _ => Err(StartError::Worker("it did not describe its code".into())),
    }
}

/// Runs the process to its end. Dropping the future kills it and destroys the sandbox.
async fn run(
    mut sandbox: Box<dyn Sandbox>,
    python: String,
    shared: Arc<Shared>,
    ended: oneshot::Sender<String>,
) {
    let program = [PYTHON_GUARD, PROGRAM].concat();
    let argv = [python.as_str(), "-B", "-c", &program, &PORT.to_string()];
    let request = ExecRequest {
        program: Program::Argv(argv.map(str::to_owned).to_vec()),
        stdin: Vec::new(),
        deadline: LIFE,
    };
    let why = match sandbox.exec_with(request, ExecOptions::default()).await {
        Ok(result) => ending(&result),
        Err(e) => e.to_string(),
    };
    let _ = ended.send(why.clone());
    // This task is one of those that are aborted: after it there is nothing to do.
    shared.end(why);
}

/// End of a process, with the end of its standard error.
pub(crate) fn ending(result: &ExecResult) -> String {
    let error = String::from_utf8_lossy(&result.stderr);
    let lines: Vec<&str> = error.lines().filter(|l| !l.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(3)..].join(" | ");
    if last.is_empty() {
        result.ending.to_string()
    } else {
        format!(
            "{}: {}",
            result.ending,
            last.chars().take(400).collect::<String>()
        )
    }
}

/// Writes frames in the order in which they come.
async fn write_all(mut to: OwnedWriteHalf, mut queue: mpsc::Receiver<Vec<u8>>) {
    while let Some(frame) = queue.recv().await {
        if to.write_all(&frame).await.is_err() {
            // The end of the process comes with its reason.
            return;
        }
    }
}

/// Reads frames until the connection or the protocol ends.
async fn read_all(mut from: OwnedReadHalf, shared: Arc<Shared>, runs: Runs) {
    let (mut reader, mut chunk) = (FrameReader::default(), vec![0; CHUNK]);
    loop {
        match from.read(&mut chunk).await {
            Ok(0) | Err(_) => {
                // The end of the process tells more; a process that closes its connection and keeps running
                // has no excuse.
                tokio::time::sleep(GRACE).await;
                shared.end("it closed its connection");
                return;
            }
            Ok(n) => reader.push(&chunk[..n]),
        }
        if let Err(why) = take_frames(&mut reader, &shared, &runs).await {
            shared.end(format!("it broke the protocol: {why}"));
            return;
        }
    }
}

/// Delivers complete answers to the calls that wait for them. A separate thread parses long answers, so that
/// the runtime of all workers continues.
async fn take_frames(
    reader: &mut FrameReader,
    shared: &Shared,
    runs: &Runs,
) -> Result<(), ProtocolError> {
    while let Some(frame) = reader.next_frame()? {
        let parse = |frame: &[u8]| sinew_types::json::from_slice::<Reply>(frame);
        let reply = if frame.len() > CHUNK {
            let frame = frame.to_vec();
            let parsed = tokio::task::spawn_blocking(move || parse(&frame));
            parsed.await??
        } else {
            parse(frame)?
        };
        if let Some(run) = reply.run {
            shared.own(runs.start(run)?);
            continue;
        }
        if let Some(question) = reply.ask {
            shared.own(runs.ask(question)?);
            continue;
        }
        let id = reply.id;
        let Some(waiter) = lock(&shared.waiting).calls.remove(&id) else {
            return Err(ProtocolError::NotWaiting(id));
        };
        let _ = waiter.send(reply);
    }
    Ok(())
}
