//! Frames of an agent, which is hostile: how they are read, and what programs and files they describe.

use crate::guest::archive::{Entry, EntryKind, plain};
use crate::{Characters, Ending, OutputChunk, OutputStream, SandboxError, Usage};
use sinew_jail::wire::{self, HEAD, MAX_REPLY, Take, cut, file, tell};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::time::Instant;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;

/// Entries of a folder, at most.
const MAX_ENTRIES: usize = 65_536;

/// Any stream to an agent.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

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

/// Frames from the agent. Bytes already read stay when a caller gives up.
pub(super) struct Frames {
    half: ReadHalf<Box<dyn Stream>>,
    had: Vec<u8>,
}

pub(super) type SandboxResult<T> = Result<T, SandboxError>;

pub(super) fn died(why: impl Into<String>) -> SandboxError {
    SandboxError::Died(why.into())
}

pub(super) fn odd(kind: u8) -> SandboxError {
    died(format!(
        "its agent sent a frame of kind {kind} that does not belong"
    ))
}

impl Frames {
    pub(super) fn new(half: ReadHalf<Box<dyn Stream>>) -> Self {
        Self {
            half,
            had: Vec::new(),
        }
    }

    pub(super) async fn next(&mut self) -> SandboxResult<(u8, Vec<u8>)> {
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
    pub(super) async fn done(&mut self, operation: &str) -> SandboxResult<Vec<u64>> {
        match self.next().await? {
            (tell::DONE, bytes) => numbers(&bytes).ok_or_else(|| odd(tell::DONE)),
            (tell::FAILED, bytes) => Err(SandboxError::io(operation, failure(&bytes)?.2)),
            (kind, _) => Err(odd(kind)),
        }
    }
}

pub(super) fn numbers(bytes: &[u8]) -> Option<Vec<u64>> {
    let mut take = Take(bytes);
    let list: Option<Vec<u64>> = (0..bytes.len() / 8).map(|_| take.number()).collect();
    list.filter(|_| take.0.is_empty())
}

/// Step, errno, text.
pub(super) fn failure(bytes: &[u8]) -> SandboxResult<(u64, i32, String)> {
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

pub(super) async fn send(
    write: &mut WriteHalf<Box<dyn Stream>>,
    frame: &[u8],
) -> SandboxResult<()> {
    let sent = async {
        write.write_all(frame).await?;
        write.flush().await
    };
    sent.await
        .map_err(|e| died(format!("its agent is gone: {e}")))
}

/// Output and end of a program, or step and errno of a start that failed.
pub(super) async fn listen(
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

/// Entries that an agent sends, and the numbers of its last frame. `hint` follows the message that there are
/// more bytes than `max_bytes`.
pub(super) async fn entries(
    frames: &mut Frames,
    max_bytes: u64,
    hint: &str,
) -> SandboxResult<(Vec<Entry>, Vec<u64>)> {
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
            tell::DONE => {
                let numbers = numbers(&bytes).ok_or_else(|| odd(kind))?;
                return Ok((list, numbers));
            }
            tell::FAILED => {
                let (_, errno, text) = failure(&bytes)?;
                return Err(SandboxError::io(
                    "archive",
                    match errno {
                        EFBIG => format!("the files have more than {max_bytes} bytes{hint}"),
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
