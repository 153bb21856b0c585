//! Real machines under QEMU, restored from templates; Firecracker's API.

mod firecracker;
mod machines;
