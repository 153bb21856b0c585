//! Properties of the host that do not change while a spawner runs: the protections that it can enforce, and
//! open files by which the host is reached after the spawner has changed to the root of programs.

use super::files::{ATTACHED, Mounting};
use super::network::Networks;
use super::root;
use super::users::uid_range;
use crate::cgroup::Hierarchy;
use crate::error::{Result, call, on};
use crate::protocol::{Config, Creation};
use crate::seccomp::{Filter, filter, init_filter};
use crate::spec::Network;
use crate::walls::{Confinement, bound};
use crate::{landlock, mounts};
use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::Mode;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

/// Sandboxes that have namespaces and an interpreter waiting, at most; they take about 2.2 MiB each, the
/// kernel's part included. The others get theirs when a program comes.
const MAX_WAITING: usize = 2048;
/// Files of this process that such a sandbox takes, with room for those that have none waiting.
const FILES_WAITING: usize = 12;

/// Facts that hold for every sandbox of this spawner.
#[derive(Debug)]
pub(super) struct Host {
    /// Places for control groups.
    pub(super) hierarchy: Hierarchy,
    /// Filters without and with TCP.
    filters: [Filter; 2],
    init_filter: Filter,
    /// `None` where the kernel has no landlock.
    pub(super) landlock: Option<landlock::Common>,
    /// Whether every sandbox can have a separate user, else why not.
    pub(super) own_users: std::result::Result<(), String>,
    /// Methods of mounting. If detached mounts work, this process runs in the root of programs.
    pub(super) mounting: Mounting,
    /// Whether a `/proc` is mounted in the root of programs, as user namespaces need it.
    pub(super) proc_below: bool,
    /// Names this run in control groups: process id and start time.
    pub(super) tag: String,
    /// PID namespace of the spawner itself.
    pub(super) pid_ns: OwnedFd,
    pub(super) networks: Networks,
    /// `/proc` of the spawner's own PID namespace, if there is one.
    own_proc: Option<OwnedFd>,
    /// Path of the Python interpreter inside; `None` if the image has none.
    pub(super) python: Option<String>,
    pub(super) processors: u64,
    /// Sandboxes that may have namespaces and an interpreter waiting.
    pub(super) max_waiting: usize,
    /// The highest capability that the kernel has.
    last_capability: i32,
    /// Whether a program gets a separate user namespace, so that its processes are counted.
    pub(super) nested_users: bool,
}

impl Host {
    /// Looks at the host and builds the root of programs, which this process enters where mounts can be
    /// detached. Files of the host are opened before.
    pub(super) fn probe(
        config: &Config,
        hierarchy: Hierarchy,
        may: Privilege,
        tag: String,
    ) -> Result<Self> {
        let max_waiting = settle_in();
        let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let networks = Networks::open()?;
        let pid_ns = File::open("/proc/self/ns/pid");
        let pid_ns = pid_ns.map_err(on("open", "/proc/self/ns/pid"))?.into();
        let last_capability = bound()?;
        let (landlock, mounting) = build_root(config, may.in_user_namespace)?;
        let shared_user = may.own_users.is_err() && hierarchy.limits_processes().is_none();
        Ok(Self {
            hierarchy,
            filters: [filter(false)?, filter(true)?],
            init_filter: init_filter()?,
            landlock,
            own_users: may.own_users,
            mounting,
            proc_below: may.in_user_namespace,
            tag,
            pid_ns,
            networks,
            own_proc: mounts::new_proc().ok(),
            python: config.python.clone(),
            processors,
            max_waiting,
            last_capability,
            nested_users: shared_user && can_nest_users(),
        })
    }

    /// Privileges that a process of a sandbox gives up before hostile code runs in it; `uid` is the sandbox's
    /// user.
    pub(super) fn confinement<'a>(&'a self, of: &'a Creation, uid: Option<u32>) -> Confinement<'a> {
        let tcp = of.network == Network::Loopback;
        Confinement {
            limits: &of.limits,
            uid,
            filter: &self.filters[usize::from(tcp)],
            landlock: self.landlock.is_some(),
            limit_user_processes: self.hierarchy.limits_processes().is_none(),
            limit_address_space: self.hierarchy.limits_memory().is_err(),
            cpu_counted: self.hierarchy.counts_cpu().is_some(),
            own_namespace: self.nested_users.then_some(self.last_capability),
        }
    }

    /// Confinement of the sandbox init, whose filter only allows it to wait.
    pub(super) fn init_confinement<'a>(
        &'a self,
        of: &'a Creation,
        uid: Option<u32>,
    ) -> Confinement<'a> {
        Confinement {
            filter: &self.init_filter,
            ..self.confinement(of, uid)
        }
    }

    /// Numbers of this process's children, as the kernel lists them; empty where it does not.
    pub(super) fn children(&self) -> Vec<i32> {
        let listed = self.own_proc.as_ref().and_then(|proc| {
            let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
            let opened = openat(proc.as_fd(), "1/task/1/children", flags, Mode::empty()).ok()?;
            std::io::read_to_string(File::from(opened)).ok()
        });
        let numbers = listed.unwrap_or_default();
        numbers.split_whitespace().flat_map(str::parse).collect()
    }

    /// The network namespace of a child, which lasts as long as this file is open; `None` where it cannot be
    /// opened.
    pub(super) fn network_of(&self, child: i32) -> Option<OwnedFd> {
        let proc = self.own_proc.as_ref()?.as_fd();
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let path = format!("{child}/ns/net");
        openat(proc, path.as_str(), flags, Mode::empty()).ok()
    }
}

/// Rights of this process on the host.
#[derive(Clone, Debug)]
pub(super) struct Privilege {
    /// Whether this is not root of the host, but of a user namespace.
    in_user_namespace: bool,
    /// Whether the users of sandboxes can be given to files and processes, else why not.
    own_users: std::result::Result<(), String>,
}

impl Privilege {
    pub(super) fn of_this_process() -> Self {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/gid_map").unwrap_or_default();
        let (first, last) = uid_range();
        Self {
            in_user_namespace: !maps(&map, 0, u32::MAX - 1),
            own_users: if maps(&map, first, last) && maps(&groups, first, last) {
                Ok(())
            } else {
                Err(format!(
                    "all sandboxes share one user: the user namespace that Sinew runs in does not \
                     map the ids {first} to {last}; run as root of the host for a user each, or \
                     map them (newuidmap, newgidmap)"
                ))
            },
        }
    }
}

/// Whether one line of a map (`/proc/PID/uid_map`: inside, outside, count) holds these ids.
fn maps(map: &str, first: u32, last: u32) -> bool {
    map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().flat_map(str::parse).collect();
        let [inside, _, count] = numbers[..] else {
            return false;
        };
        inside <= u64::from(first) && u64::from(last) < inside + count
    })
}

/// Becomes root of a user namespace with one user, and this program again: what a process maps
/// of its program belongs to the namespace in which it was started.
pub(super) fn become_root_of_namespace() -> Result<()> {
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    unshare(CloneFlags::CLONE_NEWUSER).map_err(|e| {
        call("unshare")(e).hint(
            "; user namespaces are off: run as root, or set kernel.unprivileged_userns_clone=1 and \
             user.max_user_namespaces above 0",
        )
    })?;
    let write = |file: &str, text: String| fs::write(file, text).map_err(on("write", file));
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    write("/proc/self/gid_map", format!("0 {gid} 1"))?;
    let error = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .exec();
    Err(call("start itself in a user namespace")(error))
}

/// Leaves the host's mounts, host name and process numbers; the next child is the first process of the
/// new PID namespace.
pub(super) fn isolate() -> Result<()> {
    let flags = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWUTS;
    unshare(flags).map_err(|e| {
        call("unshare")(e).hint(
            "; namespaces are not permitted here, even to root: a container needs CAP_SYS_ADMIN",
        )
    })?;
    // New UTS namespaces copy the name.
    nix::unistd::sethostname("sandbox").map_err(call("sethostname"))
}

/// Makes this process fit for many children, and raises its limit on open files as far as possible: each live
/// sandbox holds a few. Returns how many sandboxes may have an interpreter waiting.
fn settle_in() -> usize {
    // An ignored signal would let the kernel reap children before anybody looked at them.
    // SAFETY: the default action, no handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return MAX_WAITING;
    };
    let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    let hard = usize::try_from(hard).unwrap_or(usize::MAX);
    MAX_WAITING.min(hard / FILES_WAITING)
}

/// Whether a user namespace can be made in this one.
fn can_nest_users() -> bool {
    // SAFETY: one thread; the child makes system calls and ends without destructors.
    match unsafe { nix::unistd::fork() } {
        Ok(nix::unistd::ForkResult::Child) => {
            let made = unshare(CloneFlags::CLONE_NEWUSER).is_ok();
            // SAFETY: see above.
            unsafe { libc::_exit(i32::from(!made)) }
        }
        Ok(nix::unistd::ForkResult::Parent { child }) => matches!(
            nix::sys::wait::waitpid(child, None),
            Ok(nix::sys::wait::WaitStatus::Exited(_, 0))
        ),
        Err(_) => false,
    }
}

/// The root of programs, at its place or as that of this process, with what landlock names in it, and
/// the folder for files that must be mounted.
fn build_root(config: &Config, proc_below: bool) -> Result<(Option<landlock::Common>, Mounting)> {
    root::build(
        proc_below,
        &config.binds,
        &config.shows,
        config.image.as_deref(),
    )?;
    fs::create_dir_all(ATTACHED).map_err(on("make", ATTACHED))?;
    let landlock = landlock::Common::open(Path::new(root::ROOT))?;
    let mounting = Mounting::probe(config.attached);
    if mounting.detached {
        root::enter().map_err(on("enter", root::ROOT))?;
    }
    Ok((landlock, mounting))
}
