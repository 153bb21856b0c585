//! The process level: hostile code in namespaces of its own, built by a spawner.

mod cgroup;
mod jail;
mod landlock;
mod messages;
mod provider;
mod root;
mod seccomp;
mod spawner;

pub use provider::{ProcessConfig, ProcessProvider};
pub(crate) use spawner::main_if_requested;
