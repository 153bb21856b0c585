//! Confinement of hostile code: dropped privileges, control groups, namespaces, archives; and the small
//! static program that uses them.
//!
//! The program is the spawner of the process level ([`spawner`]), the agent ([`agent`]) that is the first
//! process of a container or a virtual machine, or the jail around a monitor ([`monitor`]). Its name or its
//! first argument selects one. `sinew-sandbox` carries it and starts it from a sealed file in memory.
//! Invariants: it has no async runtime; it forks with one thread; the privileges that a process gives up
//! before hostile code runs in it are listed in one place ([`walls`]); a result uses the kernel's counts,
//! never the output of a program.
//!
//! Other crates use it as a library: `sinew-sandbox` (protocol, archives, frames, walls), `sinew-container`
//! (the plan of a writable layer, control groups) and `sinew-microvm` (the plan of a jail, control groups).
//! The parts that they share with the program are compiled once for each.

pub mod agent;
pub mod archive;
mod calls;
pub mod cgroup;
mod error;
mod exec;
mod landlock;
pub mod layer;
pub mod monitor;
mod mounts;
mod process;
pub mod protocol;
mod python;
pub mod seccomp;
pub mod spawner;
pub mod spec;
pub mod walls;
pub mod wire;

pub use error::{Error, Result};
