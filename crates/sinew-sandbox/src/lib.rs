//! Isolated places in which hostile code runs.
//!
//! [`SandboxProvider`] makes [`Sandbox`]es of one level. [`ProcessProvider`] isolates with namespaces, a
//! private read-only root, seccomp, landlock, dropped capabilities and cgroups; [`NullProvider`] isolates
//! nothing and serves tests. Invariants: a sandbox is handed out clean and destroyed after use; every
//! execution ends in exactly one [`Ending`] before its deadline plus the time of a kill; the result lists the
//! protections that were really in force; nothing outlives the process that asked for it.

#![warn(missing_docs)]

pub mod archive;
mod characters;
pub mod folder;
pub mod guest;
mod null;
mod owner;
mod places;
mod pool;
mod port;
mod process;
mod program;
mod timed;

pub use characters::Characters;
pub use guest::{Entry, EntryKind};
pub use null::NullProvider;
pub use owner::{next_of_owner, owned};
pub use places::Places;
pub use pool::{Pool, PoolConfig, PoolStats};
pub use port::{
    Ending, ExecOptions, ExecRequest, ExecResult, Limits, Network, OutputChunk, OutputStream,
    Program, Protection, Sandbox, SandboxError, SandboxFuture, SandboxProvider, SandboxSpec,
    SandboxStats, Snapshot, Terminal, TerminalInput, TerminalSize, UploadOptions, Usage,
    WritableRoot,
};
pub use process::{ProcessConfig, ProcessProvider, enter_network, seccomp_filter};
pub use program::{JAIL, jail_program};
pub use sinew_jail::spawner::ETC_FILES;
pub use timed::{SandboxWait, TimedProvider};

/// Python functions that programs of Sinew in sandboxes begin with: they hide a process from the code that it
/// judges, find whether a module runs code, and end the processes that code leaves behind.
pub const PYTHON_GUARD: &str = include_str!("python/guard.py");
