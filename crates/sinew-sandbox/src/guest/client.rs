//! The host's side of the connection to an agent.

use crate::guest::archive::{Entry, EntryKind};
use crate::guest::frames::{
    Frames, Outcome, SandboxResult, Stream, died, entries, failure, listen, numbers, odd, send,
};
use crate::guest::program::{checked, not_there};
use crate::{ExecRequest, Limits, OutputChunk, SandboxError, WritableRoot, seccomp_filter};
use sinew_jail::walls::{EXECVE, FOLDER, WHO, step_name};
use sinew_jail::wire::{self, CHUNK, MAX_REQUEST, Put, VERSION, ask, content, file, tell};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use tokio::io::WriteHalf;
use tokio::sync::mpsc;

/// Maximum time for the end of a killed program, and for a request about files.
const GRACE: Duration = Duration::from_secs(10);
/// Maximum time for reading or writing the files of a work folder.
const FILES: Duration = Duration::from_secs(60);

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
    /// Programs may write everywhere; `uid` is not used then, and `limits.work_bytes` bounds a file.
    pub writable_root: Option<WritableRoot>,
}

/// User and folder of an execution in a sandbox with a writable root. Empty: those of the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// User, in the form of [`WritableRoot::user`].
    pub user: String,
    /// Absolute path of the folder.
    pub workdir: String,
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

/// Environment that programs start from. With a writable root the agent sets `HOME` to that of the user, and
/// the search path has the folders of the system's own programs.
fn base_env(writable: bool) -> Vec<(String, String)> {
    let path = if writable {
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    } else {
        "/usr/local/bin:/usr/bin:/bin"
    };
    let home = (!writable).then_some(("HOME", "/work"));
    [("PATH", path)]
        .into_iter()
        .chain(home)
        .chain([("TMPDIR", "/tmp"), ("LANG", "C.UTF-8")])
        .map(|(k, v)| (k.to_string(), v.to_string()))
        .collect()
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
        let mut frames = Frames::new(half);
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
        Self {
            level,
            frames: Frames::new(half),
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
        let python = setup.python.clone().unwrap_or_default();
        let root = setup.writable_root.as_ref();
        let mut env = base_env(root.is_some());
        env.extend_from_slice(&setup.env);
        let mut frame = Put::of(ask::SETUP)
            .number(setup.uid.into())
            .byte(u8::from(setup.warm_python && setup.python.is_some()))
            .byte(u8::from(setup.tcp))
            .number(setup.limits.work_bytes)
            .number(setup.inodes)
            .bytes(python.as_bytes())
            .bytes(&filter)
            .list(&pairs(&env))
            .byte(u8::from(root.is_some()))
            .bytes(root.map_or("", |r| r.user.as_str()).as_bytes())
            .bytes(root.map_or("", |r| r.workdir.as_str()).as_bytes());
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

    /// Runs a program to its end, as the user and in the folder of the sandbox.
    ///
    /// # Errors
    /// Fails as [`Guest::exec_at`] does.
    pub async fn exec(
        &mut self,
        request: &ExecRequest,
        env: &[(String, String)],
        output_bytes: u64,
        output: Option<mpsc::Sender<OutputChunk>>,
    ) -> SandboxResult<Outcome> {
        let place = Place::default();
        self.exec_at(request, env, &place, output_bytes, output)
            .await
    }

    /// Runs a program to its end, as a user and in a folder.
    ///
    /// # Errors
    /// [`SandboxError::Request`] if the program cannot be started, [`SandboxError::Died`] if the
    /// agent is gone or broke the rules.
    pub async fn exec_at(
        &mut self,
        request: &ExecRequest,
        env: &[(String, String)],
        place: &Place,
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
            .bytes(place.user.as_bytes())
            .bytes(place.workdir.as_bytes())
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
        outcome.map_err(|(step, errno)| self.not_started(request, place, step, errno))
    }

    /// Reason why a program was not started.
    fn not_started(
        &self,
        request: &ExecRequest,
        place: &Place,
        step: u64,
        errno: i32,
    ) -> SandboxError {
        let why = std::io::Error::from_raw_os_error(errno).to_string();
        let step = u32::try_from(step).unwrap_or(u32::MAX);
        match step {
            EXECVE => not_there(&request.program, errno, &why),
            WHO => SandboxError::Request {
                field: "user",
                value: format!("{:?} ({why})", place.user),
                allowed:
                    "a user of the image's /etc/passwd, or its number; USER:GROUP names a group of \
                          /etc/group, too"
                        .into(),
            },
            FOLDER => SandboxError::Request {
                field: "workdir",
                value: match place.workdir.as_str() {
                    "" => format!("that of the sandbox ({why})"),
                    folder => format!("{folder:?} ({why})"),
                },
                allowed: "an absolute path of a folder that is there and that the user may enter"
                    .into(),
            },
            _ => self.unavailable(format!("{}: {why}", step_name(step))),
        }
    }

    /// Makes or replaces a regular file below the work folder.
    ///
    /// # Errors
    /// If the path leaves the work folder or leads over a link, or if there is no room.
    pub async fn write_file(&mut self, path: &str, bytes: &[u8]) -> SandboxResult<()> {
        let entry = [(path.as_bytes(), 0o644, file::REGULAR, bytes)];
        self.put(&format!("write {path}"), None, &entry).await
    }

    /// Puts entries below the work folder, or below the folder that the frame `to` opens.
    async fn put(
        &mut self,
        operation: &str,
        to: Option<Vec<u8>>,
        entries: &[(&[u8], u32, u8, &[u8])],
    ) -> SandboxResult<()> {
        if let Some((path, ..)) = entries.iter().find(|e| e.0.len() > 4000) {
            return Err(SandboxError::io(
                operation,
                format!("a path of {} bytes", path.len()),
            ));
        }
        self.begin().await?;
        let asked = async {
            if let Some(frame) = to {
                send(&mut self.write, &frame).await?;
            }
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
            return Err(SandboxError::io(
                &operation,
                format!("a path of {} bytes", path.len()),
            ));
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
                    (tell::FAILED, why) => {
                        return Err(SandboxError::io(&operation, failure(&why)?.2));
                    }
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
            entries(frames, max_bytes, HINT).await.map(|(list, _)| list)
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
        self.put("restore", None, &listed(entries)).await
    }

    /// Puts entries below a folder of a writable root, which is made if it is missing. They belong to `user`
    /// (empty: root). With `replace`, what is at the path is removed first.
    ///
    /// # Errors
    /// If a path is not absolute or leads over a link, or if there is no room.
    pub async fn upload(
        &mut self,
        to: &str,
        entries: &[Entry],
        user: &str,
        replace: bool,
    ) -> SandboxResult<()> {
        absolute(to)?;
        let frame = Put::of(ask::PLACE)
            .bytes(to.as_bytes())
            .byte(u8::from(replace))
            .bytes(user.as_bytes())
            .frame();
        let operation = format!("upload to {to}");
        self.put(&operation, Some(frame), &listed(entries)).await
    }

    /// The entries below a folder of a writable root, or a regular file, at most `max_bytes` of content.
    /// `None` if nothing is there.
    ///
    /// # Errors
    /// If the path is not absolute or leads over a link, or if there is more.
    pub async fn download(
        &mut self,
        path: &str,
        max_bytes: u64,
    ) -> SandboxResult<Option<Vec<Entry>>> {
        absolute(path)?;
        self.begin().await?;
        let frames = &mut self.frames;
        let asked = async {
            let ask = Put::of(ask::FETCH).number(max_bytes);
            let ask = ask.bytes(path.as_bytes()).frame();
            send(&mut self.write, &ask).await?;
            let hint = "; name a smaller folder, or allow more";
            let (list, numbers) = entries(frames, max_bytes, hint).await?;
            match numbers.as_slice() {
                [0] if list.is_empty() => Ok(None),
                [1] => Ok(Some(list)),
                _ => Err(odd(tell::DONE)),
            }
        };
        let done = tokio::time::timeout(FILES, asked).await;
        let done = done.map_err(|_| died(format!("download {path}: no answer in {FILES:?}")))?;
        self.settle(&done);
        done
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

/// Advice for a work folder that is larger than its level copies.
const HINT: &str = ", holes included, which this level copies; remove some, or use level `process`";

/// Refuses paths that are not absolute, or longer than the system's.
fn absolute(path: &str) -> SandboxResult<()> {
    let plain = |part: &str| !matches!(part, "" | "." | "..");
    let parts = path.strip_prefix('/').map(|rest| rest.split('/'));
    if path.len() <= 4000 && parts.is_some_and(|mut parts| parts.all(plain)) {
        return Ok(());
    }
    Err(SandboxError::Request {
        field: "path",
        value: format!("{path:?}"),
        allowed: "an absolute path of plain names, such as /logs/verifier, of at most 4000 bytes"
            .into(),
    })
}

/// Entries as requests describe them: path, rights, kind, and content or target.
fn listed(entries: &[Entry]) -> Vec<(&[u8], u32, u8, &[u8])> {
    fn one(entry: &Entry) -> (&[u8], u32, u8, &[u8]) {
        let path = entry.path.as_os_str().as_bytes();
        let (kind, bytes) = match &entry.kind {
            EntryKind::File(content) => (file::REGULAR, content.as_slice()),
            EntryKind::Folder => (file::FOLDER, &[][..]),
            EntryKind::Link(target) => (file::LINK, target.as_os_str().as_bytes()),
        };
        (path, entry.mode, kind, bytes)
    }
    entries.iter().map(one).collect()
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
