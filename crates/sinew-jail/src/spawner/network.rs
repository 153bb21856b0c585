//! Network namespaces of sandboxes that have a loopback interface.
//!
//! A namespace can be made and used only by a thread that is in it: the spawner enters one for a call
//! and returns to its own before it does anything else.

use crate::error::{Result, call, on};
use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::Mode;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The namespace that the spawner is in, and how it finds others.
#[derive(Debug)]
pub(super) struct Networks {
    own: OwnedFd,
    /// `/proc` of the host, opened before the spawner left the host's files.
    proc: OwnedFd,
}

impl Networks {
    /// Opens the namespace of this process.
    pub(super) fn open() -> Result<Self> {
        Ok(Self {
            own: open("/proc/self/ns/net")?,
            proc: open("/proc")?,
        })
    }

    /// A network namespace with nothing but a loopback interface, which is up.
    pub(super) fn new_loopback(&self) -> Result<OwnedFd> {
        let made = unshare(CloneFlags::CLONE_NEWNET)
            .map_err(call("unshare the network"))
            .and_then(|()| loopback_up().map_err(call("turn loopback on")))
            .and_then(|()| self.current());
        self.home()?;
        made
    }

    /// A socket that listens on `127.0.0.1:port` of a namespace. Connections are accepted outside.
    pub(super) fn listen(&self, namespace: &OwnedFd, port: u16) -> Result<OwnedFd> {
        setns(namespace.as_fd(), CloneFlags::CLONE_NEWNET).map_err(call("enter the network"))?;
        let listening = listener(port);
        self.home()?;
        listening.map_err(on("listen inside on port", &port.to_string()))
    }

    /// The network namespace of this process now.
    fn current(&self) -> Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        openat(self.proc.as_fd(), "self/ns/net", flags, Mode::empty())
            .map_err(on("open", "/proc/self/ns/net"))
    }

    fn home(&self) -> Result<()> {
        setns(self.own.as_fd(), CloneFlags::CLONE_NEWNET).map_err(call("leave the network"))
    }
}

fn open(path: &str) -> Result<OwnedFd> {
    let file = std::fs::File::open(path).map_err(on("open", path))?;
    Ok(file.into())
}

fn listener(port: u16) -> std::io::Result<OwnedFd> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// Sets IFF_UP on `lo` of this process's network namespace.
///
/// # Errors
/// Fails if the kernel refuses it.
pub fn loopback_up() -> std::io::Result<()> {
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: i16,
        rest: [u8; 22],
    }
    let mut request = Request {
        name: *b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        flags: (libc::IFF_UP | libc::IFF_RUNNING) as i16,
        rest: [0; 22],
    };
    let socket = nix::sys::socket::socket(
        nix::sys::socket::AddressFamily::Inet,
        nix::sys::socket::SockType::Datagram,
        nix::sys::socket::SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    // SAFETY: SIOCSIFFLAGS reads a `struct ifreq` of 40 bytes.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
