//! The host's side of the connection to an agent.

use crate::guest::archive::{Entry, EntryKind, plain};
use crate::guest::program::{checked, not_there};
use crate::{
    Characters, Ending, ExecRequest, Limits, OutputChunk, OutputStream, SandboxError, Usage,
    seccomp_filter,
};
use sinew_jail::walls::{EXECVE, step_name};
use sinew_jail::wire::{
    self, CHUNK, HEAD, MAX_REPLY, MAX_REQUEST, Put, Take, VERSION, ask, content, cut, file, tell,
};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;

/// Maximum time for the end of a killed program, and for a request about files.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum time for reading or writing the files of a work folder.
const FILES: Duration = Duration::from_secs(60);
/// Entries of a work folder, at most.
const MAX_ENTRIES: usize = 65_536;
/// Any stream to an agent.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// First message of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Version of landlock in its kernel; 0 without.
    pub landlock_abi: u64,
}

/// Settings that an agent gets before the first program.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Limits of programs.
    pub limits: Limits,
    /// User that programs run as and whose files they make.
    pub uid: u32,
    /// Nobody else on its kernel has that user.
    pub own_user: bool,
    /// TCP may be used.
    pub tcp: bool,
    /// Files and folders that programs may make; heeded where the agent mounts the folders.
    pub inodes: u64,
    /// Path of the Python interpreter inside, if there is one.
    pub python: Option<String>,
    /// Keep an interpreter waiting for the next program.
    pub warm_python: bool,
    /// Environment of every program.
    pub env: Vec<(String, String)>,
}

/// End of a program, as the agent saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Exit code, or signal.
    pub exit: Result<i32, i32>,
    /// Reason why the agent ended it, if it did.
    pub cut: Option<Ending>,
    /// Whether output was cut.
    pub truncated: bool,
    /// User and system time of everything that ran.
    pub cpu_us: u64,
    /// Resident memory of the largest process.
    pub max_rss_kib: u64,
    /// Bytes written to standard output and to standard error.
    pub output_bytes: u64,
    /// Bytes of files.
    pub file_bytes: u64,
    /// Processes that a machine's kernel killed for want of memory.
    pub oom_kills: u64,
    /// Processes that a machine's kernel refused.
    pub refusals: u64,
    /// Most memory that programs of a machine had together so far; 0 where nothing counts it.
    pub peak_memory_bytes: u64,
}

impl Ended {
    /// Combines it with the counts from outside (kills for want of memory, refused processes) into an ending.
    pub fn ending(&self, oom_kills: u64, refusals: u64, cpu_limit_s: f64) -> Ending {
        if let Some(cut) = self.cut {
            return cut;
        }
        if oom_kills > 0 && self.exit != Ok(0) {
            return Ending::OutOfMemory;
        }
        let spent = self.cpu_us as f64 >= cpu_limit_s.ceil().max(1.0) * 1e6;
        match self.exit {
            // SIGXCPU, SIGKILL, SIGSYS: the filter keeps programs from sending the first and last.
            Err(24) => Ending::Timeout,
            Err(9) if spent => Ending::Timeout,
            Err(31) => Ending::Denied,
            Err(signal) => Ending::Signalled { signal },
            Ok(code) if code != 0 && refusals > 0 => Ending::TooManyProcesses,
            Ok(code) => Ending::Exited { code },
        }
    }

    /// Resources that it used, if nothing outside counted its memory.
    pub fn usage(&self, began: Instant) -> Usage {
        Usage {
            cpu_s: self.cpu_us as f64 * 1e-6,
            peak_memory_bytes: match self.peak_memory_bytes {
                0 => self.max_rss_kib << 10,
                counted => counted,
            },
            wall_s: began.elapsed().as_secs_f64(),
            output_bytes: self.output_bytes,
            file_bytes: self.file_bytes,
        }
    }
}

/// End and output of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// End of the program.
    pub ended: Ended,
    /// Standard output, within the bound.
    pub stdout: Vec<u8>,
    /// Standard error, within the bound.
    pub stderr: Vec<u8>,
}

/// Counts of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Bytes of files.
    pub file_bytes: u64,
    /// Files and folders.
    pub file_count: u64,
    /// Processes, as far as the agent sees them.
    pub processes: u64,
}

/// State of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// A program runs; whether all that it was to get is written.
    Running {
        fed: bool,
    },
    /// A request is half-way, or the other side broke the rules.
    Broken,
}

/// Frames from the agent. Bytes already read stay when a caller gives up.
struct Frames {
    half: ReadHalf<Box<dyn Stream>>,
    had: Vec<u8>,
}

/// A connection to an agent.
pub struct Guest {
    level: &'static str,
    frames: Frames,
    write: WriteHalf<Box<dyn Stream>>,
    hello: Hello,
    state: State,
}

impl std::fmt::Debug for Guest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut f = f.debug_struct("Guest");
        f.field("level", &self.level).field("state", &self.state);
        f.finish_non_exhaustive()
    }
}

type SandboxResult<T> = Result<T, SandboxError>;

fn died(why: impl Into<String>) -> SandboxError {
    SandboxError::Died(why.into())
}

fn odd(kind: u8) -> SandboxError {
    died(format!(
        "its agent sent a frame of kind {kind} that does not belong"
    ))
}

fn io(operation: &str, message: String) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message,
    }
}

impl Frames {
    async fn next(&mut self) -> SandboxResult<(u8, Vec<u8>)> {
        loop {
            if let Some(start) = self.had.first_chunk::<HEAD>() {
                let (kind, len) = wire::head(start);
                if len > MAX_REPLY {
                    return Err(died(format!(
                        "its agent sent a frame of {len} bytes, at most {MAX_REPLY} are allowed"
                    )));
                }
                if self.had.len() >= HEAD + len {
                    let payload = self.had[HEAD..HEAD + len].to_vec();
                    self.had.drain(..HEAD + len);
                    return Ok((kind, payload));
                }
            }
            self.had.reserve(16 << 10);
            match self.half.read_buf(&mut self.had).await {
                Ok(0) => return Err(died("its agent is gone")),
                Ok(_) => {}
                Err(e) => return Err(died(format!("its agent is gone: {e}"))),
            }
        }
    }

    /// The numbers of a DONE, or why it failed.
    async fn done(&mut self, operation: &str) -> SandboxResult<Vec<u64>> {
        match self.next().await? {
            (tell::DONE, bytes) => numbers(&bytes).ok_or_else(|| odd(tell::DONE)),
            (tell::FAILED, bytes) => Err(io(operation, failure(&bytes)?.2)),
            (kind, _) => Err(odd(kind)),
        }
    }
}

fn numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let mut take = Take(bytes);
    let list: Option<Vec<u64>> = (0..bytes.len() / 8).map(|_| take.number()).collect();
    list.filter(|_| take.0.is_empty())
}

/// Step, errno, text.
fn failure(bytes: &[u8]) -> SandboxResult<(u64, i32, String)> {
    let mut take = Take(bytes);
    let parts = (take.number(), take.number(), take.bytes());
    let (Some(step), Some(errno), Some(text)) = parts else {
        return Err(odd(tell::FAILED));
    };
    let text = String::from_utf8_lossy(text).into_owned();
    Ok((step, errno as i32, text))
}

fn ended(bytes: &[u8]) -> Option<Ended> {
    let mut take = Take(bytes);
    let (how, value) = (take.byte()?, i32::try_from(take.number()?).ok()?);
    let why = take.byte()?;
    let truncated = take.byte()? == 1;
    let numbers = numbers(take.0)?;
    let &[
        cpu_us,
        max_rss_kib,
        out,
        err,
        file_bytes,
        _,
        oom_kills,
        refusals,
        peak_memory_bytes,
    ] = numbers.as_slice()
    else {
        return None;
    };
    Some(Ended {
        exit: if how == 0 { Ok(value) } else { Err(value) },
        cut: match why {
            cut::DEADLINE => Some(Ending::Timeout),
            cut::OUTPUT => Some(Ending::OutputLimit),
            cut::ASKED => Some(Ending::Signalled { signal: 9 }),
            _ => None,
        },
        truncated,
        cpu_us,
        max_rss_kib,
        output_bytes: out.saturating_add(err),
        file_bytes,
        oom_kills,
        refusals,
        peak_memory_bytes,
    })
}

fn pairs(env: &[(String, String)]) -> Vec<String> {
    env.iter().map(|(k, v)| format!("{k}={v}")).collect()
}

impl Guest {
    /// Takes the first frame of an agent at the other end of `stream`.
    ///
    /// # Errors
    /// If none comes in time, or if it is of another version.
    pub async fn greet(
        stream: Box<dyn Stream>,
        level: &'static str,
        within: Duration,
    ) -> SandboxResult<Self> {
        let (half, write) = tokio::io::split(stream);
        let had = Vec::new();
        let mut frames = Frames { half, had };
        let first = tokio::time::timeout(within, frames.next()).await;
        let (kind, bytes) =
            first.map_err(|_| died(format!("its agent said nothing in {within:?}")))??;
        let said = numbers(&bytes).filter(|_| kind == tell::HELLO);
        let Some(&[version, landlock_abi]) = said.as_deref() else {
            return Err(odd(kind));
        };
        if version != u64::from(VERSION) {
            return Err(died(format!(
                "its agent speaks version {version}, this is {VERSION}"
            )));
        }
        let hello = Hello { landlock_abi };
        Ok(Self {
            level,
            frames,
            write,
            hello,
            state: State::Idle,
        })
    }

    /// The agent of a machine that was restored: it sent its first frame, `hello`, earlier.
    pub fn restored(stream: Box<dyn Stream>, level: &'static str, hello: Hello) -> Self {
        let (half, write) = tokio::io::split(stream);
        let had = Vec::new();
        Self {
            level,
            frames: Frames { half, had },
            write,
            hello,
            state: State::Idle,
        }
    }

    /// First message of the agent.
    pub fn hello(&self) -> Hello {
        self.hello
    }

    /// Whether it can still be used.
    pub fn usable(&self) -> bool {
        self.state != State::Broken
    }

    /// Gets ready for a request: ends a program whose caller has given up.
    async fn begin(&mut self) -> SandboxResult<()> {
        match self.state {
            State::Idle => {}
            State::Running { fed: true } => {
                self.state = State::Broken;
                self.send(&Put::of(ask::KILL).frame()).await?;
                let end = async {
                    while !matches!(self.frames.next().await?.0, tell::ENDED | tell::FAILED) {}
                    Ok(())
                };
                let ended = tokio::time::timeout(GRACE, end).await;
                ended.map_err(|_| died("it did not end after a kill"))??;
            }
            State::Running { fed: false } | State::Broken => {
                self.state = State::Broken;
                return Err(died("a request was given up half-way"));
            }
        }
        self.state = State::Broken;
        Ok(())
    }

    async fn send(&mut self, frame: &[u8]) -> SandboxResult<()> {
        send(&mut self.write, frame).await
    }

    /// A request and its answer; afterwards the connection is idle again.
    async fn ask(
        &mut self,
        operation: &str,
        frame: Vec<u8>,
        within: Duration,
    ) -> SandboxResult<Vec<u64>> {
        self.begin().await?;
        let asked = async {
            send(&mut self.write, &frame).await?;
            self.frames.done(operation).await
        };
        let done = tokio::time::timeout(within, asked).await;
        let done = done.map_err(|_| died(format!("{operation}: no answer in {within:?}")))?;
        self.settle(&done);
        done
    }

    /// Only a failure that the agent reported leaves the connection usable.
    fn settle<T>(&mut self, done: &SandboxResult<T>) {
        if matches!(done, Ok(_) | Err(SandboxError::Io { .. })) {
            self.state = State::Idle;
        }
    }

    /// Sends limits, user and interpreter; again if the limits change.
    ///
    /// # Errors
    /// If the walls cannot be described on this host or the agent refuses them.
    pub async fn set_up(&mut self, setup: &Setup) -> SandboxResult<()> {
        let filter = seccomp_filter(setup.tcp).map_err(|e| self.unavailable(e.to_string()))?;
        let env = [
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("HOME", "/work"),
            ("TMPDIR", "/tmp"),
            ("LANG", "C.UTF-8"),
        ];
        let env = env.map(|(k, v)| (k.to_string(), v.to_string()));
        let python = setup.python.clone().unwrap_or_default();
        let mut frame = Put::of(ask::SETUP)
            .number(setup.uid.into())
            .byte(u8::from(setup.warm_python && setup.python.is_some()))
            .byte(u8::from(setup.tcp))
            .number(setup.limits.work_bytes)
            .number(setup.inodes)
            .bytes(python.as_bytes())
            .bytes(&filter)
            .list(&pairs(&[&env, setup.env.as_slice()].concat()));
        for number in resource_limits(setup).into_iter().flatten() {
            frame = frame.number(number);
        }
        let asked = self.ask("set up", frame.frame(), GRACE).await;
        asked.map(|_| ())
    }

    fn unavailable(&self, reason: String) -> SandboxError {
        SandboxError::Unavailable {
            level: self.level.into(),
            reason,
        }
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// [`SandboxError::Request`] if the program cannot be started, [`SandboxError::Died`] if the
    /// agent is gone or broke the rules.
    pub async fn exec(
        &mut self,
        request: &ExecRequest,
        env: &[(String, String)],
        output_bytes: u64,
        mut output: Option<mpsc::Sender<OutputChunk>>,
    ) -> SandboxResult<Outcome> {
        let (python, args) = checked(&request.program)?;
        let frame = Put::of(ask::EXEC)
            .byte(u8::from(python))
            .number(request.deadline.as_millis().min(u128::from(u32::MAX)) as u64)
            .number(output_bytes)
            .list(&args)
            .list(&pairs(env))
            .frame();
        if frame.len() > MAX_REQUEST {
            return Err(SandboxError::Request {
                field: "env",
                value: format!("{} bytes with the program", frame.len()),
                allowed: format!("at most {MAX_REQUEST}"),
            });
        }
        self.begin().await?;
        self.state = State::Running { fed: false };
        let (write, frames, state) = (&mut self.write, &mut self.frames, &mut self.state);
        let feed = async {
            send(write, &frame).await?;
            for chunk in request.stdin.chunks(CHUNK) {
                send(write, &content(ask::DATA, chunk)).await?;
            }
            send(write, &Put::of(ask::END).frame()).await?;
            *state = State::Running { fed: true };
            Ok::<(), SandboxError>(())
        };
        let listen = listen(frames, output_bytes, &mut output);
        let both = async { tokio::try_join!(feed, listen) };
        let within = request.deadline.saturating_add(GRACE);
        let done = tokio::time::timeout(within, both).await;
        let done = done
            .unwrap_or_else(|_| Err(died("it did not end after its deadline")))
            .map(|((), outcome)| outcome);
        let outcome = match done {
            Ok(outcome) => outcome,
            Err(e) => {
                self.state = State::Broken;
                return Err(e);
            }
        };
        self.state = State::Idle;
        outcome.map_err(|(step, errno)| {
            let why = std::io::Error::from_raw_os_error(errno).to_string();
            if step == u64::from(EXECVE) {
                return not_there(&request.program, errno, &why);
            }
            let step = step_name(u32::try_from(step).unwrap_or(u32::MAX));
            self.unavailable(format!("{step}: {why}"))
        })
    }

    /// Makes or replaces a regular file below the work folder.
    ///
    /// # Errors
    /// If the path leaves the work folder or leads over a link, or if there is no room.
    pub async fn write_file(&mut self, path: &str, bytes: &[u8]) -> SandboxResult<()> {
        let entry = [(path.as_bytes(), 0o644, file::REGULAR, bytes)];
        self.put(&format!("write {path}"), &entry).await
    }

    async fn put(
        &mut self,
        operation: &str,
        entries: &[(&[u8], u32, u8, &[u8])],
    ) -> SandboxResult<()> {
        if let Some((path, ..)) = entries.iter().find(|e| e.0.len() > 4000) {
            return Err(io(operation, format!("a path of {} bytes", path.len())));
        }
        self.begin().await?;
        let asked = async {
            for (path, mode, kind, bytes) in entries {
                let target = if *kind == file::LINK { *bytes } else { b"" };
                let put = Put::of(ask::PUT).byte(*kind).number(u64::from(*mode));
                let mut frames = put.bytes(path).bytes(target).frame();
                if *kind == file::REGULAR {
                    for chunk in bytes.chunks(CHUNK) {
                        frames.extend(content(ask::DATA, chunk));
                        send(&mut self.write, &std::mem::take(&mut frames)).await?;
                    }
                    frames.extend(Put::of(ask::END).frame());
                }
                send(&mut self.write, &frames).await?;
            }
            send(&mut self.write, &Put::of(ask::SYNC).frame()).await?;
            self.frames.done(operation).await.map(|_| ())
        };
        let done = tokio::time::timeout(FILES, asked).await;
        let done = done.map_err(|_| died(format!("{operation}: no answer in {FILES:?}")))?;
        self.settle(&done);
        done
    }

    /// A regular file below the work folder.
    ///
    /// # Errors
    /// If it is none, is larger than `max_bytes`, or if the path leads over a link.
    pub async fn read_file(&mut self, path: &str, max_bytes: u64) -> SandboxResult<Vec<u8>> {
        let operation = format!("read {path}");
        if path.len() > 4000 {
            return Err(io(&operation, format!("a path of {} bytes", path.len())));
        }
        self.begin().await?;
        let frame = Put::of(ask::READ).number(max_bytes).bytes(path.as_bytes());
        let asked = async {
            send(&mut self.write, &frame.frame()).await?;
            let mut bytes = Vec::new();
            loop {
                match self.frames.next().await? {
                    (tell::DATA, more) => bytes.extend_from_slice(&more),
                    (tell::DONE, _) => return Ok(bytes),
                    (tell::FAILED, why) => return Err(io(&operation, failure(&why)?.2)),
                    (kind, _) => return Err(odd(kind)),
                }
                if bytes.len() as u64 > max_bytes {
                    return Err(died(format!(
                        "{operation}: more than {max_bytes} bytes came"
                    )));
                }
            }
        };
        let done = tokio::time::timeout(FILES, asked).await;
        let done = done.map_err(|_| died(format!("{operation}: no answer in {FILES:?}")))?;
        self.settle(&done);
        done
    }

    /// Everything below the work folder, at most `max_bytes` of content.
    ///
    /// # Errors
    /// If there is more, or if it is too deep or too many.
    pub async fn entries(&mut self, max_bytes: u64) -> SandboxResult<Vec<Entry>> {
        self.begin().await?;
        let frames = &mut self.frames;
        let asked = async {
            let ask = Put::of(ask::ARCHIVE).number(max_bytes).frame();
            send(&mut self.write, &ask).await?;
            entries(frames, max_bytes).await
        };
        let done = tokio::time::timeout(FILES, asked).await;
        let done = done.map_err(|_| died("archive: no answer in time"))?;
        self.settle(&done);
        done
    }

    /// Puts entries below the work folder.
    ///
    /// # Errors
    /// Fails as [`Guest::write_file`] does.
    pub async fn restore(&mut self, entries: &[Entry]) -> SandboxResult<()> {
        let list: Vec<_> = entries
            .iter()
            .map(|entry| {
                let path = entry.path.as_os_str().as_bytes();
                let (kind, bytes) = match &entry.kind {
                    EntryKind::File(content) => (file::REGULAR, content.as_slice()),
                    EntryKind::Folder => (file::FOLDER, &[][..]),
                    EntryKind::Link(target) => (file::LINK, target.as_os_str().as_bytes()),
                };
                (path, entry.mode, kind, bytes)
            })
            .collect();
        self.put("restore", &list).await
    }

    /// Removes all files.
    ///
    /// # Errors
    /// If one cannot be removed.
    pub async fn reset(&mut self) -> SandboxResult<()> {
        let frame = Put::of(ask::RESET).frame();
        self.ask("reset", frame, FILES).await.map(|_| ())
    }

    /// Counts files and processes.
    ///
    /// # Errors
    /// If the agent is gone.
    pub async fn count(&mut self) -> SandboxResult<Count> {
        let frame = Put::of(ask::STATS).frame();
        match self.ask("count", frame, GRACE).await?.as_slice() {
            &[file_bytes, file_count, processes] => Ok(Count {
                file_bytes,
                file_count,
                processes,
            }),
            _ => Err(odd(tell::DONE)),
        }
    }

    /// Prepares a machine that was restored from a copy of its memory: sets its time (nanoseconds since
    /// 1970), fresh random bytes, and its name.
    ///
    /// # Errors
    /// If the agent cannot set them.
    pub async fn resume(&mut self, time_ns: u64, entropy: &[u8], name: &str) -> SandboxResult<()> {
        let frame = Put::of(ask::RESUME).number(time_ns).bytes(entropy);
        let frame = frame.bytes(name.as_bytes()).frame();
        self.ask("resume", frame, GRACE).await.map(|_| ())
    }
}

/// Resource (setrlimit(2)), soft and hard limit, as at the process level.
fn resource_limits(setup: &Setup) -> Vec<[u64; 3]> {
    let limits = &setup.limits;
    let cpu = limits.cpu_s.ceil().max(1.0) as u64;
    let (files, bytes) = (limits.open_files, limits.work_bytes);
    // CPU, FSIZE, CORE, NOFILE, MEMLOCK, SIGPENDING, MSGQUEUE.
    let mut all = vec![
        [0, cpu, cpu + 1],
        [1, bytes, bytes],
        [4, 0, 0],
        [7, files, files],
        [8, 0, 0],
        [11, 256, 256],
        [12, 0, 0],
    ];
    if setup.own_user {
        // NPROC counts the processes of a user.
        all.push([6, limits.processes, limits.processes]);
    }
    all.push([wire::TOGETHER, limits.memory_bytes, limits.processes]);
    all
}

async fn send(write: &mut WriteHalf<Box<dyn Stream>>, frame: &[u8]) -> SandboxResult<()> {
    let sent = async {
        write.write_all(frame).await?;
        write.flush().await
    };
    sent.await
        .map_err(|e| died(format!("its agent is gone: {e}")))
}

/// Output and end of a program, or step and errno of a start that failed.
async fn listen(
    frames: &mut Frames,
    most: u64,
    output: &mut Option<mpsc::Sender<OutputChunk>>,
) -> SandboxResult<Result<Outcome, (u64, i32)>> {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (mut outs, mut errs) = (Characters::default(), Characters::default());
    loop {
        let (kind, bytes) = frames.next().await?;
        let (kept, stream, characters) = match kind {
            tell::STDOUT => (&mut stdout, OutputStream::Stdout, &mut outs),
            tell::STDERR => (&mut stderr, OutputStream::Stderr, &mut errs),
            tell::ENDED => {
                let ended = ended(&bytes).ok_or_else(|| odd(kind))?;
                pass_on(output, OutputStream::Stdout, outs.rest()).await;
                pass_on(output, OutputStream::Stderr, errs.rest()).await;
                return Ok(Ok(Outcome {
                    ended,
                    stdout,
                    stderr,
                }));
            }
            tell::FAILED => {
                let (step, errno, _) = failure(&bytes)?;
                return Ok(Err((step, errno)));
            }
            kind => return Err(odd(kind)),
        };
        kept.extend_from_slice(&bytes);
        if kept.len() as u64 > most {
            let why = format!("its agent sent more than {most} bytes of output");
            return Err(died(why));
        }
        pass_on(output, stream, characters.add(&bytes)).await;
    }
}

/// Sends a reader the received output, if there is a reader and a complete piece.
async fn pass_on(
    output: &mut Option<mpsc::Sender<OutputChunk>>,
    stream: OutputStream,
    bytes: Vec<u8>,
) {
    if let Some(sender) = output
        && !bytes.is_empty()
        && sender.send(OutputChunk { stream, bytes }).await.is_err()
    {
        *output = None;
    }
}

/// File too large.
const EFBIG: i32 = 27;

async fn entries(frames: &mut Frames, max_bytes: u64) -> SandboxResult<Vec<Entry>> {
    let mut list: Vec<Entry> = Vec::new();
    let mut left = max_bytes;
    loop {
        let (kind, bytes) = frames.next().await?;
        match kind {
            tell::ENTRY => {
                let entry = entry(&bytes).ok_or_else(|| odd(kind))?;
                list.push(entry);
                if list.len() > MAX_ENTRIES {
                    return Err(died(format!("more than {MAX_ENTRIES} files came")));
                }
            }
            tell::DATA => {
                let last = list.last_mut().map(|e| &mut e.kind);
                let (Some(EntryKind::File(content)), Some(rest)) =
                    (last, left.checked_sub(bytes.len() as u64))
                else {
                    return Err(died(format!("more than {max_bytes} bytes of files came")));
                };
                content.extend_from_slice(&bytes);
                left = rest;
            }
            tell::DONE => return Ok(list),
            tell::FAILED => {
                let (_, errno, text) = failure(&bytes)?;
                return Err(io(
                    "archive",
                    match errno {
                        EFBIG => format!(
                            "the files have more than {max_bytes} bytes, holes included, which this \
                         level copies; remove some, or use level `process`"
                        ),
                        _ => text,
                    },
                ));
            }
            kind => return Err(odd(kind)),
        }
    }
}

fn entry(bytes: &[u8]) -> Option<Entry> {
    let mut take = Take(bytes);
    let (kind, mode, _) = (take.byte()?, take.number()?, take.number()?);
    let text = |bytes: &[u8]| std::ffi::OsString::from_vec(bytes.to_vec());
    let (path, target) = (text(take.bytes()?), text(take.bytes()?));
    let kind = match kind {
        file::REGULAR => EntryKind::File(Vec::new()),
        file::FOLDER => EntryKind::Folder,
        file::LINK => EntryKind::Link(target.into()),
        _ => return None,
    };
    plain(Path::new(&path)).then(|| Entry {
        path: path.into(),
        mode: mode as u32 & 0o777,
        kind,
    })
}
