//! The microvm level: a sandbox is a virtual machine with its own kernel.
//!
//! Machines are restored from a template, which is booted once. Clones map its memory privately and share the
//! pages that they do not change. A snapshot holds the changes of a clone, and a fork is a restore, so that
//! both carry memory.
//!
//! | part | files |
//! |---|---|
//! | the port | `provider`, `sandbox` |
//! | start of QEMU behind walls, machines, their memory | `monitor`, `launcher`, `ram`, `template` |
//! | QEMU: command line, control channel | `qemu`, `qmp` |
//! | probes of this host, kernel and root file system | `probe`, `image`, `cpio` |
//!
//! Invariants:
//! - A guest reaches the devices of its monitor and nothing else: no network, no disk, no file of the host.
//! - The monitor runs behind its own walls and ends with this process.
//! - Templates are sealed.
//! - No two clones share random numbers, clock or name.
//! - The monitor ends within a limit, whatever its guest does.

mod cpio;
mod image;
mod launcher;
mod monitor;
mod probe;
mod provider;
mod qemu;
mod qmp;
mod ram;
mod sandbox;
mod template;

pub use image::{Image, ImageError};
pub use provider::{MicrovmConfig, MicrovmProvider};
pub use qemu::Accel;
