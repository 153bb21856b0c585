//! Input and output of a program: input is written, output is captured up to a bound and passed on as it
//! comes.
//!
//! Bytes beyond the limit are read and dropped, so that a program that writes too much is seen as that
//! and not as one that hangs. A reader that is slow holds the program back until its deadline, never
//! longer.

use crate::characters::Characters;
use crate::port::{OutputChunk, OutputStream};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::os::fd::OwnedFd;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;
use tokio::sync::{Notify, mpsc, watch};

/// Bytes that one read of a program's output takes at most.
const CHUNK: usize = 8 << 10;
/// Maximum wait for a reader to take a piece of output after the program has ended.
const READER_GRACE: Duration = Duration::from_secs(3);

/// Output of a program on one stream.
#[derive(Default)]
pub(super) struct StreamOutput {
    /// Captured bytes, at most the limit of the execution.
    pub(super) kept: Vec<u8>,
    pub(super) truncated: bool,
    /// Bytes that were read, those that were dropped included.
    pub(super) bytes: u64,
}

impl StreamOutput {
    /// Takes what was read, up to a bound; the bytes of it that are kept.
    fn add(&mut self, read: &[u8], max: usize) -> usize {
        self.bytes += read.len() as u64;
        let room = (max - self.kept.len()).min(read.len());
        self.kept.extend_from_slice(&read[..room]);
        self.truncated |= room < read.len();
        room
    }
}

/// Reads the rest of a pipe that has no writer any more.
pub(super) async fn drain(
    pipe: OwnedFd,
    max: usize,
    stream: OutputStream,
    output: Option<mpsc::Sender<OutputChunk>>,
) -> std::io::Result<StreamOutput> {
    let mut captured = StreamOutput::default();
    fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut chunk = [0; CHUNK];
    loop {
        match nix::unistd::read(&pipe, &mut chunk) {
            Ok(0) | Err(Errno::EAGAIN) => break,
            Ok(n) => captured.add(&chunk[..n], max),
            Err(e) => return Err(e.into()),
        };
    }
    let mut delivery = Delivery::new(stream, output);
    for bytes in captured.kept.chunks(CHUNK) {
        delivery.late(bytes).await;
    }
    delivery.rest().await;
    Ok(captured)
}

/// Parts shared by the two captures of an execution.
#[derive(Clone, Copy)]
pub(super) struct Bounds<'a> {
    pub(super) max: usize,
    pub(super) overflow: &'a Notify,
    /// Becomes true when no process will write any more, even if one still holds the pipe.
    pub(super) over: &'a watch::Receiver<bool>,
    /// Becomes true when the program is killed: from then on nothing is held back.
    pub(super) cut_short: &'a watch::Receiver<bool>,
}

/// Passes output on as it comes, in whole characters.
struct Delivery {
    stream: OutputStream,
    output: Option<mpsc::Sender<OutputChunk>>,
    characters: Characters,
}

impl Delivery {
    fn new(stream: OutputStream, output: Option<mpsc::Sender<OutputChunk>>) -> Self {
        Self {
            stream,
            output,
            characters: Characters::default(),
        }
    }

    /// Passes on bytes of a running program: it waits for the reader, until the program ends or is to end.
    async fn add(&mut self, bytes: &[u8], bounds: Bounds<'_>) {
        let Some(sender) = self.output.clone() else {
            return;
        };
        let (stream, bytes) = (self.stream, self.characters.add(bytes));
        if bytes.is_empty() {
            return;
        }
        let (mut over, mut cut_short) = (bounds.over.clone(), bounds.cut_short.clone());
        let mut sending = std::pin::pin!(sender.send(OutputChunk { stream, bytes }));
        let sent = tokio::select! {
            sent = &mut sending => sent.is_ok(),
            _ = async { tokio::select! {
                _ = over.wait_for(|over| *over) => {}
                _ = cut_short.wait_for(|cut| *cut) => {}
            } } => matches!(tokio::time::timeout(READER_GRACE, sending).await, Ok(Ok(()))),
        };
        if !sent {
            self.output = None;
        }
    }

    /// Passes on bytes of a program that has ended: a reader that takes nothing for a while gets no more.
    async fn late(&mut self, bytes: &[u8]) {
        let bytes = self.characters.add(bytes);
        self.send_late(bytes).await;
    }

    /// Passes on the bytes of a character that never became whole.
    async fn rest(&mut self) {
        let bytes = self.characters.rest();
        self.send_late(bytes).await;
    }

    async fn send_late(&mut self, bytes: Vec<u8>) {
        let stream = self.stream;
        if let Some(sender) = self.output.as_ref().filter(|_| !bytes.is_empty()) {
            let sent = sender.send(OutputChunk { stream, bytes });
            if !matches!(tokio::time::timeout(READER_GRACE, sent).await, Ok(Ok(()))) {
                self.output = None;
            }
        }
    }
}

/// Everything that a program wrote, up to a bound, and whether there was more.
pub(super) async fn capture(
    pipe: OwnedFd,
    bounds: Bounds<'_>,
    stream: OutputStream,
    output: Option<mpsc::Sender<OutputChunk>>,
) -> std::io::Result<StreamOutput> {
    let mut delivery = Delivery::new(stream, output);
    let mut pipe = pipe::Receiver::from_owned_fd(pipe)?;
    let mut captured = StreamOutput::default();
    let mut chunk = vec![0; CHUNK];
    let mut over = bounds.over.clone();
    let mut ended = false;
    // The pipe is drained beyond the bound, too: a full pipe would look like a hung program.
    loop {
        let n = if ended {
            // This reads bytes that are there already; the runtime may not have noticed them.
            nix::unistd::read(&pipe, &mut chunk).unwrap_or(0)
        } else {
            tokio::select! {
                n = pipe.read(&mut chunk) => n.unwrap_or(0),
                _ = over.wait_for(|over| *over) => {
                    ended = true;
                    continue;
                }
            }
        };
        if n == 0 {
            delivery.rest().await;
            return Ok(captured);
        }
        let cut = captured.truncated;
        let room = captured.add(&chunk[..n], bounds.max);
        // The notice comes before the bytes are passed on, so that a slow reader does not keep alive a
        // program that writes too much.
        if captured.truncated && !cut {
            bounds.overflow.notify_one();
        }
        delivery.add(&chunk[..room], bounds).await;
    }
}

/// Writes the input and closes the pipe; ends early when nothing reads any more.
pub(super) async fn feed(pipe: Option<pipe::Sender>, bytes: &[u8], over: &watch::Receiver<bool>) {
    let mut over = over.clone();
    if let Some(mut pipe) = pipe {
        // A program need not read what it is given.
        tokio::select! {
            _ = pipe.write_all(bytes) => {}
            _ = over.wait_for(|over| *over) => {}
        }
    }
}
