//! The process level: namespaces, seccomp and limits, with a pool of ready sandboxes.

use super::image;
use crate::egress::{WayOut, WithEgress};
use crate::failure::Failure;
use sinew_recipe::SandboxPlan;
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, ProcessProvider, SandboxProvider};
use std::path::PathBuf;
use std::sync::Arc;

fn named(e: &dyn std::fmt::Display) -> Failure {
    Failure::system(format!("sandbox.level = \"process\": {e}"))
}

/// Processes in a pool, behind the egress proxy if the recipe has one.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let search = std::env::var("PATH").unwrap_or_default();
    let mut config = ProcessConfig::new(&search);
    config.max_live = section.max_live;
    let audit = section.egress_audit.as_ref().map(PathBuf::from);
    let way_out = section.egress.clone().map(|e| WayOut::start(e, audit));
    let way_out = way_out.transpose()?;
    config.shows.extend(way_out.as_ref().map(WayOut::shows));
    let image = image::image(section)?;
    config.image = image.as_ref().map(|i| i.root.clone());
    let pool = PoolConfig::for_live(config.max_live);
    let provider = ProcessProvider::start(config).map_err(|e| named(&e))?;
    let provider = Pool::new(Arc::new(provider), pool).map_err(|e| named(&e))?;
    let provider: Arc<dyn SandboxProvider> = Arc::new(provider);
    Ok(match way_out {
        Some(way_out) => WithEgress::wrap(provider, way_out),
        None => provider,
    })
}
