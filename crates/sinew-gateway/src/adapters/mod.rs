//! Adapters that the engine holds by name, and the rules by which a call uses one.
//!
//! Adapters come from folders of this host, or from uploads, which are stored in a folder and loaded again
//! after a restart. Tokens sampled with an adapter carry its version: 1 more than the highest one so far,
//! unless the caller sets it.

mod folder;
mod peft;
mod upload;

pub use peft::{AdapterFolderError, read_adapter};
pub(crate) use upload::boundary;

use crate::rollout::unix_s;
use bytes::Bytes;
use serde::Serialize;
use sinew_dialect::ApiError;
use sinew_types::{AdapterName, Engine, EngineError, PolicyVersion, TensorSource};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of names in an error.
const MAX_LISTED: usize = 16;

/// An adapter that the engine holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LoadedAdapter {
    pub name: AdapterName,
    /// Version that tokens sampled with it carry.
    pub version: PolicyVersion,
    /// Inner width of its matrices.
    pub rank: usize,
    /// The product of its matrices is scaled by `alpha / rank`.
    pub alpha: f32,
    /// Bytes of its tensors in their file.
    pub bytes: u64,
    /// Folder that it was read from.
    pub folder: PathBuf,
    /// Time at which it was loaded, Unix seconds.
    pub loaded_s: f64,
}

#[derive(Debug, Default)]
struct Known {
    loaded: BTreeMap<AdapterName, LoadedAdapter>,
    /// Highest version so far.
    highest: u64,
    /// Whether an adapter was ever loaded.
    used: bool,
}

/// The adapters of a gateway's engine.
pub struct Adapters {
    engine: Arc<dyn Engine>,
    /// Name of the engine's own weights for clients.
    base: String,
    /// Folder of uploaded adapters.
    dir: Option<PathBuf>,
    /// Maximum bytes of a file of tensors.
    max_bytes: u64,
    known: Mutex<Known>,
    /// Lock that is held while the engine loads or drops an adapter.
    changing: Mutex<()>,
    /// One upload is read at a time, since it is kept in memory.
    uploads: Arc<Semaphore>,
}

sinew_types::debug_fields!(Adapters, known, dir);

impl Adapters {
    pub(crate) fn new(
        engine: Arc<dyn Engine>,
        base: String,
        dir: Option<PathBuf>,
        max_bytes: usize,
    ) -> Self {
        Self {
            engine,
            base,
            dir,
            max_bytes: max_bytes as u64,
            known: Mutex::default(),
            changing: Mutex::default(),
            uploads: Arc::new(Semaphore::new(1)),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The loaded adapters, in the order of their names.
    pub fn list(&self) -> Vec<LoadedAdapter> {
        self.known().loaded.values().cloned().collect()
    }

    /// Loads the adapter of a folder in PEFT's layout, or replaces the one of that name; calls that run
    /// continue with the new one. Blocks until the engine has it.
    ///
    /// # Errors
    /// If the folder is not that of an adapter, the engine refuses it, or the name is the model's.
    pub fn load(
        &self,
        name: &AdapterName,
        folder: &Path,
        version: Option<PolicyVersion>,
    ) -> Result<LoadedAdapter, ApiError> {
        let _changing = self.change();
        let version = version.unwrap_or_else(|| self.next_version());
        self.load_version(name, folder, version)
    }

    /// Loads the newest version of each uploaded adapter. Returns their number.
    ///
    /// # Errors
    /// If the folder cannot be read, or the engine refuses an adapter.
    pub fn restore(&self) -> Result<usize, ApiError> {
        let Some(dir) = &self.dir else {
            return Ok(0);
        };
        let _changing = self.change();
        let found = folder::newest(dir).map_err(|e| not_stored(dir, &e))?;
        for (name, version, path) in &found {
            self.load_version(name, path, *version)?;
        }
        Ok(found.len())
    }

    /// Drops an adapter, and its files if it was uploaded. Calls that use it fail with status 404.
    ///
    /// # Errors
    /// If it is not loaded, or the engine or the file system refuses.
    pub fn unload(&self, name: &AdapterName) -> Result<(), ApiError> {
        let _changing = self.change();
        if !self.known().loaded.contains_key(name) {
            return Err(self.unknown(name.as_str()));
        }
        self.engine.unload_adapter(name)?;
        self.known().loaded.remove(name);
        match &self.dir {
            Some(dir) => folder::remove(&dir.join(name.as_str())).map_err(|e| not_stored(dir, &e)),
            None => Ok(()),
        }
    }

    /// Takes the only place for an upload.
    ///
    /// # Errors
    /// If there is no folder for uploads, or another one is read.
    pub(crate) fn upload_permit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.upload_dir()?;
        let permit = Arc::clone(&self.uploads).try_acquire_owned();
        permit.map_err(|_| {
            ApiError::overloaded("upload_running", "another adapter is being uploaded")
        })
    }

    fn upload_dir(&self) -> Result<&Path, ApiError> {
        self.dir.as_deref().ok_or_else(|| {
            let why = "uploads need a folder that keeps them (`sinew serve --adapter-dir DIR`); \
                without it, send {\"folder\": PATH} with a folder on the gateway's host";
            ApiError::bad_request("no_adapter_dir", why)
        })
    }

    /// Stores the adapter of a form, and loads it like [`Adapters::load`].
    ///
    /// # Errors
    /// If the form is wrong, the version is there with other content, or the engine refuses the adapter; its
    /// files are then removed.
    pub(crate) fn upload(
        &self,
        name: &AdapterName,
        boundary: &str,
        body: &Bytes,
    ) -> Result<LoadedAdapter, ApiError> {
        let dir = self.upload_dir()?;
        let form = upload::read(boundary, body)?;
        let _changing = self.change();
        let version = form.version.unwrap_or_else(|| self.next_version());
        let stored = folder::put(dir, name, version, &form.config, &form.weights);
        let stored = stored.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                let why = format!(
                    "version {} of {name} has other content: upload another version, or leave it out",
                    version.0
                );
                ApiError::conflict("adapter_version", why)
            }
            _ => not_stored(dir, &error),
        })?;
        let loaded = self.load_version(name, &stored.path, version);
        let cleaned = match &loaded {
            Ok(_) => folder::keep_only(dir, name, version),
            Err(_) if stored.is_new => folder::remove(&stored.path),
            Err(_) => Ok(()),
        };
        if let Err(error) = cleaned {
            tracing::warn!(adapter = %name, %error, "old files of an adapter were not removed");
        }
        loaded
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next_version(&self) -> PolicyVersion {
        PolicyVersion(self.known().highest.saturating_add(1))
    }

    fn load_version(
        &self,
        name: &AdapterName,
        folder: &Path,
        version: PolicyVersion,
    ) -> Result<LoadedAdapter, ApiError> {
        if name.as_str() == self.base {
            let why = format!("adapter {name}: the model itself has this name, choose another one");
            return Err(ApiError::invalid("name", why));
        }
        let refused = |why: String| ApiError::bad_request("adapter_refused", why);
        let adapter = read_adapter(folder, self.max_bytes);
        let adapter = adapter.map_err(|e| refused(format!("adapter {name}: {e}")))?;
        let (rank, bytes) = size(&*adapter.tensors);
        let loaded = LoadedAdapter {
            name: name.clone(),
            version,
            rank,
            alpha: adapter.alpha,
            bytes,
            folder: folder.to_owned(),
            loaded_s: unix_s(),
        };
        let taken = self.engine.load_adapter(name, version, adapter);
        taken.map_err(|error| match error {
            EngineError::Weights(_) | EngineError::Failed(_) => refused(error.to_string()),
            other => other.into(),
        })?;
        let mut known = self.known();
        known.used = true;
        known.highest = known.highest.max(version.0);
        known.loaded.insert(name.clone(), loaded.clone());
        Ok(loaded)
    }

    /// The names of the loaded adapters.
    pub(crate) fn names(&self) -> Vec<AdapterName> {
        self.known().loaded.keys().cloned().collect()
    }

    /// Checks the adapter of a rollout that is to be opened.
    ///
    /// # Errors
    /// If it is not loaded.
    pub(crate) fn check(&self, name: &AdapterName) -> Result<(), ApiError> {
        if self.known().loaded.contains_key(name) {
            return Ok(());
        }
        let why = format!("adapter {name} is not loaded; {}", self.choices(false));
        Err(ApiError::invalid("adapter", why))
    }

    /// The adapter that a client without a rollout chooses by the name of its model; `None`: the engine's own
    /// weights. Until an adapter is loaded, these have every name.
    ///
    /// # Errors
    /// 404 if the name is neither that of the model nor that of an adapter.
    pub(crate) fn resolve(&self, model: &str) -> Result<Option<AdapterName>, ApiError> {
        let known = self.known();
        if let Some(name) = known.loaded.keys().find(|name| name.as_str() == model) {
            return Ok(Some(name.clone()));
        }
        let base = !known.used || model.is_empty() || model == self.base;
        drop(known);
        if base {
            return Ok(None);
        }
        Err(self.unknown(model))
    }

    /// Checks the model of a call in a rollout that uses the adapter `own`, or none. Agents may name any
    /// model, but not another adapter.
    ///
    /// # Errors
    /// If the name is that of another adapter.
    pub(crate) fn fits(&self, model: &str, own: Option<&AdapterName>) -> Result<(), ApiError> {
        let other = own.is_none_or(|own| own.as_str() != model)
            && self
                .known()
                .loaded
                .keys()
                .any(|name| name.as_str() == model);
        if !other {
            return Ok(());
        }
        let own = own.map_or(self.base.as_str(), AdapterName::as_str);
        let why = format!(
            "model {model:?}: this rollout uses {own}, and its key opens nothing else; open a rollout with \
             \"adapter\": {model:?}"
        );
        Err(ApiError::invalid("model", why))
    }

    fn unknown(&self, name: &str) -> ApiError {
        let why = format!(
            "there is no model or adapter {name:?}; {}",
            self.choices(true)
        );
        ApiError {
            code: "model_not_found",
            param: Some("model".into()),
            ..ApiError::not_found(why)
        }
    }

    /// The allowed names, in words.
    fn choices(&self, with_base: bool) -> String {
        let base = with_base.then(|| self.base.clone());
        let loaded = self.names();
        let names = base
            .into_iter()
            .chain(loaded.iter().map(ToString::to_string));
        let names: Vec<String> = names.take(MAX_LISTED).collect();
        if names.is_empty() {
            return "none is loaded: PUT /adapters/NAME loads one".to_owned();
        }
        format!("allowed: {}", names.join(", "))
    }
}

/// Status 503: the folder of uploads cannot be used.
fn not_stored(dir: &Path, error: &io::Error) -> ApiError {
    ApiError::overloaded("store_failed", format!("{}: {error}", dir.display()))
}

/// Rank and bytes of an adapter.
fn size(tensors: &dyn TensorSource) -> (usize, u64) {
    let (mut rank, mut bytes) = (0, 0);
    for name in tensors.names() {
        let Some(info) = tensors.info(&name) else {
            continue;
        };
        bytes += info.bytes() as u64;
        if name.ends_with(".lora_A.weight") {
            rank = info.shape.first().copied().unwrap_or(0);
        }
    }
    (rank, bytes)
}

#[cfg(test)]
mod tests;
