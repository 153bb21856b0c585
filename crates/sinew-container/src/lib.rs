//! The container level: Docker and Podman through their API, crun and runc without a daemon.
//!
//! [`ContainerProvider`] makes [`Sandbox`](sinew_sandbox::Sandbox)es of which each is one
//! container with an agent as its first process; programs start through the agent, within the
//! walls of the process level. Invariants: an image is a folder, an archive or one that the engine
//! has: nothing is ever pulled; a container lives no longer than the connection to its agent, so
//! none outlives the process that made it; what a dead process left behind is removed by the next
//! one; a container that broke the rules of its connection is not used again.

mod api;
mod engine;
mod net;
mod provider;
mod reaper;
mod root;
mod runtime;
mod sandbox;
mod state;

pub use engine::{Choice, EngineKind};
pub use provider::{ContainerConfig, ContainerProvider, Image};
