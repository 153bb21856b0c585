//! The levels of isolation beyond `process`: each is built with the feature of its name, and refused
//! with that name where it is not.

#[cfg(feature = "container")]
pub(crate) mod container;
#[cfg(feature = "microvm")]
pub(crate) mod microvm;
#[cfg(feature = "wasm")]
pub(crate) mod wasm;

use crate::failure::Failure;
use crate::recipe::SandboxSection;
use sinew_sandbox::SandboxProvider;
use std::path::PathBuf;
use std::sync::Arc;

/// Names of the container level: its own, and those of its engines.
pub(crate) const CONTAINER: [&str; 5] = ["container", "crun", "runc", "docker", "podman"];
/// What `sandbox.container_engine` may say.
pub(crate) const CONTAINER_ENGINES: [&str; 5] = ["auto", "crun", "runc", "docker", "podman"];
/// Names of the microvm level: its own, and those of what runs its machines.
pub(crate) const MICROVM: [&str; 3] = ["microvm", "qemu", "firecracker"];

type Provider = Result<Arc<dyn SandboxProvider>, Failure>;

/// Sandboxes of the section's level, with a few ready; `None` at level process.
pub(crate) fn sandboxes(section: &SandboxSection) -> Option<Provider> {
    let level = section.level.as_str();
    if CONTAINER.contains(&level) {
        #[cfg(feature = "container")]
        return Some(container::sandboxes(section));
        #[cfg(not(feature = "container"))]
        return Some(Err(missing(level, "container")));
    }
    if MICROVM.contains(&level) {
        #[cfg(feature = "microvm")]
        return Some(microvm::sandboxes(section));
        #[cfg(not(feature = "microvm"))]
        return Some(Err(missing(level, "microvm")));
    }
    if level == "wasm" {
        #[cfg(feature = "wasm")]
        return Some(wasm::sandboxes(section));
        #[cfg(not(feature = "wasm"))]
        return Some(Err(missing(level, "wasm")));
    }
    None
}

/// Containers without a pool, which see these folders of the host.
pub(crate) fn containers(section: &SandboxSection, shows: Vec<(PathBuf, PathBuf)>) -> Provider {
    #[cfg(feature = "container")]
    return container::unpooled(section, shows);
    #[cfg(not(feature = "container"))]
    {
        drop(shows);
        Err(missing(&section.level, "container"))
    }
}

#[cfg(not(all(feature = "container", feature = "microvm", feature = "wasm")))]
fn missing(level: &str, feature: &str) -> Failure {
    crate::features::missing(&format!("sandbox.level = {level:?}"), feature)
}

/// Runs a child process of a level, where this process was started as one; its exit code.
pub(crate) fn child_main_if_requested() -> Option<i32> {
    #[cfg(feature = "wasm")]
    return sinew_wasm::worker_main_if_requested();
    #[cfg(not(feature = "wasm"))]
    None
}
