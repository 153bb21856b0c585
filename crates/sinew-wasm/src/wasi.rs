//! The part of WASI preview 1 that interpreters use, with files in memory. Programs cannot access folders,
//! sockets or environment variables of the host.
//!
//! Addresses and lengths come from the program. Each is checked against the linear memory (`memory`) when it
//! is used, and an invalid one is the error `Fault`, as in the standard. No call waits beyond the deadline,
//! and none allocates more than the program has already: buffers, paths and lists are limited.
//!
//! A program that reads and writes in a loop makes no host calls that block, so that the epochs of compiled
//! code end it; a program in [`poll`] is ended there.

use crate::fs::{Content, Errno, Fs, Node, resolve};
pub(crate) use crate::memory::{add, iovecs, put, slice, slice_mut, u32_at, u64_at};
use rustix::time::{ClockId, clock_gettime};
use sinew_sandbox::{Ending, Limits, OutputStream};
use std::time::{Duration, Instant};

/// Preopened folders. Both are the work folder.
pub(crate) const PREOPENS: [(u32, &str); 2] = [(3, "/"), (4, "/work")];
/// Path from which a turn of Python reads its program.
const JOB_PATH: &str = "dev/job";
/// Path to which a turn of Python writes its exit code.
const STATUS_PATH: &str = "dev/status";
/// Output is sent when this number of bytes is buffered, unless it is streamed.
pub(crate) const FLUSH_BYTES: usize = 16 << 10;

/// End of a program inside of a host call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}")]
pub(crate) struct Stop(pub(crate) Ending);

/// Result of a host call, an error number for the program. A call that ends the program sets [`Host::stop`].
pub(crate) type Answer = Result<(), Errno>;

/// Receiver of output.
pub(crate) type Sink = Box<dyn FnMut(OutputStream, &[u8])>;

/// Files, input and limits of an execution.
pub(crate) struct Setting {
    /// Files of the sandbox.
    pub(crate) files: crate::wire::Tree,
    /// Standard input.
    pub(crate) stdin: Vec<u8>,
    /// Limits of the execution.
    pub(crate) bounds: Bounds,
    /// Receiver of output.
    pub(crate) sink: Sink,
}

/// Limits of an execution.
#[derive(Clone, Debug)]
pub(crate) struct Bounds {
    /// Deadline.
    pub(crate) until: Instant,
    /// CPU time of the thread at which the execution ends.
    pub(crate) cpu: Duration,
    /// Limits of memory, files, descriptors and output.
    pub(crate) limits: Limits,
    /// Send output immediately.
    pub(crate) stream: bool,
}

/// Limits for memory and tables of an instance.
#[derive(Debug, Default)]
pub(crate) struct Ceiling {
    /// Maximum linear memory in bytes.
    pub(crate) memory_bytes: usize,
    /// Largest linear memory so far, in bytes.
    pub(crate) peak: usize,
    /// True if the limit has refused memory.
    pub(crate) refused: bool,
}

/// Maximum elements of a table. CPython has about 5,000.
pub(crate) const MAX_TABLE: usize = 1 << 17;

impl wasmtime::ResourceLimiter for Ceiling {
    fn memory_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let fits = desired <= self.memory_bytes;
        if fits {
            self.peak = self.peak.max(desired);
        } else {
            self.refused = true;
        }
        Ok(fits)
    }

    fn table_growing(
        &mut self,
        _: usize,
        desired: usize,
        _: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= MAX_TABLE)
    }
}

/// An open descriptor. Numbers are assigned from 0, the lowest free one first, as POSIX requires.
#[derive(Clone, Debug)]
pub(crate) enum Fd {
    /// Standard input of the execution, a pipe that ends.
    Stdin,
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// A folder by its path. A renamed folder is not found through an older descriptor.
    Folder { path: String },
    /// A file by its content: it stays readable after its name is gone.
    File { content: Content, id: u64, how: How },
    /// Program of the turn.
    Job { at: u64 },
    /// Exit code of the turn.
    Status,
}

/// Offset and mode of an open file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct How {
    /// Offset of the next read or write.
    pub(crate) at: u64,
    /// Writes go to the end.
    pub(crate) append: bool,
    /// Reading is allowed.
    pub(crate) read: bool,
    /// Writing is allowed.
    pub(crate) write: bool,
}

/// State of the host that a program can access.
pub(crate) struct Host {
    /// Limits for memory and tables.
    pub(crate) ceiling: Ceiling,
    /// Files of the sandbox.
    pub(crate) fs: Fs,
    /// Limits of the execution.
    pub(crate) bounds: Bounds,
    /// True if output was cut at the limit.
    pub(crate) truncated: bool,
    /// End of the program by the current host call.
    pub(crate) stop: Option<Ending>,
    /// Program of the current turn.
    job: Vec<u8>,
    /// True while the program may open the files of turns.
    pub(crate) boots: bool,
    /// Exit code of the last turn.
    pub(crate) status: Option<i32>,
    /// Arguments of the program.
    pub(crate) args: Vec<String>,
    /// Environment variables as `NAME=VALUE`.
    pub(crate) env: Vec<String>,
    /// Standard input.
    stdin: Vec<u8>,
    /// Number of read bytes of standard input.
    stdin_at: u64,
    /// Bytes written to standard output and standard error.
    written: [usize; 2],
    /// Buffered bytes of standard output and standard error.
    pending: [Vec<u8>; 2],
    /// Receiver of output.
    sink: Sink,
    /// Descriptors by number.
    pub(crate) fds: Vec<Option<Fd>>,
    /// CPU time of the thread at the start of the program.
    pub(crate) cpu_from: Duration,
}

/// CPU time of the calling thread.
pub(crate) fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl Host {
    /// Creates the state of a program.
    pub(crate) fn new(args: Vec<String>, env: Vec<(String, String)>, setting: Setting) -> Self {
        let folder = |_| {
            Some(Fd::Folder {
                path: String::new(),
            })
        };
        let standard = [Some(Fd::Stdin), Some(Fd::Stdout), Some(Fd::Stderr)];
        Self {
            ceiling: Ceiling {
                memory_bytes: setting.bounds.limits.memory_bytes as usize,
                ..Ceiling::default()
            },
            fs: Fs::new(&setting.files, setting.bounds.limits.work_bytes),
            bounds: setting.bounds,
            truncated: false,
            stop: None,
            job: Vec::new(),
            boots: false,
            status: None,
            args,
            env: env.iter().map(|(n, v)| format!("{n}={v}")).collect(),
            stdin: setting.stdin,
            stdin_at: 0,
            written: [0; 2],
            pending: [Vec::new(), Vec::new()],
            sink: setting.sink,
            fds: standard
                .into_iter()
                .chain(PREOPENS.iter().map(folder))
                .collect(),
            cpu_from: thread_cpu(),
        }
    }

    /// Starts a turn with the files of `setting`. Descriptors are kept.
    pub(crate) fn begin(&mut self, mut setting: Setting, job: Vec<u8>) {
        setting.bounds.cpu += thread_cpu();
        let mut fds = std::mem::take(&mut self.fds);
        for fd in fds.iter_mut().flatten() {
            if let Fd::Job { at } = fd {
                *at = 0;
            }
        }
        let peak = self.ceiling.peak;
        *self = Self {
            fds,
            job,
            ..Self::new(Vec::new(), Vec::new(), setting)
        };
        self.ceiling.peak = peak;
    }

    /// Copies the descriptors for a fork. Files are closed in it.
    pub(crate) fn saved_fds(&self) -> Vec<Option<Fd>> {
        let kept = |fd: &Fd| !matches!(fd, Fd::File { .. });
        self.fds.iter().map(|fd| fd.clone().filter(kept)).collect()
    }

    /// True after the deadline or CPU limit.
    pub(crate) fn over(&self) -> bool {
        Instant::now() >= self.bounds.until || thread_cpu() >= self.bounds.cpu
    }

    /// Sends all buffered output.
    pub(crate) fn flush(&mut self) {
        for (at, stream) in [OutputStream::Stdout, OutputStream::Stderr]
            .into_iter()
            .enumerate()
        {
            let bytes = std::mem::take(&mut self.pending[at]);
            if !bytes.is_empty() {
                (self.sink)(stream, &bytes);
            }
        }
    }

    /// Keeps output up to the limit, and ends the program at the first byte beyond it.
    fn output(&mut self, at: usize, bytes: &[u8]) {
        let free = self.bounds.limits.output_bytes as usize - self.written[at];
        let kept = &bytes[..bytes.len().min(free)];
        self.written[at] += kept.len();
        self.pending[at].extend_from_slice(kept);
        if self.bounds.stream || self.pending[at].len() >= FLUSH_BYTES {
            self.flush();
        }
        if kept.len() < bytes.len() {
            self.truncated = true;
            self.stop = Some(Ending::OutputLimit);
        }
    }

    /// Finds an open descriptor.
    pub(crate) fn fd(&mut self, fd: u32) -> Result<&mut Fd, Errno> {
        self.fds
            .get_mut(fd as usize)
            .and_then(Option::as_mut)
            .ok_or(Errno::Badf)
    }

    /// Path of a folder descriptor.
    fn folder(&mut self, fd: u32) -> Result<String, Errno> {
        match self.fd(fd)? {
            Fd::Folder { path, .. } => Ok(path.clone()),
            _ => Err(Errno::Notdir),
        }
    }

    /// Assigns the lowest free descriptor number.
    fn open(&mut self, fd: Fd) -> Result<u32, Errno> {
        let at = self
            .fds
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.fds.len());
        if at as u64 >= self.bounds.limits.open_files {
            return Err(Errno::Mfile);
        }
        if at == self.fds.len() {
            self.fds.push(None);
        }
        self.fds[at] = Some(fd);
        Ok(at as u32)
    }

    /// Reads a path from the memory of the program, relative to a folder descriptor.
    pub(crate) fn path(
        &mut self,
        memory: &[u8],
        fd: u32,
        at: u32,
        len: u32,
    ) -> Result<String, Errno> {
        let folder = self.folder(fd)?;
        let path = std::str::from_utf8(slice(memory, at, len)?).map_err(|_| Errno::Inval)?;
        resolve(&folder, path)
    }
}

/// Writes zero-terminated texts and pointers to them, for arguments and environment.
pub(crate) fn texts(memory: &mut [u8], pointers: u32, buffer: u32, list: &[String]) -> Answer {
    let mut at = buffer;
    for (n, text) in list.iter().enumerate() {
        put(memory, add(pointers, 4 * n)?, &at.to_le_bytes())?;
        put(memory, at, text.as_bytes())?;
        put(memory, add(at, text.len())?, &[0])?;
        at = add(at, text.len() + 1)?;
    }
    Ok(())
}

/// `args_sizes_get` and `environ_sizes_get`: number of texts, and bytes with their zeros.
pub(crate) fn sizes(memory: &mut [u8], count: u32, bytes: u32, list: &[String]) -> Answer {
    put(memory, count, &(list.len() as u32).to_le_bytes())?;
    let total: usize = list.iter().map(|t| t.len() + 1).sum();
    put(memory, bytes, &(total as u32).to_le_bytes())
}

/// Writes the result of `stat`.
///
/// Folders have a modification time that counts changes, in seconds, so that importers detect them. Files
/// have none.
pub(crate) fn stat(
    memory: &mut [u8],
    at: u32,
    id: u64,
    kind: u8,
    size: u64,
    changes: u64,
) -> Answer {
    let mut out = [0; 64];
    out[8..16].copy_from_slice(&id.to_le_bytes());
    out[16] = kind;
    out[24..32].copy_from_slice(&1u64.to_le_bytes());
    out[32..40].copy_from_slice(&size.to_le_bytes());
    let time = changes.saturating_mul(1_000_000_000).to_le_bytes();
    out[48..56].copy_from_slice(&time);
    put(memory, at, &out)
}

/// File type of a character device.
pub(crate) const CHARACTERS: u8 = 2;
/// File type of a folder.
pub(crate) const FOLDER: u8 = 3;
/// File type of a regular file.
pub(crate) const FILE: u8 = 4;

/// `path_filestat_get`: the result of [`stat`] for a path.
pub(crate) fn node_stat(memory: &mut [u8], at: u32, host: &Host, path: &str) -> Answer {
    match host.fs.find(path)? {
        (id, Node::Folder) => stat(memory, at, id, FOLDER, 0, host.fs.version()),
        (id, Node::File(content)) => stat(memory, at, id, FILE, content.borrow().len() as u64, 0),
    }
}

/// Copies bytes from an offset, which it moves. Returns their number.
fn copy(source: &[u8], at: &mut u64, target: &mut [u8]) -> usize {
    let rest = &source[(*at).min(source.len() as u64) as usize..];
    let n = rest.len().min(target.len());
    target[..n].copy_from_slice(&rest[..n]);
    *at += n as u64;
    n
}

/// `fd_read` and `fd_pread`: reads into buffers from the descriptor's offset, or from `from`. Fewer bytes
/// than asked for mean the end. Streams have no offset.
pub(crate) fn read(
    memory: &mut [u8],
    host: &mut Host,
    fd: u32,
    vecs: (u32, u32),
    from: Option<u64>,
    total: u32,
) -> Answer {
    let mut read = 0;
    for (buffer, len) in iovecs(memory, vecs)? {
        let target = slice_mut(memory, buffer, len as usize)?;
        let n = match host.fds.get_mut(fd as usize).and_then(Option::as_mut) {
            Some(Fd::Stdin) if from.is_none() => copy(&host.stdin, &mut host.stdin_at, target),
            Some(Fd::Job { at }) if from.is_none() => copy(&host.job, at, target),
            Some(Fd::File { content, how, .. }) if how.read => match from {
                None => copy(&content.borrow(), &mut how.at, target),
                Some(from) => {
                    let mut at = from.saturating_add(u64::from(read));
                    copy(&content.borrow(), &mut at, target)
                }
            },
            Some(Fd::Folder { .. }) => return Err(Errno::Isdir),
            _ => return Err(Errno::Badf),
        };
        read += n as u32;
        if n < len as usize {
            break;
        }
    }
    put(memory, total, &read.to_le_bytes())
}

/// `fd_write` and `fd_pwrite`: writes buffers at the descriptor's offset, or at `to`.
pub(crate) fn write(
    memory: &mut [u8],
    host: &mut Host,
    fd: u32,
    vecs: (u32, u32),
    to: Option<u64>,
    total: u32,
) -> Answer {
    let mut written = 0u32;
    for (buffer, len) in iovecs(memory, vecs)? {
        let bytes = slice(memory, buffer, len)?;
        match host.fds.get_mut(fd as usize).and_then(Option::as_mut) {
            Some(Fd::Stdout) if to.is_none() => host.output(0, bytes),
            Some(Fd::Stderr) if to.is_none() => host.output(1, bytes),
            Some(Fd::Status) if to.is_none() => {
                let text = std::str::from_utf8(bytes).map_err(|_| Errno::Inval)?;
                host.status = Some(text.trim().parse().map_err(|_| Errno::Inval)?);
            }
            Some(Fd::File { content, how, .. }) if how.write => {
                let end = content.borrow().len() as u64;
                let next = if how.append { end } else { how.at };
                let start = to.map_or(next, |t| t.saturating_add(u64::from(written)));
                host.fs.write(content, start, bytes)?;
                if to.is_none() {
                    how.at = start + bytes.len() as u64;
                }
            }
            Some(Fd::Folder { .. }) => return Err(Errno::Isdir),
            _ => return Err(Errno::Badf),
        }
        written = written.saturating_add(len);
    }
    put(memory, total, &written.to_le_bytes())
}

/// Flags of `path_open`.
pub(crate) struct Opening {
    /// Create the file if it does not exist.
    create: bool,
    /// Fail unless the path is a folder.
    folder: bool,
    /// Fail if the path exists.
    exclusive: bool,
    /// Set the length to 0.
    truncate: bool,
    /// Mode of the descriptor.
    how: How,
}

impl Opening {
    /// Decodes the flags of the call.
    pub(crate) fn of(oflags: i32, rights: i64, fdflags: i32) -> Self {
        Self {
            create: oflags & 1 != 0,
            folder: oflags & 2 != 0,
            exclusive: oflags & 4 != 0,
            truncate: oflags & 8 != 0,
            how: How {
                at: 0,
                append: fdflags & 1 != 0,
                read: rights & (1 << 1) != 0,
                write: rights & (1 << 6) != 0,
            },
        }
    }
}

/// Opens a path and returns the descriptor's number. The files of turns can be opened only while an
/// interpreter starts.
pub(crate) fn path_open(host: &mut Host, path: &str, how: &Opening) -> Result<u32, Errno> {
    match path {
        JOB_PATH if host.boots => return host.open(Fd::Job { at: 0 }),
        STATUS_PATH if host.boots => return host.open(Fd::Status),
        _ => {}
    }
    let (id, node) = match host.fs.find(path) {
        Ok(_) if how.create && how.exclusive => return Err(Errno::Exist),
        Ok(found) => found,
        Err(Errno::Noent) if how.create && !how.folder => {
            host.fs.create(path)?;
            host.fs.find(path)?
        }
        Err(e) => return Err(e),
    };
    let fd = match node {
        Node::Folder if how.how.write || how.truncate => return Err(Errno::Isdir),
        Node::Folder => Fd::Folder { path: path.into() },
        Node::File(_) if how.folder => return Err(Errno::Notdir),
        Node::File(content) => {
            if how.truncate {
                host.fs.resize(&content, 0)?;
            }
            Fd::File {
                content,
                id,
                how: how.how,
            }
        }
    };
    host.open(fd)
}

/// `fd_fdstat_get`: type, flags and rights of a descriptor.
pub(crate) fn fdstat(memory: &mut [u8], host: &mut Host, fd: u32, at: u32) -> Answer {
    let (kind, flags) = match host.fd(fd)? {
        Fd::Stdin | Fd::Stdout | Fd::Stderr => (CHARACTERS, 0u16),
        Fd::Folder { .. } => (FOLDER, 0),
        Fd::File { how, .. } => (FILE, u16::from(how.append)),
        Fd::Job { .. } | Fd::Status => (FILE, 0),
    };
    // Streams do not have the rights seek and tell.
    let rights: u64 = if kind == CHARACTERS {
        (1 << 29) - 1 - (1 << 2) - (1 << 5)
    } else {
        (1 << 29) - 1
    };
    let mut out = [0; 24];
    out[0] = kind;
    out[2..4].copy_from_slice(&flags.to_le_bytes());
    out[8..16].copy_from_slice(&rights.to_le_bytes());
    out[16..24].copy_from_slice(&rights.to_le_bytes());
    put(memory, at, &out)
}

/// `fd_seek`: moves the offset of a file and writes it to `to`. It may lie behind the end.
pub(crate) fn seek(
    memory: &mut [u8],
    host: &mut Host,
    fd: u32,
    offset: i64,
    whence: i32,
    to: u32,
) -> Answer {
    let Fd::File { content, how, .. } = host.fd(fd)? else {
        return Err(Errno::Spipe);
    };
    let base = match whence {
        0 => 0,
        1 => how.at,
        2 => content.borrow().len() as u64,
        _ => return Err(Errno::Inval),
    };
    how.at = base.checked_add_signed(offset).ok_or(Errno::Inval)?;
    put(memory, to, &how.at.to_le_bytes())
}

/// `fd_readdir`: entries of a folder from `cookie` on, an index in the order of names. Entries `.` and `..`
/// are left out.
pub(crate) fn readdir(
    memory: &mut [u8],
    host: &mut Host,
    fd: u32,
    buffer: u32,
    len: u32,
    cookie: u64,
    used: u32,
) -> Answer {
    let folder = host.folder(fd)?;
    let entries = host.fs.list(&folder)?;
    let mut out = Vec::new();
    for (n, (name, id, is_folder)) in entries.iter().enumerate().skip(cookie as usize) {
        if out.len() >= len as usize {
            break;
        }
        out.extend((n as u64 + 1).to_le_bytes());
        out.extend(id.to_le_bytes());
        out.extend((name.len() as u32).to_le_bytes());
        out.extend([if *is_folder { FOLDER } else { FILE }, 0, 0, 0]);
        out.extend(name.as_bytes());
    }
    // The last entry may be truncated. The caller then repeats the call from there.
    out.truncate(len as usize);
    put(memory, buffer, &out)?;
    put(memory, used, &(out.len() as u32).to_le_bytes())
}

/// Time of a clock in nanoseconds: 0 real time, 1 monotonic, 2 and 3 CPU time of the thread.
pub(crate) fn now(id: i32) -> Result<u64, Errno> {
    let time = match id {
        0 => clock_gettime(ClockId::Realtime),
        1 => clock_gettime(ClockId::Monotonic),
        2 | 3 => clock_gettime(ClockId::ThreadCPUTime),
        _ => return Err(Errno::Inval),
    };
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// `random_get`: fills a buffer with random bytes of the kernel.
pub(crate) fn random(buffer: &mut [u8]) -> Answer {
    for chunk in buffer.chunks_mut(256) {
        rustix::rand::getrandom(chunk, rustix::rand::GetRandomFlags::empty())
            .map_err(|_| Errno::Io)?;
    }
    Ok(())
}

/// Name of a preopened folder.
pub(crate) fn preopened(fd: u32) -> Result<&'static str, Errno> {
    let found = PREOPENS.iter().find(|p| p.0 == fd);
    found.map(|p| p.1).ok_or(Errno::Badf)
}

/// Waits for clocks, at most until the deadline. Descriptors are always ready.
///
/// A call has at most 64 subscriptions. Output is sent before the wait, so that a reader sees it meanwhile.
pub(crate) fn poll(
    memory: &mut [u8],
    host: &mut Host,
    subscriptions: u32,
    events: u32,
    count: u32,
    ready: u32,
) -> Answer {
    if count == 0 || count > 64 {
        return Err(Errno::Inval);
    }
    let (mut due, mut waits) = (Vec::new(), Vec::new());
    for n in 0..count {
        let at = add(subscriptions, 48 * n as usize)?;
        let user = u64_at(memory, at)?;
        let tag = slice(memory, add(at, 8)?, 1)?[0];
        if tag != 0 {
            due.push((user, tag));
            continue;
        }
        let id = u32_at(memory, add(at, 16)?)?;
        let mut wait = u64_at(memory, add(at, 24)?)?;
        if u32_at(memory, add(at, 40)?)? & 1 != 0 {
            wait = wait.saturating_sub(now(id as i32)?);
        }
        waits.push((wait, user));
    }
    if due.is_empty() {
        let Some(&(shortest, _)) = waits.iter().min() else {
            return Err(Errno::Inval);
        };
        let left = host.bounds.until.saturating_duration_since(Instant::now());
        host.flush();
        std::thread::sleep(Duration::from_nanos(shortest).min(left));
        if host.over() {
            host.stop = Some(Ending::Timeout);
            return Ok(());
        }
        due.extend(waits.iter().filter(|w| w.0 == shortest).map(|w| (w.1, 0)));
    }
    for (n, (user, tag)) in due.iter().enumerate() {
        let mut event = [0; 32];
        event[0..8].copy_from_slice(&user.to_le_bytes());
        event[10] = *tag;
        event[16..24].copy_from_slice(&1u64.to_le_bytes());
        put(memory, add(events, 32 * n)?, &event)?;
    }
    put(memory, ready, &(due.len() as u32).to_le_bytes())
}
