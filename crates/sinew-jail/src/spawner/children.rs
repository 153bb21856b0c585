//! Children of the spawner. Each is known only by a pidfd: the spawner signals it, sees its end and reaps it
//! through that. So no number of a process can come to mean another one, and nothing is kept of a process
//! that was not forked here.
//!
//! A `Child` is shared by the list of watched children ([`Children`]) and by the sandbox it belongs to. It is
//! marked when it is reaped, and from then on its number is not given out any more.

use crate::error::{Error, Result, call};
use crate::process;
use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;

/// Ends that are taken in one turn.
const AT_ONCE: usize = 16;

/// Role of a child of the spawner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// First process of an execution's namespaces.
    Init {
        id: u64,
        serial: u32,
    },
    /// Main process of an execution, or an interpreter that waits for one.
    Program {
        id: u64,
    },
    Zygote,
    /// Reads or writes an archive.
    Archiver,
    /// Child of a sandbox that is gone.
    Stray,
}

/// Way in which a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Code(i32),
    Signal(i32),
}

/// Report of the kernel about a process that ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChildEnd {
    pub(super) fate: Fate,
    /// User and system time, of children that it waited for too.
    pub(super) cpu_us: u64,
    /// Resident memory of the process at its largest.
    pub(super) max_rss_kib: u64,
}

/// A child that was not reaped, or was reaped through this.
#[derive(Debug)]
pub(super) struct Child {
    pidfd: OwnedFd,
    /// Names it to the kernel where a pidfd cannot: files of control groups and of `/proc`, clocks.
    /// Not after it was reaped: then another process may have it.
    number: i32,
    reaped: Cell<bool>,
}

/// Waits for a process through a file; `None` if it has not ended.
fn wait(pidfd: &OwnedFd, flags: i32) -> std::io::Result<Option<ChildEnd>> {
    // SAFETY: plain data, for which zero is a value.
    let (mut info, mut usage) = unsafe {
        (
            std::mem::zeroed::<libc::siginfo_t>(),
            std::mem::zeroed::<libc::rusage>(),
        )
    };
    // The library's function does not pass the fifth argument.
    loop {
        // SAFETY: writes to two local values.
        let done = unsafe {
            libc::syscall(
                libc::SYS_waitid,
                libc::P_PIDFD,
                pidfd.as_raw_fd(),
                &raw mut info,
                libc::WEXITED | flags,
                &raw mut usage,
            )
        };
        if done == 0 {
            break;
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: the kernel has filled in what belongs to an end of a child, or nothing.
    let (pid, status) = unsafe { (info.si_pid(), info.si_status()) };
    Ok((pid != 0).then(|| ChildEnd {
        fate: match info.si_code {
            libc::CLD_EXITED => Fate::Code(status),
            _ => Fate::Signal(status),
        },
        cpu_us: process::ended_us(&usage),
        max_rss_kib: usage.ru_maxrss as u64,
    }))
}

impl Child {
    /// A child of this process that was not reaped; only [`Child`] reaps.
    ///
    /// # Errors
    /// If it is none, or if no file can be opened for it; in that case it is killed and reaped.
    pub(super) fn of(number: i32) -> Result<Rc<Self>> {
        // SAFETY: no pointers.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
        if opened < 0 {
            let why = Error::last("pidfd_open");
            // SAFETY: waits for a child alone, which still has this number.
            unsafe {
                let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
                let mut info = std::mem::zeroed::<libc::siginfo_t>();
                let id = number as libc::id_t;
                if number > 1 && libc::waitid(libc::P_PID, id, &raw mut info, flags) == 0 {
                    libc::kill(number, libc::SIGKILL);
                    libc::waitid(libc::P_PID, id, &raw mut info, libc::WEXITED);
                }
            }
            return Err(why);
        }
        // SAFETY: the descriptor is new and ours.
        let pidfd = unsafe { OwnedFd::from_raw_fd(opened as RawFd) };
        wait(&pidfd, libc::WNOHANG | libc::WNOWAIT)
            .map_err(call("wait for a process that is no child"))?;
        Ok(Rc::new(Self {
            pidfd,
            number,
            reaped: Cell::new(false),
        }))
    }

    /// Process number; `None` after the child was reaped.
    pub(super) fn number(&self) -> Option<i32> {
        (!self.reaped.get()).then_some(self.number)
    }

    pub(super) fn signal(&self, signal: i32) {
        let nothing = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: no information goes with it; one that has ended is not signalled.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                signal,
                nothing,
                0,
            )
        };
    }

    pub(super) fn kill(&self) {
        self.signal(libc::SIGKILL);
    }

    /// Kills it; when this returns it is gone.
    pub(super) fn end(&self) {
        self.kill();
        if !self.reaped.replace(true) {
            let _ = wait(&self.pidfd, 0);
        }
    }

    /// CPU time of it, dead or alive.
    pub(super) fn cpu_us(&self) -> Option<u64> {
        process::cpu_us(self.number()?)
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for Child {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

/// All children whose ends are waited for.
#[derive(Debug)]
pub(super) struct Children {
    epoll: OwnedFd,
    /// Children by descriptor, which is open as long as the child is listed.
    all: HashMap<RawFd, (Rc<Child>, Role)>,
}

impl AsFd for Children {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Children {
    pub(super) fn new() -> Result<Self> {
        // SAFETY: no pointers; the descriptor is new and ours.
        match unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } {
            -1 => Err(Error::last("epoll")),
            fd => {
                // SAFETY: the descriptor is new and owned by nothing else.
                let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
                let all = HashMap::new();
                Ok(Self { epoll, all })
            }
        }
    }

    /// Waits for the end of a child from now on.
    ///
    /// # Errors
    /// If the kernel has no room for that; then the child is gone.
    pub(super) fn watch(&mut self, child: &Rc<Child>, role: Role) -> Result<()> {
        let fd = child.as_raw_fd();
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: fd as u64,
        };
        let (epoll, add) = (self.epoll.as_raw_fd(), libc::EPOLL_CTL_ADD);
        // SAFETY: open descriptors and a local event.
        if unsafe { libc::epoll_ctl(epoll, add, fd, &raw mut event) } != 0 {
            let why = Error::last("epoll_ctl");
            child.end();
            return Err(why);
        }
        self.all.insert(fd, (Rc::clone(child), role));
        Ok(())
    }

    /// Stops waiting for a child.
    fn forget(&mut self, child: &Child) {
        let (epoll, fd) = (self.epoll.as_raw_fd(), child.as_raw_fd());
        if self.all.remove(&fd).is_some() {
            // A fork of this process may hold the file for a moment longer.
            // SAFETY: two open descriptors; the event is not looked at.
            unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
        }
    }

    /// Whether a child has this number.
    pub(super) fn knows(&self, number: i32) -> bool {
        let mut all = self.all.values();
        all.any(|(child, _)| child.number() == Some(number))
    }

    /// Reaps children that have ended, a few at a time; none any more if this is empty.
    pub(super) fn ended(&mut self) -> Vec<(Rc<Child>, Role, ChildEnd)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        let epoll = self.epoll.as_raw_fd();
        // SAFETY: a local array of that many events.
        let count = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), AT_ONCE as i32, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        let mut ended = Vec::with_capacity(count);
        for event in &events[..count] {
            let fd = event.u64 as RawFd;
            let Some((child, role)) = self.all.get(&fd).map(|(c, r)| (Rc::clone(c), *r)) else {
                continue;
            };
            match wait(&child.pidfd, libc::WNOHANG) {
                Ok(Some(end)) => {
                    child.reaped.set(true);
                    self.forget(&child);
                    ended.push((child, role, end));
                }
                Ok(None) => {}
                Err(_) => self.forget(&child),
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forked(then: impl FnOnce()) -> i32 {
        // SAFETY: the child makes nothing but system calls and ends without destructors.
        match unsafe { libc::fork() } {
            0 => {
                then();
                // SAFETY: see above.
                unsafe { libc::_exit(7) }
            }
            pid => pid,
        }
    }

    fn next(children: &mut Children) -> (Rc<Child>, Role, ChildEnd) {
        loop {
            if let Some(one) = children.ended().pop() {
                return one;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn ends_are_those_of_children_that_are_watched() {
        let mut children = Children::new().expect("epoll");
        let unwatched = forked(|| ());
        let first = Child::of(forked(|| ())).expect("a child");
        let number = first.number().expect("it was not reaped");
        children.watch(&first, Role::Stray).expect("it is watched");
        assert!(children.knows(number) && !children.knows(unwatched));
        let (child, role, end) = next(&mut children);
        assert!(Rc::ptr_eq(&child, &first));
        assert_eq!((role, end.fate), (Role::Stray, Fate::Code(7)));
        assert!(!children.knows(number), "its number may be another's");
        assert_eq!((first.number(), first.cpu_us()), (None, None));
        assert!(children.ended().is_empty(), "the other one is not reaped");
        // It keeps its number until somebody asks for it by that.
        let late = Child::of(unwatched).expect("it is there");
        children.watch(&late, Role::Zygote).expect("it is watched");
        assert_eq!(next(&mut children).2.fate, Fate::Code(7));
    }

    #[test]
    fn a_process_that_is_no_child_is_refused_and_lives() {
        let parent = std::os::unix::process::parent_id() as i32;
        let error = Child::of(parent).expect_err("no child");
        assert!(error.to_string().contains("is no child"), "{error}");
        assert!(Child::of(i32::MAX).is_err());
    }

    #[test]
    fn a_killed_child_is_gone_and_its_end_is_seen_once() {
        let mut children = Children::new().expect("epoll");
        let sleeps = || {
            forked(|| {
                loop {
                    // SAFETY: no arguments.
                    unsafe { libc::pause() };
                }
            })
        };
        let child = Child::of(sleeps()).expect("a child");
        children.watch(&child, Role::Zygote).expect("it is watched");
        child.kill();
        assert_eq!(next(&mut children).2.fate, Fate::Signal(libc::SIGKILL));
        let other = Child::of(sleeps()).expect("a child");
        other.end();
        assert_eq!(other.number(), None);
        other.end();
        assert!(children.ended().is_empty());
    }
}
