//! Who starts containers: a runtime without a daemon, or a daemon with an API.

use crate::api::Api;
use crate::reaper::Reaper;
use crate::root::Root;
use crate::runtime::Runtime;
use sinew_sandbox::{Limits, SandboxError, SandboxSpec};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long an engine may take to end a container whose agent is gone.
pub(crate) const END: Duration = Duration::from_secs(15);
/// Programs that the agent needs: SETUID, SETGID, SETPCAP to give everything up in the programs
/// that it starts, KILL to end them. Programs have none.
pub(crate) const AGENT_CAPABILITIES: [&str; 4] = ["SETUID", "SETGID", "SETPCAP", "KILL"];
/// Files of `/proc` that tell of the host or change it.
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
/// Folders of `/proc` that nobody inside may write.
pub(crate) const READ_ONLY: [&str; 5] = [
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
];
/// The user of programs where an engine knows few users.
pub(crate) const SHARED_UID: u32 = 65_534;
/// First user of programs elsewhere, and how many there are: beyond those of people, of services and of
/// the process level.
const FIRST_UID: u32 = 2_000_000;
const UIDS: u64 = 1 << 24;
/// So many containers of one process come before the users of the next.
const UIDS_OF_PROCESS: u64 = 1 << 13;

/// A user that no other living container of this process has. What the kernel bounds for each user
/// (descriptors in flight, pages of pipes, locks) is then not shared.
pub(crate) fn next_uid() -> u32 {
    static MADE: AtomicU64 = AtomicU64::new(0);
    let number = MADE.fetch_add(1, Ordering::Relaxed);
    let number = u64::from(std::process::id()) * UIDS_OF_PROCESS + number;
    // Less than 2^24.
    FIRST_UID + (number % UIDS) as u32
}
/// Files and folders that one sandbox may make.
pub(crate) const INODES: u64 = 4096;

/// Open files that a container may have: what its programs may, and the agent's own.
pub(crate) fn open_files(limits: &Limits) -> u64 {
    limits.open_files.max(1024)
}

/// What starts containers.
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
    /// As recipes and commands name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Crun => "crun",
            Self::Runc => "runc",
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }

    /// Where its API listens if nothing else is said.
    fn socket(self) -> &'static str {
        match self {
            Self::Podman => "/run/podman/podman.sock",
            _ => "/var/run/docker.sock",
        }
    }
}

/// Which engine to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first that works: crun, runc, Docker, Podman.
    #[default]
    Auto,
    /// This one.
    Only(EngineKind),
}

impl Choice {
    /// What can be written for it.
    pub const NAMES: [&str; 5] = ["auto", "crun", "runc", "docker", "podman"];
}

impl FromStr for Choice {
    type Err = SandboxError;

    fn from_str(text: &str) -> Result<Self, SandboxError> {
        Ok(match text {
            "auto" => Self::Auto,
            "crun" => Self::Only(EngineKind::Crun),
            "runc" => Self::Only(EngineKind::Runc),
            "docker" => Self::Only(EngineKind::Docker),
            "podman" => Self::Only(EngineKind::Podman),
            other => {
                return Err(SandboxError::Request {
                    field: "container engine",
                    value: other.into(),
                    allowed: format!("one of: {}", Self::NAMES.join(", ")),
                });
            }
        })
    }
}

/// A container that is to be.
pub(crate) struct Birth<'a> {
    /// Unique on the host while it lives.
    pub(crate) name: String,
    /// Folder of its own on the host.
    pub(crate) folder: &'a Path,
    /// The user of its programs, to whom its folders belong.
    pub(crate) uid: u32,
    /// Folder that holds the socket, and nothing else; stands at `/.host` inside.
    pub(crate) host: PathBuf,
    pub(crate) spec: &'a SandboxSpec,
}

/// A container as its engine knows it.
#[derive(Debug)]
pub(crate) enum Body {
    /// The process that waits for it and cleans up after it.
    Process(Box<Waiter>),
    /// Its number.
    Named(String),
}

/// A runtime's process that waits for a container. Where it is dropped before it has ended, container and
/// groups go with it: nothing else would end them.
#[derive(Debug)]
pub(crate) struct Waiter {
    pub(crate) child: tokio::process::Child,
    /// Of the container and of its groups.
    pub(crate) name: String,
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

/// What all containers of a provider share.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    /// The agent on the host.
    pub(crate) agent: PathBuf,
    /// An empty root with mount points.
    pub(crate) root_folder: PathBuf,
    pub(crate) root: Root,
    /// Share of processors, if bounded.
    pub(crate) cpus: Option<f64>,
    /// Tag of this run.
    pub(crate) tag: String,
    /// Removes what dropped containers leave.
    pub(crate) reaper: Reaper,
}

#[derive(Debug)]
pub(crate) enum Engine {
    Runtime(Runtime),
    Api(Api),
}

impl Engine {
    /// The engine that was chosen, if it works on this host.
    pub(crate) async fn find(
        choice: Choice,
        socket: Option<&Path>,
        common: &Common,
        state: &Path,
    ) -> Result<Self, SandboxError> {
        let all = [
            EngineKind::Crun,
            EngineKind::Runc,
            EngineKind::Docker,
            EngineKind::Podman,
        ];
        let wanted = match choice {
            Choice::Only(kind) => vec![kind],
            // Who names a socket wants what listens there.
            Choice::Auto if socket.is_some() => vec![EngineKind::Docker],
            Choice::Auto => all.to_vec(),
        };
        let mut why = Vec::new();
        for kind in wanted {
            let tried = match kind {
                EngineKind::Crun | EngineKind::Runc => {
                    Runtime::new(kind.name(), common, state).map(Self::Runtime)
                }
                EngineKind::Docker | EngineKind::Podman => {
                    let socket = socket.unwrap_or(Path::new(kind.socket()));
                    Api::new(kind, socket).await.map(Self::Api)
                }
            };
            match tried {
                Ok(engine) => return Ok(engine),
                Err(SandboxError::Unavailable { reason, .. }) => {
                    why.push(format!("{}: {reason}", kind.name()));
                }
                Err(e) => {
                    let package = match kind {
                        EngineKind::Docker => "docker.io",
                        other => other.name(),
                    };
                    why.push(format!(
                        "{}: {e}: start it, or install it (Debian: apt-get install {package})",
                        kind.name()
                    ));
                }
            }
        }
        Err(unavailable(why.join("; ")))
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Runtime(runtime) => runtime.name(),
            Self::Api(api) => api.kind().name(),
        }
    }

    pub(crate) async fn start(
        &self,
        common: &Common,
        birth: &Birth<'_>,
    ) -> Result<Body, SandboxError> {
        match self {
            Self::Runtime(runtime) => runtime.start(common, birth),
            Self::Api(api) => api.start(common, birth).await.map(Body::Named),
        }
    }

    /// Ends a container and waits until nothing of it is left.
    pub(crate) async fn end(&self, body: Body) -> Result<(), SandboxError> {
        match (self, body) {
            (Self::Runtime(runtime), Body::Process(waiter)) => runtime.end(waiter).await,
            (Self::Api(api), Body::Named(id)) => api.remove(&id).await,
            _ => Err(unavailable("a container of another engine".into())),
        }
    }
}

pub(crate) fn unavailable(reason: String) -> SandboxError {
    SandboxError::Unavailable {
        level: "container".into(),
        reason,
    }
}
