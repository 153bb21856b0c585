//! Host side of the level: sandboxes are file trees, and workers run their programs.

use crate::config::WasmConfig;
use crate::error::WasmError;
use crate::fs::resolve;
use crate::manifest::Manifest;
use crate::wire::{Job, Tree, base_env, pack_job};
use crate::workers::{Output, Workers};
use sinew_sandbox::{
    ExecOptions, ExecRequest, ExecResult, Network, Places, Program, Protection, Sandbox,
    SandboxError, SandboxFuture, SandboxProvider, SandboxSpec, SandboxStats, Snapshot, Usage,
};
use std::fs::File;
use std::io::{BufReader, Seek};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;

/// Maximum bytes of a program or argument list.
const MAX_PROGRAM_BYTES: usize = 4 << 20;

/// State of a provider, shared with its sandboxes.
struct Inner {
    /// Settings of the provider.
    config: WasmConfig,
    /// Names of the modules.
    modules: Vec<String>,
    /// Workers, which start with the first executions.
    workers: Workers,
    /// Free sandboxes.
    live: Places,
    /// Next number of a sandbox or snapshot.
    next: AtomicU64,
    /// Protections of all sandboxes.
    protections: Arc<Vec<Protection>>,
}

impl Inner {
    /// Creates a snapshot. Data shared with other snapshots counts for each of them.
    fn keep(&self, tree: Arc<Tree>) -> Snapshot {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        Snapshot {
            level: "wasm",
            id,
            stores: [(id, bytes(&tree))].into(),
            handle: tree,
        }
    }
}

/// Provider of sandboxes with interpreters in WebAssembly.
pub struct WasmProvider {
    /// State shared with the sandboxes. It outlives the provider as long as one of them lives.
    inner: Arc<Inner>,
}

impl std::fmt::Debug for WasmProvider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WasmProvider")
            .field("config", &self.inner.config)
            .finish_non_exhaustive()
    }
}

impl WasmProvider {
    /// Creates a provider whose workers run in sandboxes of `below`, which must mount the folders of
    /// [`WasmConfig::shows`]. Workers start with the first executions.
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
                workers: Workers::new(below, config.clone(), &manifest),
                modules: manifest.modules.into_keys().collect(),
                live: Places::new(config.max_live, config.acquire_timeout),
                next: AtomicU64::new(1),
                config,
                protections,
            }),
        })
    }
}

/// Protections of this level, followed by those of the workers' sandboxes.
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
                "{} in linear memories of their own; every program has a fresh one",
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

    fn health(&self) -> Result<(), SandboxError> {
        self.inner.workers.health()
    }

    fn fork<'a>(
        &'a self,
        spec: &'a SandboxSpec,
        snapshot: &'a Snapshot,
    ) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move { self.make(spec, own(snapshot)?).await })
    }

    fn export_file<'a>(
        &'a self,
        snapshot: &'a Snapshot,
        max_bytes: u64,
    ) -> SandboxFuture<'a, File> {
        Box::pin(async move {
            let tree = own(snapshot)?;
            apart("export", move || {
                let file = sinew_sandbox::archive::spool(&[])?;
                let mut file = crate::archive::pack(&tree, file, max_bytes)?;
                file.rewind()?;
                Ok(file)
            })
            .await
        })
    }

    fn import_file(&self, archive: File, max_bytes: u64) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let unpack = move || crate::archive::unpack(BufReader::new(archive), max_bytes);
            let tree = apart("import", unpack).await?;
            Ok(self.inner.keep(Arc::new(tree)))
        })
    }
}

/// Runs file I/O on a blocking thread.
async fn apart<T: Send + 'static>(
    operation: &'static str,
    work: impl FnOnce() -> Result<T, WasmError> + Send + 'static,
) -> Result<T, SandboxError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.map_err(|e| SandboxError::io(operation, e))?;
    done.map_err(|e| SandboxError::io(operation, e))
}

/// Files in a snapshot of this level.
///
/// # Errors
/// [`SandboxError::Request`] for a snapshot of another level.
fn own(snapshot: &Snapshot) -> Result<Arc<Tree>, SandboxError> {
    let tree = Arc::clone(&snapshot.handle).downcast();
    tree.map_err(|_| SandboxError::Request {
        field: "snapshot",
        value: format!("of level {}", snapshot.level),
        allowed: "one of level wasm; others are exported and imported".into(),
    })
}

impl WasmProvider {
    /// Creates a sandbox from files. No worker takes part: it only reserves a place among the live ones.
    ///
    /// # Errors
    /// [`SandboxError::Unsupported`] for a network, [`SandboxError::NotEnforced`] if `spec` is strict and a
    /// protection is missing, [`SandboxError::Busy`] at the limit of live sandboxes.
    async fn make(
        &self,
        spec: &SandboxSpec,
        base: Arc<Tree>,
    ) -> Result<Box<dyn Sandbox>, SandboxError> {
        spec.refuse_writable_root("wasm")?;
        if spec.network != Network::None {
            return Err(SandboxError::Unsupported {
                operation: "reach a network",
            });
        }
        spec.refuse_missing(self.inner.protections.iter())?;
        let permit = self.inner.live.take().await?;
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

/// A sandbox of the level.
struct WasmSandbox {
    /// State of the provider.
    inner: Arc<Inner>,
    /// Limits, environment and settings.
    spec: SandboxSpec,
    /// Current files.
    tree: Arc<Tree>,
    /// Files at the start, for a reset.
    base: Arc<Tree>,
    /// Number of executions.
    executions: u64,
    /// CPU seconds of all executions.
    cpu_s: f64,
    /// Place among the live sandboxes.
    _permit: OwnedSemaphorePermit,
}

/// Bytes of all files of a tree.
fn bytes(tree: &Tree) -> u64 {
    tree.values().flatten().map(|f| f.len() as u64).sum()
}

/// Error for a program that this level cannot run.
fn refused(value: &str, allowed: impl Into<String>) -> SandboxError {
    SandboxError::Request {
        field: "program",
        value: value.into(),
        allowed: allowed.into(),
    }
}

impl WasmSandbox {
    /// Module, arguments, and code for an interpreter that is already running.
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
        if code.as_ref().is_some_and(|c| c.contains('\0')) {
            return Err(refused("text with a zero byte", "text without zero bytes"));
        }
        if total > MAX_PROGRAM_BYTES {
            return Err(refused(
                &format!("{total} bytes"),
                format!("at most {MAX_PROGRAM_BYTES} bytes"),
            ));
        }
        Ok((module, args, code))
    }

    /// Job for a worker, without standard input and files.
    fn job(
        &self,
        program: Program,
        deadline: Duration,
        env: Vec<(String, String)>,
    ) -> Result<Job, SandboxError> {
        let (module, args, code) = self.program(program)?;
        let limits = &self.spec.limits;
        let asked = limits.memory_bytes.saturating_add(limits.work_bytes);
        let most = self.inner.config.program_bytes();
        if asked > most {
            return Err(SandboxError::Unavailable {
                level: "wasm".into(),
                reason: format!(
                    "a worker has no memory for this program: its limits of memory and files are {asked} \
                     bytes together, at most {most}"
                ),
            });
        }
        Ok(Job {
            module,
            args,
            env: self.variables(env)?,
            code,
            deadline_ms: deadline.as_millis().min(u128::from(u32::MAX)) as u64,
            limits: limits.clone(),
            ..Job::default()
        })
    }

    /// Runs a program in a worker and takes over the changed files. A result of a sandbox that died is an
    /// error; the files are then those from before.
    async fn run(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
        options.refuse_user_and_workdir()?;
        let began = Instant::now();
        let (stdin, deadline) = (request.stdin, request.deadline);
        let mut job = self.job(request.program, deadline, options.env)?;
        job.stream = options.output.is_some();
        let job =
            pack_job(job, &stdin, &self.tree).map_err(|e| SandboxError::io("pack a job", e))?;
        let mut output = Output {
            onward: options.output,
            ..Output::default()
        };
        let ran = self.inner.workers.run(&job, deadline, &mut output);
        let (done, files) = ran.await?;
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

    /// Environment variables of an execution.
    fn variables(
        &self,
        more: Vec<(String, String)>,
    ) -> Result<Vec<(String, String)>, SandboxError> {
        let mut env = base_env();
        env.extend(self.spec.env.iter().cloned().chain(more));
        match env
            .iter()
            .find(|(n, v)| n.is_empty() || n.contains(['\0', '=']) || v.contains('\0'))
        {
            None => Ok(env),
            Some((name, _)) => Err(SandboxError::Request {
                field: "env",
                value: format!("{name:?}"),
                allowed: "names without `=`, and no zero bytes".into(),
            }),
        }
    }

    /// Writes a file into the tree, with the folders above it. The tree is copied if a snapshot shares it.
    fn write(&mut self, path: &str, content: &[u8]) -> Result<(), WasmError> {
        let path = plain(path)?;
        let old = self
            .tree
            .get(&path)
            .and_then(|f| f.as_ref().map(|f| f.len() as u64))
            .unwrap_or_default();
        let limit = self.spec.limits.work_bytes;
        if bytes(&self.tree) - old + content.len() as u64 > limit {
            return Err(
                format!("quota exceeded: the sandbox's files may have {limit} bytes").into(),
            );
        }
        if self.tree.get(&path).is_some_and(Option::is_none) {
            return Err("is a folder".into());
        }
        let tree = Arc::make_mut(&mut self.tree);
        for (at, _) in path.match_indices('/') {
            let folder = tree.entry(path[..at].into()).or_insert(None);
            if folder.is_some() {
                return Err(format!("{} is no folder", &path[..at]).into());
            }
        }
        tree.insert(path, Some(content.into()));
        Ok(())
    }

    /// Reads a file from the tree.
    fn read(&self, path: &str, max_bytes: u64) -> Result<Vec<u8>, WasmError> {
        match self.tree.get(&plain(path)?) {
            Some(Some(file)) if file.len() as u64 <= max_bytes => Ok(file.to_vec()),
            Some(Some(_)) => Err(format!("is larger than {max_bytes} bytes").into()),
            Some(None) => Err("is a folder".into()),
            None => Err("does not exist".into()),
        }
    }
}

/// Normalizes a path relative to the work folder.
fn plain(path: &str) -> Result<String, WasmError> {
    let named = !path.split('/').any(|p| matches!(p, "" | "." | ".."));
    let resolved = resolve("", path)
        .ok()
        .filter(|p| named && p != "tmp" && !p.starts_with("tmp/"));
    resolved.ok_or_else(|| {
        "path must be relative, below the work folder, without `..`, not in tmp".into()
    })
}

impl Sandbox for WasmSandbox {
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
                .map_err(|e| SandboxError::io(format!("write {path}"), e))
        })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            self.read(path, max_bytes)
                .map_err(|e| SandboxError::io(format!("read {path}"), e))
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let tree = Arc::clone(&self.tree);
            Ok(self.inner.keep(tree))
        })
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
