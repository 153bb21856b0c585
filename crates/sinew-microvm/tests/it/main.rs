//! Real machines under QEMU, restored from templates; Firecracker's API.

#[cfg(feature = "firecracker")]
mod firecracker;
mod machines;
