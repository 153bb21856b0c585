//! Unmeasured helpers of a bench: the program `sinew`, sandboxes.

use crate::BenchError;
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use std::path::PathBuf;
use std::sync::Arc;

/// The program `sinew`, which is installed in the same folder, or is on the search path.
pub(crate) fn sinew() -> Result<PathBuf, BenchError> {
    let program = std::env::current_exe().map_err(BenchError::system)?;
    let own = program.with_file_name("sinew");
    if own.is_file() {
        return Ok(own);
    }
    let search = std::env::var_os("PATH").unwrap_or_default();
    let mut found = std::env::split_paths(&search).map(|dir| dir.join("sinew"));
    found
        .find(|p| p.is_file())
        .ok_or_else(|| BenchError::input("there is no `sinew` beside this program or on PATH"))
}

/// Sandboxes of the process level, without a pool; an interpreter waits in each. More than `at_once` wait.
///
/// # Errors
/// If this host cannot isolate processes.
pub(crate) fn sandboxes(at_once: usize) -> Result<Arc<dyn SandboxProvider>, BenchError> {
    let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap_or_default());
    (config.warm_python, config.max_live) = (true, at_once);
    let provider = ProcessProvider::start(config).map_err(BenchError::system)?;
    Ok(Arc::new(provider))
}
