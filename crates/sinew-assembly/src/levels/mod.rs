//! Sandboxes of a recipe: every level, its image, its way to the network.
//!
//! A [`SandboxPlan`] becomes a started [`SandboxProvider`] behind one function, [`sandboxes`]. The levels
//! beyond `process`, and the egress proxy, are each built with the feature of their name. A program without
//! the feature refuses the recipe with that name: the recipe is right, but needs another build.
//!
//! Invariants:
//! - A host that cannot enforce a level is found at the start, and not by the first episode.
//! - A level never falls back to a weaker one.

#[cfg(feature = "container")]
mod container;
pub mod egress;
mod error;
mod image;
#[cfg(feature = "container")]
mod machines;
#[cfg(feature = "microvm")]
mod microvm;
mod process;
mod remote;
mod volumes;
#[cfg(feature = "wasm")]
mod wasm;

use sinew_env::Machines;
use sinew_image::ImageConfig;
use sinew_recipe::{Level, SandboxPlan};
use sinew_sandbox::{Limits, SandboxProvider, SandboxSpec, WritableRoot};
use std::path::PathBuf;
use std::sync::Arc;

pub use error::{LevelError, missing_feature};
pub use image::{image, task_images};
pub use volumes::{parse as parse_volumes, volumes};

/// A started level.
type Provider = Result<Arc<dyn SandboxProvider>, LevelError>;

/// Starts the sandboxes of a recipe, with a few ready, or connects to the server that has them. A host that
/// cannot enforce the level is found now, and not by the first episode.
///
/// # Errors
/// If the level cannot be started here, or this program was built without it.
pub fn sandboxes(section: &SandboxPlan) -> Provider {
    if let (Some(image), Level::Wasm | Level::Microvm) = (&section.image, section.level) {
        return Err(LevelError::input(format!(
            "sandbox.image = {image:?}: level {} has roots of its own; allowed at level process and container",
            section.level
        )));
    }
    if section.is_elsewhere() {
        return remote::sandboxes(section);
    }
    match section.level {
        Level::Process => process::sandboxes(section),
        #[cfg(feature = "container")]
        Level::Container => container::sandboxes(section),
        #[cfg(feature = "microvm")]
        Level::Microvm => microvm::sandboxes(section),
        #[cfg(feature = "wasm")]
        Level::Wasm => wasm::sandboxes(section),
        #[cfg(not(all(feature = "container", feature = "microvm", feature = "wasm")))]
        level => Err(missing(level)),
    }
}

/// Limits of a sandbox and the environment variables of its image. It has no network; the egress proxy
/// adds a loopback interface.
///
/// # Errors
/// If the image cannot be unpacked.
pub fn sandbox_spec(section: &SandboxPlan) -> Result<SandboxSpec, LevelError> {
    // A server gives its images their variables itself.
    let image = if section.is_elsewhere() {
        None
    } else {
        image(section)?
    };
    let env = image.map(|i| i.config.env).unwrap_or_default();
    Ok(SandboxSpec {
        env,
        limits: Limits {
            cpu_s: section.cpu_s,
            memory_bytes: section.memory_mb << 20,
            work_bytes: section.work_mb << 20,
            processes: section.processes,
            open_files: section.open_files,
            ..Limits::default()
        },
        strict: section.strict,
        ..SandboxSpec::default()
    })
}

/// A writable root of `bytes` above an image, with the user and the working folder that the image names.
pub fn writable_root(config: &ImageConfig, bytes: u64) -> WritableRoot {
    let or = |given: &str, own: String| {
        if given.is_empty() {
            own
        } else {
            given.to_owned()
        }
    };
    let default = WritableRoot::default();
    // Docker takes a relative folder from the top.
    let folder = config.working_dir.trim_start_matches('/');
    WritableRoot {
        bytes,
        user: or(&config.user, default.user),
        workdir: format!("/{folder}"),
    }
}

/// Containers without a pool, which see these folders of the host, read-only: for agent programs.
///
/// # Errors
/// If the level cannot be started here, or this program was built without it.
pub fn containers(section: &SandboxPlan, shows: Vec<(PathBuf, PathBuf)>) -> Provider {
    #[cfg(feature = "container")]
    return container::unpooled(section, shows);
    #[cfg(not(feature = "container"))]
    {
        drop(shows);
        Err(missing(section.level))
    }
}

/// Machines at the level `container`, which see these folders of the host, read-only.
///
/// # Errors
/// If a volume of the recipe cannot be shown, or this program was built without the level.
pub fn machines(
    section: &SandboxPlan,
    shows: Vec<(PathBuf, PathBuf)>,
) -> Result<Arc<dyn Machines>, LevelError> {
    #[cfg(feature = "container")]
    return machines::machines(section, shows);
    #[cfg(not(feature = "container"))]
    {
        drop(shows);
        Err(missing(section.level))
    }
}

#[cfg(not(all(feature = "container", feature = "microvm", feature = "wasm")))]
fn missing(level: Level) -> LevelError {
    // The feature has the level's name.
    let name = level.name();
    missing_feature(&format!("sandbox.level = {name:?}"), name)
}

/// Runs a child process of a level if this process was started as one, and returns its exit code. Must be
/// called before arguments are parsed.
pub fn child_main_if_requested() -> Option<i32> {
    #[cfg(feature = "wasm")]
    return sinew_wasm::worker_main_if_requested();
    #[cfg(not(feature = "wasm"))]
    None
}
