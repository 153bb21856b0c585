//! The sandbox level `wasm`: Python and JavaScript interpreters compiled to WebAssembly.
//!
//! A [`WasmProvider`] runs workers. Each is a process in a sandbox of another provider (the process level),
//! so that an escape from WebAssembly ends in that sandbox. A worker loads interpreters that were compiled in
//! advance (`scripts/wasm_modules.py`) and has no compiler. Programs access files in memory (`fs`) through
//! WASI preview 1 (`wasi`), and nothing of the host.
//!
//! | part | files |
//! |---|---|
//! | host: the port, and workers that are started, given jobs and killed | `provider`, `workers`, `config`, `archive` |
//! | protocol between them | `wire` |
//! | worker: jobs | `worker` |
//! | modules and instances, their clock and their result | `engine`, `ticks`, `outcome`, `manifest` |
//! | a started Python and its forks | `live`, `boot.py` |
//! | interface of programs | `calls` (functions), `wasi` (state), `fs` (files), `memory` (addresses) |
//!
//! WASI is this crate's own because `wasmtime-wasi` 48 serves only folders of the host, without a limit on
//! the bytes and entries that one program of a worker may fill, and cannot copy open descriptors into a
//! fork. It would also add 28 packages, and end a program that sleeps only if all calls are asynchronous.
//!
//! Invariants:
//! - An instance serves one execution and is dropped.
//! - The state of a sandbox is its file tree, which the host holds and sends to the worker for one execution.
//! - Every execution ends by its deadline, also inside of host calls.
//! - Memory, tables, files, descriptors and output are limited.
//! - Only modules whose hash is in the manifest are loaded.

mod archive;
mod calls;
mod config;
mod engine;
mod error;
mod fs;
mod live;
mod manifest;
mod memory;
mod outcome;
mod provider;
mod ticks;
mod wasi;
mod wire;
mod worker;
mod workers;

pub use config::{FOLDER_INSIDE, WasmConfig};
pub use manifest::{Manifest, ManifestError, Module};
pub use provider::WasmProvider;
pub use worker::worker_main_if_requested;
