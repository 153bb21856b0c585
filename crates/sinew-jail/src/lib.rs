//! What confines hostile code: walls, control groups, namespaces, archives; and the small static
//! program that is made of them.
//!
//! The program is the spawner of the process level ([`spawner`]), the agent ([`agent`]) that is the
//! first process of a container or a virtual machine, or the jail around a monitor ([`monitor`]), as
//! its name or its first argument says. `sinew-sandbox` carries it and starts it from a sealed file in
//! memory. Invariants: it has no async runtime; it forks with one thread; what a process gives up
//! before hostile code runs in it is built in one place ([`walls`]); a result counts what the kernel
//! said, never what a program wrote.
//!
//! Three crates use it as a library: `sinew-sandbox` (protocol and archives), `sinew-guest` (frames and
//! walls) and `sinew-microvm` (the plan of a jail, control groups). What they share with the program is
//! compiled once for each.

pub mod agent;
pub mod archive;
mod calls;
pub mod cgroup;
mod error;
mod exec;
mod landlock;
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
