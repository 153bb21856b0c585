//! What the host and the spawner say to each other: one JSON message a packet, with files.

use crate::port::{Limits, Protection};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Deserialize, Serialize};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Largest packet: what a Unix socket takes at once under Debian's defaults, with room to spare.
pub(crate) const MAX_PACKET: usize = 160 << 10;

/// Files of a packet.
const MAX_FDS: usize = 4;

/// From the host.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// A new sandbox.
    Create { id: u64, limits: Limits },
    /// Kills and frees a sandbox.
    Destroy { id: u64 },
    /// Files: standard input, output, error and the status pipe.
    Exec {
        id: u64,
        argv: Vec<String>,
        env: Vec<(String, String)>,
    },
    /// Kills what runs in a sandbox.
    Kill { id: u64 },
    /// File: a memory file with the content.
    WriteFile { id: u64, path: String },
    /// The reply brings a memory file with the content.
    ReadFile {
        id: u64,
        path: String,
        max_bytes: u64,
    },
}

/// A request with the number that its reply carries.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Numbered {
    pub(crate) seq: u64,
    pub(crate) request: Request,
}

/// From the spawner.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// First message: what this host enforces.
    Hello { protections: Vec<Protection> },
    /// First message: nothing can be isolated.
    Unavailable { reason: String },
    /// A request is done.
    Done { seq: u64, error: Option<String> },
    /// What ran in a sandbox is gone, all of it.
    Ended { id: u64, events: CgroupEvents },
}

/// What the kernel counted for one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CgroupEvents {
    pub(crate) oom_kills: u64,
    pub(crate) process_refusals: u64,
    pub(crate) peak_memory_bytes: u64,
}

/// How the jailed program ended, as its init tells it: 24 bytes on the status pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status {
    /// 0 exited, 1 signalled, 2 set-up failed (`value` is the errno, `detail` the step).
    pub(crate) kind: u32,
    pub(crate) value: i32,
    pub(crate) detail: u32,
    pub(crate) max_rss_kib: u32,
    pub(crate) cpu_us: u64,
}

impl Status {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&self.kind.to_le_bytes());
        out[4..8].copy_from_slice(&self.value.to_le_bytes());
        out[8..12].copy_from_slice(&self.detail.to_le_bytes());
        out[12..16].copy_from_slice(&self.max_rss_kib.to_le_bytes());
        out[16..24].copy_from_slice(&self.cpu_us.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| -> Option<[u8; 4]> { bytes.get(at..at + 4)?.try_into().ok() };
        Some(Self {
            kind: u32::from_le_bytes(word(0)?),
            value: i32::from_le_bytes(word(4)?),
            detail: u32::from_le_bytes(word(8)?),
            max_rss_kib: u32::from_le_bytes(word(12)?),
            cpu_us: u64::from_le_bytes(bytes.get(16..24)?.try_into().ok()?),
        })
    }
}

/// Sends one message with files.
pub(crate) fn send<T: Serialize>(
    socket: BorrowedFd<'_>,
    message: &T,
    fds: &[RawFd],
) -> Result<(), String> {
    let bytes = serde_json::to_vec(message).map_err(|e| e.to_string())?;
    if bytes.len() > MAX_PACKET {
        return Err(format!(
            "message of {} bytes, at most {MAX_PACKET}",
            bytes.len()
        ));
    }
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() {
        &rights[..0]
    } else {
        &rights
    };
    loop {
        let sent = sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        );
        match sent {
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(format!("sendmsg: {e}")),
        }
    }
}

/// Receives one message with files; `None` if the other side is gone.
pub(crate) fn receive<T: for<'a> Deserialize<'a>>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Result<Option<(T, Vec<OwnedFd>)>, String> {
    let mut control = nix::cmsg_space!([RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let received = loop {
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags) {
            Err(nix::errno::Errno::EINTR) => {}
            other => break other.map_err(|e| format!("recvmsg: {e}"))?,
        }
    };
    let mut fds = Vec::new();
    for message in received.cmsgs().map_err(|e| format!("recvmsg: {e}"))? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just installed these descriptors for us alone.
            fds.extend(
                raw.into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    let len = received.bytes;
    if len == 0 {
        return Ok(None);
    }
    if received.flags.contains(MsgFlags::MSG_TRUNC) {
        return Err("message was cut".into());
    }
    let message = serde_json::from_slice(&buffer[..len]).map_err(|e| e.to_string())?;
    Ok(Some((message, fds)))
}
