//! Messages between the host and the spawner: one JSON message a packet, with files.
//!
//! Both ends are of one build, the spawner from the bytes that the host carries, so the protocol has no
//! versions. The host trusts the spawner; hostile code never holds this socket. Descriptors travel with the
//! packet that names them.

use crate::cgroup::CgroupEvents;
use crate::error::{Error, Result, call};
use crate::spec::{Limits, Network, Protection};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

/// Largest packet: what a Unix socket takes at once under Debian's defaults, with room to spare.
pub const MAX_PACKET: usize = 160 << 10;

/// Largest message: what a packet does not take goes in a memory file. The longest program is six
/// times as long in JSON at worst.
const MAX_MESSAGE: usize = 2 << 20;
/// The packet of a message that is in the last of its files.
const IN_FILE: &[u8] = b"F";

/// Files of a packet, the one with its message included.
const MAX_FDS: usize = 4;

/// Settings that the host sends the spawner at start.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Config {
    /// Folders visible inside at the same path, in addition to `/usr` and the other system folders.
    pub binds: Vec<PathBuf>,
    /// Folders to show elsewhere inside: on the host, inside.
    pub shows: Vec<(PathBuf, PathBuf)>,
    /// Root file system, instead of the host's system folders.
    pub image: Option<PathBuf>,
    /// Path of the Python interpreter inside; `None` if the image has none.
    pub python: Option<String>,
    /// Whether Python programs start as forks of a zygote.
    pub zygote: bool,
    /// Mount each sandbox's files in the spawner even where this is not needed.
    pub attached: bool,
}

/// Program to start.
#[derive(Debug, Serialize, Deserialize)]
pub enum Start {
    /// A program that the sandbox sees, and its arguments.
    Argv(Vec<String>),
    /// Like the variant above, with a terminal as its standard streams and as the terminal of its session.
    OnTerminal(Vec<String>),
    /// Code for a fork of the zygote.
    Python(String),
}

/// Properties of a new sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Creation {
    pub limits: Limits,
    pub network: Network,
    /// Snapshot that it starts from.
    pub base: Option<u64>,
    /// Whether an interpreter waits in it for the next program.
    pub warm: bool,
}

/// Request of the host.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// A new sandbox.
    Create { id: u64, creation: Creation },
    /// Kills and frees a sandbox.
    Destroy { id: u64 },
    /// Files: standard input, output and error.
    Exec {
        id: u64,
        start: Start,
        env: Vec<(String, String)>,
    },
    /// Kills what runs in a sandbox.
    Kill { id: u64 },
    /// Throws away all files of a sandbox.
    Reset { id: u64 },
    /// File: a memory file with the content.
    WriteFile { id: u64, path: String },
    /// The reply brings a memory file with the content.
    ReadFile {
        id: u64,
        path: String,
        max_bytes: u64,
    },
    /// The reply brings a listening socket.
    Listen { id: u64, port: u16 },
    /// The reply brings [`SpawnerStats`].
    Stats { id: u64 },
    /// Freezes the work folder under a number.
    Snapshot { id: u64, snapshot: u64 },
    /// A snapshot or an export is not needed any more, be it made or not.
    DropSnapshot { snapshot: u64 },
    /// File: where the archive goes. The export has a separate number, by which it is dropped.
    Export {
        snapshot: u64,
        export: u64,
        max_bytes: u64,
    },
    /// File: an archive.
    Import { snapshot: u64, max_bytes: u64 },
}

impl Request {
    /// The sandbox whose processes must all be gone before this is done.
    pub fn waits_for(&self) -> Option<u64> {
        match self {
            Self::Exec { id, .. }
            | Self::Reset { id }
            | Self::WriteFile { id, .. }
            | Self::ReadFile { id, .. }
            | Self::Stats { id }
            | Self::Snapshot { id, .. } => Some(*id),
            Self::Create { .. }
            | Self::Destroy { .. }
            | Self::Kill { .. }
            | Self::Listen { .. }
            | Self::DropSnapshot { .. }
            | Self::Export { .. }
            | Self::Import { .. } => None,
        }
    }
}

/// A request with the number that its reply carries.
#[derive(Debug, Serialize, Deserialize)]
pub struct Numbered {
    pub seq: u64,
    pub request: Request,
}

/// Reply of the spawner.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// First message: what this host enforces.
    Hello {
        protections: Vec<Protection>,
        /// Parts that start more slowly than they could, with the reasons.
        degradations: Vec<String>,
    },
    /// First message: nothing can be isolated.
    Unavailable { reason: String },
    /// A request is done.
    Done {
        seq: u64,
        error: Option<String>,
        stats: Option<SpawnerStats>,
        /// Stores that a new snapshot keeps, and the bytes of each.
        held: Vec<(u64, u64)>,
    },
    /// All processes of the request are gone, or were never begun.
    Ended { seq: u64, end: End },
}

/// The spawner's counts of a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnerStats {
    /// Charged to its control group now, files included; 0 where nothing counts.
    pub memory_bytes: u64,
    pub processes: u64,
    pub file_bytes: u64,
    pub file_count: u64,
    /// Snapshots below its work folder.
    pub layers: u64,
}

/// End of the main process of an execution, as the kernel reports it to the parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    Signal(i32),
    /// The setup failed before the program ran: number of the step, errno.
    SetUp(u32, i32),
    /// The program was never started.
    Lost(String),
    /// It could not even be tried.
    Refused(String),
}

/// The end of an execution.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    pub exit: Exit,
    /// CPU time of all its processes, in microseconds; of the main process where no group counts.
    pub cpu_us: u64,
    /// Whether it was killed because its CPU time was spent.
    pub cpu_spent: bool,
    /// Resident memory of its largest process.
    pub max_rss_kib: u64,
    pub events: CgroupEvents,
    /// Bytes that the files of the sandbox take after it.
    pub file_bytes: u64,
}

/// Report of a child of the spawner before hostile code runs in it: one record on a pipe that only such
/// children hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The sandbox; 0 for the zygote itself.
    pub id: u64,
    /// Number of the sandbox's init.
    pub serial: u32,
    pub kind: u32,
    /// Process id, or number of the step that failed.
    pub value: i32,
    pub errno: i32,
}

impl Notice {
    pub const BYTES: usize = 24;
    /// A sandbox init is ready.
    pub const READY: u32 = 0;
    /// The zygote has forked.
    pub const FORKED: u32 = 1;
    /// A step failed.
    pub const FAILED: u32 = 2;
    /// The zygote is ready.
    pub const ZYGOTE: u32 = 3;

    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..8].copy_from_slice(&self.id.to_ne_bytes());
        out[8..12].copy_from_slice(&self.serial.to_ne_bytes());
        out[12..16].copy_from_slice(&self.kind.to_ne_bytes());
        out[16..20].copy_from_slice(&self.value.to_ne_bytes());
        out[20..24].copy_from_slice(&self.errno.to_ne_bytes());
        out
    }

    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        let mut id = [0; 8];
        id.copy_from_slice(&bytes[..8]);
        Self {
            id: u64::from_ne_bytes(id),
            serial: u32::from_ne_bytes(word(8)),
            kind: u32::from_ne_bytes(word(12)),
            value: i32::from_ne_bytes(word(16)),
            errno: i32::from_ne_bytes(word(20)),
        }
    }
}

/// Sends one message with files.
pub fn send<T: Serialize>(socket: BorrowedFd<'_>, message: &T, fds: &[RawFd]) -> Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() <= MAX_PACKET {
        return send_bytes(socket, &bytes, fds);
    }
    if bytes.len() > MAX_MESSAGE {
        return Err(Error::TooLong {
            what: "message",
            bytes: bytes.len(),
            max: MAX_MESSAGE,
        });
    }
    let file = memory_file(&bytes)?;
    let fds: Vec<RawFd> = fds.iter().copied().chain([file.as_raw_fd()]).collect();
    send_bytes(socket, IN_FILE, &fds)
}

/// Sends one packet with files.
pub fn send_bytes(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
    if bytes.len() > MAX_PACKET {
        return Err(Error::TooLong {
            what: "message",
            bytes: bytes.len(),
            max: MAX_PACKET,
        });
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
            &[IoSlice::new(bytes)],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        );
        match sent {
            Ok(_) => return Ok(()),
            Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(call("sendmsg")(e)),
        }
    }
}

/// Receives one message with files; `None` if the other side is gone.
pub fn receive<T: for<'a> Deserialize<'a>>(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> Result<Option<(T, Vec<OwnedFd>)>> {
    let mut control = nix::cmsg_space!([RawFd; MAX_FDS]);
    let mut slices = [IoSliceMut::new(buffer)];
    let received = loop {
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<()>(socket.as_raw_fd(), &mut slices, Some(&mut control), flags) {
            Err(nix::errno::Errno::EINTR) => {}
            other => break other.map_err(call("recvmsg"))?,
        }
    };
    let mut fds = Vec::new();
    for message in received.cmsgs().map_err(call("recvmsg"))? {
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
        return Err(Error::refused("message", "it was cut"));
    }
    let kept;
    let bytes = if &buffer[..len] == IN_FILE {
        kept = whole(File::from(
            fds.pop().ok_or(Error::NoSuch("file of a long message"))?,
        ))?;
        &kept
    } else {
        &buffer[..len]
    };
    let message = serde_json::from_slice(bytes)?;
    Ok(Some((message, fds)))
}

fn whole(mut file: File) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()
        .and_then(|()| file.take(MAX_MESSAGE as u64).read_to_end(&mut bytes))
        .map_err(call("read a message"))?;
    Ok(bytes)
}

/// A memory file with this content.
///
/// # Errors
/// The call that failed.
pub fn memory_file(bytes: &[u8]) -> Result<OwnedFd> {
    let memory = memfd_create(c"sinew-file", MFdFlags::MFD_CLOEXEC);
    let mut memory = File::from(memory.map_err(call("make a memory file"))?);
    memory
        .write_all(bytes)
        .map_err(call("write a memory file"))?;
    memory.rewind().map_err(call("rewind a memory file"))?;
    Ok(memory.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
    use std::os::fd::AsFd;

    #[test]
    fn messages_of_any_length_up_to_the_bound_arrive_with_their_files() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let pair = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags);
        let (ours, theirs) = pair.expect("a pair");
        let mut buffer = vec![0; MAX_PACKET + 1];
        for length in [0, 90 << 10, MAX_PACKET - 2, MAX_PACKET - 1, MAX_MESSAGE - 2] {
            let said = "x".repeat(length);
            send(ours.as_fd(), &said, &[0, 1, 2]).expect("it is sent");
            let got = receive::<String>(theirs.as_fd(), &mut buffer);
            let (heard, files) = got.expect("it arrives").expect("a message");
            assert!(heard == said, "{length} bytes");
            assert_eq!(files.len(), 3);
        }
        let error = send(ours.as_fd(), &"x".repeat(MAX_MESSAGE), &[]).expect_err("too long");
        assert!(error.to_string().contains("at most 2097152"), "{error}");
    }
}
