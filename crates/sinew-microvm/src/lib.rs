//! The microvm level: a sandbox is a virtual machine with a kernel of its own.
//!
//! Under QEMU a machine is not booted but restored from a template that was made once: clones
//! map its memory privately and share what they do not change; a snapshot is what a clone
//! changed, a fork is a restore, so both carry memory. Invariants: a guest reaches its monitor's
//! devices and nothing else (no network, no disk, no file of the host); the monitor runs behind
//! walls of its own and ends with the server; templates are sealed; no two clones share
//! randomness, clock or name; whatever a guest does, its monitor ends within a bound.

mod cpio;
#[cfg(feature = "firecracker")]
pub mod firecracker;
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
#[cfg(feature = "firecracker")]
mod vmlinux;

pub use image::{Image, ImageError};
pub use provider::{Backend, MicrovmConfig, MicrovmProvider};
pub use qemu::Accel;
