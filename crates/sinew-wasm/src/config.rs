//! Settings of a provider, and the places of files in the sandboxes of its workers.

use crate::manifest::{Manifest, ManifestError};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Folder of the modules inside of workers.
pub const FOLDER_INSIDE: &str = "/opt/sinew-wasm";
/// Folder of the worker program inside of workers.
pub(crate) const PROGRAM_INSIDE: &str = "/opt/sinew-bin";
/// Memory of a worker for its modules, and for Python interpreters that are ready.
const WORKER_OWN_BYTES: u64 = 240 << 20;

/// Settings of a provider.
#[derive(Clone, Debug)]
pub struct WasmConfig {
    /// Folder with the output of `scripts/wasm_modules.py`.
    pub modules: PathBuf,
    /// Program of the workers: `sinew` itself, or `sinew-wasm-worker`.
    pub program: PathBuf,
    /// Number of workers. Each runs one program at a time.
    pub workers: usize,
    /// Number of started Python interpreters that each worker keeps ready.
    pub warm: usize,
    /// Memory of a worker in bytes.
    pub worker_memory_bytes: u64,
    /// Maximum live sandboxes. Further requests wait.
    pub max_live: usize,
    /// Maximum wait in `SandboxProvider::acquire`.
    pub acquire_timeout: Duration,
}

impl WasmConfig {
    /// Default settings: one worker with two Python interpreters ready.
    pub fn new(modules: PathBuf, program: PathBuf) -> Self {
        Self {
            modules,
            program,
            workers: 1,
            warm: 2,
            worker_memory_bytes: 2 << 30,
            max_live: 4096,
            acquire_timeout: Duration::from_secs(60),
        }
    }

    /// Memory and files of one program, at most. The kernel would kill the worker of a larger one.
    pub(crate) fn program_bytes(&self) -> u64 {
        self.worker_memory_bytes.saturating_sub(WORKER_OWN_BYTES)
    }

    /// Folders that must be mounted in the sandboxes of workers: path on the host, and path inside.
    ///
    /// # Errors
    /// [`ManifestError`] if there are no compiled modules.
    pub fn shows(&self) -> Result<Vec<(PathBuf, PathBuf)>, ManifestError> {
        let (_, folder) = Manifest::load(&self.modules)?;
        let program = self.program.parent().unwrap_or(Path::new("/"));
        Ok(vec![
            (folder, FOLDER_INSIDE.into()),
            (program.into(), PROGRAM_INSIDE.into()),
        ])
    }
}
