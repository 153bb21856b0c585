//! The process level: hostile code in namespaces of its own, built by a spawner.

mod archive;
mod archiver;
mod calls;
mod cgroup;
mod children;
mod client;
mod cpu;
mod ends;
mod files;
mod init;
mod landlock;
mod launch;
mod live;
mod messages;
mod mounts;
mod output;
mod plan;
mod protections;
mod provider;
mod root;
mod sandbox;
mod seccomp;
mod spawner;
mod supervisor;
mod users;
mod zygote;

pub use provider::{ProcessConfig, ProcessProvider};
pub use root::ETC_FILES;
pub(crate) use spawner::main_if_requested;

/// The filter of system calls as the kernel takes it, for a program that an agent confines
/// elsewhere; with `tcp`, TCP sockets can be made.
///
/// # Errors
/// If there is no filter for this architecture.
pub fn seccomp_filter(tcp: bool) -> Result<Vec<u8>, String> {
    seccomp::filter(tcp).map(|f| f.bytes)
}

/// Moves this thread into a network namespace and turns its loopback interface on.
///
/// # Errors
/// What the kernel refuses.
pub fn enter_network(namespace: &std::fs::File) -> std::io::Result<()> {
    nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)?;
    init::loopback_up()
}
