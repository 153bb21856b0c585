//! The host's side of the process level.

use super::jail::{SHELL, step_name};
use super::messages::{CgroupEvents, MAX_PACKET, Numbered, Reply, Request, Status, receive, send};
use super::spawner::{Config, FLAG};
use crate::port::{
    Ending, ExecRequest, ExecResult, Program, Protection, Sandbox, SandboxError, SandboxFuture,
    SandboxProvider, SandboxSpec, Usage,
};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, Shutdown, SockFlag, SockType, shutdown, socketpair};
use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// How long a killed sandbox may take to be gone.
const KILL_GRACE: Duration = Duration::from_secs(10);
/// How long the spawner may take to get ready.
const START_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest program: one argument of execve may have 128 KiB.
const MAX_PROGRAM_BYTES: usize = 96 << 10;

/// How a provider runs.
#[derive(Clone, Debug)]
pub struct ProcessConfig {
    /// Program that becomes the spawner: `sinew` itself, or `sinew-sandbox-spawner`.
    pub spawner: PathBuf,
    /// Most live sandboxes; who asks for more waits.
    pub max_live: usize,
    /// How long [`SandboxProvider::acquire`] waits.
    pub acquire_timeout: Duration,
    /// The Python that runs [`Program::Python`]; its real path and prefix are shown inside.
    pub python: PathBuf,
}

impl ProcessConfig {
    /// The spawner in `spawner`, the Python that Debian installs, else the first `python3` of
    /// `search_path` (folders separated by colons).
    pub fn new(spawner: PathBuf, search_path: &str) -> Self {
        let system = Path::new("/usr/bin/python3");
        let found = std::iter::once(PathBuf::from("/usr/bin"))
            .chain(search_path.split(':').map(PathBuf::from))
            .map(|dir| dir.join("python3"))
            .find(|p| p.is_file());
        Self {
            spawner,
            max_live: 64,
            acquire_timeout: Duration::from_secs(60),
            python: found.unwrap_or_else(|| system.into()),
        }
    }
}

type Answer = oneshot::Sender<Result<Option<OwnedFd>, String>>;

#[derive(Debug, Default)]
struct Waiting {
    /// Why nothing can be asked any more.
    dead: Option<String>,
    answers: HashMap<u64, Answer>,
    ends: HashMap<u64, oneshot::Sender<CgroupEvents>>,
}

#[derive(Debug)]
struct Spawner {
    socket: OwnedFd,
    waiting: Mutex<Waiting>,
    next: AtomicU64,
    protections: Arc<Vec<Protection>>,
}

/// Sandboxes of processes in namespaces. Dropping it and its sandboxes ends the spawner.
#[derive(Debug)]
pub struct ProcessProvider {
    spawner: Arc<Spawner>,
    live: Arc<Semaphore>,
    config: ProcessConfig,
    python: String,
}

fn unavailable(reason: impl Into<String>) -> SandboxError {
    SandboxError::Unavailable {
        level: "process".into(),
        reason: reason.into(),
    }
}

fn io_error(operation: &str, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

impl ProcessProvider {
    /// Starts a spawner and asks it what this host enforces.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with what is missing and what to do.
    pub fn start(config: ProcessConfig) -> Result<Self, SandboxError> {
        let python = config.python.canonicalize().map_err(|e| {
            let path = config.python.display();
            unavailable(format!("no Python at {path}: {e}; install python3"))
        })?;
        let prefix = python
            .parent()
            .and_then(Path::parent)
            .map(Path::to_path_buf);
        let binds = match prefix {
            Some(p) if !python.starts_with("/usr") && p != Path::new("/") => vec![p],
            _ => Vec::new(),
        };
        let (socket, child) = launch(&config.spawner, &Config { binds })?;
        let protections = hello(&socket)?;
        let spawner = Arc::new(Spawner {
            socket,
            waiting: Mutex::default(),
            next: AtomicU64::new(1),
            protections: Arc::new(protections),
        });
        let reader = Arc::clone(&spawner);
        std::thread::Builder::new()
            .name("sinew-sandbox".into())
            .spawn(move || read_replies(&reader, child))
            .map_err(|e| io_error("start a thread", e))?;
        Ok(Self {
            spawner,
            live: Arc::new(Semaphore::new(config.max_live)),
            python: python.to_string_lossy().into_owned(),
            config,
        })
    }
}

impl Drop for ProcessProvider {
    fn drop(&mut self) {
        let _ = shutdown(self.spawner.socket.as_raw_fd(), Shutdown::Both);
    }
}

fn launch(program: &Path, config: &Config) -> Result<(OwnedFd, Child), SandboxError> {
    let (ours, theirs) = socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC,
    )
    .map_err(|e| io_error("socketpair", e))?;
    let config = serde_json::to_string(config).map_err(|e| io_error("encode", e))?;
    let child = Command::new(program)
        .arg(FLAG)
        .arg(config)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .env_clear()
        .current_dir("/")
        .spawn()
        .map_err(|e| io_error(&format!("start {}", program.display()), e))?;
    Ok((ours, child))
}

fn hello(socket: &OwnedFd) -> Result<Vec<Protection>, SandboxError> {
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    let timeout = PollTimeout::try_from(START_TIMEOUT).unwrap_or(PollTimeout::MAX);
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, timeout).map_err(|e| io_error("poll", e))?;
    if ready == 0 {
        return Err(unavailable("the spawner did not get ready in 20 s"));
    }
    let mut buffer = vec![0; MAX_PACKET + 1];
    match receive(socket.as_fd(), &mut buffer) {
        Ok(Some((Reply::Hello { protections }, _))) => Ok(protections),
        Ok(Some((Reply::Unavailable { reason }, _))) => Err(unavailable(reason)),
        Ok(other) => Err(unavailable(format!(
            "the spawner ended at once ({:?})",
            other.map(|o| o.0)
        ))),
        Err(e) => Err(unavailable(e)),
    }
}

/// The reader's thread: hands replies to whoever waits, until the spawner is gone.
fn read_replies(spawner: &Spawner, mut child: Child) {
    let mut buffer = vec![0; MAX_PACKET + 1];
    loop {
        let reply = match receive::<Reply>(spawner.socket.as_fd(), &mut buffer) {
            Ok(Some(reply)) => reply,
            Ok(None) | Err(_) => break,
        };
        let mut waiting = spawner.lock();
        match reply {
            (Reply::Done { seq, error }, fds) => {
                if let Some(answer) = waiting.answers.remove(&seq) {
                    let result = error.map_or(Ok(fds.into_iter().next()), Err);
                    let _ = answer.send(result);
                }
            }
            (Reply::Ended { id, events }, _) => {
                if let Some(end) = waiting.ends.remove(&id) {
                    let _ = end.send(events);
                }
            }
            (Reply::Hello { .. } | Reply::Unavailable { .. }, _) => {}
        }
    }
    let mut waiting = spawner.lock();
    *waiting = Waiting {
        dead: Some("the process that starts sandboxes is gone".into()),
        ..Waiting::default()
    };
    drop(waiting);
    let _ = child.wait();
}

impl Spawner {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request whose answer nobody waits for.
    fn tell(&self, request: Request) {
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let _ = send(self.socket.as_fd(), &Numbered { seq, request }, &[]);
    }

    async fn ask(&self, request: Request, fds: &[RawFd]) -> Result<Option<OwnedFd>, SandboxError> {
        let seq = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = oneshot::channel();
        {
            let mut waiting = self.lock();
            if let Some(dead) = &waiting.dead {
                return Err(SandboxError::Died(dead.clone()));
            }
            waiting.answers.insert(seq, sender);
        }
        if let Err(e) = send(self.socket.as_fd(), &Numbered { seq, request }, fds) {
            self.lock().answers.remove(&seq);
            return Err(io_error("ask the spawner", e));
        }
        match receiver.await {
            Ok(Ok(fd)) => Ok(fd),
            Ok(Err(message)) => Err(io_error("sandbox", message)),
            Err(_) => Err(SandboxError::Died(
                "the process that starts sandboxes is gone".into(),
            )),
        }
    }
}

impl SandboxProvider for ProcessProvider {
    fn level(&self) -> &'static str {
        "process"
    }

    fn acquire<'a>(&'a self, spec: &'a SandboxSpec) -> SandboxFuture<'a, Box<dyn Sandbox>> {
        Box::pin(async move {
            if spec.strict {
                refuse_missing(&self.spawner.protections)?;
            }
            let waited = tokio::time::timeout(
                self.config.acquire_timeout,
                Arc::clone(&self.live).acquire_owned(),
            );
            let Ok(Ok(permit)) = waited.await else {
                return Err(SandboxError::Busy {
                    waited_s: self.config.acquire_timeout.as_secs(),
                    live: self.config.max_live,
                    limit: self.config.max_live,
                });
            };
            let id = self.spawner.next.fetch_add(1, Ordering::Relaxed);
            let limits = spec.limits.clone();
            let sandbox = ProcessSandbox {
                spawner: Arc::clone(&self.spawner),
                id,
                spec: spec.clone(),
                python: self.python.clone(),
                _permit: permit,
            };
            self.spawner
                .ask(Request::Create { id, limits }, &[])
                .await?;
            Ok(Box::new(sandbox) as Box<dyn Sandbox>)
        })
    }

    fn protections(&self) -> Arc<Vec<Protection>> {
        Arc::clone(&self.spawner.protections)
    }
}

fn refuse_missing(protections: &[Protection]) -> Result<(), SandboxError> {
    let missing: Vec<String> = protections
        .iter()
        .filter(|p| !p.enforced)
        .map(|p| format!("{} ({})", p.name, p.how))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(SandboxError::NotEnforced {
        missing: missing.join(", "),
    })
}

struct ProcessSandbox {
    spawner: Arc<Spawner>,
    id: u64,
    spec: SandboxSpec,
    python: String,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ProcessSandbox {
    fn drop(&mut self) {
        self.spawner.tell(Request::Destroy { id: self.id });
    }
}

/// Kills what runs if the caller stops waiting for it.
struct KillOnDrop<'a> {
    spawner: &'a Spawner,
    id: u64,
    armed: bool,
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.spawner.tell(Request::Kill { id: self.id });
        }
    }
}

struct Pipes {
    stdin: pipe::Sender,
    stdout: pipe::Receiver,
    stderr: pipe::Receiver,
    status: pipe::Receiver,
    theirs: [OwnedFd; 4],
}

fn pipes() -> std::io::Result<Pipes> {
    let (stdin_r, stdin_w) = std::io::pipe()?;
    let (stdout_r, stdout_w) = std::io::pipe()?;
    let (stderr_r, stderr_w) = std::io::pipe()?;
    let (status_r, status_w) = std::io::pipe()?;
    Ok(Pipes {
        stdin: pipe::Sender::from_owned_fd(stdin_w.into())?,
        stdout: pipe::Receiver::from_owned_fd(stdout_r.into())?,
        stderr: pipe::Receiver::from_owned_fd(stderr_r.into())?,
        status: pipe::Receiver::from_owned_fd(status_r.into())?,
        theirs: [
            stdin_r.into(),
            stdout_w.into(),
            stderr_w.into(),
            status_w.into(),
        ],
    })
}

/// Everything that a program wrote, up to a bound, and whether there was more.
async fn capture(
    mut pipe: pipe::Receiver,
    max: usize,
    overflow: &tokio::sync::Notify,
) -> (Vec<u8>, bool) {
    let mut kept = Vec::new();
    let mut chunk = vec![0; 16 << 10];
    let mut truncated = false;
    // After the bound the pipe is still drained: a full pipe would look like a hung program.
    while let Ok(n @ 1..) = pipe.read(&mut chunk).await {
        let room = (max - kept.len()).min(n);
        kept.extend_from_slice(&chunk[..room]);
        if room < n && !truncated {
            truncated = true;
            overflow.notify_one();
        }
    }
    (kept, truncated)
}

impl ProcessSandbox {
    fn argv(&self, program: Program) -> Result<Vec<String>, SandboxError> {
        let argv = match program {
            Program::Argv(argv) => argv,
            Program::Python(code) => {
                let python = self.python.clone();
                // Isolated, without site and without writing byte code: nothing that lies in
                // the work folder is imported before the program asks for it.
                vec![
                    python,
                    "-I".into(),
                    "-S".into(),
                    "-B".into(),
                    "-c".into(),
                    code,
                ]
            }
            Program::Shell(script) => {
                vec![SHELL.to_string_lossy().into_owned(), "-c".into(), script]
            }
        };
        let bytes: usize = argv.iter().map(String::len).sum();
        let bad = |value: String, allowed: &str| SandboxError::Request {
            field: "program",
            value,
            allowed: allowed.into(),
        };
        if argv.first().is_none_or(String::is_empty) {
            return Err(bad("empty".into(), "at least the name of a program"));
        }
        if bytes > MAX_PROGRAM_BYTES {
            let allowed = "at most 98304 bytes; write longer ones to a file in the sandbox";
            return Err(bad(format!("{bytes} bytes"), allowed));
        }
        if argv.iter().any(|a| a.contains('\0')) {
            return Err(bad(
                "text with a zero byte".into(),
                "text without zero bytes",
            ));
        }
        Ok(argv)
    }

    fn env(&self) -> Vec<(String, String)> {
        let mut env = vec![
            ("PATH".into(), "/usr/bin:/bin".into()),
            ("HOME".into(), "/work".into()),
            ("TMPDIR".into(), "/tmp".into()),
            ("LANG".into(), "C.UTF-8".into()),
        ];
        env.extend(self.spec.env.clone());
        env
    }

    async fn run(&self, request: ExecRequest) -> Result<ExecResult, SandboxError> {
        let started = Instant::now();
        let argv = self.argv(request.program)?;
        let pipes = pipes().map_err(|e| io_error("pipe", e))?;
        let (ended_sender, ended) = oneshot::channel();
        self.spawner.lock().ends.insert(self.id, ended_sender);
        let raw: Vec<RawFd> = pipes.theirs.iter().map(AsRawFd::as_raw_fd).collect();
        let exec = Request::Exec {
            id: self.id,
            argv,
            env: self.env(),
        };
        self.spawner.ask(exec, &raw).await?;
        drop(pipes.theirs);
        let mut guard = KillOnDrop {
            spawner: &self.spawner,
            id: self.id,
            armed: true,
        };
        let overflow = tokio::sync::Notify::new();
        let max = self.spec.limits.output_bytes as usize;
        let mut stdin = pipes.stdin;
        let mut status_pipe = pipes.status;
        let work = async {
            let feed = async {
                let _ = stdin.write_all(&request.stdin).await;
                drop(stdin);
            };
            let status = async {
                let mut bytes = Vec::new();
                let _ = (&mut status_pipe).take(1024).read_to_end(&mut bytes).await;
                Status::decode(&bytes)
            };
            let (out, err) = (
                capture(pipes.stdout, max, &overflow),
                capture(pipes.stderr, max, &overflow),
            );
            tokio::join!(out, err, status, feed)
        };
        tokio::pin!(work);
        let mut cut = None;
        let deadline = tokio::time::sleep(request.deadline);
        let (stdout, stderr, status, ()) = tokio::select! {
            done = &mut work => done,
            () = deadline => {
                cut = Some(Ending::Timeout);
                self.kill_and(&mut work).await?
            }
            () = overflow.notified() => {
                cut = Some(Ending::OutputLimit);
                self.kill_and(&mut work).await?
            }
        };
        let events = tokio::time::timeout(KILL_GRACE, ended)
            .await
            .map_err(|_| SandboxError::Died("it did not end after a kill".into()))?
            .map_err(|_| SandboxError::Died("the process that starts sandboxes is gone".into()))?;
        guard.armed = false;
        self.result(started, cut, status, events, (stdout, stderr))
    }

    async fn kill_and<T>(
        &self,
        work: &mut (impl Future<Output = T> + Unpin),
    ) -> Result<T, SandboxError> {
        self.spawner.tell(Request::Kill { id: self.id });
        tokio::time::timeout(KILL_GRACE, work)
            .await
            .map_err(|_| SandboxError::Died("it did not end after a kill".into()))
    }

    fn result(
        &self,
        started: Instant,
        cut: Option<Ending>,
        status: Option<Status>,
        events: CgroupEvents,
        output: ((Vec<u8>, bool), (Vec<u8>, bool)),
    ) -> Result<ExecResult, SandboxError> {
        if let Some(s) = status.filter(|s| s.kind == 2 && cut.is_none()) {
            let step = step_name(s.detail);
            let errno = std::io::Error::from_raw_os_error(s.value);
            if step == "execve" {
                return Err(SandboxError::Request {
                    field: "program",
                    value: errno.to_string(),
                    allowed: "a program that the sandbox sees and may run".into(),
                });
            }
            return Err(unavailable(format!("{step}: {errno}")));
        }
        let ending = cut.unwrap_or_else(|| ending(status, events, &output.1.0));
        let ((stdout, cut_out), (stderr, cut_err)) = output;
        // The largest process's resident pages count shared files that no group is charged for.
        let rss = status.map_or(0, |s| u64::from(s.max_rss_kib) << 10);
        let peak_memory_bytes = match events.peak_memory_bytes {
            0 => rss,
            charged => charged,
        };
        Ok(ExecResult {
            ending,
            stdout,
            stderr,
            truncated: cut_out || cut_err,
            usage: Usage {
                cpu_s: status.map_or(0.0, |s| s.cpu_us as f64 * 1e-6),
                peak_memory_bytes,
                wall_s: started.elapsed().as_secs_f64(),
                ..Usage::default()
            },
            protections: Arc::clone(&self.spawner.protections),
        })
    }
}

/// What the status and the kernel's counters say together.
fn ending(status: Option<Status>, events: CgroupEvents, stderr: &[u8]) -> Ending {
    let failed = status.is_none_or(|s| s.kind != 0 || s.value != 0);
    if events.oom_kills > 0 && failed {
        return Ending::OutOfMemory;
    }
    let out_of_memory = b"MemoryError";
    let Some(status) = status else {
        return Ending::SandboxDied;
    };
    match (status.kind, status.value) {
        (1, libc::SIGXCPU) => Ending::Timeout,
        (1, libc::SIGSYS) => Ending::Denied,
        (1, signal) => Ending::Signalled { signal },
        (_, code) if failed && events.process_refusals > 0 => {
            let _ = code;
            Ending::TooManyProcesses
        }
        (_, code)
            if failed
                && stderr
                    .windows(out_of_memory.len())
                    .any(|w| w == out_of_memory) =>
        {
            let _ = code;
            Ending::OutOfMemory
        }
        (_, code) => Ending::Exited { code },
    }
}

impl Sandbox for ProcessSandbox {
    fn exec(&mut self, request: ExecRequest) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request))
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            let memory = memfd_create(c"sinew-file", MFdFlags::MFD_CLOEXEC)
                .map_err(|e| io_error("memfd_create", e))?;
            let mut file = File::from(memory);
            file.write_all(content).map_err(|e| io_error("write", e))?;
            file.rewind().map_err(|e| io_error("rewind", e))?;
            let request = Request::WriteFile {
                id: self.id,
                path: path.into(),
            };
            self.spawner.ask(request, &[file.as_raw_fd()]).await?;
            Ok(())
        })
    }

    fn read_file<'a>(&'a mut self, path: &'a str, max_bytes: u64) -> SandboxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let request = Request::ReadFile {
                id: self.id,
                path: path.into(),
                max_bytes,
            };
            let fd = self.spawner.ask(request, &[]).await?;
            let fd = fd.ok_or_else(|| io_error("read", "the answer had no content"))?;
            let mut bytes = Vec::new();
            let file = File::from(fd);
            file.take(max_bytes)
                .read_to_end(&mut bytes)
                .map_err(|e| io_error("read", e))?;
            Ok(bytes)
        })
    }

    fn destroy(self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async move {
            let id = self.id;
            self.spawner
                .ask(Request::Destroy { id }, &[])
                .await
                .map(|_| ())
        })
    }
}
