//! The pipe on which children of the spawner report before hostile code runs in them: sandbox inits,
//! the zygote, and its forks up to the end of their plan. All of them close it before a program comes.
//!
//! Hostile code never holds the writing end: inits and programs close it, or lose it at `execve`.

use crate::error::{Result, call};
use crate::protocol::Notice;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Both ends: children inherit the writing one.
#[derive(Debug)]
pub(super) struct Notices {
    reader: PipeReader,
    writer: PipeWriter,
}

impl Notices {
    pub(super) fn new() -> Result<Self> {
        let (reader, writer) = std::io::pipe().map_err(call("pipe"))?;
        Ok(Self { reader, writer })
    }

    /// End of the pipe to which children write. A notice is shorter than `PIPE_BUF`: notices never mix.
    pub(super) fn writer(&self) -> RawFd {
        self.writer.as_raw_fd()
    }

    /// The next notice, if one comes within this time.
    pub(super) fn next(&mut self, within: Duration) -> Option<Notice> {
        let timeout = PollTimeout::try_from(within).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.reader.as_fd(), PollFlags::POLLIN)];
        if !matches!(poll(&mut fds, timeout), Ok(1)) {
            return None;
        }
        let mut bytes = [0; Notice::BYTES];
        self.reader.read_exact(&mut bytes).ok()?;
        Some(Notice::decode(&bytes))
    }
}

impl AsFd for Notices {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.reader.as_fd()
    }
}
