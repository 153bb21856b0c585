//! Choice of an engine: a runtime without a daemon, or a daemon with an API.

use crate::api::Api;
use crate::runtime::Runtime;
use crate::spec::{Body, Common, EngineKind, RootWay, StartSpec, unavailable};
use sinew_sandbox::SandboxError;
use std::path::Path;
use std::str::FromStr;

/// Choice of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first that works, in this order: crun, runc, Docker, Podman. If a socket is given, Docker's API at
    /// that socket.
    #[default]
    Auto,
    /// This one, or an error.
    Only(EngineKind),
}

impl Choice {
    /// Names that can be parsed.
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

/// All ways to writable roots.
static WAYS: [RootWay; 4] = [
    RootWay::new(true, true),
    RootWay::new(true, false),
    RootWay::new(false, true),
    RootWay::new(false, false),
];

/// An engine that works on this host.
#[derive(Debug)]
pub(crate) enum Engine {
    /// crun or runc.
    Runtime(Runtime),
    /// Docker or Podman.
    Api(Api),
}

impl Engine {
    /// Finds the engine of a choice.
    ///
    /// # Errors
    /// [`SandboxError::Unavailable`] with the reason of every engine that was tried.
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
            // A named socket means the engine that listens there.
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

    /// Name of the engine.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Runtime(runtime) => runtime.name(),
            Self::Api(api) => api.kind().name(),
        }
    }

    /// Ways to writable roots, the best first.
    pub(crate) fn root_ways(&self) -> &'static [RootWay] {
        match self {
            // The layer is made by Sinew.
            Self::Runtime(_) => &WAYS[..1],
            Self::Api(api) if api.kind() == EngineKind::Podman => &WAYS,
            // A mapping of users is a setting of the daemon.
            Self::Api(_) => &WAYS[2..],
        }
    }

    /// Starts a container. The agent connects later.
    pub(crate) async fn start(
        &self,
        common: &Common,
        start: &StartSpec<'_>,
    ) -> Result<Body, SandboxError> {
        match self {
            Self::Runtime(runtime) => runtime.start(common, start),
            Self::Api(api) => api.start(common, start).await.map(Body::Named),
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
