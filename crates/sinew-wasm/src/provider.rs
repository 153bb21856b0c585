//! The host's side: sandboxes as trees of files, and the workers that run their programs.

use crate::fs::resolve;
use crate::manifest::{Manifest, ManifestError};
use crate::wire::{Done, Job, Kind, Tree, head, pack_job, read_head, unpack_done};
use crate::worker::FLAG;
use sinew_sandbox::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, Network, OutputChunk, OutputStream,
    Program, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    SandboxStats, Snapshot, Usage,
};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Where workers see their modules.
pub const FOLDER_INSIDE: &str = "/opt/sinew-wasm";
/// Where workers see the program that they are.
const PROGRAM_INSIDE: &str = "/opt/sinew-bin";
/// Port of the host on a worker's loopback address.
const PORT: u16 = 4000;
/// How long a worker may take to load its modules.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How often a worker that dies while it starts is started again.
const MAX_STARTS: u32 = 3;
/// How long beyond its deadline an execution may take before its worker is killed.
const GRACE: Duration = Duration::from_secs(2);
/// A worker's own life; it ends with the provider before that.
const WORKER_LIFE: Duration = Duration::from_secs(30 * 86_400);
/// Largest program or argument list.
const MAX_PROGRAM_BYTES: usize = 4 << 20;

/// How a provider runs.
#[derive(Clone, Debug)]
pub struct WasmConfig {
    /// Folder that `scripts/wasm_modules.py` filled.
    pub modules: PathBuf,
    /// Program that becomes the worker: `sinew` itself, or `sinew-wasm-worker`.
    pub program: PathBuf,
    /// Processes that run programs, one at a time each.
    pub workers: usize,
    /// Pythons that each worker has running, for the next executions.
    pub warm: usize,
    /// Memory of a worker.
    pub worker_memory_bytes: u64,
    /// Most live sandboxes; who asks for more waits.
    pub max_live: usize,
    /// How long [`SandboxProvider::acquire`] waits.
    pub acquire_timeout: Duration,
}

impl WasmConfig {
    /// One worker, two warm Pythons.
    pub fn new(modules: PathBuf, program: PathBuf) -> Self {
        Self {
            modules,
            program,
            workers: 1,
            warm: 2,
            worker_memory_bytes: 2 << 30,
            max_live: 4096,
            acquire_timeout: Duration::from_secs(60),
        }
    }

    /// Folders that the sandboxes of workers must show.
    ///
    /// # Errors
    /// If there are no compiled modules.
    pub fn shows(&self) -> Result<Vec<(PathBuf, PathBuf)>, ManifestError> {
        let (_, folder) = Manifest::load(&self.modules)?;
        let program = self.program.parent().unwrap_or(Path::new("/"));
        Ok(vec![
            (folder, FOLDER_INSIDE.into()),
            (program.into(), PROGRAM_INSIDE.into()),
        ])
    }
}

fn io_error(operation: &str, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

struct Inner {
    level_below: Arc<dyn SandboxProvider>,
    config: WasmConfig,
    modules: Vec<String>,
    idle: Mutex<Vec<Worker>>,
    workers: Semaphore,
    live: Arc<Semaphore>,
    next_snapshot: AtomicU64,
    protections: Arc<Vec<Protection>>,
}

/// Sandboxes of interpreters in WebAssembly.
pub struct WasmProvider {
    inner: Arc<Inner>,
}

impl std::fmt::Debug for WasmProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WasmProvider")
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

/// A worker that is ready; dropping it kills it.
struct Worker {
    stream: TcpStream,
    process: tokio::task::JoinHandle<Result<ExecResult, SandboxError>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.process.abort();
    }
}

impl WasmProvider {
    /// A provider whose workers live in sandboxes of `below`, which must show what
    /// [`WasmConfig::shows`] names. Workers start with the first executions.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] if there are no compiled interpreters.
    pub fn new(below: Arc<dyn SandboxProvider>, config: WasmConfig) -> Result<Self, SandboxError> {
        let (manifest, _) =
            Manifest::load(&config.modules).map_err(|e| SandboxError::Unavailable {
                level: "wasm".into(),
                reason: e.to_string(),
            })?;
        let protections = Arc::new(protections(below.as_ref(), &manifest));
        Ok(Self {
            inner: Arc::new(Inner {
                modules: manifest.modules.into_keys().collect(),
                idle: Mutex::default(),
                workers: Semaphore::new(config.workers.max(1)),
                live: Arc::new(Semaphore::new(config.max_live)),
                next_snapshot: AtomicU64::new(1),
                level_below: below,
                config,
                protections,
            }),
        })
    }
}

/// Own walls first, then those of the workers' sandboxes.
fn protections(below: &dyn SandboxProvider, manifest: &Manifest) -> Vec<Protection> {
    let row = |name: &str, how: String| Protection {
        name: name.into(),
        enforced: true,
        how,
    };
    let titles: Vec<_> = manifest
        .modules
        .values()
        .map(|m| m.title.as_str())
        .collect();
    let own = [
        (
            "webassembly",
            format!(
                "{} in linear memories of their own, a fresh one for each execution",
                titles.join(", ")
            ),
        ),
        (
            "file system",
            "in memory; no folder, device or link of the host".into(),
        ),
        ("network", "no sockets in the interface".into()),
        ("memory", "linear memory and tables bounded".into()),
        (
            "time",
            "epochs every 2 ms; host calls end by the deadline".into(),
        ),
        (
            "modules",
            format!("hashes checked; compiled by {}", manifest.compiler),
        ),
    ];
    let below = below.protections();
    let worker = below.iter().map(|p| Protection {
        name: format!("worker: {}", p.name),
        ..p.clone()
    });
    own.into_iter()
        .map(|(name, how)| row(name, how))
        .chain(worker)
        .collect()
}

impl Inner {
    async fn worker(&self) -> Result<Worker, SandboxError> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        match idle {
            Some(worker) if !worker.process.is_finished() => return Ok(worker),
            _ => {}
        }
        let mut starts = 1;
        loop {
            match self.launch().await {
                Err(SandboxError::Died(_)) if starts < MAX_STARTS => starts += 1,
                launched => return launched,
            }
        }
    }

    async fn launch(&self) -> Result<Worker, SandboxError> {
        let spec = SandboxSpec {
            limits: Limits {
                cpu_s: WORKER_LIFE.as_secs_f64(),
                memory_bytes: self.config.worker_memory_bytes,
                processes: 64,
                output_bytes: 64 << 10,
                work_bytes: 1 << 20,
                open_files: 64,
            },
            network: Network::Loopback,
            ..SandboxSpec::default()
        };
        let mut sandbox = self.level_below.acquire(&spec).await?;
        let listener = sandbox.listen_inside(PORT).await?;
        listener
            .set_nonblocking(true)
            .map_err(|e| io_error("listen to a worker", e))?;
        let listener =
            TcpListener::from_std(listener).map_err(|e| io_error("listen to a worker", e))?;
        let name = self.config.program.file_name().unwrap_or_default();
        let program = Path::new(PROGRAM_INSIDE)
            .join(name)
            .to_string_lossy()
            .into_owned();
        let mut argv = vec![
            program,
            FLAG.into(),
            PORT.to_string(),
            FOLDER_INSIDE.into(),
            self.config.warm.to_string(),
        ];
        argv.extend(self.modules.iter().cloned());
        let request = ExecRequest {
            program: Program::Argv(argv),
            stdin: Vec::new(),
            deadline: WORKER_LIFE,
        };
        let mut process = tokio::spawn(async move {
            let result = sandbox.exec(request).await;
            sandbox.destroy().await?;
            result
        });
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted.map_err(|e| io_error("listen to a worker", e)),
            ended = &mut process => Err(not_up(ended)),
            () = tokio::time::sleep(START_TIMEOUT) => Err(SandboxError::Died("a wasm worker did not come up in 30 s".into())),
        };
        let (stream, _) = accepted.inspect_err(|_| process.abort())?;
        let _ = stream.set_nodelay(true);
        let mut worker = Worker { stream, process };
        let ready = tokio::time::timeout(START_TIMEOUT, worker.read()).await;
        match ready {
            Ok(Ok((Kind::Ready, _))) => Ok(worker),
            other => Err(SandboxError::Died(format!(
                "a wasm worker did not get ready: {other:?}"
            ))),
        }
    }

    async fn run(
        &self,
        job: Vec<u8>,
        deadline: Duration,
        output: &mut Output,
    ) -> Result<(Done, Option<Tree>), SandboxError> {
        let closed = |_| SandboxError::Died("the provider ended".into());
        let permit = self.workers.acquire().await.map_err(closed)?;
        let mut worker = self.worker().await?;
        let done = tokio::time::timeout(deadline + GRACE, worker.run(&job, output)).await;
        let result = match done {
            // Not even a host call came back: the worker is killed with what runs in it.
            Err(_) => return Ok((Done::new(Ending::Timeout), None)),
            Ok(Err(_)) => return Ok((Done::new(Ending::SandboxDied), None)),
            Ok(Ok(result)) => result,
        };
        if result.0.failure.is_none() {
            self.idle
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(worker);
        }
        drop(permit);
        Ok(result)
    }
}

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
        Err(e) => io_error("start a wasm worker", e),
    }
}

/// Output as it comes in, and where it goes on to.
#[derive(Default)]
struct Output {
    kept: [Vec<u8>; 2],
    onward: Option<tokio::sync::mpsc::Sender<OutputChunk>>,
}

impl Worker {
    async fn read(&mut self) -> Result<(Kind, Vec<u8>), String> {
        let mut start = [0; 5];
        self.stream
            .read_exact(&mut start)
            .await
            .map_err(|e| e.to_string())?;
        let (kind, len) = read_head(start)?;
        let mut bytes = vec![0; len];
        self.stream
            .read_exact(&mut bytes)
            .await
            .map_err(|e| e.to_string())?;
        Ok((kind, bytes))
    }

    async fn run(
        &mut self,
        job: &[u8],
        output: &mut Output,
    ) -> Result<(Done, Option<Tree>), String> {
        self.stream
            .write_all(&head(Kind::Job, job.len()))
            .await
            .map_err(|e| e.to_string())?;
        self.stream
            .write_all(job)
            .await
            .map_err(|e| e.to_string())?;
        loop {
            let (kind, bytes) = self.read().await?;
            let (at, stream) = match kind {
                Kind::Stdout => (0, OutputStream::Stdout),
                Kind::Stderr => (1, OutputStream::Stderr),
                Kind::Done => return unpack_done(&bytes),
                Kind::Job | Kind::Ready => return Err(format!("an answer of kind {kind:?}")),
            };
            output.kept[at].extend_from_slice(&bytes);
            if let Some(onward) = &output.onward {
                // Whoever asked for it may have gone.
                let _ = onward.send(OutputChunk { stream, bytes }).await;
            }
        }
    }
}

impl SandboxProvider for WasmProvider {
    fn level(&self) -> &'static str {
        "wasm"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.make(spec, Arc::default()).await })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.inner.protections)
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            let tree = Arc::clone(&snapshot.handle).downcast::<Tree>();
            let tree = tree.map_err(|_| SandboxError::Request {
                field: "snapshot",
                value: format!("of level {}", snapshot.level),
                allowed: "one of level wasm".into(),
            })?;
            self.make(spec, tree).await
        })
    }
}

impl WasmProvider {
    async fn make(
        &self,
        spec: &SandboxSpec,
        base: Arc<Tree>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        if spec.network != Network::None {
            return Err(SandboxError::Unsupported {
                operation: "reach a network",
            });
        }
        let missing = self.inner.protections.iter().filter(|p| !p.enforced);
        let missing: Vec<_> = missing.map(|p| format!("{} ({})", p.name, p.how)).collect();
        if spec.strict && !missing.is_empty() {
            return Err(SandboxError::NotEnforced {
                missing: missing.join(", "),
            });
        }
        let config = &self.inner.config;
        let waited = tokio::time::timeout(
            config.acquire_timeout,
            Arc::clone(&self.inner.live).acquire_owned(),
        );
        let Ok(Ok(permit)) = waited.await else {
            return Err(SandboxError::Busy {
                waited_s: config.acquire_timeout.as_secs(),
                live: config.max_live,
                limit: config.max_live,
            });
        };
        Ok(Box::new(WasmSandbox {
            inner: Arc::clone(&self.inner),
            spec: spec.clone(),
            tree: Arc::clone(&base),
            base,
            executions: 0,
            cpu_s: 0.0,
            _permit: permit,
        }))
    }
}

struct WasmSandbox {
    inner: Arc<Inner>,
    spec: SandboxSpec,
    tree: Arc<Tree>,
    /// What it started from.
    base: Arc<Tree>,
    executions: u64,
    cpu_s: f64,
    _permit: OwnedSemaphorePermit,
}

fn bytes(tree: &Tree) -> u64 {
    tree.values().flatten().map(|f| f.len() as u64).sum()
}

fn refused(value: &str, allowed: impl Into<String>) -> SandboxError {
    SandboxError::Request {
        field: "program",
        value: value.into(),
        allowed: allowed.into(),
    }
}

impl WasmSandbox {
    /// Module, arguments, and code for an interpreter that is running already.
    fn program(
        &self,
        program: Program,
    ) -> Result<(String, Vec<String>, Option<String>), SandboxError> {
        let names = self.inner.modules.join(", ");
        let (module, args, code) = match program {
            Program::Python(code) => ("python".to_string(), Vec::new(), Some(code)),
            Program::Shell(_) => {
                return Err(refused(
                    "a script for the shell",
                    format!("Python code, or argv with one of: {names}"),
                ));
            }
            Program::Argv(argv) => {
                let name = argv.first().cloned().unwrap_or_default();
                let module = if name == "python3" {
                    "python".into()
                } else {
                    name
                };
                (module, argv, None)
            }
        };
        if !self.inner.modules.contains(&module) {
            return Err(refused(&module, format!("one of: {names}")));
        }
        let total: usize =
            args.iter().map(String::len).sum::<usize>() + code.as_ref().map_or(0, String::len);
        if total > MAX_PROGRAM_BYTES {
            return Err(refused(
                &format!("{total} bytes"),
                format!("at most {MAX_PROGRAM_BYTES} bytes"),
            ));
        }
        Ok((module, args, code))
    }

    async fn run(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
        let began = Instant::now();
        let (module, args, code) = self.program(request.program)?;
        let limits = &self.spec.limits;
        let env = [
            ("HOME", "/work"),
            ("TMPDIR", "/tmp"),
            ("LANG", "C.UTF-8"),
            ("PWD", "/work"),
        ];
        let env = env.map(|(n, v)| (n.to_string(), v.to_string()));
        let job = Job {
            module,
            args,
            env: env
                .into_iter()
                .chain(self.spec.env.clone())
                .chain(options.env)
                .collect(),
            code,
            deadline_ms: request.deadline.as_millis().min(u128::from(u32::MAX)) as u64,
            cpu_ms: (limits.cpu_s * 1e3) as u64,
            memory_bytes: limits.memory_bytes,
            output_bytes: limits.output_bytes,
            work_bytes: limits.work_bytes,
            open_files: limits.open_files,
            stream: options.output.is_some(),
            ..Job::default()
        };
        let job =
            pack_job(job, &request.stdin, &self.tree).map_err(|e| io_error("pack a job", e))?;
        let mut output = Output {
            onward: options.output,
            ..Output::default()
        };
        let (done, files) = self.inner.run(job, request.deadline, &mut output).await?;
        if let Some(failure) = done.failure {
            return Err(SandboxError::Died(failure));
        }
        if let Some(files) = files {
            self.tree = Arc::new(files);
        }
        self.executions += 1;
        self.cpu_s += done.cpu_s;
        let [stdout, stderr] = output.kept;
        Ok(ExecResult {
            ending: done.ending,
            truncated: done.truncated,
            usage: Usage {
                cpu_s: done.cpu_s,
                peak_memory_bytes: done.peak_memory_bytes,
                wall_s: began.elapsed().as_secs_f64(),
                output_bytes: (stdout.len() + stderr.len()) as u64,
                file_bytes: bytes(&self.tree),
            },
            stdout,
            stderr,
            protections: Arc::clone(&self.inner.protections),
        })
    }

    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), String> {
        let path = plain(path)?;
        let old = self
            .tree
            .get(&path)
            .and_then(|f| f.as_ref().map(|f| f.len() as u64))
            .unwrap_or_default();
        let limit = self.spec.limits.work_bytes;
        if bytes(&self.tree) - old + content.len() as u64 > limit {
            return Err(format!(
                "no room: the sandbox's files may have {limit} bytes"
            ));
        }
        if self.tree.get(&path).is_some_and(Option::is_none) {
            return Err("is a folder".into());
        }
        let tree = Arc::make_mut(&mut self.tree);
        for (at, _) in path.match_indices('/') {
            let folder = tree.entry(path[..at].into()).or_insert(None);
            if folder.is_some() {
                return Err(format!("{} is no folder", &path[..at]));
            }
        }
        tree.insert(path, Some(content.into()));
        Ok(())
    }

    fn read(&self, path: &str, max_bytes: u64) -> Result<Vec<u8>, String> {
        match self.tree.get(&plain(path)?) {
            Some(Some(file)) if file.len() as u64 <= max_bytes => Ok(file.to_vec()),
            Some(Some(_)) => Err(format!("is larger than {max_bytes} bytes")),
            Some(None) => Err("is a folder".into()),
            None => Err("does not exist".into()),
        }
    }
}

/// A path below the work folder.
fn plain(path: &str) -> Result<String, String> {
    let named = !path.split('/').any(|p| matches!(p, "" | "." | ".."));
    let resolved = resolve("", path)
        .ok()
        .filter(|p| named && p != "tmp" && !p.starts_with("tmp/"));
    resolved.ok_or_else(|| {
        "path must be relative, below the work folder, without `..`, not in tmp".into()
    })
}

impl Sandbox for WasmSandbox {
    fn exec(&mut self, request: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request, ExecOptions::default()))
    }

    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request, options))
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            self.write(path, content)
                .map_err(|e| io_error(&format!("write {path}"), e))
        })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            self.read(path, max_bytes)
                .map_err(|e| io_error(&format!("read {path}"), e))
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        let snapshot = Snapshot {
            level: "wasm",
            id: self.inner.next_snapshot.fetch_add(1, Ordering::Relaxed),
            handle: Arc::clone(&self.tree) as Arc<dyn std::any::Any + Send + Sync>,
        };
        Box::pin(async move { Ok(snapshot) })
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        self.tree = Arc::clone(&self.base);
        Box::pin(async { Ok(()) })
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        let file_bytes = bytes(&self.tree);
        let stats = SandboxStats {
            memory_bytes: file_bytes,
            file_bytes,
            file_count: self.tree.len() as u64,
            executions: self.executions,
            cpu_s: self.cpu_s,
            ..SandboxStats::default()
        };
        Box::pin(async move { Ok(stats) })
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        drop(self);
        Box::pin(async { Ok(()) })
    }
}
