//! The end of a Python program as it tells it itself, just before the kernel takes its memory
//! apart, which takes longer than most programs run.
//!
//! Whoever says so is stopped at once and killed soon after, without having run again, so that a
//! forged report is worth no more than an exit with that code. It counts only where the kernel says that nothing but the main process is left,
//! and that no process of it ever ended before; else the end is told by the kernel, as that of
//! any other program. Nothing else is done for the sandbox before the kernel is done with it.

use super::cgroup::{Counters, Group};
use super::live::Way;
use super::messages::{End, Exit};
use super::spawner::Spawner;
use nix::fcntl::{OFlag, openat};
use nix::sys::socket::{MsgFlags, recv};
use nix::sys::stat::Mode;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// How long a program that told its end stays where it is, unless something is asked of its
/// sandbox before.
const CLOSE_PAUSE: Duration = Duration::from_millis(1);
/// Reports that are taken in one turn.
const AT_ONCE: usize = 16;
/// What a report consists of: this byte and the exit code.
const ENDED: u8 = b'E';

/// Sockets on which programs that run may report.
#[derive(Clone, Debug)]
pub(super) struct Reports(Rc<OwnedFd>);

/// The socket of one program.
#[derive(Debug)]
pub(super) struct Report {
    socket: OwnedFd,
    reports: Reports,
}

impl Drop for Report {
    fn drop(&mut self) {
        // A fork of this process may hold the socket for a moment longer.
        let (epoll, socket) = (self.reports.fd(), self.socket.as_raw_fd());
        // SAFETY: two open descriptors; the event is not looked at.
        unsafe { libc::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, socket, std::ptr::null_mut()) };
    }
}

impl Reports {
    pub(super) fn new() -> Result<Self, String> {
        // SAFETY: no pointers; the descriptor is new and ours.
        match unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } {
            -1 => Err(format!("epoll: {}", std::io::Error::last_os_error())),
            // SAFETY: see above.
            fd => Ok(Self(Rc::new(unsafe { OwnedFd::from_raw_fd(fd) }))),
        }
    }

    fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(super) fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Waits for what the program of a sandbox says; `None` leaves its end to the kernel.
    pub(super) fn watch(&self, id: u64, socket: OwnedFd) -> Option<Report> {
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: id,
        };
        let (fd, add) = (socket.as_raw_fd(), libc::EPOLL_CTL_ADD);
        // SAFETY: open descriptors and a local event.
        let added = unsafe { libc::epoll_ctl(self.fd(), add, fd, &raw mut event) };
        let reports = self.clone();
        (added == 0).then_some(Report { socket, reports })
    }

    /// Sandboxes whose programs have said something or hung up.
    fn ready(&self) -> Vec<u64> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_ONCE];
        let most = AT_ONCE as i32;
        // SAFETY: a local array of that many events.
        let count = unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), most, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        events[..count].iter().map(|e| e.u64).collect()
    }
}

impl Report {
    /// The exit code; `None` if anything else was said. Files that come with it are dropped.
    fn code(&self) -> Option<i32> {
        let mut said = [0; 8];
        match recv(self.socket.as_raw_fd(), &mut said, MsgFlags::MSG_DONTWAIT) {
            Ok(2) if said[0] == ENDED => Some(i32::from(said[1])),
            _ => None,
        }
    }
}

/// What the kernel says of a program, opened before somebody waits for it.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    stat: Option<File>,
    pub(super) counters: Counters,
}

impl Evidence {
    pub(super) fn open(proc: Option<&OwnedFd>, pid: i32, group: &Group) -> Self {
        Self {
            stat: proc.and_then(|proc| open_stat(proc, pid)),
            counters: group.counters(),
        }
    }
}

fn open_stat(proc: &OwnedFd, pid: i32) -> Option<File> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    let path = format!("{pid}/stat");
    let opened = openat(proc.as_fd(), path.as_str(), flags, Mode::empty());
    opened.ok().map(File::from)
}

/// Whether a process never had a child that ended, whose CPU time would count as its own: no
/// child ends without a page fault (`/proc/PID/stat`, fields 11 and 13).
fn childless(stat: &File) -> Option<bool> {
    let mut bytes = [0; 512];
    let read = stat.read_at(&mut bytes, 0).ok()?;
    let stat = String::from_utf8_lossy(&bytes[..read]);
    // Behind the name, which is in parentheses and the program's choice.
    let fields: Vec<&str> = stat.rsplit(')').next()?.split_whitespace().collect();
    Some(fields.get(8) == Some(&"0") && fields.get(10) == Some(&"0"))
}

impl Spawner {
    /// Takes what programs say of their ends.
    pub(super) fn read_reports(&mut self) {
        for id in self.reports.ready() {
            self.reported(id);
        }
    }

    /// One chance for each program; who wastes it ends as any other program does.
    fn reported(&mut self, id: u64) {
        let Some(live) = self.live.get_mut(&id) else {
            return;
        };
        let Some(running) = &mut live.running else {
            return;
        };
        let (Some(report), Some(child)) = (running.report.take(), running.child.clone()) else {
            return;
        };
        let Some(code) = report.code() else {
            return;
        };
        let evidence = std::mem::take(&mut running.evidence);
        // First: what is counted from here on counts nothing that it does. It is killed after
        // its end is told: on a busy processor whoever waits would otherwise wait for the kernel
        // to take its memory apart. Nothing else is in the sandbox that could let it go on.
        child.signal(libc::SIGSTOP);
        let alone = matches!(running.way, Way::Started)
            && live.failed.is_none()
            && live.room.is_some()
            // The first process of the room and the one that spoke.
            && evidence.counters.processes() == Some(2)
            && evidence.stat.as_ref().is_some_and(|stat| childless(stat) == Some(true));
        if !alone {
            child.signal(libc::SIGCONT);
            return;
        }
        let Some(cpu_us) = child.cpu_us() else {
            child.signal(libc::SIGCONT);
            return;
        };
        live.running = None;
        live.leaving = true;
        live.ended = Some(End {
            exit: Exit::Code(code),
            cpu_us: cpu_us.saturating_sub(live.spent.main_before_us),
            cpu_spent: live.spent.over,
            max_rss_kib: 0,
            events: live.group.events(code != 0, &evidence.counters),
            file_bytes: live.file_bytes(),
        });
        self.tell_end(id);
        self.to_warm.push_back((Instant::now() + CLOSE_PAUSE, id));
    }
}
