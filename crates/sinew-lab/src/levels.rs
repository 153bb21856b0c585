//! Sandboxes of every level, with and without the pool that a recipe with only the level gets.

use crate::LabError;
use sinew_container::{ContainerConfig, ContainerProvider};
use sinew_microvm::{MicrovmConfig, MicrovmProvider};
use sinew_sandbox::{Pool, PoolConfig, ProcessConfig, ProcessProvider, SandboxProvider};
use sinew_wasm::{WasmConfig, WasmProvider};
use std::path::PathBuf;
use std::sync::Arc;

/// Sandboxes that the largest row of the bench keeps alive, and some.
const MAX_LIVE: usize = 6000;
/// Folders of interpreters and images, as the recipes name them by default.
const WASM_MODULES: &str = ".cache/wasm";
/// Folder in which `make` puts kernel and root of machines.
const MICROVM_IMAGES: &str = ".cache/microvm";
/// Sandboxes that are kept ready where one takes much memory.
const READY: usize = 4;

/// A level of isolation, with what carries it out where there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Namespaces of this host's kernel.
    Process,
    /// Interpreters in WebAssembly.
    Wasm,
    /// Containers of this engine.
    Container(&'static str),
    /// Virtual machines under QEMU.
    Microvm,
}

/// Values of `--level`.
const LEVELS: [(&str, Level); 8] = [
    ("process", Level::Process),
    ("wasm", Level::Wasm),
    ("container", Level::Container("auto")),
    ("crun", Level::Container("crun")),
    ("runc", Level::Container("runc")),
    ("docker", Level::Container("docker")),
    ("podman", Level::Container("podman")),
    ("microvm", Level::Microvm),
];

impl Level {
    /// Names that `--level` accepts.
    pub fn names() -> [&'static str; 8] {
        LEVELS.map(|(name, _)| name)
    }

    /// The level of a name.
    ///
    /// # Errors
    /// Names what is not one of [`Level::names`].
    pub fn parse(name: &str) -> Result<Self, LabError> {
        let found = LEVELS.iter().find(|(known, _)| *known == name);
        found.map(|(_, level)| *level).ok_or_else(|| {
            let allowed = Self::names().join(", ");
            LabError::input(format!("--level {name}: allowed: {allowed}"))
        })
    }
}

/// The process level without a pool; `warm_python` keeps a waiting interpreter in each.
///
/// # Errors
/// If this host cannot isolate processes.
pub fn process(warm_python: bool) -> Result<Arc<dyn SandboxProvider>, LabError> {
    let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap_or_default());
    (config.warm_python, config.max_live) = (warm_python, MAX_LIVE);
    let provider = ProcessProvider::start(config).map_err(LabError::system)?;
    Ok(Arc::new(provider))
}

/// The wasm level, with its interpreters compiled.
fn wasm() -> Result<WasmProvider, LabError> {
    let mut config = ProcessConfig::new(&std::env::var("PATH").unwrap_or_default());
    let program = std::env::current_exe().map_err(LabError::system)?;
    let mut wasm = WasmConfig::new(WASM_MODULES.into(), program);
    wasm.workers = std::thread::available_parallelism().map_or(1, usize::from);
    config.shows = wasm.shows().map_err(LabError::system)?;
    let below = ProcessProvider::start(config).map_err(LabError::system)?;
    WasmProvider::new(Arc::new(below), wasm).map_err(LabError::system)
}

/// Containers of an engine, none kept ready. `DOCKER_HOST` and `CONTAINER_HOST` name sockets.
///
/// # Errors
/// If the level is not a container level, or its engine does not work here.
pub fn container(level: Level) -> Result<ContainerProvider, LabError> {
    let Level::Container(engine) = level else {
        return Err(LabError::input(format!("{level:?} has no containers")));
    };
    let variable = ["CONTAINER_HOST", "DOCKER_HOST"][usize::from(engine == "docker")];
    let host = std::env::var(variable).ok();
    let socket = host.and_then(|h| h.strip_prefix("unix://").map(PathBuf::from));
    let config = ContainerConfig {
        engine: engine.parse().map_err(LabError::system)?,
        socket: socket.filter(|_| matches!(engine, "docker" | "podman")),
        python: ProcessConfig::new(&std::env::var("PATH").unwrap_or_default()).python,
        ..ContainerConfig::default()
    };
    ContainerProvider::start(config).map_err(LabError::system)
}

/// Virtual machines, none kept ready.
///
/// # Errors
/// If QEMU does not work here.
pub fn microvm() -> Result<MicrovmProvider, LabError> {
    let mut config = MicrovmConfig::new(MICROVM_IMAGES.into());
    config.temporary = std::env::temp_dir();
    MicrovmProvider::start(config).map_err(LabError::system)
}

/// Creates a level without a pool, so that everything found after the destruction of a sandbox was left
/// behind by it.
///
/// # Errors
/// If the level does not work on this host.
pub fn unpooled(level: Level) -> Result<Arc<dyn SandboxProvider>, LabError> {
    Ok(match level {
        Level::Process => process(true)?,
        Level::Wasm => Arc::new(wasm()?),
        Level::Container(_) => Arc::new(container(level)?),
        Level::Microvm => Arc::new(microvm()?),
    })
}

/// A level behind the pool that recipes use.
///
/// # Errors
/// If the level does not work on this host.
pub fn pooled(level: Level) -> Result<Arc<dyn SandboxProvider>, LabError> {
    let ready = |ceiling| PoolConfig {
        floor: 0,
        ceiling,
        ..PoolConfig::default()
    };
    let pool = match level {
        Level::Wasm => return unpooled(level),
        Level::Process => PoolConfig::for_live(ProcessConfig::new("").max_live),
        Level::Container(_) => ready(2 * READY),
        Level::Microvm => PoolConfig {
            starts_at_once: 1,
            ..ready(READY)
        },
    };
    let pool = Pool::new(unpooled(level)?, pool).map_err(LabError::system)?;
    Ok(Arc::new(pool))
}
