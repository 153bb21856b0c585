//! Integration tests: files, golden numbers, hub.

mod corrupt;
mod files;
#[cfg(feature = "hub")]
mod hub;
mod infer;
mod lora;
mod support;
mod train;
