//! File systems by the mount calls of Linux 5.2: a context is configured, becomes a mount that is mounted
//! nowhere, and is moved to its place. The devices of every `/dev` are listed here, too.

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_fd, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, open_tree,
};
use std::os::fd::{AsFd, OwnedFd};

/// Devices of every sandbox that have no state: name and minor number under major 1 (Linux's
/// `admin-guide/devices.txt`).
pub(crate) const DEVICES: [(&str, u64); 5] = [
    ("null", 3),
    ("zero", 5),
    ("full", 7),
    ("random", 8),
    ("urandom", 9),
];

/// Links in `/dev` to the files that a process has open.
pub(crate) const STREAMS: [(&str, &str); 4] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
];

/// A file system that is being configured.
#[derive(Debug)]
pub(crate) struct Context(OwnedFd);

impl Context {
    pub(crate) fn new(kind: &str) -> Result<Self, Errno> {
        fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC).map(Self)
    }

    pub(crate) fn set(self, key: &str, value: &str) -> Result<Self, Errno> {
        fsconfig_set_string(&self.0, key, value).map(|()| self)
    }

    pub(crate) fn flag(self, key: &str) -> Result<Self, Errno> {
        fsconfig_set_flag(&self.0, key).map(|()| self)
    }

    pub(crate) fn fd(self, key: &str, value: impl AsFd) -> Result<Self, Errno> {
        fsconfig_set_fd(&self.0, key, value).map(|()| self)
    }

    /// A mount without set-user-id and devices and with `more` attributes.
    pub(crate) fn mount(self, more: MountAttrFlags) -> Result<OwnedFd, Errno> {
        fsconfig_create(&self.0)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | more;
        fsmount(&self.0, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    }
}

/// Copies a mount, or one folder of a mount.
pub(crate) fn copy(mount: impl AsFd, folder: &str) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    open_tree(mount, folder, flags)
}

/// Moves a mount that is mounted nowhere to `target`.
pub(crate) fn attach(mount: impl AsFd, target: &str) -> Result<(), Errno> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, "", CWD, target, flags)
}

/// A `/proc` of this process's PID namespace, mounted nowhere. If the kernel can, it shows a process only
/// those that the process may trace.
pub(crate) fn new_proc() -> Result<OwnedFd, Errno> {
    let hidden = || Context::new("proc")?.set("hidepid", "invisible");
    let context = hidden().or_else(|_| Context::new("proc"))?;
    context
        .mount(MountAttrFlags::MOUNT_ATTR_NOEXEC)
        .or_else(|_| Context::new("proc")?.mount(MountAttrFlags::MOUNT_ATTR_NOEXEC))
}
