//! Settings of a provider.

use crate::engine::Choice;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Root file system of containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Image {
    /// The system folders of the host, read-only.
    #[default]
    Host,
    /// An unpacked root.
    Folder(PathBuf),
    /// A root as a tar file, optionally compressed by gzip or zstd.
    Archive(PathBuf),
    /// An image that the engine has. It is never pulled.
    Named(String),
}

impl Image {
    /// Reads `host` (or nothing), a folder, an archive, else the name of an image of the engine.
    pub fn parse(text: &str) -> Self {
        let path = Path::new(text);
        match text {
            "" | "host" => Self::Host,
            _ if path.is_dir() => Self::Folder(path.into()),
            _ if path.is_file() => Self::Archive(path.into()),
            name => Self::Named(name.into()),
        }
    }
}

/// Settings of a provider.
#[derive(Clone, Debug)]
pub struct ContainerConfig {
    /// Engine that starts containers.
    pub engine: Choice,
    /// Socket of a daemon's API. `None`: the engine's usual path.
    pub socket: Option<PathBuf>,
    /// Root file system of all containers.
    pub image: Image,
    /// Python of the host for [`Image::Host`]. Other images have their own.
    pub python: PathBuf,
    /// Files and folders of the host to show inside, read-only: path on the host, and path inside.
    pub shows: Vec<(PathBuf, PathBuf)>,
    /// Keep an interpreter waiting in each container for its next Python program.
    pub warm_python: bool,
    /// Maximum processors of one container. `None`: no limit.
    pub cpus: Option<f64>,
    /// Maximum live sandboxes. Further requests wait.
    pub max_live: usize,
    /// Maximum wait in [`SandboxProvider::acquire`](sinew_sandbox::SandboxProvider::acquire).
    pub acquire_timeout: Duration,
    /// Folder of runs on the host. Providers that share it remove each other's leftovers when their processes
    /// are gone.
    pub state: PathBuf,
}

impl Default for ContainerConfig {
    fn default() -> Self {
        Self {
            engine: Choice::Auto,
            socket: None,
            image: Image::Host,
            python: "/usr/bin/python3".into(),
            shows: Vec::new(),
            warm_python: true,
            cpus: None,
            max_live: 64,
            acquire_timeout: Duration::from_secs(60),
            state: "/run/sinew".into(),
        }
    }
}
