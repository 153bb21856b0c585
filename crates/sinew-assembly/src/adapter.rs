//! The adapter that a measurement samples with.
//!
//! It is read before the model is loaded, loaded into the engine by its name, and recorded in every trace.

use crate::failure::Failure;
use sinew_gateway::{ServerLimits, read_adapter};
use sinew_types::{Adapter, AdapterName, Engine};
use std::path::{Path, PathBuf};

/// A folder with an adapter in PEFT's layout, and the name that it gets.
#[derive(Clone, Copy, Debug)]
pub struct AdapterFolder<'a> {
    pub name: &'a AdapterName,
    pub path: &'a Path,
}

/// An adapter in memory.
pub(crate) struct MeasuredAdapter {
    pub(crate) name: AdapterName,
    path: PathBuf,
    adapter: Adapter,
}

impl MeasuredAdapter {
    /// Reads the adapter of a folder.
    ///
    /// # Errors
    /// If the folder is not that of an adapter.
    pub(crate) fn read(folder: AdapterFolder<'_>) -> Result<Self, Failure> {
        let max = ServerLimits::default().max_adapter_bytes as u64;
        let adapter = read_adapter(folder.path, max);
        let adapter = adapter.map_err(|e| Failure::input(format!("--adapter: {e}")))?;
        Ok(Self {
            name: folder.name.clone(),
            path: folder.path.to_owned(),
            adapter,
        })
    }

    /// Hash of its name, scale and tensors. A measurement that resumes compares it.
    pub(crate) fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        let tensors = &self.adapter.tensors;
        hasher.update(format!("{} {}\n", self.name, self.adapter.alpha).as_bytes());
        for name in tensors.names() {
            let Some(view) = tensors.tensor(&name) else {
                continue;
            };
            let head = format!("{name} {} {:?}\n", view.dtype().name(), view.shape());
            hasher.update(head.as_bytes()).update(view.bytes());
        }
        hasher.finalize().to_hex().to_string()
    }

    /// Loads it into an engine. Its tokens carry the version of the engine's weights.
    ///
    /// # Errors
    /// If the engine takes no adapters by name, or this one does not fit its model.
    pub(crate) fn load(&self, engine: &dyn Engine) -> Result<(), Failure> {
        let version = engine.status().version;
        let loaded = engine.load_adapter(&self.name, version, self.adapter.clone());
        let place = self.path.display();
        loaded.map_err(|e| Failure::input(format!("--adapter {}={place}: {e}", self.name)))
    }
}
