//! The room of an execution: fresh namespaces, held by a first process that does nothing.
//!
//! The first process makes the namespaces, builds the mounts, gives up every privilege and
//! waits. Programs enter its namespaces; when it is killed, the kernel kills all of them. All
//! that it does is a table ([`super::plan`]), which a fork of the mother of rooms
//! ([`super::mother`]) carries out, or one of the spawner where there is no mother.

use super::cgroup::Group;
use super::files::{Files, Source};
use super::messages::Notice;
use super::plan::{self, Arg, Confinement, Plan, Who};
use nix::mount::{MntFlags, umount2};
use nix::unistd::{chdir, pivot_root};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The read-only root that all sandboxes of a spawner start from.
pub(crate) const ROOT: &str = "/root";

/// Where rows put a descriptor or a count.
const MADE: u8 = plan::GIVEN as u8;
const CONTEXT: u8 = MADE + 1;
/// What is read of a list of sockets; its head line is shorter.
const LIST_BYTES: usize = 256;

/// The network of a room.
#[derive(Debug)]
pub(crate) enum NetNs<'a> {
    /// A new, empty one.
    New,
    /// One in which a room lived that is gone, and how long a list of no sockets is; a new one if
    /// anything is left in it.
    Used(&'a OwnedFd, usize),
    /// One that it shares with the sandbox's other rooms.
    Shared(&'a OwnedFd),
}

/// How a `/proc` is mounted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proc {
    /// Whether one is mounted already, as user namespaces need it.
    pub(crate) below: bool,
    /// Whether the kernel can show a process its own kind only.
    pub(crate) hides: bool,
}

/// What the first process needs.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    pub(crate) notice: Notice,
    pub(crate) group: &'a Group,
    pub(crate) files: &'a Files,
    pub(crate) confinement: Confinement<'a>,
    pub(crate) ruleset: Option<&'a OwnedFd>,
    pub(crate) net_ns: NetNs<'a>,
    /// Whether it starts in the root that programs see; else that is at [`ROOT`].
    pub(crate) at_root: bool,
    pub(crate) proc: Proc,
}

/// A room as a table, and the descriptors that are given to it.
#[derive(Debug)]
pub(super) struct Tabled {
    pub(super) plan: Plan,
    pub(super) fds: Vec<RawFd>,
}

impl Tabled {
    fn given(&mut self, fd: RawFd) -> Arg {
        self.fds.push(fd);
        Arg::Slot(self.fds.len() as u8 - 1)
    }

    fn text(&mut self, text: &str) -> Arg {
        Arg::At(self.plan.bytes(&[text.as_bytes(), b"\0"].concat()))
    }

    fn call(&mut self, step: u32, nr: i64, args: &[Arg]) {
        self.plan.call(step, nr, args);
    }

    fn open(&mut self, step: u32, at: Arg, path: Arg, flags: i32) {
        let args = [at, path, Arg::Is(i64::from(flags)), Arg::Is(0)];
        self.plan
            .call_into(step, libc::SYS_openat, &args, Some(MADE));
    }

    fn close(&mut self, step: u32, slot: u8) {
        self.call(step, libc::SYS_close, &[Arg::Slot(slot)]);
    }

    /// Moves the mount in a slot, which is mounted nowhere, to `target`.
    fn mount(&mut self, step: u32, slot: u8, target: &str) {
        let (nothing, target) = (self.text(""), self.text(target));
        // MOVE_MOUNT_F_EMPTY_PATH is 4.
        let args = [Arg::Slot(slot), nothing, HERE, target, Arg::Is(4)];
        self.call(step, libc::SYS_move_mount, &args);
        self.close(step, slot);
    }
}

const HERE: Arg = Arg::Is(libc::AT_FDCWD as i64);

impl Room<'_> {
    /// All that the first process does before it says that the room is ready.
    pub(super) fn table(&self, who: Who) -> Tabled {
        let mut table = Tabled {
            plan: Plan::default(),
            fds: vec![self.files.first_mount()],
        };
        table
            .fds
            .extend(self.ruleset.map(std::os::fd::AsRawFd::as_raw_fd));
        self.join(&mut table);
        self.namespaces(&mut table);
        self.attach(&mut table);
        self.mount_proc(&mut table);
        if let NetNs::Used(_, empty) = self.net_ns {
            leave_sockets(&mut table, empty);
        }
        table.plan.confinement(who, &self.confinement);
        table
    }

    fn join(&self, table: &mut Tabled) {
        for (folder, file) in self.group.members() {
            let (folder, file, me) = (table.given(folder), table.text(&file), table.text("0"));
            table.open(plan::JOIN, folder, file, libc::O_WRONLY | libc::O_CLOEXEC);
            let write = [Arg::Slot(MADE), me, Arg::Is(1)];
            table.call(plan::JOIN, libc::SYS_write, &write);
            table.close(plan::JOIN, MADE);
        }
    }

    fn namespaces(&self, table: &mut Tabled) {
        let mut flags =
            libc::CLONE_NEWNS | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWCGROUP;
        match self.net_ns {
            NetNs::New => flags |= libc::CLONE_NEWNET,
            NetNs::Used(fd, _) | NetNs::Shared(fd) => {
                let network = table.given(fd.as_raw_fd());
                let kind = Arg::Is(i64::from(libc::CLONE_NEWNET));
                table.call(plan::NAMESPACES, libc::SYS_setns, &[network, kind]);
            }
        }
        let flags = [Arg::Is(i64::from(flags))];
        table.call(plan::NAMESPACES, libc::SYS_unshare, &flags);
    }

    fn attach(&self, table: &mut Tabled) {
        let root = if self.at_root { "" } else { ROOT };
        for folder in ["work", "tmp"] {
            let target = format!("{root}/{folder}");
            match self.files.source(folder) {
                Source::Mount(mount, folder) => {
                    let mount = match mount == self.files.first_mount() {
                        true => Arg::Slot(plan::FILES),
                        false => table.given(mount),
                    };
                    let folder = table.text(folder);
                    // OPEN_TREE_CLONE is 1.
                    let flags = 1 | libc::O_CLOEXEC | libc::AT_EMPTY_PATH;
                    let args = [mount, folder, Arg::Is(i64::from(flags))];
                    let call = libc::SYS_open_tree;
                    table
                        .plan
                        .call_into(plan::MOUNT_WORK, call, &args, Some(MADE));
                    table.mount(plan::MOUNT_WORK, MADE, &target);
                }
                Source::Path(path) => {
                    let (path, target) = (table.text(&path), table.text(&target));
                    let flags = Arg::Is(libc::MS_BIND as i64);
                    let args = [path, target, Arg::Is(0), flags, Arg::Is(0)];
                    table.call(plan::MOUNT_WORK, libc::SYS_mount, &args);
                }
            }
        }
        if !self.at_root {
            // Bind mounts are made by path, outside of the new root; then as `enter_root` does.
            let (root, dot, top) = (table.text(ROOT), table.text("."), table.text("/"));
            let detach = Arg::Is(i64::from(libc::MNT_DETACH));
            table.call(plan::PIVOT, libc::SYS_chdir, &[root]);
            table.call(plan::PIVOT, libc::SYS_pivot_root, &[dot, dot]);
            table.call(plan::PIVOT, libc::SYS_umount2, &[dot, detach]);
            table.call(plan::PIVOT, libc::SYS_chdir, &[top]);
        }
    }

    /// As [`super::files::new_proc`] makes it.
    fn mount_proc(&self, table: &mut Tabled) {
        let step = plan::MOUNT_PROC;
        let kind = table.text("proc");
        let open = [kind, Arg::Is(1)];
        table
            .plan
            .call_into(step, libc::SYS_fsopen, &open, Some(CONTEXT));
        let context = Arg::Slot(CONTEXT);
        if self.proc.hides {
            // FSCONFIG_SET_STRING is 1.
            let (key, value) = (table.text("hidepid"), table.text("invisible"));
            let hide = [context, Arg::Is(1), key, value, Arg::Is(0)];
            table.call(step, libc::SYS_fsconfig, &hide);
        }
        // FSCONFIG_CMD_CREATE is 6.
        let create = [context, Arg::Is(6), Arg::Is(0), Arg::Is(0), Arg::Is(0)];
        table.call(step, libc::SYS_fsconfig, &create);
        // FSMOUNT_CLOEXEC is 1.
        let mount = [context, Arg::Is(1), Arg::Is(super::files::PROC_ATTRIBUTES)];
        table
            .plan
            .call_into(step, libc::SYS_fsmount, &mount, Some(MADE));
        table.close(step, CONTEXT);
        if self.proc.below {
            let detach = Arg::Is(i64::from(libc::MNT_DETACH));
            let path = table.text("/proc");
            table.call(step, libc::SYS_umount2, &[path, detach]);
        }
        table.mount(step, MADE, "/proc");
    }
}

/// Goes on in a new network namespace if this one has any socket: a killed program's sockets that
/// were on their way in messages are freed a moment after it. `/proc/1/net/unix` has a head line,
/// then one for each Unix socket; others cannot be made in it.
fn leave_sockets(table: &mut Tabled, empty: usize) {
    let step = plan::NAMESPACES;
    let list = table.text("/proc/1/net/unix");
    table.open(step, HERE, list, libc::O_RDONLY | libc::O_CLOEXEC);
    let buffer = Arg::At(table.plan.bytes(&[0; LIST_BYTES]));
    let read = [Arg::Slot(MADE), buffer, Arg::Is(LIST_BYTES as i64)];
    for most in [empty, 0] {
        table
            .plan
            .call_into(step, libc::SYS_read, &read, Some(CONTEXT));
        table.plan.unless_more(CONTEXT, most);
        let network = [Arg::Is(i64::from(libc::CLONE_NEWNET))];
        table.call(step, libc::SYS_unshare, &network);
    }
    table.close(step, MADE);
}

/// How long the list of sockets of a network namespace is that has none: its head line; `None`
/// where there is no such list.
pub(crate) fn empty_list_bytes() -> Option<usize> {
    let list = std::fs::read("/proc/self/net/unix").ok()?;
    let head = list.iter().position(|b| *b == b'\n')? + 1;
    (head < LIST_BYTES).then_some(head)
}

/// Called in a child that is the first process of a new PID namespace; never returns.
pub(crate) fn run(mut table: Tabled, mut notice: Notice, notices: RawFd) -> ! {
    let done = table.plan.run(&table.fds);
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

/// Makes [`ROOT`] the root of this process's mount namespace and drops what was there.
pub(crate) fn enter_root() -> nix::Result<()> {
    chdir(ROOT)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
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
