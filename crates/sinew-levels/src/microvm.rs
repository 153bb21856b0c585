//! The microvm level, built with the feature `microvm`.

use crate::error::LevelError;
use sinew_microvm::{Backend, MicrovmConfig, MicrovmProvider};
use sinew_recipe::{MicrovmBackend, SandboxPlan};
use sinew_sandbox::{Pool, PoolConfig, SandboxProvider};
use std::path::PathBuf;
use std::sync::Arc;

/// Where Firecracker is looked for if FIRECRACKER_BIN does not name it.
const FIRECRACKER: [&str; 2] = ["/usr/local/bin/firecracker", "/usr/bin/firecracker"];
/// Maximum number of machines that are kept ready: each takes about 100 MB.
const READY: usize = 4;

fn backend(backend: MicrovmBackend) -> Backend {
    match backend {
        MicrovmBackend::Auto => Backend::Auto,
        MicrovmBackend::Qemu => Backend::Qemu,
        MicrovmBackend::Firecracker => Backend::Firecracker,
    }
}

fn named(e: &dyn std::fmt::Display) -> LevelError {
    LevelError::system(format!("sandbox.level = \"microvm\": {e}"))
}

fn provider(section: &SandboxPlan) -> Result<MicrovmProvider, LevelError> {
    let mut config = MicrovmConfig::new(section.microvm_images.clone().into());
    config.temporary = std::env::temp_dir();
    config.backend = backend(section.microvm_backend);
    let found = FIRECRACKER.map(PathBuf::from).into_iter();
    let found = found.filter(|p| p.is_file());
    let name = std::env::var_os("FIRECRACKER_BIN").map(PathBuf::from);
    config.firecracker = name.or_else(|| found.into_iter().next());
    config.max_live = section.max_sandboxes;
    MicrovmProvider::start(config).map_err(|e| named(&e))
}

/// Machines for a recipe: a few are ready before they are asked for. One is started at a time.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let pool = PoolConfig {
        floor: 0,
        ceiling: READY.min(section.max_sandboxes / 2),
        starts_at_once: 1,
        ..PoolConfig::default()
    };
    let pool = Pool::new(Arc::new(provider(section)?), pool).map_err(|e| named(&e))?;
    Ok(Arc::new(pool))
}
