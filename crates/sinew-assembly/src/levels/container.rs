//! The container level, built with the feature `container`.
//!
//! The root of a container is made of the system folders of the host if there is no `sandbox.image`.

use crate::levels::egress::{self, EgressProxy};
use crate::levels::error::LevelError;
use crate::levels::volumes::volumes;
use sinew_container::{Choice, ContainerConfig, ContainerProvider, EngineKind, Image};
use sinew_recipe::{ContainerEngine, SandboxPlan};
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, SandboxProvider};
use std::path::PathBuf;
use std::sync::Arc;

/// Maximum number of containers that are kept ready: each takes about 15 MB.
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

fn named(e: &dyn std::fmt::Display) -> LevelError {
    LevelError::system(format!("sandbox.level = \"container\": {e}"))
}

/// The socket that `DOCKER_HOST` or `CONTAINER_HOST` names. An address of another host is not an answer: the
/// folders that containers see are those of this one.
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
) -> Result<ContainerProvider, LevelError> {
    let search = std::env::var("PATH").unwrap_or_default();
    let engine = section.container_engine;
    let socket = section.container_socket.as_ref().map(PathBuf::from);
    let image = match crate::levels::image::image(section)? {
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
        max_live: section.max_sandboxes,
        ..ContainerConfig::default()
    };
    ContainerProvider::start(config).map_err(|e| named(&e))
}

/// Containers without a pool, which see these folders of the host.
pub(crate) fn unpooled(
    section: &SandboxPlan,
    shows: Vec<(PathBuf, PathBuf)>,
) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    Ok(Arc::new(provider(section, shows)?))
}

/// Containers for a recipe: a few are ready before they are requested, at most half of
/// `sandbox.max_sandboxes`.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Result<Arc<dyn SandboxProvider>, LevelError> {
    let proxy = egress::start(section)?;
    let mut shows = volumes(&section.volumes)?;
    shows.extend(proxy.as_ref().map(EgressProxy::shows));
    let pool = PoolConfig {
        floor: 0,
        ceiling: READY.min(section.max_sandboxes / 2),
        ..PoolConfig::default()
    };
    let provider = provider(section, shows)?;
    let pool = Pool::new(Arc::new(provider), pool).map_err(|e| named(&e))?;
    Ok(egress::wrap(Arc::new(pool), proxy))
}
