//! Machines: sandboxes with a writable root, such as containers, in which shells and agent programs run.
//!
//! [`Machines`] makes images and starts sandboxes of them; an environment uses one for an episode. The port
//! names no engine: the level `container` implements it above this crate.

use sinew_sandbox::{Sandbox, SandboxFuture};
use std::path::PathBuf;
use std::time::Duration;

/// Source of an image.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ImageSource {
    /// A folder with a file of instructions, which is built.
    Build {
        /// Folder that the instructions copy from.
        context: PathBuf,
        /// File with the instructions, relative to the folder.
        dockerfile: String,
    },
    /// Name of an image, as in `docker.io/library/debian:12`.
    Named(String),
}

/// An image that machines start from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineImage {
    /// Folder with the image's files.
    pub root: PathBuf,
    /// Working folder that the image names; empty: `/`.
    pub workdir: String,
    /// Environment variables of the image.
    pub env: Vec<(String, String)>,
    /// User that the image names; empty: root.
    pub user: String,
}

/// Network of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MachineNetwork {
    /// A loopback interface, from which nothing leads out.
    #[default]
    Loopback,
    /// The rules of the recipe; without rules the same as [`MachineNetwork::Loopback`].
    Recipe,
    /// These hosts, through the egress proxy: names, `*.NAME`, or addresses.
    Hosts(Vec<String>),
}

/// Requested properties of a machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MachineSpec {
    /// Image, made by [`Machines::image`].
    pub image: MachineImage,
    /// Environment variables after those of the image.
    pub env: Vec<(String, String)>,
    /// Working folder in place of that of the image.
    pub workdir: Option<String>,
    /// Processors; `None`: the bound of the recipe.
    pub cpus: Option<f64>,
    /// Memory; `None`: that of the recipe.
    pub memory_bytes: Option<u64>,
    /// Bytes that files may take in addition to the image; `None`: the usual bound.
    pub storage_bytes: Option<u64>,
    /// CPU time of one command, in seconds.
    pub cpu_s: f64,
    /// Output of one command that is kept; a command that writes more is killed.
    pub output_bytes: u64,
    /// Network that it has.
    pub network: MachineNetwork,
}

/// Makes machines.
pub trait Machines: Send + Sync {
    /// Builds or finds an image within the time, or takes it from the cache: equal sources are made once,
    /// also if a caller stops waiting.
    fn image<'a>(
        &'a self,
        source: &'a ImageSource,
        within: Duration,
    ) -> SandboxFuture<'a, MachineImage>;

    /// Starts a machine. Waits while the limit of live ones is reached.
    fn start<'a>(&'a self, spec: &'a MachineSpec) -> SandboxFuture<'a, Box<dyn Sandbox>>;
}
