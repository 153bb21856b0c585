//! Start and state of one container, for every engine.

use crate::reaper::Reaper;
use crate::root::Root;
use sinew_jail::layer::USERS;
use sinew_sandbox::{Limits, SandboxError, SandboxSpec};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum time of an engine to end a container whose agent is gone. Then the container is deleted by force.
pub(crate) const END: Duration = Duration::from_secs(15);
/// Programs that the agent needs: SETUID, SETGID, SETPCAP to give everything up in the programs
/// that it starts, KILL to end them. Programs have none.
pub(crate) const AGENT_CAPABILITIES: [&str; 4] = ["SETUID", "SETGID", "SETPCAP", "KILL"];
/// Capabilities that the agent needs in addition with a writable root: for files of all users.
pub(crate) const FILE_CAPABILITIES: [&str; 3] = ["CHOWN", "DAC_OVERRIDE", "FOWNER"];
/// Files and folders of the kernel that show or change the host. An empty file or folder covers each.
pub(crate) const MASKED: [&str; 9] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/sys",
];
/// Folders of `/proc` that are mounted read-only.
pub(crate) const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];
/// User of the programs of all containers where the engine runs in a user namespace with few users.
pub(crate) const SHARED_UID: u32 = 65_534;
/// First user of programs elsewhere: beyond the users of people, of services and of the process level.
const FIRST_UID: u32 = 2_000_000;
/// Number of these users. After this many containers, numbers are used again.
const UIDS: u64 = 1 << 24;
/// Containers of one process before the users of the next process number are reached.
const UIDS_OF_PROCESS: u64 = 1 << 13;

/// First user of containers with a user namespace: beyond [`FIRST_UID`] and all of its users.
const FIRST_MAPPED: u32 = 1 << 25;
/// Number of containers with separate users. After this many, users are used again.
const MAPPED: u64 = 65_000;
/// Containers of one process before the users of the next process number are reached.
const MAPPED_OF_PROCESS: u64 = 64;

/// First of the users of a container with a user namespace. No other living container of this process has
/// them.
pub(crate) fn next_users() -> u32 {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let number = u64::from(std::process::id()) * MAPPED_OF_PROCESS + number;
    // Less than 2^32.
    FIRST_MAPPED + (number % MAPPED) as u32 * USERS
}

/// A user that no other living container of this process has.
///
/// The kernel counts some resources for each user (descriptors in flight, pages of pipes, locks), so that
/// containers with separate users cannot exhaust them for each other.
pub(crate) fn next_uid() -> u32 {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let number = u64::from(std::process::id()) * UIDS_OF_PROCESS + number;
    // Less than 2^24.
    FIRST_UID + (number % UIDS) as u32
}
/// Maximum files and folders in the work folder, and in the temporary folder.
pub(crate) const INODES: u64 = 4096;

/// Maximum open files of a container: those of its programs, and at least 1,024 for the agent and programs
/// together.
pub(crate) fn open_files(limits: &Limits) -> u64 {
    limits.open_files.max(1024)
}

/// Program or service that starts containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// `crun`, without a daemon.
    Crun,
    /// `runc`, without a daemon.
    Runc,
    /// The Docker daemon, through its API.
    Docker,
    /// The Podman service, through Docker's API.
    Podman,
}

impl EngineKind {
    /// Name in recipes and commands.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crun => "crun",
            Self::Runc => "runc",
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// Path of the API's socket if the configuration names none.
    pub(crate) fn socket(self) -> &'static str {
        match self {
            Self::Podman => "/run/podman/podman.sock",
            _ => "/var/run/docker.sock",
        }
    }
}

/// Way of an engine to give a container a writable root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RootWay {
    /// The users of the container are others outside.
    pub(crate) mapped: bool,
    /// The layer has a size.
    pub(crate) sized: bool,
}

impl RootWay {
    pub(crate) const fn new(mapped: bool, sized: bool) -> Self {
        Self { mapped, sized }
    }
}

/// Data for the start of one container. Paths are on the host.
pub(crate) struct StartSpec<'a> {
    /// Unique on the host while it lives.
    pub(crate) name: String,
    /// Folder of only this container.
    pub(crate) folder: &'a Path,
    /// User of its programs. The work folder and the temporary folder belong to it. With a writable root: the
    /// user outside that is root inside, for runtimes without a daemon.
    pub(crate) uid: u32,
    /// Folder with only the agent's socket. It is `/.host` inside.
    pub(crate) host: PathBuf,
    /// Limits, environment and network of the sandbox.
    pub(crate) spec: &'a SandboxSpec,
    /// Way to a writable root, if the sandbox has one.
    pub(crate) way: Option<RootWay>,
}

/// A started container in the form of its engine.
#[derive(Debug)]
pub(crate) enum Body {
    /// crun and runc: the process that waits for the container and cleans up after it.
    Process(Box<Waiter>),
    /// Docker and Podman: the id of the container.
    Named(String),
}

/// Process of a runtime that waits for a container.
///
/// If it is dropped before the container has ended, it removes the container's groups with all processes in
/// them, because no daemon would.
#[derive(Debug)]
pub(crate) struct Waiter {
    /// The process, `crun run` or `runc run`.
    pub(crate) child: tokio::process::Child,
    /// Name of the container and of its groups.
    pub(crate) name: String,
    /// True after the runtime has ended and the groups are removed.
    pub(crate) ended: bool,
    /// Removes the groups if the container has not ended.
    pub(crate) reaper: Reaper,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.start_kill();
            self.reaper.groups(&self.name);
        }
    }
}

/// Parts that all containers of a provider share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// Program of the agent on the host.
    pub(crate) agent: PathBuf,
    /// Empty root with mount points, on the host.
    pub(crate) root_folder: PathBuf,
    /// Read-only mounts of the root, and the Python in it.
    pub(crate) root: Root,
    /// Maximum processors of one container. `None`: no limit.
    pub(crate) cpus: Option<f64>,
    /// Tag of this process: its number and start time. Leftovers with the tag of a dead process are removed.
    pub(crate) tag: String,
    /// Removes what dropped containers leave.
    pub(crate) reaper: Reaper,
}

/// Error for a level that cannot be used on this host. `reason` names the missing part and the remedy.
pub(crate) fn unavailable(reason: String) -> SandboxError {
    SandboxError::Unavailable {
        level: "container".into(),
        reason,
    }
}
