//! The wasm level, built with the feature `wasm`.

use crate::levels::error::LevelError;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::{ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_wasm::{WasmConfig, WasmProvider};
use std::sync::Arc;

/// Interpreters in jailed workers, one worker for each core. A worker is this program, started in a sandbox
/// of the level `process`: code that escapes from WebAssembly is still inside that.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let named =
        |e: &dyn std::fmt::Display| LevelError::system(format!("sandbox.level = \"wasm\": {e}"));
    let program = std::env::current_exe().map_err(LevelError::system)?;
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(&search);
    config.max_live = section.max_sandboxes;
    let mut wasm = WasmConfig::new(section.wasm_modules.clone().into(), program);
    wasm.workers = std::thread::available_parallelism().map_or(1, usize::from);
    wasm.max_live = section.max_sandboxes;
    config.shows = wasm.shows().map_err(|e| named(&e))?;
    let below = ProcessProvider::start(config).map_err(|e| named(&e))?;
    let provider = WasmProvider::new(Arc::new(below), wasm).map_err(|e| named(&e))?;
    Ok(Arc::new(provider))
}
