//! Interpreters that the zygote forks: asked for, reported, given to their sandboxes; and the zygote
//! itself, which is started again when it dies or does not answer.
//!
//! The zygote answers in turn. Its forks are children of the spawner (CLONE_PARENT), so that only the spawner
//! gets their ends; a fork that it made and did not live to report is found in the kernel's list of children
//! and killed.

use super::Spawner;
use super::children::{Child, Role};
use super::live::NO_SANDBOX;
use super::pending_exec::{PendingExec, Way};
use super::zygote::{MAX_STARTS, START, Zygote};
use crate::error::{Error, Result, call};
use crate::protocol::Notice;
use crate::walls::step_name;
use nix::poll::PollTimeout;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::io::Error as IoError;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

impl Spawner {
    /// Starts a zygote and waits until it is ready.
    pub(super) fn await_zygote(&mut self) -> Result<()> {
        self.start_zygote()?;
        let failed = match self.notices.next(START) {
            Some(notice) if notice.kind == Notice::ZYGOTE => {
                self.noticed(notice);
                return Ok(());
            }
            Some(n) => {
                let why = IoError::from_raw_os_error(n.errno);
                format!("the zygote cannot {}: {why}", step_name(n.value as u32))
            }
            None => format!("the zygote did not get ready in {} s", START.as_secs()),
        };
        if let Some(zygote) = self.zygote.take() {
            zygote.child.kill();
        }
        Err(Error::Unavailable(failed))
    }

    /// Starts one, not ready yet; its first notice reports that it is ready, or the failure.
    fn start_zygote(&mut self) -> Result<()> {
        let python = self.host.python.as_deref();
        let python = python.ok_or(Error::NoSuch("program: the image has no python3"))?;
        let at_root = self.host.mounting.detached;
        let zygote = Zygote::start(python, self.notices.writer(), at_root)?;
        self.zygote_starts += 1;
        self.children.watch(&zygote.child, Role::Zygote)?;
        self.zygote = Some(zygote);
        Ok(())
    }

    /// Ends a zygote that does not answer; the time until the next answer is due.
    pub(super) fn zygote_due(&mut self) -> PollTimeout {
        let Some(due) = self.zygote.as_ref().and_then(Zygote::due) else {
            return PollTimeout::NONE;
        };
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // A late message still counts.
            self.read_notices();
            if self.zygote.as_ref().and_then(Zygote::due) == Some(due)
                && let Some(zygote) = &self.zygote
            {
                zygote.child.kill();
            }
            return PollTimeout::from(100u8);
        }
        PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
    }

    /// Takes what children have reported already.
    pub(super) fn read_notices(&mut self) {
        while let Some(notice) = self.notices.next(Duration::ZERO) {
            self.noticed(notice);
        }
    }

    /// Acts on a report. Those of sandboxes and inits that are gone meanwhile are dropped: `serial`
    /// numbers the inits of a sandbox.
    fn noticed(&mut self, notice: Notice) {
        let (id, serial) = (notice.id, notice.serial);
        match notice.kind {
            Notice::READY => self.init_ready(id, serial),
            Notice::FORKED => {
                if let Some(zygote) = &mut self.zygote {
                    zygote.answered();
                }
                let forked = match notice.value {
                    number @ 1.. => self.forked(id, serial, number),
                    _ => Err(call("fork")(IoError::from_raw_os_error(notice.errno))),
                };
                match forked {
                    Ok(()) => self.advance(id),
                    Err(why) => self.unforked(id, serial, why.to_string()),
                }
            }
            Notice::ZYGOTE => {
                if let Some(zygote) = &mut self.zygote {
                    zygote.set_ready();
                }
            }
            Notice::FAILED if id != 0 => {
                // Failures in namespaces that are gone do not matter.
                let live = self.live.get_mut(&id).filter(|l| l.serial == serial);
                if let Some(live) = live {
                    live.failed = Some((notice.value as u32, notice.errno));
                }
            }
            _ => {}
        }
    }

    /// Namespaces are complete. Later ones of the sandbox take the network from the first: to make one and to
    /// take it apart costs the machine a sixth of a small program.
    fn init_ready(&mut self, id: u64, serial: u32) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let Some(init) = live.init.as_mut().filter(|init| init.serial == serial) else {
            return;
        };
        init.ready = true;
        if live.net_ns.is_none() {
            let number = init.child.number();
            live.net_ns = number.and_then(|number| self.host.network_of(number));
        }
        self.advance(id);
    }

    /// Requests a fork from the zygote in the PID namespace of the sandbox. The process number is known when
    /// the zygote reports it; until then only the socket to it exists.
    pub(super) fn fork_python(&mut self, id: u64) -> Result<PendingExec> {
        let zygote = self.zygote.as_mut().ok_or(Error::NoSuch("zygote"))?;
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let init = live.init.as_ref().ok_or(Error::NoSuch("namespaces"))?;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)
            .map_err(call("socketpair"))?;
        let fd = init.child.as_raw_fd();
        zygote.fork(id, init.serial, fd, theirs.as_raw_fd())?;
        Ok(PendingExec {
            serial: init.serial,
            child: None,
            way: Way::Python {
                socket: ours,
                entered: false,
                program: None,
            },
        })
    }

    /// The zygote has forked, and reports which of this process's children it is.
    fn forked(&mut self, id: u64, serial: u32, number: i32) -> Result<()> {
        let child = Child::of(number)?;
        let live = self.live.get_mut(&id);
        let found = live.and_then(|live| {
            let wanted = live.unforked(serial).is_some() && !live.evict;
            // The fork must join the limits before it gets a program; if that fails, it dies.
            if !(wanted && live.group.join(number).is_ok()) {
                child.kill();
            }
            live.unforked(serial)?.child = Some(Rc::clone(&child));
            live.children += 1;
            Some(())
        });
        if found.is_none() {
            child.kill();
        }
        let role = found.map_or(Role::Stray, |()| Role::Program { id });
        self.children.watch(&child, role)
    }

    /// Handles a fork that the zygote will not deliver.
    fn unforked(&mut self, id: u64, serial: u32, why: String) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        if live.warm.as_ref().is_some_and(|w| w.serial == serial) {
            live.warm = None;
            live.evict = false;
            self.advance(id);
        } else if live.unforked(serial).is_some() {
            self.lost(id, why);
        }
    }

    /// Starts another zygote, at most [`MAX_STARTS`] in all, and requests the outstanding forks from it. If
    /// none starts, executions that wait for a fork fail, and later Python programs start by execve.
    pub(super) fn zygote_died(&mut self) {
        // Messages from before its death still count.
        self.read_notices();
        self.zygote = None;
        self.end_strays();
        if self.zygote_starts > 0 && self.zygote_starts < MAX_STARTS {
            let _ = self.start_zygote();
        }
        let unanswered = |e: &Option<PendingExec>| {
            let python = |e: &PendingExec| e.child.is_none() && matches!(e.way, Way::Python { .. });
            e.as_ref().is_some_and(python)
        };
        let lost: Vec<u64> = self.live.keys().copied().collect();
        for id in lost {
            if let Some(live) = self.live.get_mut(&id) {
                if unanswered(&live.warm) {
                    live.warm = None;
                    // A program that waits for the end of this fork has nothing to wait for.
                    let waits = std::mem::take(&mut live.evict);
                    self.warming.later(id);
                    if waits {
                        self.advance(id);
                    }
                }
                let runs = self.live.get(&id).map(|live| &live.running);
                if runs.is_some_and(unanswered)
                    && let Err(why) = self.ask_again(id)
                {
                    self.lost(id, format!("the zygote died: {why}"));
                }
            }
        }
    }

    /// Asks the next zygote for what the last one did not fork.
    fn ask_again(&mut self, id: u64) -> Result<()> {
        let mut again = self.fork_python(id)?;
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        let before = live.running.as_mut().map(|e| &mut e.way);
        if let (Some(Way::Python { program, .. }), Way::Python { program: next, .. }) =
            (before, &mut again.way)
        {
            *next = program.take();
        }
        live.running = Some(again);
        Ok(())
    }

    /// Kills children that the zygote made for this process and did not live to report. If the kernel lists
    /// no children, they stay until this process ends.
    fn end_strays(&mut self) {
        let numbers = self.host.children();
        let strays: Vec<i32> = numbers
            .into_iter()
            .filter(|n| !self.children.knows(*n))
            .collect();
        for stray in strays.into_iter().flat_map(Child::of) {
            stray.kill();
            let _ = self.children.watch(&stray, Role::Stray);
        }
    }
}
