//! Communication between processes of one host: messages through pipes, and numbers through shared memory.
//!
//! Rank 0 has a pair of pipes to each other rank. The other ranks have no pipes between them, since data
//! parallelism needs none. The shared memory is an anonymous file of equal slots: slot 0 holds the buffers
//! that rank 0 sends, and slot `r` those of rank `r`. An empty message means that a slot is written or has
//! been read.

use super::{Comm, CommError};
use sinew_tensor::{Cpu, ops};
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Number of values that are read from another process and added at once (512 KiB), so that they stay in the
/// L2 cache.
const PIECE: usize = 1 << 17;

/// The pipes between two ranks.
pub struct Link {
    /// The rank at the other end.
    rank: usize,
    output: BufWriter<Box<dyn Write + Send>>,
    messages: Receiver<io::Result<Vec<u8>>>,
    /// Number of the peer's reports that it has read a slot which this process has still to receive.
    unread: usize,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Link");
        f.field("rank", &self.rank).finish_non_exhaustive()
    }
}

/// Reads a message: its length in 8 bytes, little-endian, then its bytes. `None` at the end of the stream.
fn read_message(input: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 8];
    match input.read(&mut length[..1])? {
        0 => return Ok(None),
        _ => input.read_exact(&mut length[1..])?,
    }
    let length = u64::from_le_bytes(length);
    let mut message = Vec::new();
    // Grows with what really comes, whatever the length claims.
    input.take(length).read_to_end(&mut message)?;
    if message.len() as u64 == length {
        Ok(Some(message))
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

impl Link {
    /// Creates the link to `rank` over two pipes. A thread reads `input`, one message ahead.
    pub fn new(
        rank: usize,
        mut input: impl Read + Send + 'static,
        output: impl Write + Send + 'static,
    ) -> Self {
        let (sender, messages) = sync_channel(1);
        std::thread::spawn(move || {
            loop {
                let message = read_message(&mut input).transpose();
                let Some(message) = message else { return };
                let failed = message.is_err();
                if sender.send(message).is_err() || failed {
                    return;
                }
            }
        });
        Self {
            rank,
            output: BufWriter::new(Box::new(output)),
            messages,
            unread: 0,
        }
    }

    fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length = message.len() as u64;
        self.output.write_all(&length.to_le_bytes())?;
        self.output.write_all(message)?;
        self.output.flush()
    }

    fn next(&mut self, deadline: Option<Duration>) -> Result<Vec<u8>, Lost> {
        let message = match deadline {
            Some(deadline) => self.messages.recv_timeout(deadline),
            None => (self.messages.recv()).map_err(|_| RecvTimeoutError::Disconnected),
        };
        match message {
            Ok(Ok(message)) => Ok(message),
            Ok(Err(e)) => Err(Lost::Failed(e.to_string())),
            Err(RecvTimeoutError::Disconnected) => Err(Lost::Closed),
            Err(RecvTimeoutError::Timeout) => {
                let waited = deadline.unwrap_or_default().as_secs();
                Err(Lost::Failed(format!("no answer for {waited} s")))
            }
        }
    }
}

/// Reason why no message was received.
enum Lost {
    Closed,
    Failed(String),
}

/// Communicator of one of several processes on a host.
#[derive(Debug)]
pub struct ProcessComm {
    rank: usize,
    ranks: usize,
    links: Vec<Link>,
    /// Memory shared by all ranks: `ranks` slots of `slot` values.
    memory: File,
    /// Number of values in a slot, at least the total length of all buffers of one call.
    slot: usize,
    /// Maximum wait for a message; `None` waits without limit.
    deadline: Option<Duration>,
    device: Cpu,
}

impl ProcessComm {
    /// Size in bytes of the shared memory for exchanges of up to `numbers` f32 values between `ranks`
    /// processes.
    pub fn memory_bytes(ranks: usize, numbers: usize) -> u64 {
        4 * ranks as u64 * numbers as u64
    }

    /// Creates the communicator of rank 0. `links` lead to the ranks from 1 on, in order. It waits at most
    /// `deadline` for a message. `numbers` is the capacity of a slot.
    pub fn leader(
        links: Vec<Link>,
        memory: File,
        numbers: usize,
        deadline: Duration,
        device: Cpu,
    ) -> Self {
        Self {
            rank: 0,
            ranks: links.len() + 1,
            links,
            memory,
            slot: numbers,
            deadline: Some(deadline),
            device,
        }
    }

    /// Creates the communicator of another rank. It waits without limit for messages of rank 0 over `link`.
    pub fn follower(
        rank: usize,
        ranks: usize,
        link: Link,
        memory: File,
        numbers: usize,
        device: Cpu,
    ) -> Self {
        Self {
            rank,
            ranks,
            links: vec![link],
            memory,
            slot: numbers,
            deadline: None,
            device,
        }
    }

    fn gone(&self, rank: usize, reason: &str) -> CommError {
        CommError::Gone {
            rank,
            ranks: self.ranks,
            reason: reason.to_owned(),
        }
    }

    fn memory_failed(&self, reason: &str) -> CommError {
        CommError::Failed {
            rank: self.rank,
            ranks: self.ranks,
            reason: format!("shared memory: {reason}"),
        }
    }

    /// Returns the index of the link to a rank.
    fn link(&self, rank: usize) -> Option<usize> {
        self.links.iter().position(|link| link.rank == rank)
    }

    fn put(&mut self, at: usize, message: &[u8]) -> Result<(), CommError> {
        let sent = self.links[at].send(message);
        sent.map_err(|e| self.gone(self.links[at].rank, &e.to_string()))
    }

    /// Receives the next message of a link, after the peer has read everything that was sent through the
    /// shared memory.
    fn take(&mut self, at: usize) -> Result<Vec<u8>, CommError> {
        self.settle(at)?;
        self.take_one(at)
    }

    fn take_one(&mut self, at: usize) -> Result<Vec<u8>, CommError> {
        let rank = self.links[at].rank;
        self.links[at]
            .next(self.deadline)
            .map_err(|lost| match lost {
                Lost::Closed if self.rank == 0 => self.gone(rank, "it ended"),
                Lost::Closed => CommError::Closed { rank },
                Lost::Failed(reason) => self.gone(rank, &reason),
            })
    }

    /// Waits until the peer has read everything that was sent through the shared memory.
    fn settle(&mut self, at: usize) -> Result<(), CommError> {
        while self.links[at].unread > 0 {
            self.take_one(at)?;
            self.links[at].unread -= 1;
        }
        Ok(())
    }

    /// Returns the byte offset of value `at` in a slot.
    ///
    /// # Errors
    /// If the slot is too small.
    fn place(&self, slot: usize, at: usize, len: usize) -> Result<u64, CommError> {
        if at + len <= self.slot {
            Ok(4 * (slot * self.slot + at) as u64)
        } else {
            let (slot, wanted) = (self.slot, at + len);
            Err(self.memory_failed(&format!("a slot has {slot} numbers, {wanted} are sent")))
        }
    }

    fn write(&self, slot: usize, buffers: &[&mut [f32]]) -> Result<(), CommError> {
        let mut at = 0;
        for buffer in buffers {
            let place = self.place(slot, at, buffer.len())?;
            let written = self
                .memory
                .write_all_at(bytemuck::cast_slice(buffer), place);
            written.map_err(|e| self.memory_failed(&e.to_string()))?;
            at += buffer.len();
        }
        Ok(())
    }

    fn read(&self, slot: usize, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        let mut at = 0;
        for buffer in buffers {
            self.read_at(slot, at, buffer)?;
            at += buffer.len();
        }
        Ok(())
    }

    fn read_at(&self, slot: usize, at: usize, buffer: &mut [f32]) -> Result<(), CommError> {
        let place = self.place(slot, at, buffer.len())?;
        let bytes = bytemuck::cast_slice_mut(buffer);
        let read = self.memory.read_exact_at(bytes, place);
        read.map_err(|e| self.memory_failed(&e.to_string()))
    }

    /// Rank 0: sends buffers to all ranks through slot 0, and each rank confirms that it has read them.
    fn hand_out(&mut self, buffers: &[&mut [f32]]) -> Result<(), CommError> {
        for at in 0..self.links.len() {
            self.settle(at)?;
        }
        self.write(0, buffers)?;
        for at in 0..self.links.len() {
            self.put(at, &[])?;
            self.links[at].unread += 1;
        }
        Ok(())
    }

    /// Other ranks: read slot 0 and confirm it.
    fn take_in(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        self.take(0)?;
        self.read(0, buffers)?;
        self.put(0, &[])
    }
}

impl Comm for ProcessComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn send(&mut self, to: usize, message: &[u8]) -> Result<(), CommError> {
        let from = self.rank;
        let at = self.link(to).ok_or(CommError::NoLink { from, to })?;
        self.put(at, message)
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>, CommError> {
        let to = self.rank;
        let at = self.link(from).ok_or(CommError::NoLink { from, to })?;
        self.take(at)
    }

    fn broadcast(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        match self.rank {
            0 => self.hand_out(buffers),
            _ => self.take_in(buffers),
        }
    }

    fn all_reduce(&mut self, buffers: &mut [&mut [f32]]) -> Result<(), CommError> {
        if self.rank > 0 {
            self.write(self.rank, buffers)?;
            self.put(0, &[])?;
            return self.take_in(buffers);
        }
        let mut part = vec![0.0; PIECE];
        for at in 0..self.links.len() {
            self.take(at)?;
            let (slot, mut place) = (self.links[at].rank, 0);
            for sums in buffers.iter_mut().flat_map(|b| b.chunks_mut(PIECE)) {
                let part = &mut part[..sums.len()];
                self.read_at(slot, place, part)?;
                ops::add(&self.device, part, sums);
                place += part.len();
            }
        }
        self.hand_out(buffers)
    }

    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if self.rank > 0 {
            self.put(0, own)?;
            return (0..self.ranks).map(|_| self.take(0)).collect();
        }
        let mut all = vec![own.to_vec()];
        for at in 0..self.links.len() {
            all.push(self.take(at)?);
        }
        for at in 0..self.links.len() {
            for message in &all {
                self.put(at, message)?;
            }
        }
        Ok(all)
    }
}
