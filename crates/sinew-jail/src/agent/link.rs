//! The connection to the host.
//!
//! A Unix socket of a container, a virtio port or a vsock connection of a machine. A machine that is
//! restored from a snapshot finds its connection gone: it waits for the host at the listener again and
//! forgets the half frame that it had, or reads on from the port.

use crate::wire::{self, HEAD, MAX_REQUEST};
use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

/// Frames in and out. Whatever the file behind it: a Unix socket, a port of a machine.
pub(super) struct Link {
    file: File,
    /// A port of a machine: the host may come back.
    machine: bool,
    /// Where the host connects again: after a snapshot its connection is gone.
    listener: Option<OwnedFd>,
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
    pub(super) fn new(file: File, machine: bool, listener: Option<OwnedFd>) -> Self {
        Self {
            file,
            machine,
            listener,
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

    /// Reads what is there; the end of the connection is the end of the agent.
    pub(super) fn fill(&mut self) -> Result<()> {
        let mut chunk = [0; 64 << 10];
        let read = self.file.read(&mut chunk);
        // ECONNRESET.
        let lost = |e: &std::io::Error| e.raw_os_error() == Some(104);
        if let Some(listener) = &self.listener
            && (matches!(read, Ok(0)) || read.as_ref().is_err_and(lost))
        {
            self.had.clear();
            self.file = super::sys::accept(listener)?;
            return Ok(());
        }
        match read {
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
