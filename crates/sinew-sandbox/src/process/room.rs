//! The room of an execution: fresh namespaces, held by a first process that does nothing.
//!
//! The first process makes the namespaces, builds the mounts, gives up every privilege and
//! waits. Programs enter its namespaces; when it is killed, the kernel kills all of them.

use super::cgroup::Group;
use super::files::Files;
use super::messages::Notice;
use super::plan::{self, Plan};
use nix::mount::{MntFlags, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{chdir, pivot_root};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The read-only root that all sandboxes of a spawner start from.
pub(crate) const ROOT: &str = "/root";

/// The network of a room.
#[derive(Debug)]
pub(crate) enum NetNs<'a> {
    /// A new, empty one.
    New,
    /// One in which a room lived that is gone; a new one if anything is left in it.
    Used(&'a OwnedFd),
    /// One that it shares with the sandbox's other rooms.
    Shared(&'a OwnedFd),
}

/// What the first process needs, prepared before the fork.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    pub(crate) notice: Notice,
    pub(crate) group: &'a Group,
    pub(crate) files: &'a Files,
    pub(crate) plan: Plan,
    pub(crate) ruleset: Option<&'a OwnedFd>,
    pub(crate) net_ns: NetNs<'a>,
    /// Whether this process sees the root that programs see; else it is at [`ROOT`].
    pub(crate) at_root: bool,
    /// Whether a `/proc` is mounted already, as user namespaces need it.
    pub(crate) proc_below: bool,
    /// Where notices go.
    pub(crate) notices: RawFd,
}

type Step<T> = Result<T, (u32, i32)>;

fn at(step: u32) -> impl Fn(nix::errno::Errno) -> (u32, i32) {
    move |e| (step, e as i32)
}

impl Room<'_> {
    /// Called in a child that is the first process of a new PID namespace; never returns.
    pub(crate) fn run(self) -> ! {
        let (notices, mut notice) = (self.notices, self.notice);
        let done = self.enter();
        if let Err((step, errno)) = done {
            notice.kind = Notice::FAILED;
            (notice.value, notice.errno) = (step as i32, errno);
        }
        let bytes = notice.encode();
        // SAFETY: writes a local array to an open descriptor; the calls after it take no
        // pointers. With SIGCHLD ignored, the kernel reaps orphans that end up here.
        unsafe {
            libc::write(notices, bytes.as_ptr().cast(), bytes.len());
            if done.is_err() {
                libc::_exit(1);
            }
            libc::syscall(libc::SYS_close_range, 0, u32::MAX, 0);
            libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            loop {
                libc::pause();
            }
        }
    }

    fn enter(mut self) -> Step<()> {
        self.group
            .join(0)
            .map_err(|e| (plan::JOIN, e.raw_os_error().unwrap_or(0)))?;
        let mut flags = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP;
        match self.net_ns {
            NetNs::New => flags |= CloneFlags::CLONE_NEWNET,
            NetNs::Used(fd) | NetNs::Shared(fd) => {
                setns(fd, CloneFlags::CLONE_NEWNET).map_err(at(plan::NAMESPACES))?;
            }
        }
        unshare(flags).map_err(at(plan::NAMESPACES))?;
        self.mounts()?;
        if matches!(self.net_ns, NetNs::Used(_)) && !no_sockets() {
            unshare(CloneFlags::CLONE_NEWNET).map_err(at(plan::NAMESPACES))?;
        }
        let ruleset = self.ruleset.map_or(-1, AsRawFd::as_raw_fd);
        self.plan.run(-1, ruleset)
    }

    fn mounts(&self) -> Step<()> {
        if !self.at_root {
            // Bind mounts are made by path, outside of the new root.
            self.attach(ROOT)?;
            enter_root().map_err(at(plan::PIVOT))?;
        } else {
            self.attach("")?;
        }
        let failed = |e: std::io::Error| (plan::MOUNT_PROC, e.raw_os_error().unwrap_or(0));
        let proc = super::files::new_proc().map_err(failed)?;
        if self.proc_below {
            umount2("/proc", MntFlags::MNT_DETACH).map_err(at(plan::MOUNT_PROC))?;
        }
        super::files::move_mount(&proc, "/proc").map_err(failed)
    }

    fn attach(&self, root: &str) -> Step<()> {
        for folder in ["work", "tmp"] {
            self.files
                .attach(folder, &format!("{root}/{folder}"))
                .map_err(|e| (plan::MOUNT_WORK, e.raw_os_error().unwrap_or(0)))?;
        }
        Ok(())
    }
}

/// Makes [`ROOT`] the root of this process's mount namespace and drops what was there.
pub(crate) fn enter_root() -> nix::Result<()> {
    chdir(ROOT)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

/// Whether the network namespace of this process, which is PID 1, has no socket at all: a killed
/// program's sockets that were on their way in messages are freed a moment after it.
fn no_sockets() -> bool {
    // A head line, then one for each Unix socket; others cannot be made in it.
    let listed = std::fs::read("/proc/1/net/unix");
    listed.is_ok_and(|text| text.iter().filter(|b| **b == b'\n').count() == 1)
}

/// Sets IFF_UP on `lo` of this process's network namespace.
pub(crate) fn loopback_up() -> std::io::Result<()> {
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
