//! The sandbox init: the first process of an execution's namespaces.
//!
//! It makes the namespaces and mounts, gives up every privilege and waits. Programs enter its
//! namespaces; when it is killed, the kernel kills all of them.
//!
//! It is a fork of the spawner and takes the mounts from there: copies of the sandbox's own two folders, a
//! new `/proc`, and nothing else that can be written to. Each execution has a new one, so that no message
//! queue or mount outlives an execution. Only the network namespace stays: nothing in it can be set from
//! inside, and sockets end with their processes. The init waits with no capability, no open file, and a
//! filter that allows nothing but that.

use super::Spawner;
use super::children::{Child, Role};
use super::files::{Files, Source};
use super::live::{InitState, NO_SANDBOX};
use super::root;
use crate::cgroup::Group;
use crate::error::{Error, Result};
use crate::landlock::Writable;
use crate::mounts;
use crate::protocol::Notice;
use crate::spec::Network;
use crate::walls::{self, Confinement, Failure, Plan, Who};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

/// Inputs of the init.
#[derive(Debug)]
struct Init<'a> {
    notice: Notice,
    group: &'a Group,
    files: &'a Files,
    confinement: Confinement<'a>,
    ruleset: Option<&'a OwnedFd>,
    /// The network that it shares with the sandbox's earlier executions; else it makes a new one.
    net_ns: Option<&'a OwnedFd>,
    /// Whether it starts in the root that programs see; else that is at [`root::ROOT`].
    at_root: bool,
    /// Whether a `/proc` is mounted already, as user namespaces need it.
    proc_below: bool,
}

/// Adds the step to the error of a call.
fn at<E: Into<std::io::Error>>(step: u32) -> impl Fn(E) -> Failure {
    move |error| (step, error.into().raw_os_error().unwrap_or(0))
}

impl Init<'_> {
    /// All that it does before it reports that it is ready.
    fn build(&self) -> std::result::Result<(), Failure> {
        self.group.join(0).map_err(at(walls::JOIN))?;
        let mut flags = CloneFlags::CLONE_NEWNS
            | CloneFlags::CLONE_NEWIPC
            | CloneFlags::CLONE_NEWUTS
            | CloneFlags::CLONE_NEWCGROUP;
        match self.net_ns {
            Some(shared) => setns(shared.as_fd(), CloneFlags::CLONE_NEWNET),
            None => {
                flags |= CloneFlags::CLONE_NEWNET;
                Ok(())
            }
        }
        .and_then(|()| unshare(flags))
        .map_err(at(walls::NAMESPACES))?;
        self.attach()?;
        if !self.at_root {
            root::enter().map_err(at(walls::PIVOT))?;
        }
        let proc = mounts::new_proc().map_err(at(walls::MOUNT_PROC))?;
        if self.proc_below {
            umount2("/proc", MntFlags::MNT_DETACH).map_err(at(walls::MOUNT_PROC))?;
        }
        mounts::attach(&proc, "/proc").map_err(at(walls::MOUNT_PROC))?;
        let given = [-1, self.ruleset.map_or(-1, AsRawFd::as_raw_fd)];
        Plan::confine(Who::Init, &self.confinement).run(given)
    }

    /// Mounts the folders of the sandbox.
    fn attach(&self) -> std::result::Result<(), Failure> {
        let root = if self.at_root { "" } else { root::ROOT };
        for folder in ["work", "tmp"] {
            let target = format!("{root}/{folder}");
            match self.files.source(folder) {
                Source::Mount(mount, folder) => mounts::copy(mount, folder)
                    .and_then(|copy| mounts::attach(&copy, &target))
                    .map_err(at(walls::MOUNT_WORK))?,
                Source::Path(path) => {
                    const NONE: Option<&str> = None;
                    let flags = MsFlags::MS_BIND;
                    mount(Some(path.as_str()), target.as_str(), NONE, flags, NONE)
                        .map_err(at(walls::MOUNT_WORK))?;
                }
            }
        }
        Ok(())
    }

    /// Runs in the child that is the first process of a new PID namespace; never returns.
    fn run(self, notices: RawFd) -> ! {
        let done = self.build();
        let mut notice = self.notice;
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
}

impl Spawner {
    /// Makes namespaces for a sandbox that has none.
    pub(super) fn start_init(&mut self, id: u64) -> Result<()> {
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        let tcp = live.creation.network == Network::Loopback;
        if let (None, Some(common)) = (&live.ruleset, &self.host.landlock) {
            let (work, tmp) = live.files()?.folders()?;
            live.ruleset = Some(common.ruleset(&work, &tmp, tcp, Writable::Folders)?);
        }
        live.serial += 1;
        let serial = live.serial;
        let live = self.live.get(&id).ok_or(NO_SANDBOX)?;
        let init = Init {
            notice: Notice {
                id,
                serial,
                kind: Notice::READY,
                value: 0,
                errno: 0,
            },
            group: &live.group,
            files: live.files()?,
            confinement: self.host.init_confinement(&live.creation, live.uid()),
            ruleset: live.ruleset.as_ref(),
            net_ns: live.net_ns.as_ref(),
            at_root: self.host.mounting.detached,
            proc_below: self.host.proc_below,
        };
        let flags = i64::from(libc::CLONE_NEWPID | libc::SIGCHLD);
        // SAFETY: one thread, so the copy is consistent; the child never returns.
        let number = match unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } {
            -1 => return Err(Error::last("clone")),
            0 => init.run(self.notices.writer()),
            pid => pid as i32,
        };
        let child = Child::of(number)?;
        self.children.watch(&child, Role::Init { id, serial })?;
        let live = self.live.get_mut(&id).ok_or(NO_SANDBOX)?;
        live.children += 1;
        live.failed = None;
        live.init = Some(InitState {
            serial,
            child,
            ready: false,
        });
        Ok(())
    }
}
