//! The container level: Docker and Podman through their API, crun and runc without a daemon.
//!
//! [`ContainerProvider`] makes [`Sandbox`](sinew_sandbox::Sandbox)es. Each is one container whose first
//! process is an agent. Programs start through the agent, within the walls of the process level.
//!
//! | part | files |
//! |---|---|
//! | the port | `provider`, `sandbox`, `snapshot`, `config` |
//! | start, probe and end of containers | `containers`, `observed`, `reaper` |
//! | engines, behind one interface | `engine`, `runtime` (crun, runc), `api` (Docker, Podman), `spec` |
//! | files on the host | `root` (image), `state` (leftovers), `net` (sockets inside) |
//!
//! Invariants:
//! - An image is a folder, an archive or one that the engine has. Nothing is ever pulled.
//! - A container lives no longer than the connection to its agent, so that none outlives the process that
//!   made it.
//! - The next process removes leftovers of a dead one.
//! - A container that broke the rules of its connection is not used again.
//! - No drop waits on a thread of an async runtime.

mod api;
mod config;
mod containers;
mod engine;
mod net;
mod observed;
mod provider;
mod reaper;
mod root;
mod runtime;
mod sandbox;
mod snapshot;
mod spec;
mod state;

pub use config::{ContainerConfig, Image};
pub use engine::Choice;
pub use provider::ContainerProvider;
pub use spec::EngineKind;
