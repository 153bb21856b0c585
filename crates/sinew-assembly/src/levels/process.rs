//! The process level: namespaces, seccomp and limits, with a pool of ready sandboxes.

use crate::levels::egress::{self, EgressProxy};
use crate::levels::error::LevelError;
use crate::levels::image;
use crate::levels::volumes::volumes;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, ProcessProvider, SandboxProvider};
use std::sync::Arc;

fn named(e: &dyn std::fmt::Display) -> LevelError {
    LevelError::system(format!("sandbox.level = \"process\": {e}"))
}

/// Processes in a pool, behind the egress proxy if the recipe has one. The pool keeps as many ready as
/// suits `sandbox.max_sandboxes`.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(&search);
    config.max_live = section.max_sandboxes;
    let proxy = egress::start(section)?;
    config.shows.extend(proxy.as_ref().map(EgressProxy::shows));
    config.shows.extend(volumes(&section.volumes)?);
    let image = image::image(section)?;
    config.image = image.as_ref().map(|i| i.root.clone());
    let pool = PoolConfig::for_live(config.max_live);
    let provider = ProcessProvider::start(config).map_err(|e| named(&e))?;
    let provider = Pool::new(Arc::new(provider), pool).map_err(|e| named(&e))?;
    Ok(egress::wrap(Arc::new(provider), proxy))
}
