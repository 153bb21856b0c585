//! One sandbox of the process level, as the host sees it.
//!
//! One execution runs at a time: methods take `&mut self`. A future that is dropped kills its execution; the
//! sandbox is usable again when that is gone, and a request before that is refused.

use super::client::{Answer, Client, gone, unavailable};
use super::output::{Bounds, StreamOutput, capture, drain, feed};
use super::snapshot::kept;
use super::terminal;
use crate::port::{
    Ending, ExecOptions, ExecRequest, ExecResult, OutputChunk, OutputStream, Program, Sandbox,
    SandboxError, SandboxFuture, SandboxSpec, SandboxStats, Snapshot, Terminal, Usage,
};
use sinew_jail::protocol::{End, Exit, Request, Start, memory_file};
use sinew_jail::walls::{EXECVE, step_name};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, watch};

/// Maximum time until a killed sandbox is gone.
const KILL_GRACE: Duration = Duration::from_secs(60);
/// Memory that can be missing for one allocation of the kernel's.
const FULL_BYTES: u64 = 1 << 20;
/// Time after the start of a program without input before its output is read. Most programs have ended by
/// then, and their output is read once.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// Bytes of an environment: with the longest program it fits a packet.
const MAX_ENV_BYTES: usize = 32 << 10;

pub(super) struct ProcessSandbox {
    client: Arc<Client>,
    id: u64,
    spec: SandboxSpec,
    /// The snapshot that it started from lives as long as it.
    base: Option<Snapshot>,
    executions: u64,
    cpu_s: f64,
    destroyed: bool,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ProcessSandbox {
    fn drop(&mut self) {
        if !self.destroyed {
            self.client.tell(Request::Destroy { id: self.id });
        }
    }
}

/// Kills what runs if the caller stops waiting for it.
/// Armed as long as the end is not known.
struct KillOnDrop<'a> {
    client: &'a Client,
    id: u64,
    armed: bool,
}

impl<'a> KillOnDrop<'a> {
    fn new(client: &'a Client, id: u64) -> Self {
        Self {
            client,
            id,
            armed: true,
        }
    }
}

impl Drop for KillOnDrop<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.client.tell(Request::Kill { id: self.id });
        }
    }
}

/// Standard streams of a program: our ends, and those that go to the spawner.
struct Pipes {
    /// None where there is nothing to feed.
    stdin: Option<pipe::Sender>,
    stdout: OwnedFd,
    stderr: OwnedFd,
    theirs: Vec<OwnedFd>,
}

/// New pipes; without input the program reads the end of a file at once.
fn pipes(fed: bool) -> std::io::Result<Pipes> {
    let (stdout_r, stdout_w) = std::io::pipe()?;
    let (stderr_r, stderr_w) = std::io::pipe()?;
    // A program without input gets a separate pipe, too: the flags of a shared file would be visible to
    // programs of others.
    let (stdin_r, w) = std::io::pipe()?;
    let stdin = if fed {
        Some(pipe::Sender::from_owned_fd(w.into())?)
    } else {
        None
    };
    Ok(Pipes {
        stdin,
        stdout: stdout_r.into(),
        stderr: stderr_r.into(),
        theirs: vec![stdin_r.into(), stdout_w.into(), stderr_w.into()],
    })
}

/// Content of the file that an answer brings.
fn content(answer: Answer, max_bytes: u64) -> Result<Vec<u8>, SandboxError> {
    let file = answer.file;
    let file = file.ok_or_else(|| SandboxError::io("read", "the answer had no content"))?;
    let mut bytes = Vec::new();
    let read = File::from(file).take(max_bytes).read_to_end(&mut bytes);
    read.map_err(|e| SandboxError::io("read", e))?;
    Ok(bytes)
}

/// # Errors
/// [`SandboxError::Request`] for a program that is empty, too long, or has a zero byte.
fn checked(program: &Program) -> Result<Start, SandboxError> {
    let (is_python, args) = crate::guest::checked(program)?;
    Ok(if is_python {
        Start::Python(args.concat())
    } else {
        Start::Argv(args)
    })
}

fn check_env(env: &[(String, String)]) -> Result<(), SandboxError> {
    let bytes: usize = env.iter().map(|(k, v)| k.len() + v.len() + 2).sum();
    if bytes > MAX_ENV_BYTES {
        return Err(SandboxError::Request {
            field: "env",
            value: format!("{bytes} bytes"),
            allowed: "at most 32768 bytes of names and values together".into(),
        });
    }
    Ok(())
}

impl ProcessSandbox {
    pub(super) fn new(
        client: &Arc<Client>,
        id: u64,
        spec: SandboxSpec,
        permit: OwnedSemaphorePermit,
        base: Option<Snapshot>,
    ) -> Self {
        Self {
            client: Arc::clone(client),
            id,
            spec,
            base,
            executions: 0,
            cpu_s: 0.0,
            destroyed: false,
            _permit: permit,
        }
    }

    /// Runs a program to its end. Most programs without input end within [`FIRST_LOOK`]: then their output is
    /// read once, and no stream is registered with the runtime.
    async fn run(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> Result<ExecResult, SandboxError> {
        options.refuse_user_and_workdir()?;
        let started = Instant::now();
        let start = checked(&request.program)?;
        let env = [self.spec.env.clone(), options.env].concat();
        check_env(&env)?;
        let mut pipes =
            pipes(!request.stdin.is_empty()).map_err(|e| SandboxError::io("pipe", e))?;
        let raw: Vec<RawFd> = pipes.theirs.iter().map(AsRawFd::as_raw_fd).collect();
        let exec = Request::Exec {
            id: self.id,
            start,
            env,
        };
        let mut ended = self.client.run(exec, &raw)?;
        drop(std::mem::take(&mut pipes.theirs));
        let mut guard = KillOnDrop::new(&self.client, self.id);
        let mut soon = None;
        if pipes.stdin.is_none() {
            let look = FIRST_LOOK.min(request.deadline);
            if let Ok(told) = tokio::time::timeout(look, &mut ended).await {
                soon = Some(told.map_err(|_| gone())?);
            }
        }
        let max = self.spec.limits.output_bytes as usize;
        let output = options.output;
        let (mut cut, stdout, stderr, end) = match soon {
            Some(end) => {
                let (out, err) = (OutputStream::Stdout, OutputStream::Stderr);
                let captured = async {
                    let stdout = drain(pipes.stdout, max, out, output.clone()).await?;
                    Ok((stdout, drain(pipes.stderr, max, err, output).await?))
                };
                let captured: std::io::Result<_> = captured.await;
                let (stdout, stderr) = captured.map_err(|e| SandboxError::io("read output", e))?;
                (None, stdout, stderr, end)
            }
            None => {
                let until = started + request.deadline;
                let input = &request.stdin;
                self.attend(pipes, input, output, until, ended).await?
            }
        };
        // It wrote too much and ended before anybody looked.
        if stdout.truncated || stderr.truncated {
            cut = cut.or(Some(Ending::OutputLimit));
        }
        guard.armed = false;
        let result = self.result(started, cut, end, stdout, stderr)?;
        self.executions += 1;
        self.cpu_s += result.usage.cpu_s;
        Ok(result)
    }

    /// Feeds a program and takes what it writes until it ends, or its time, or what it may write.
    async fn attend(
        &self,
        pipes: Pipes,
        input: &[u8],
        output: Option<mpsc::Sender<OutputChunk>>,
        until: Instant,
        mut ended: tokio::sync::oneshot::Receiver<End>,
    ) -> Result<(Option<Ending>, StreamOutput, StreamOutput, End), SandboxError> {
        let overflow = Notify::new();
        let (no_more, over) = watch::channel(false);
        let (cutting, cut_short) = watch::channel(false);
        let bounds = Bounds {
            max: self.spec.limits.output_bytes as usize,
            overflow: &overflow,
            over: &over,
            cut_short: &cut_short,
        };
        let (out, err) = (OutputStream::Stdout, OutputStream::Stderr);
        let work = async {
            let captured = tokio::join!(
                capture(pipes.stdout, bounds, out, output.clone()),
                capture(pipes.stderr, bounds, err, output.clone()),
                feed(pipes.stdin, input, &over)
            );
            Ok(captured)
        };
        let ending = async {
            let cut = tokio::select! {
                told = &mut ended => {
                    let _ = no_more.send(true);
                    return Ok((None, told.map_err(|_| gone())?));
                }
                () = tokio::time::sleep_until(until.into()) => Ending::Timeout,
                () = overflow.notified() => Ending::OutputLimit,
            };
            let _ = cutting.send(true);
            let end = self.kill(&mut ended).await?;
            let _ = no_more.send(true);
            Ok((Some(cut), end))
        };
        // A program can close its output and continue: its end is waited for, too.
        let ((stdout, stderr, ()), (cut, end)) = tokio::try_join!(work, ending)?;
        let failed = |e| SandboxError::io("read output", e);
        Ok((cut, stdout.map_err(failed)?, stderr.map_err(failed)?, end))
    }

    /// Runs a program on a terminal until it ends, or its time, or the terminal hangs up.
    async fn run_on_terminal(
        &mut self,
        request: ExecRequest,
        mut terminal: Terminal,
    ) -> Result<ExecResult, SandboxError> {
        let started = Instant::now();
        let refused = |field, value: &str, allowed: &str| SandboxError::Request {
            field,
            value: value.into(),
            allowed: allowed.into(),
        };
        if !request.stdin.is_empty() {
            return Err(refused(
                "stdin",
                "given",
                "nothing, where there is a terminal",
            ));
        }
        let Start::Argv(argv) = checked(&request.program)? else {
            return Err(refused(
                "program",
                "Python code",
                "a program or a script, where there is a terminal",
            ));
        };
        let env = [self.spec.env.clone(), std::mem::take(&mut terminal.env)].concat();
        check_env(&env)?;
        let (master, theirs) =
            terminal::open(terminal.size).map_err(|e| SandboxError::io("open a terminal", e))?;
        let raw: Vec<RawFd> = theirs.iter().map(AsRawFd::as_raw_fd).collect();
        let exec = Request::Exec {
            id: self.id,
            start: Start::OnTerminal(argv),
            env,
        };
        let mut ended = self.client.run(exec, &raw)?;
        drop(theirs);
        let mut guard = KillOnDrop::new(&self.client, self.id);
        let cut = tokio::select! {
            told = &mut ended => Err(told.map_err(|_| gone())?),
            () = tokio::time::sleep_until((started + request.deadline).into()) => Ok(Ending::Timeout),
            () = master.carry(&mut terminal) => Ok(Ending::Signalled { signal: libc::SIGHUP }),
        };
        let (cut, end) = match cut {
            Err(end) => (None, end),
            Ok(cut) => (Some(cut), self.kill(&mut ended).await?),
        };
        guard.armed = false;
        master.finish(&terminal.output).await;
        let nothing = StreamOutput::default;
        let result = self.result(started, cut, end, nothing(), nothing())?;
        self.executions += 1;
        self.cpu_s += result.usage.cpu_s;
        Ok(result)
    }

    /// Kills what runs and waits for its end.
    async fn kill(
        &self,
        ended: &mut tokio::sync::oneshot::Receiver<End>,
    ) -> Result<End, SandboxError> {
        self.client.tell(Request::Kill { id: self.id });
        let told = tokio::time::timeout(KILL_GRACE, ended).await;
        let told = told.map_err(|_| SandboxError::Died("it did not end after a kill".into()))?;
        told.map_err(|_| gone())
    }

    /// Whether the program did not come to run because what earlier ones left in the sandbox takes
    /// all of its memory.
    fn is_full(&self, end: &End) -> bool {
        let used = end.events.peak_memory_bytes.saturating_add(FULL_BYTES);
        matches!(end.exit, Exit::SetUp(_, libc::ENOMEM)) && used >= self.spec.limits.memory_bytes
    }

    /// Builds the result from the kernel's report, with the reason if the program could not begin.
    fn result(
        &self,
        started: Instant,
        cut: Option<Ending>,
        end: End,
        stdout: StreamOutput,
        stderr: StreamOutput,
    ) -> Result<ExecResult, SandboxError> {
        if let Exit::Refused(why) = end.exit {
            return Err(SandboxError::io("sandbox", why));
        }
        let full = self.is_full(&end);
        if let (Exit::SetUp(step, errno), None, false) = (&end.exit, cut, full) {
            let errno = std::io::Error::from_raw_os_error(*errno);
            if *step == EXECVE {
                return Err(SandboxError::Request {
                    field: "program",
                    value: errno.to_string(),
                    allowed: "a program that the sandbox sees and may run".into(),
                });
            }
            return Err(unavailable(format!("{}: {errno}", step_name(*step))));
        }
        let ending = match (cut, full) {
            (Some(cut), _) => cut,
            (None, true) => Ending::OutOfMemory,
            (None, false) => ending(&end, self.spec.limits.cpu_s),
        };
        // The largest process's resident pages count shared files that no group is charged for.
        let peak_memory_bytes = match end.events.peak_memory_bytes {
            0 => end.max_rss_kib << 10,
            charged => charged,
        };
        Ok(ExecResult {
            ending,
            truncated: stdout.truncated || stderr.truncated,
            usage: Usage {
                cpu_s: end.cpu_us as f64 * 1e-6,
                peak_memory_bytes,
                wall_s: started.elapsed().as_secs_f64(),
                output_bytes: stdout.bytes + stderr.bytes,
                file_bytes: end.file_bytes,
            },
            stdout: stdout.kept,
            stderr: stderr.kept,
            protections: Arc::clone(&self.client.protections),
        })
    }
}

/// Derives the ending from the kernel's report on the main process and from the counts of its groups. The
/// program controls none of these: its output is not read here, and the filter keeps it from sending the
/// signals that have a meaning here.
fn ending(end: &End, cpu_limit_s: f64) -> Ending {
    let failed = end.exit != Exit::Code(0);
    if end.events.oom_kills > 0 && failed {
        return Ending::OutOfMemory;
    }
    let spent = end.cpu_us as f64 >= cpu_limit_s.ceil().max(1.0) * 1e6;
    match end.exit {
        Exit::Signal(libc::SIGXCPU) => Ending::Timeout,
        Exit::Signal(libc::SIGKILL) if spent || end.cpu_spent => Ending::Timeout,
        Exit::Signal(libc::SIGSYS) => Ending::Denied,
        Exit::Signal(signal) => Ending::Signalled { signal },
        Exit::Code(_) if failed && end.events.process_refusals > 0 => Ending::TooManyProcesses,
        Exit::Code(code) => Ending::Exited { code },
        Exit::SetUp(..) | Exit::Lost(_) | Exit::Refused(_) => Ending::SandboxDied,
    }
}

impl Sandbox for ProcessSandbox {
    fn exec_with(
        &mut self,
        request: ExecRequest,
        options: ExecOptions,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run(request, options))
    }

    fn exec_on_terminal(
        &mut self,
        request: ExecRequest,
        terminal: Terminal,
    ) -> SandboxFuture<'_, ExecResult> {
        Box::pin(self.run_on_terminal(request, terminal))
    }

    fn write_file<'a>(&'a mut self, path: &'a str, content: &'a [u8]) -> SandboxFuture<'a, ()> {
        Box::pin(async move {
            let file = memory_file(content).map_err(|e| SandboxError::io("write", e))?;
            let request = Request::WriteFile {
                id: self.id,
                path: path.into(),
            };
            self.client.ask(request, &[file.as_raw_fd()]).await?;
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
            content(self.client.ask(request, &[]).await?, max_bytes)
        })
    }

    fn snapshot(&mut self) -> SandboxFuture<'_, Snapshot> {
        Box::pin(async move {
            let id = self.id;
            let request = |snapshot| Request::Snapshot { id, snapshot };
            kept(&self.client, request, &[]).await
        })
    }

    fn reset(&mut self) -> SandboxFuture<'_, ()> {
        Box::pin(async move {
            debug_assert!(self.base.as_ref().is_none_or(|b| b.level == "process"));
            let id = self.id;
            self.client.ask(Request::Reset { id }, &[]).await?;
            Ok(())
        })
    }

    fn stats(&mut self) -> SandboxFuture<'_, SandboxStats> {
        Box::pin(async move {
            let id = self.id;
            let answer = self.client.ask(Request::Stats { id }, &[]).await?;
            let stats = answer.stats.unwrap_or_default();
            Ok(SandboxStats {
                memory_bytes: stats.memory_bytes,
                processes: stats.processes,
                file_bytes: stats.file_bytes,
                file_count: stats.file_count,
                layers: stats.layers,
                executions: self.executions,
                cpu_s: self.cpu_s,
            })
        })
    }

    fn is_dead(&self) -> bool {
        self.client.is_dead()
    }

    fn listen_inside(&mut self, port: u16) -> SandboxFuture<'_, std::net::TcpListener> {
        Box::pin(async move {
            let id = self.id;
            let answer = self.client.ask(Request::Listen { id, port }, &[]).await?;
            let file = answer
                .file
                .ok_or_else(|| SandboxError::io("listen", "no socket"))?;
            Ok(file.into())
        })
    }

    fn destroy(mut self: Box<Self>) -> SandboxFuture<'static, ()> {
        Box::pin(async move {
            let id = self.id;
            self.destroyed = true;
            self.client
                .ask(Request::Destroy { id }, &[])
                .await
                .map(|_| ())
        })
    }
}
