//! Machines: worlds with a writable root, such as containers, in which shells and agent programs run.
//!
//! [`Machines`] makes images and starts [`Machine`]s of them; an environment uses one for an episode. The port
//! names no engine: containers implement it above this crate, and a sandbox can stand in for one
//! ([`Layout`] says where its folders are).

use futures::future::BoxFuture;
use sinew_sandbox::{ExecResult, SandboxError};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Future of a machine's method.
pub type MachineFuture<'a, T> = BoxFuture<'a, Result<T, SandboxError>>;

/// Source of an image.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ImageSource {
    /// A folder with a `Dockerfile`, which is built.
    Build {
        /// Folder that the instructions copy from.
        context: PathBuf,
        /// File with the instructions.
        dockerfile: PathBuf,
    },
    /// Name of an image, as in `docker.io/library/debian:12`.
    Named(String),
}

/// An image that machines start from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineImage {
    /// Identity for [`Machines::start`].
    pub id: String,
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
    /// Bytes that files may take in addition to the image; `None`: those of the recipe.
    pub storage_bytes: Option<u64>,
    /// Network that it has.
    pub network: MachineNetwork,
}

/// User that a command runs as.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MachineUser {
    /// The user of the image.
    #[default]
    OfImage,
    /// Root inside of the machine.
    Root,
    /// A name or a number.
    Named(String),
}

/// A command in a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCommand {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment variables of this command, after those of the machine.
    pub env: Vec<(String, String)>,
    /// User that it runs as.
    pub user: MachineUser,
    /// Wall time after which everything that it started is killed.
    pub deadline: Duration,
}

impl MachineCommand {
    /// A script for `/bin/sh` as the user of the image.
    pub fn shell(script: impl Into<String>, deadline: Duration) -> Self {
        Self {
            argv: vec!["/bin/sh".into(), "-c".into(), script.into()],
            env: Vec::new(),
            user: MachineUser::OfImage,
            deadline,
        }
    }
}

/// Folders of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Folder in which commands start.
    pub workdir: String,
    /// Folder of the tests while a verifier runs.
    pub tests: String,
    /// Folder of a solution while it runs.
    pub solution: String,
    /// Folder whose `verifier`, `agent` and `artifacts` are the logs.
    pub logs: String,
}

/// Bounds on files that are copied out of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyBounds {
    /// Bytes of all files.
    pub bytes: u64,
    /// Files and folders.
    pub entries: usize,
}

/// One machine. Dropping it destroys it; [`Machine::destroy`] waits for that.
pub trait Machine: Send {
    /// Folders that it has.
    fn layout(&self) -> &Layout;

    /// Runs a command in the working folder to its end. Its output is bounded by the machine.
    fn run(&mut self, command: MachineCommand) -> MachineFuture<'_, ExecResult>;

    /// Copies a folder of the host to a path inside, which is created or replaced. Modes are kept; links
    /// that lead out of the folder are refused. Files belong to root.
    fn put<'a>(&'a mut self, host: &'a Path, inside: &'a str) -> MachineFuture<'a, ()>;

    /// Copies the content of a folder of the host over that of a folder inside.
    fn put_over<'a>(&'a mut self, host: &'a Path, inside: &'a str) -> MachineFuture<'a, ()>;

    /// Reads a regular file of at most `max_bytes`; `None`: there is none. Links are not followed.
    fn read<'a>(
        &'a mut self,
        inside: &'a str,
        max_bytes: u64,
    ) -> MachineFuture<'a, Option<Vec<u8>>>;

    /// Copies a file or folder to a path of the host that does not exist. Links and special files are left
    /// out. `false`: there is nothing at that path.
    fn take<'a>(
        &'a mut self,
        inside: &'a str,
        host: &'a Path,
        bounds: CopyBounds,
    ) -> MachineFuture<'a, bool>;

    /// Removes files and folders, whatever they are, and creates an empty folder in place of each that is
    /// named in `folders`, which every user may write.
    fn clear<'a>(
        &'a mut self,
        remove: &'a [String],
        folders: &'a [String],
    ) -> MachineFuture<'a, ()>;

    /// Ends all processes that commands left.
    fn end_processes(&mut self) -> MachineFuture<'_, ()>;

    /// Listens on `127.0.0.1:port` inside; connections are accepted outside.
    fn listen_inside(&mut self, port: u16) -> MachineFuture<'_, TcpListener>;

    /// Ends it and frees all that it held.
    fn destroy(self: Box<Self>) -> MachineFuture<'static, ()>;
}

/// Makes machines.
pub trait Machines: Send + Sync {
    /// Builds or finds an image within the time, or takes it from the cache: equal sources are made once.
    fn image<'a>(
        &'a self,
        source: &'a ImageSource,
        within: Duration,
    ) -> MachineFuture<'a, MachineImage>;

    /// Starts a machine. Waits while the limit of live ones is reached.
    fn start<'a>(&'a self, spec: &'a MachineSpec) -> MachineFuture<'a, Box<dyn Machine>>;
}
