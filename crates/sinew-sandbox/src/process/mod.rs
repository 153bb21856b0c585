//! The process level: hostile code in namespaces of its own, built by a spawner.

mod archive;
mod cgroup;
mod client;
mod files;
mod landlock;
mod live;
mod messages;
mod plan;
mod provider;
mod room;
mod root;
mod sandbox;
mod seccomp;
mod spawner;
mod zygote;

pub use provider::{ProcessConfig, ProcessProvider};
pub(crate) use spawner::main_if_requested;
