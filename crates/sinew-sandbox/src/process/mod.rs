//! The process level: hostile code in separate namespaces, built by a spawner (`sinew-jail`).
//!
//! | part | what it does |
//! |---|---|
//! | `provider` | makes sandboxes, waits while the limit of live ones is reached |
//! | `sandbox`, `output` | one sandbox: executions, their streams, files |
//! | `terminal` | the terminal of an execution |
//! | `snapshot` | numbers of snapshots, given back when the last clone is dropped |
//! | `client`, `supervisor` | the socket to a spawner, and the next spawner when one dies |

mod client;
mod output;
mod provider;
mod sandbox;
mod snapshot;
mod supervisor;
mod terminal;

pub use provider::{ProcessConfig, ProcessProvider};

/// The filter of system calls as the kernel takes it, for a program that an agent confines
/// elsewhere; with `tcp`, TCP sockets can be made.
///
/// # Errors
/// If there is no filter for this architecture.
pub fn seccomp_filter(tcp: bool) -> Result<Vec<u8>, sinew_jail::Error> {
    sinew_jail::seccomp::filter(tcp).map(|f| f.bytes)
}

/// Moves this thread into a network namespace and turns its loopback interface on.
///
/// # Errors
/// Fails if the kernel refuses it.
pub fn enter_network(namespace: &std::fs::File) -> std::io::Result<()> {
    nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
    sinew_jail::spawner::loopback_up()
}
