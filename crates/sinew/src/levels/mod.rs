//! The levels of isolation beyond `process`: each is built with the feature of its name, and refused
//! with that name where it is not.

#[cfg(feature = "container")]
pub(crate) mod container;
#[cfg(feature = "microvm")]
pub(crate) mod microvm;
#[cfg(feature = "wasm")]
pub(crate) mod wasm;

use crate::failure::Failure;
use sinew_recipe::{Level, SandboxPlan};
use sinew_sandbox::SandboxProvider;
use std::path::PathBuf;
use std::sync::Arc;

type Provider = Result<Arc<dyn SandboxProvider>, Failure>;

/// Sandboxes of the section's level, with a few ready; `None` at level process.
pub(crate) fn sandboxes(section: &SandboxPlan) -> Option<Provider> {
    match section.level {
        Level::Process => None,
        #[cfg(feature = "container")]
        Level::Container => Some(container::sandboxes(section)),
        #[cfg(feature = "microvm")]
        Level::Microvm => Some(microvm::sandboxes(section)),
        #[cfg(feature = "wasm")]
        Level::Wasm => Some(wasm::sandboxes(section)),
        #[cfg(not(all(feature = "container", feature = "microvm", feature = "wasm")))]
        level => Some(Err(missing(level))),
    }
}

/// Containers without a pool, which see these folders of the host.
pub(crate) fn containers(section: &SandboxPlan, shows: Vec<(PathBuf, PathBuf)>) -> Provider {
    #[cfg(feature = "container")]
    return container::unpooled(section, shows);
    #[cfg(not(feature = "container"))]
    {
        drop(shows);
        Err(missing(section.level))
    }
}

#[cfg(not(all(feature = "container", feature = "microvm", feature = "wasm")))]
fn missing(level: Level) -> Failure {
    // The feature has the level's name.
    let name = level.name();
    crate::features::missing(&format!("sandbox.level = {name:?}"), name)
}

/// Runs a child process of a level, where this process was started as one; its exit code.
pub(crate) fn child_main_if_requested() -> Option<i32> {
    #[cfg(feature = "wasm")]
    return sinew_wasm::worker_main_if_requested();
    #[cfg(not(feature = "wasm"))]
    None
}
