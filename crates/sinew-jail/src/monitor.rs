//! Walls around a monitor of virtual machines (QEMU): builds them around this process,
//! which then becomes the monitor.
//!
//! It has one thread and inherits three descriptors: the agent's channel (0), the monitor's control channel
//! (1) and a log (2). Other files of the monitor are opened by path and passed by number. A step that the
//! probe found possible and that fails later is fatal.
//!
//! | step | why |
//! |---|---|
//! | control groups | before anything is allocated for the monitor |
//! | files by descriptor | images, memory and devices are opened with the rights of the caller and passed on |
//! | namespaces and a root of its own | mounts, network, IPC and host name; the root shows the monitor and its libraries, read-only |
//! | limits and user | a user that owns nothing; no core dumps |
//! | death signal | set twice: a change of user clears it |

use crate::error::{Error, Result, call, on};
use crate::walls;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::unistd::{Gid, Uid, execve, getppid, pivot_root};
use serde::{Deserialize, Serialize};
use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Exit code of a jail that could not be built.
pub const FAILED: i32 = 126;

/// Descriptors of a monitor; QEMU needs about twenty.
const OPEN_FILES: u64 = 128;
/// Threads of a monitor's user.
const THREADS: u64 = 64;
/// Bytes of a file that a monitor writes: its log and the state of its devices.
pub const FILE_BYTES: u64 = 16 << 20;
/// Number of the first descriptor that is opened for a monitor.
const FIRST: i32 = 64;

/// A file that is opened for the monitor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Opened {
    /// `{name}` in the arguments becomes its number.
    pub name: String,
    pub path: PathBuf,
    pub write: bool,
}

/// Walls to build, and the program to become.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Process that starts it; when that process ends, so does the monitor.
    pub parent: i32,
    pub opens: Vec<Opened>,
    /// Files that take the number of a process that joins a group.
    pub groups: Vec<PathBuf>,
    /// An empty folder that becomes the root.
    pub root: PathBuf,
    /// Folders of the host to show, read-only, and where.
    pub shows: Vec<(PathBuf, PathBuf)>,
    /// Devices of the host, and where they are shown.
    pub devices: Vec<(PathBuf, PathBuf)>,
    /// User and group to become; `None` where that needs rights that are missing.
    pub user: Option<(u32, u32)>,
    /// Whether to leave the host's mounts, network, names and message queues.
    pub walls: bool,
    /// Path of the monitor, or `/proc/self/fd/{name}`.
    pub program: String,
    pub args: Vec<String>,
}

/// Builds walls and becomes the monitor of this [`Plan`] in JSON. Returns the exit code if it could
/// not.
#[must_use]
pub fn main(plan: &str) -> i32 {
    let failure = serde_json::from_str::<Plan>(plan)
        .map_err(Error::from)
        .and_then(become_monitor);
    use std::io::Write;
    // It may be that no process reads it: the exit code is enough.
    let _ = match failure {
        Err(e) => writeln!(std::io::stderr(), "jail: {e}"),
        Ok(never) => match never {},
    };
    FAILED
}

fn become_monitor(plan: Plan) -> Result<std::convert::Infallible> {
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(call("set_pdeathsig"))?;
    for group in &plan.groups {
        fs::write(group, "0").map_err(on("join", group))?;
    }
    let opened = plan.opens.iter().enumerate().map(open);
    let opened: Vec<(String, OwnedFd)> = opened.collect::<Result<_>>()?;
    if plan.walls {
        leave_namespaces()?;
        new_root(&plan)?;
    }
    let limits = limits();
    let mut walls = walls::Plan::monitor(&limits, plan.user);
    walls.run([-1; 2]).map_err(|(step, errno)| {
        call(walls::step_name(step))(std::io::Error::from_raw_os_error(errno))
    })?;
    // A change of user clears it.
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(call("set_pdeathsig"))?;
    if getppid().as_raw() != plan.parent {
        return Err(Error::NoSuch("process any more that started it"));
    }
    let mut argv = Vec::new();
    for arg in std::iter::once(&plan.program).chain(&plan.args) {
        let numbered = opened.iter().fold(arg.clone(), |text, (name, fd)| {
            text.replace(&format!("{{{name}}}"), &fd.as_raw_fd().to_string())
        });
        argv.push(numbered);
    }
    let argv = argv.into_iter().map(CString::new);
    let argv: Vec<CString> = argv
        .collect::<std::result::Result<_, _>>()
        .map_err(|e| Error::refused("arguments", e.to_string()))?;
    execve(&argv[0], &argv, &[c"LC_ALL=C"]).map_err(call("execve"))
}

/// Opened without close-on-exec: it is for the monitor, which gets its number.
fn open((index, file): (usize, &Opened)) -> Result<(String, OwnedFd)> {
    use nix::fcntl::OFlag;
    let number = FIRST + index as i32;
    let flags = if file.write {
        OFlag::O_RDWR
    } else {
        OFlag::O_RDONLY
    };
    let fd = nix::fcntl::open(&file.path, flags, nix::sys::stat::Mode::empty());
    let fd = fd.map_err(on("open", &file.path))?;
    let fd = rustix::io::fcntl_dupfd_cloexec(&fd, number).map_err(on("dup", &file.path))?;
    if fd.as_raw_fd() != number {
        let path = file.path.display().to_string();
        return Err(Error::refused(
            path,
            "the number of its descriptor is taken",
        ));
    }
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())
        .map_err(on("keep open", &file.path))?;
    Ok((file.name.clone(), fd))
}

/// Leaves the host's namespaces. A process without rights of the host gets the rights for the other steps
/// from a user namespace.
fn leave_namespaces() -> Result<()> {
    let mut flags = CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWUTS;
    let (user, group) = (Uid::effective(), Gid::effective());
    if user.is_root() {
        return unshare(flags).map_err(call("unshare"));
    }
    flags |= CloneFlags::CLONE_NEWUSER;
    unshare(flags).map_err(call("unshare with a user namespace"))?;
    fs::write("/proc/self/setgroups", "deny").map_err(call("setgroups"))?;
    fs::write("/proc/self/uid_map", format!("{user} {user} 1")).map_err(call("uid_map"))?;
    fs::write("/proc/self/gid_map", format!("{group} {group} 1")).map_err(call("gid_map"))
}

/// Binds, then binds again with flags: the kernel ignores them in the first call.
fn bind(from: &Path, to: &Path, flags: MsFlags) -> Result<()> {
    let failed = |e: nix::Error| on("show", from)(e);
    let none: Option<&str> = None;
    let rec = MsFlags::MS_BIND | MsFlags::MS_REC;
    mount(Some(from), to, none, rec, none).map_err(failed)?;
    let again = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | flags;
    mount(none, to, none, again, none).map_err(failed)
}

/// A file system in memory of 1 MiB that becomes the root, read-only at the end.
fn new_root(plan: &Plan) -> Result<()> {
    let none: Option<&str> = None;
    let (root, made) = (&plan.root, call("make the root"));
    mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none).map_err(call("mounts"))?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let options = Some("size=1m,nr_inodes=256,mode=0755");
    mount(Some("tmpfs"), root, Some("tmpfs"), safe, options).map_err(call("tmpfs"))?;
    let inside = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    for (from, to) in &plan.shows {
        let to = inside(to);
        if from.symlink_metadata().map_err(&made)?.is_symlink() {
            let target = fs::read_link(from).map_err(&made)?;
            std::os::unix::fs::symlink(target, to).map_err(&made)?;
            continue;
        }
        fs::create_dir_all(&to).map_err(&made)?;
        bind(from, &to, safe | MsFlags::MS_RDONLY)?;
    }
    fs::create_dir_all(inside(Path::new("/dev"))).map_err(&made)?;
    for (device, shown) in plan.devices.iter().filter(|(d, _)| d.exists()) {
        let to = inside(shown);
        fs::write(&to, "").map_err(&made)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        bind(device, &to, flags)?;
    }
    let proc = inside(Path::new("/proc"));
    fs::create_dir_all(&proc).map_err(&made)?;
    proc_of_its_own(&proc)?;
    let old = inside(Path::new("/old"));
    fs::create_dir_all(&old).map_err(&made)?;
    pivot_root(root, &old).map_err(call("pivot_root"))?;
    std::env::set_current_dir("/").map_err(call("chdir"))?;
    umount2("/old", MntFlags::MNT_DETACH).map_err(call("umount"))?;
    fs::remove_dir("/old").map_err(call("rmdir"))?;
    let again = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | safe;
    mount(
        none,
        "/",
        none,
        again,
        Some("size=1m,nr_inodes=256,mode=0755"),
    )
    .map_err(call("remount"))
}

/// Memory is opened by its number in `/proc/self/fd`. Other users' processes stay hidden; where
/// the kernel does not give a new one (user namespaces), the host's is shown.
fn proc_of_its_own(to: &Path) -> Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let options = Some("hidepid=2,subset=pid");
    if mount(Some("proc"), to, Some("proc"), flags, options).is_ok() {
        return Ok(());
    }
    bind(Path::new("/proc"), to, flags)
}

/// Resource, soft and hard limit.
fn limits() -> [[u64; 3]; 5] {
    [
        (libc::RLIMIT_CORE, 0),
        (libc::RLIMIT_NOFILE, OPEN_FILES),
        (libc::RLIMIT_NPROC, THREADS),
        (libc::RLIMIT_FSIZE, FILE_BYTES),
        (libc::RLIMIT_MEMLOCK, 1 << 20),
    ]
    .map(|(resource, maximum)| [resource.into(), maximum, maximum])
}
