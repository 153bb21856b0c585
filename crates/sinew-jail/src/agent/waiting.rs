//! Interpreters that wait for programs. In a virtual machine, one interpreter stays unchanged and forks
//! another for each program, since a start takes seconds with emulation. It is in a control group separate
//! from programs, so that these can be killed without it.
//!
//! It never runs a program. The user of programs could only send it signals: the agent starts another if it
//! is dead or silent.
//!
//! A container has one interpreter that waits and becomes the next program; the one after it is started
//! as soon as the host asks for nothing. In a machine a *reserve* stays and forks; its forks wait, one
//! at a time.

use super::group;
use super::program::{Child, Setup};
use super::sys::{self, POLLIN, PollFd, ReapedChild};
use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Maximum time of a fork, emulated on a busy machine.
const FORK_MS: i32 = 2000;
/// Message of a reserve that has loaded its modules.
const READY: u8 = b'R';

/// An interpreter that forks others.
struct Reserve {
    pid: i32,
    /// One byte asks for a fork; eight bytes bring its number.
    talk: UnixStream,
    ready: bool,
}

impl Reserve {
    /// Whether it reported that it is ready; false if it ended or failed.
    fn hear(&mut self) -> bool {
        let mut said = [0];
        self.ready = self.talk.read_exact(&mut said).is_ok() && said[0] == READY;
        self.ready
    }

    /// A fork of it, which waits for its program.
    fn fork(&mut self) -> Result<Child> {
        let late = || Error::from_raw_os_error(110);
        self.talk.write_all(b"F")?;
        let mut said = [0; 8];
        let mut had = 0;
        while had < said.len() {
            let mut fds = [PollFd {
                fd: self.talk.as_raw_fd(),
                events: POLLIN,
                revents: 0,
            }];
            sys::wait_for(&mut fds, FORK_MS)?;
            if fds[0].revents == 0 {
                return Err(late());
            }
            match self.talk.read(&mut said[had..])? {
                0 => return Err(late()),
                n => had += n,
            }
        }
        let text = String::from_utf8_lossy(&said);
        let pid = text.trim().parse().map_err(|_| late())?;
        let end = |number: i32, write: bool| -> Result<OwnedFd> {
            let path = format!("/proc/{pid}/fd/{number}");
            let opened = File::options().read(!write).write(write).open(path)?;
            Ok(opened.into())
        };
        let ends = [end(0, true)?, end(1, false)?, end(2, false)?, end(3, true)?];
        Child::waiting(pid, ends)
    }
}

/// Interpreters that wait for programs.
#[derive(Default)]
pub(super) struct Waiting {
    /// Interpreter for the next program.
    spare: Option<Child>,
    /// Forks the next ones, in a machine.
    reserve: Option<Reserve>,
    /// One of both ended.
    lost: bool,
}

impl Waiting {
    /// Whether another should be made ready when nothing is asked.
    pub(super) fn wants(&self, setup: &Setup) -> bool {
        setup.warm && self.spare.is_none() && self.reserve.as_ref().is_none_or(|r| r.ready)
    }

    /// Descriptor of a reserve that gets ready, to be polled.
    pub(super) fn fd(&self) -> RawFd {
        let reserve = self.reserve.as_ref().filter(|r| !r.ready);
        reserve.map_or(-1, |r| r.talk.as_raw_fd())
    }

    /// Hears a reserve; false if it cannot get ready.
    pub(super) fn hear(&mut self) -> bool {
        let ready = self.reserve.as_mut().is_none_or(Reserve::hear);
        if !ready {
            self.discard();
        }
        ready
    }

    /// Makes the next interpreter ready, or the reserve that will; false if none can be started.
    pub(super) fn make(&mut self, setup: &Setup) -> bool {
        match &self.reserve {
            Some(_) => self.fork(),
            None if setup.divides() => {
                let Some((pid, talk)) = setup.reserve() else {
                    return false;
                };
                let ready = false;
                self.reserve = Some(Reserve { pid, talk, ready });
            }
            None => {
                self.spare = setup.spare();
                return self.spare.is_some();
            }
        }
        true
    }

    /// Makes the spare from the reserve; a reserve that does not answer in time is ended.
    fn fork(&mut self) {
        match self.reserve.as_mut().map(Reserve::fork) {
            Some(Ok(child)) => self.spare = Some(child),
            // Something stopped it: another starts when nothing is asked.
            Some(Err(_)) => self.discard(),
            None => {}
        }
    }

    /// The interpreter that waits, for its program.
    pub(super) fn take(&mut self) -> Option<Child> {
        if self.spare.is_none() && self.reserve.as_ref().is_some_and(|r| r.ready) {
            self.fork();
        }
        let child = self.spare.take()?;
        if self.reserve.is_none() {
            return Some(child);
        }
        // A program may have stopped it.
        sys::go_on(child.pid);
        if group::join(child.pid).is_err() {
            self.spare = Some(child);
            self.discard();
            return None;
        }
        Some(child)
    }

    /// Makes room for a program that runs without an interpreter: a waiting interpreter in the same group
    /// ends.
    pub(super) fn make_room(&mut self) {
        if self.reserve.is_none() && self.spare.is_some() {
            self.clear();
        }
    }

    /// Whether a process that ended is one of these.
    pub(super) fn lost(&mut self, pid: i32) -> bool {
        let spare = self.spare.as_ref().is_some_and(|c| c.pid == pid);
        let reserve = self.reserve.as_ref().is_some_and(|r| r.pid == pid);
        if spare {
            self.spare = None;
        }
        if reserve {
            self.reserve = None;
        }
        self.lost |= spare || reserve;
        spare || reserve
    }

    /// Ends what is left where something was lost; whether it was.
    pub(super) fn settle(&mut self) -> bool {
        let lost = std::mem::take(&mut self.lost);
        if lost {
            self.discard();
        }
        lost
    }

    /// Ends what waits, and nothing else.
    fn discard(&mut self) {
        let spare = self.spare.take().map(|c| c.pid);
        let reserve = self.reserve.take().map(|r| r.pid);
        for pid in spare.into_iter().chain(reserve) {
            sys::end(pid);
        }
    }

    /// Ends everything.
    pub(super) fn clear(&mut self) {
        sys::kill_all();
        while sys::reap(true).is_some() {}
        *self = Self::default();
    }

    /// Kills all programs.
    pub(super) fn kill_programs(&self) {
        if self.reserve.is_none() || group::kill().is_err() {
            sys::kill_all();
        }
    }

    /// Returns the next ended process after [`Waiting::kill_programs`], until nothing of the programs is
    /// left.
    pub(super) fn next_end(&self) -> Option<ReapedChild> {
        sys::reap(self.reserve.is_none() || !group::is_empty())
    }
}
