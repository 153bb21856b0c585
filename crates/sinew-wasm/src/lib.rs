//! The wasm level of sandboxes: Python and JavaScript interpreters compiled to WebAssembly.
//!
//! A [`WasmProvider`] runs workers, each a process in a sandbox of another provider (the process
//! level), so that an escape from WebAssembly ends in a jail. A worker loads interpreters that
//! were compiled beforehand (`scripts/wasm_modules.py`) and has no compiler. Programs see files
//! in memory (`fs`) through the system interface WASI preview 1 (`wasi`), and nothing of the host.
//!
//! Invariants: an instance serves one execution and is dropped; all state of a sandbox is its
//! tree of files, held by the host and given to the worker for one execution; every execution
//! ends by its deadline, also inside of host calls; memory, tables, files, descriptors and output
//! have bounds; only modules whose hash is in the manifest are loaded.

mod archive;
mod calls;
mod engine;
mod fs;
mod live;
mod manifest;
mod provider;
mod wasi;
mod wire;
mod worker;
mod workers;

pub use manifest::{Manifest, ManifestError, Module};
pub use provider::{FOLDER_INSIDE, WasmConfig, WasmProvider};
pub use worker::worker_main_if_requested;
