//! Integration tests: files, golden numbers, hub.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod adapters;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx;
mod corrupt;
mod files;
#[cfg(feature = "hub")]
mod hub;
mod infer;
mod lora;
mod masked;
mod memory;
mod scorer;
mod support;
mod train;
