//! Starts the zygote: a Python interpreter inside the read-only root, ready to be forked.
//!
//! It runs `python/zygote.py` and nothing else, holds six capabilities that entering namespaces takes,
//! and no file but its control socket, the pipe of notices and an unused pipe in place of its standard
//! streams.

use super::children::Child;
use super::pending_exec::c_strings;
use super::root;
use crate::error::{Error, Result, call};
use crate::exec::{execve, place, pointers};
use crate::python::{self, BASE_ENV};
use crate::walls::Plan;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Maximum starts of a zygote within the life of a spawner.
pub(crate) const MAX_STARTS: u32 = 16;

/// Maximum time of a zygote for loading its modules.
pub(super) const START: Duration = Duration::from_secs(30);
/// Maximum time of a fork, which normally takes less than a millisecond. A zygote that is stopped or stuck is
/// replaced after that.
const ANSWER: Duration = Duration::from_secs(3);

/// A zygote as the spawner holds it.
#[derive(Debug)]
pub(crate) struct Zygote {
    pub(super) child: Rc<Child>,
    socket: OwnedFd,
    started: Instant,
    ready: Option<Instant>,
    /// Times of the requests for forks that it has not answered, the oldest first.
    asked: VecDeque<Instant>,
}

impl Zygote {
    /// Starts one; it reports on the notice pipe when it is ready.
    pub(crate) fn start(python: &str, notices: RawFd, at_root: bool) -> Result<Self> {
        let argv = python::waiting(python.as_bytes(), "zygote", &python::zygote());
        let argv = argv.map_err(|e| Error::refused("python", e.to_string()))?;
        let env = c_strings(BASE_ENV.iter().map(|(k, v)| format!("{k}={v}")))?;
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(call("socketpair"))?;
        // Programs have pipes as standard streams; the objects of the interpreter are made for
        // the same kind of file. Forks have this one until their program comes with its own three:
        // no code but `python/` ever sees it.
        let (read_end, write_end) = std::io::pipe().map_err(call("pipe"))?;
        let stdio = [
            read_end.as_raw_fd(),
            write_end.as_raw_fd(),
            write_end.as_raw_fd(),
            theirs.as_raw_fd(),
            notices,
        ];
        // SAFETY: this process has one thread; the child never returns.
        match unsafe { libc::fork() } {
            -1 => Err(Error::last("fork")),
            0 => {
                if confine(at_root).is_ok() && place(&stdio).is_ok() {
                    execve(&pointers(&argv), &pointers(&env));
                }
                // SAFETY: exits without destructors of the copied parent.
                unsafe { libc::_exit(127) }
            }
            number => {
                let zygote = Self {
                    child: Child::of(number)?,
                    socket: ours,
                    started: Instant::now(),
                    ready: None,
                    asked: VecDeque::new(),
                };
                zygote.send(&Plan::zygote().encode(), &[])?;
                Ok(zygote)
            }
        }
    }

    fn send(&self, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
        crate::protocol::send_bytes(self.socket.as_fd(), bytes, fds)
    }

    /// Asks for a fork in the PID namespace of `init`, which gets `socket`.
    pub(crate) fn fork(&mut self, id: u64, serial: u32, init: RawFd, socket: RawFd) -> Result<()> {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&id.to_ne_bytes());
        bytes[8..].copy_from_slice(&serial.to_ne_bytes());
        let sent = self.send(&bytes, &[init, socket]);
        if !self.is_gone() {
            sent?;
        }
        // One that has just died is asked, too: when its end is seen, the next one gets the request.
        self.asked.push_back(Instant::now());
        Ok(())
    }

    /// Whether its end of the socket is closed.
    fn is_gone(&self) -> bool {
        let mut socket = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        let hung_up = |events: PollFlags| events.contains(PollFlags::POLLHUP);
        poll(&mut socket, PollTimeout::ZERO).is_ok() && socket[0].revents().is_some_and(hung_up)
    }

    pub(super) fn set_ready(&mut self) {
        self.ready = Some(Instant::now());
    }

    /// It answers in turn.
    pub(super) fn answered(&mut self) {
        self.asked.pop_front();
    }

    /// Time by which its next message must have come, if one is expected.
    pub(super) fn due(&self) -> Option<Instant> {
        match self.ready {
            None => Some(self.started + START),
            Some(ready) => self.asked.front().map(|asked| *asked.max(&ready) + ANSWER),
        }
    }
}

/// Enters separate namespaces, and the root that programs see.
fn confine(at_root: bool) -> nix::Result<()> {
    let flags = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS
        | CloneFlags::CLONE_NEWCGROUP;
    unshare(flags)?;
    if at_root { Ok(()) } else { root::enter() }
}
