//! The container level, built with the feature `container`.

use crate::egress::{WayOut, WithEgress};
use crate::failure::Failure;
use sinew_container::{Choice, ContainerConfig, ContainerProvider, EngineKind, Image};
use sinew_recipe::{ContainerEngine, SandboxPlan};
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, SandboxProvider};
use std::path::PathBuf;
use std::sync::Arc;

/// Containers that are kept ready, at most: each takes about 15 MB.
const READY: usize = 8;

fn choice(engine: ContainerEngine) -> Choice {
    match engine {
        ContainerEngine::Auto => Choice::Auto,
        ContainerEngine::Crun => Choice::Only(EngineKind::Crun),
        ContainerEngine::Runc => Choice::Only(EngineKind::Runc),
        ContainerEngine::Docker => Choice::Only(EngineKind::Docker),
        ContainerEngine::Podman => Choice::Only(EngineKind::Podman),
    }
}

fn named(e: &dyn std::fmt::Display) -> Failure {
    Failure::system(format!("sandbox.level = \"container\": {e}"))
}

/// Where the variable of an engine says that it listens, if that is a socket of this host.
fn engine_host(engine: ContainerEngine) -> Option<PathBuf> {
    let variable = match engine {
        ContainerEngine::Docker => "DOCKER_HOST",
        ContainerEngine::Podman => "CONTAINER_HOST",
        _ => return None,
    };
    let host = std::env::var(variable).ok()?;
    host.strip_prefix("unix://").map(PathBuf::from)
}

fn provider(
    section: &SandboxPlan,
    shows: Vec<(PathBuf, PathBuf)>,
) -> Result<ContainerProvider, Failure> {
    let search = std::env::var("PATH").unwrap_or_default();
    let engine = section.container_engine;
    let socket = section.container_socket.as_ref().map(PathBuf::from);
    let image = match super::image(section)? {
        Some(unpacked) => Image::Folder(unpacked.root),
        None => Image::parse(section.image.as_deref().unwrap_or("host")),
    };
    let config = ContainerConfig {
        engine: choice(engine),
        socket: socket.or_else(|| engine_host(engine)),
        image,
        python: ProcessConfig::new(&search).python,
        shows,
        cpus: section.cpus,
        max_live: section.max_live,
        ..ContainerConfig::default()
    };
    ContainerProvider::start(config).map_err(|e| named(&e))
}

/// Containers without a pool, which see these folders of the host.
pub(crate) fn unpooled(
    section: &SandboxPlan,
    shows: Vec<(PathBuf, PathBuf)>,
) -> Result<Arc<dyn SandboxProvider>, Failure> {
    Ok(Arc::new(provider(section, shows)?))
}

/// Containers for a recipe: a few are ready before they are asked for.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, Failure> {
    let audit = section.egress_audit.as_ref().map(PathBuf::from);
    let way_out = section.egress.clone().map(|e| WayOut::start(e, audit));
    let way_out = way_out.transpose()?;
    let shows = way_out.as_ref().map(WayOut::shows).into_iter().collect();
    let pool = PoolConfig {
        floor: 0,
        ceiling: READY.min(section.max_live / 2),
        ..PoolConfig::default()
    };
    let provider = provider(section, shows)?;
    let pool = Pool::new(Arc::new(provider), pool).map_err(|e| named(&e))?;
    Ok(match way_out {
        Some(way_out) => WithEgress::wrap(Arc::new(pool), way_out),
        None => Arc::new(pool),
    })
}
