//! Host side of the workers. Each runs one program at a time.
//!
//! A job goes to the least busy worker and waits for its turn there. A worker that does not answer 2 s after
//! the deadline is killed, and so is one whose job was dropped: the program could not be stopped otherwise.
//! The next job starts another one.

use crate::config::{FOLDER_INSIDE, PROGRAM_INSIDE, WasmConfig};
use crate::error::WasmError;
use crate::manifest::Manifest;
use crate::wire::{JobResult, Kind, Tree, head, read_head, unpack_done};
use crate::worker::FLAG;
use sinew_sandbox::{
    Ending, ExecRequest, ExecResult, Limits, Network, OutputChunk, OutputStream, Program,
    SandboxError, SandboxProvider, SandboxSpec,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Port of the host on a worker's loopback address.
const PORT: u16 = 4000;
/// Maximum time for a worker to load its modules and start its Python.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum attempts to start a worker.
const MAX_STARTS: u32 = 3;
/// Time beyond the deadline of an execution until its worker is killed.
const GRACE: Duration = Duration::from_secs(2);
/// Maximum lifetime of a worker. Normally it ends with the provider.
const WORKER_LIFE: Duration = Duration::from_secs(30 * 86_400);

/// Place of one worker.
#[derive(Default)]
struct Slot {
    /// The worker. `None` before the start and after a failure.
    worker: tokio::sync::Mutex<Option<Worker>>,
    /// Number of running and waiting executions.
    busy: AtomicUsize,
}

/// All workers of a provider. Each starts with its first job, and again after a failure.
pub(crate) struct Workers {
    /// Provider of the workers' sandboxes.
    below: Arc<dyn SandboxProvider>,
    /// Settings of the provider.
    config: WasmConfig,
    /// Names of the modules.
    modules: Vec<String>,
    /// One slot per worker.
    slots: Vec<Slot>,
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers")
            .field("slots", &self.slots.len())
            .finish_non_exhaustive()
    }
}

/// Counts an execution of a slot while it lives.
struct Busy<'a>(&'a AtomicUsize);

impl<'a> Busy<'a> {
    /// Counts until it is dropped.
    fn new(busy: &'a AtomicUsize) -> Self {
        busy.fetch_add(1, Ordering::SeqCst);
        Self(busy)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A running worker. Dropping it kills the process.
#[derive(Debug)]
struct Worker {
    /// Connection to the worker.
    stream: BufReader<TcpStream>,
    /// Execution of the worker in its sandbox.
    process: tokio::task::JoinHandle<Result<ExecResult, SandboxError>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.process.abort();
    }
}

/// Collected output, and the receiver of streamed output.
#[derive(Debug, Default)]
pub(crate) struct Output {
    /// Standard output and standard error.
    pub(crate) kept: [Vec<u8>; 2],
    /// Receiver of streamed output.
    pub(crate) onward: Option<tokio::sync::mpsc::Sender<OutputChunk>>,
}

impl Workers {
    /// Workers that are not started yet. There is at least one.
    pub(crate) fn new(
        below: Arc<dyn SandboxProvider>,
        config: WasmConfig,
        manifest: &Manifest,
    ) -> Self {
        Self {
            below,
            slots: (0..config.workers.max(1))
                .map(|_| Slot::default())
                .collect(),
            config,
            modules: manifest.modules.keys().cloned().collect(),
        }
    }

    /// Runs a job in the least busy worker.
    pub(crate) async fn run(
        &self,
        job: &[u8],
        deadline: Duration,
        output: &mut Output,
    ) -> Result<(JobResult, Option<Tree>), SandboxError> {
        let least = |s: &&Slot| s.busy.load(Ordering::SeqCst);
        let Some(slot) = self.slots.iter().min_by_key(least) else {
            return Err(SandboxError::Died("there are no workers".into()));
        };
        let _busy = Busy::new(&slot.busy);
        let mut place = slot.worker.lock().await;
        // Taken out of the slot: dropping this future kills the worker with its program.
        let mut worker = match place.take().filter(|w| !w.process.is_finished()) {
            Some(worker) => worker,
            None => self.start().await?,
        };
        match tokio::time::timeout(deadline + GRACE, worker.run(job, output)).await {
            // The worker does not respond: it is killed with its program.
            Err(_) => Ok((JobResult::new(Ending::Timeout), None)),
            Ok(Err(_)) => Ok((JobResult::new(Ending::SandboxDied), None)),
            Ok(Ok(done)) => {
                *place = Some(worker);
                Ok(done)
            }
        }
    }

    /// Checks that the level below can create sandboxes for workers.
    pub(crate) fn health(&self) -> Result<(), SandboxError> {
        self.below.health()
    }

    /// Starts a worker, with up to [`MAX_STARTS`] attempts.
    async fn start(&self) -> Result<Worker, SandboxError> {
        let mut starts = 1;
        loop {
            match self.launch().await {
                Err(SandboxError::Died(_)) if starts < MAX_STARTS => starts += 1,
                launched => return launched,
            }
        }
    }

    /// Starts a worker once and waits until it is ready.
    async fn launch(&self) -> Result<Worker, SandboxError> {
        let spec = SandboxSpec {
            limits: Limits {
                cpu_s: WORKER_LIFE.as_secs_f64(),
                memory_bytes: self.config.worker_memory_bytes,
                processes: 64,
                output_bytes: 64 << 10,
                // Memory files count as files: the started Python.
                work_bytes: self.config.worker_memory_bytes,
                open_files: 4096,
            },
            network: Network::Loopback,
            ..SandboxSpec::default()
        };
        let mut sandbox = self.below.acquire(&spec).await?;
        let failed = |e: std::io::Error| SandboxError::io("listen to a worker", e);
        let listener = sandbox.listen_inside(PORT).await?;
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        let request = ExecRequest::new(Program::Argv(self.argv()), WORKER_LIFE);
        let mut process = tokio::spawn(async move {
            let result = sandbox.exec(request).await;
            sandbox.destroy().await?;
            result
        });
        let late = "a wasm worker did not come up in 60 s";
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.map_err(failed),
            ended = &mut process => Err(not_up(ended)),
            () = tokio::time::sleep(START_TIMEOUT) => Err(SandboxError::Died(late.into())),
        };
        let (stream, _) = accepted.inspect_err(|_| process.abort())?;
        let _ = stream.set_nodelay(true);
        let mut worker = Worker {
            stream: BufReader::with_capacity(64 << 10, stream),
            process,
        };
        let ready = tokio::time::timeout(START_TIMEOUT, worker.read()).await;
        match ready {
            Ok(Ok((Kind::Ready, _))) => Ok(worker),
            // The process ends by itself and writes the reason.
            Ok(Err(_)) => match tokio::time::timeout(GRACE, &mut worker.process).await {
                Ok(ended) => Err(not_up(ended)),
                Err(_) => Err(SandboxError::Died("a wasm worker closed its stream".into())),
            },
            other => Err(SandboxError::Died(format!(
                "a wasm worker did not get ready: {other:?}"
            ))),
        }
    }

    /// Command line of a worker; see [`FLAG`].
    fn argv(&self) -> Vec<String> {
        let name = self.config.program.file_name().unwrap_or_default();
        let program = Path::new(PROGRAM_INSIDE).join(name);
        let fixed = [
            program.to_string_lossy().into_owned(),
            FLAG.into(),
            PORT.to_string(),
            FOLDER_INSIDE.into(),
            self.config.warm.to_string(),
        ];
        fixed
            .into_iter()
            .chain(self.modules.iter().cloned())
            .collect()
    }
}

/// Error for a worker that ended before it was ready, with its standard error.
fn not_up(ended: Result<Result<ExecResult, SandboxError>, tokio::task::JoinError>) -> SandboxError {
    match ended {
        Ok(Ok(result)) => {
            let text = String::from_utf8_lossy(&result.stderr).into_owned();
            SandboxError::Died(format!(
                "a wasm worker ended at once ({:?}): {}",
                result.ending,
                text.trim()
            ))
        }
        Ok(Err(e)) => e,
        Err(e) => SandboxError::io("start a wasm worker", e),
    }
}

impl Worker {
    /// Reads a frame.
    async fn read(&mut self) -> Result<(Kind, Vec<u8>), WasmError> {
        let mut start = [0; 5];
        self.stream.read_exact(&mut start).await?;
        let (kind, len) = read_head(start)?;
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).await?;
        Ok((kind, bytes))
    }

    /// Sends a job and collects output until its result.
    async fn run(
        &mut self,
        job: &[u8],
        output: &mut Output,
    ) -> Result<(JobResult, Option<Tree>), WasmError> {
        for bytes in [head(Kind::Job, job.len()).as_slice(), job] {
            self.stream.write_all(bytes).await?;
        }
        loop {
            let (kind, bytes) = self.read().await?;
            let (at, stream) = match kind {
                Kind::Stdout => (0, OutputStream::Stdout),
                Kind::Stderr => (1, OutputStream::Stderr),
                Kind::Done => return unpack_done(&bytes),
                other => return Err(format!("an answer of kind {other:?}").into()),
            };
            output.kept[at].extend_from_slice(&bytes);
            if let Some(onward) = &output.onward {
                // The receiver may have been dropped.
                let _ = onward.send(OutputChunk { stream, bytes }).await;
            }
        }
    }
}
