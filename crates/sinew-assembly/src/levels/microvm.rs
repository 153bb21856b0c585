//! The microvm level, built with the feature `microvm`.

use crate::levels::error::LevelError;
use sinew_microvm::{MicrovmConfig, MicrovmProvider};
use sinew_recipe::SandboxPlan;
use sinew_sandbox::{Pool, PoolConfig, SandboxProvider};
use std::sync::Arc;

/// Maximum number of machines that are kept ready: each takes about 100 MB.
const READY: usize = 4;

fn named(e: &dyn std::fmt::Display) -> LevelError {
    LevelError::system(format!("sandbox.level = \"microvm\": {e}"))
}

fn provider(section: &SandboxPlan) -> Result<MicrovmProvider, LevelError> {
    let mut config = MicrovmConfig::new(section.microvm_images.clone().into());
    config.temporary = std::env::temp_dir();
    config.max_live = section.max_sandboxes;
    MicrovmProvider::start(config).map_err(|e| named(&e))
}

/// Machines for a recipe: a few are ready before they are requested. One is started at a time.
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
