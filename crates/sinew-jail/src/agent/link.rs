//! The connection to the host.
//!
//! A Unix socket of a container or a virtio port of a machine. A machine that is restored from a snapshot
//! reads on from its port.

use crate::wire::{self, HEAD, MAX_REQUEST};
use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

/// Frames in and out. Whatever the file behind it: a Unix socket, a port of a machine.
pub(super) struct Link {
    file: File,
    /// Whether the link is a port of a virtual machine, so that the host may connect again after the
    /// connection ended.
    machine: bool,
    /// Bytes that were read and not yet taken.
    had: Vec<u8>,
}

/// Kind and payload.
pub(super) type Frame = (u8, Vec<u8>);

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Link {
    pub(super) fn new(file: File, machine: bool) -> Self {
        Self {
            file,
            machine,
            had: Vec::new(),
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// A whole frame that was read already. The host is trusted, a length beyond the bound is
    /// a defect: the agent ends, and with it the sandbox.
    pub(super) fn ready(&mut self) -> Option<Frame> {
        let start: [u8; HEAD] = self.had.get(..HEAD)?.try_into().ok()?;
        let (kind, len) = wire::head(&start);
        if len > MAX_REQUEST {
            super::leave(71);
        }
        if self.had.len() < HEAD + len {
            return None;
        }
        let payload = self.had[HEAD..HEAD + len].to_vec();
        self.had.drain(..HEAD + len);
        Some((kind, payload))
    }

    /// Reads the available bytes. At the end of the connection the agent exits; in a virtual machine it waits
    /// 1 ms instead, since the host may connect again.
    pub(super) fn fill(&mut self) -> Result<()> {
        let mut chunk = [0; 64 << 10];
        match self.file.read(&mut chunk) {
            Ok(0) if self.machine => {
                std::thread::sleep(std::time::Duration::from_millis(1));
                Ok(())
            }
            Ok(0) => super::leave(0),
            Ok(n) => {
                self.had.extend_from_slice(&chunk[..n]);
                Ok(())
            }
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The next frame, however long it takes.
    pub(super) fn next(&mut self) -> Result<Frame> {
        loop {
            if let Some(frame) = self.ready() {
                return Ok(frame);
            }
            self.fill()?;
        }
    }

    /// Sends a frame, however long the host takes to read it.
    pub(super) fn send(&mut self, frame: &[u8]) -> Result<()> {
        self.file.write_all(frame)
    }

    /// Writes what goes out now; how much that was.
    pub(super) fn send_some(&mut self, bytes: &[u8]) -> Result<usize> {
        match self.file.write(bytes) {
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(0),
            other => other,
        }
    }
}
