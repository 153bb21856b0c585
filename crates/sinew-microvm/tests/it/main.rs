//! Real machines under QEMU, restored from templates.

mod machines;
