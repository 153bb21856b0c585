//! Weights at the engine: adapters by name within a bound, and engines of whole models.
//!
//! Weights are read from disk when a request uses them. Those that were used longest ago leave first; those
//! that requests use stay.

use super::MakeEngine;
use crate::TinkerError;
use crate::desk::flight_orders::{AdapterSource, Source};
use crate::desk::folders::{About, Folders, failed};
use crate::desk::residents::ADAPTER;
use sinew_model::LoraConfig;
use sinew_train::checkpoint::{LoadedCheckpoint, StoredTensors};
use sinew_types::{
    Adapter, AdapterName, Engine, PublishedFolder, TensorInfo, TensorSource, TensorView,
    WeightsManifestTensor,
};
use std::collections::BTreeMap;
use std::sync::Arc;

/// An adapter at the engine.
#[derive(Debug)]
struct Slot {
    source: AdapterSource,
    /// Requests that use it.
    flying: usize,
    /// When it was last used, as a count of uses.
    used: u64,
    /// Whether it leaves once no request uses it.
    is_grounded: bool,
}

/// An engine of a whole model.
struct Hull {
    engine: Arc<dyn Engine>,
    flying: usize,
    used: u64,
    is_grounded: bool,
}

/// The weights that requests are sampled with.
pub(super) struct Hangar {
    engine: Arc<dyn Engine>,
    make: Option<MakeEngine>,
    folders: Folders,
    most_adapters: usize,
    most_hulls: usize,
    slots: BTreeMap<AdapterName, Slot>,
    /// By folder.
    hulls: BTreeMap<String, Hull>,
    /// Newest versions of adapters that change.
    newest: BTreeMap<AdapterName, AdapterSource>,
    uses: u64,
}

/// The engine for a request, and the name of its adapter.
type Place = (Arc<dyn Engine>, Option<AdapterName>);

impl Hangar {
    /// With the base model only.
    pub(super) fn new(
        engine: Arc<dyn Engine>,
        make: Option<MakeEngine>,
        folders: Folders,
        most_adapters: usize,
        most_hulls: usize,
    ) -> Self {
        Self {
            engine,
            make,
            folders,
            most_adapters: most_adapters.max(1),
            most_hulls: most_hulls.max(1),
            slots: BTreeMap::new(),
            hulls: BTreeMap::new(),
            newest: BTreeMap::new(),
            uses: 0,
        }
    }

    /// Has the weights of a request ready. `None`: all places are in use, and one becomes free at the end of
    /// another request. [`Hangar::leave`] follows at the end of this one.
    pub(super) fn board(&mut self, source: &Source) -> Result<Option<Place>, TinkerError> {
        self.uses += 1;
        match source {
            Source::Base => Ok(Some((Arc::clone(&self.engine), None))),
            Source::Adapter(adapter) => {
                let newest = self.newest.get(&adapter.name);
                let newer = newest.filter(|newest| newest.version > adapter.version);
                let adapter = newer.unwrap_or(adapter).clone();
                if !self.load(&adapter)? {
                    return Ok(None);
                }
                if let Some(slot) = self.slots.get_mut(&adapter.name) {
                    slot.flying += 1;
                    slot.used = self.uses;
                }
                Ok(Some((Arc::clone(&self.engine), Some(adapter.name))))
            }
            Source::Full { folder } => self.board_full(folder),
        }
    }

    /// Loads an adapter, unless it is there. Returns whether there is a place for it.
    fn load(&mut self, adapter: &AdapterSource) -> Result<bool, TinkerError> {
        let known = self.slots.get(&adapter.name);
        if known.is_some_and(|slot| slot.source.version >= adapter.version) {
            return Ok(true);
        }
        if known.is_none() && !self.make_room() {
            return Ok(false);
        }
        let (loaded, about) = self.folders.read(&adapter.folder)?;
        let weights = stored_adapter(&loaded, &about)?;
        let taken = self
            .engine
            .load_adapter(&adapter.name, adapter.version, weights);
        taken.map_err(|e| TinkerError::Internal(e.to_string()))?;
        let slot = self.slots.entry(adapter.name.clone()).or_insert(Slot {
            source: adapter.clone(),
            flying: 0,
            used: self.uses,
            is_grounded: false,
        });
        slot.source = adapter.clone();
        Ok(true)
    }

    /// Frees a place for an adapter. Returns whether there is one.
    fn make_room(&mut self) -> bool {
        while self.slots.len() >= self.most_adapters {
            let idle = self.slots.iter().filter(|(_, slot)| slot.flying == 0);
            let oldest = idle.min_by_key(|(_, slot)| slot.used);
            let Some(name) = oldest.map(|(name, _)| name.clone()) else {
                return false;
            };
            self.unload(&name);
        }
        true
    }

    fn unload(&mut self, name: &AdapterName) {
        self.slots.remove(name);
        if let Err(error) = self.engine.unload_adapter(name) {
            tracing::warn!(%name, %error, "an adapter was not unloaded");
        }
    }

    fn board_full(&mut self, folder: &str) -> Result<Option<Place>, TinkerError> {
        if !self.hulls.contains_key(folder) {
            while self.hulls.len() >= self.most_hulls {
                let idle = self.hulls.iter().filter(|(_, hull)| hull.flying == 0);
                let oldest = idle.min_by_key(|(_, hull)| hull.used);
                let Some(name) = oldest.map(|(name, _)| name.clone()) else {
                    return Ok(None);
                };
                self.hulls.remove(&name);
            }
            let (loaded, _) = self.folders.read(folder)?;
            let make = self.make.as_mut().ok_or_else(|| {
                TinkerError::Internal("there are no engines for whole models".to_owned())
            })?;
            let engine = make(&loaded.path).map_err(TinkerError::Internal)?;
            let hull = Hull {
                engine,
                flying: 0,
                used: 0,
                is_grounded: false,
            };
            self.hulls.insert(folder.to_owned(), hull);
        }
        let Some(hull) = self.hulls.get_mut(folder) else {
            return Ok(None);
        };
        hull.flying += 1;
        hull.used = self.uses;
        Ok(Some((Arc::clone(&hull.engine), None)))
    }

    /// A request that boarded has ended.
    pub(super) fn leave(&mut self, source: &Source) {
        match source {
            Source::Base => {}
            Source::Adapter(adapter) => {
                let Some(slot) = self.slots.get_mut(&adapter.name) else {
                    return;
                };
                slot.flying = slot.flying.saturating_sub(1);
                if slot.flying == 0 && slot.is_grounded {
                    self.unload(&adapter.name);
                }
            }
            Source::Full { folder } => {
                let Some(hull) = self.hulls.get_mut(folder) else {
                    return;
                };
                hull.flying = hull.flying.saturating_sub(1);
                if hull.flying == 0 && hull.is_grounded {
                    self.hulls.remove(folder);
                }
            }
        }
    }

    /// The files of weights are gone: they leave once no request uses them.
    pub(super) fn ground(&mut self, folder: &str) {
        self.newest.retain(|_, newest| newest.folder != folder);
        let slots = self.slots.iter_mut();
        let mut found = slots.filter(|(_, slot)| slot.source.folder == folder);
        if let Some((name, slot)) = found.next() {
            slot.is_grounded = true;
            if slot.flying == 0 {
                let name = name.clone();
                self.unload(&name);
            }
        }
        if let Some(hull) = self.hulls.get_mut(folder) {
            hull.is_grounded = true;
            if hull.flying == 0 {
                self.hulls.remove(folder);
            }
        }
    }

    /// Replaces an adapter that changes, if it is at the engine. Requests that use it continue with the new
    /// one.
    pub(super) fn publish(&mut self, adapter: AdapterSource) {
        if self.slots.contains_key(&adapter.name)
            && let Err(error) = self.load(&adapter)
        {
            // The next request tries again, and fails with the reason.
            tracing::warn!(name = %adapter.name, %error, "an adapter was not replaced");
        }
        self.newest.insert(adapter.name.clone(), adapter);
    }

    /// The engine does not have an adapter that it had: it was started again.
    pub(super) fn lost(&mut self, name: &AdapterName) {
        self.slots.remove(name);
    }
}

/// The adapters of a checkpoint.
fn stored_adapter(loaded: &LoadedCheckpoint, about: &About) -> Result<Adapter, TinkerError> {
    let broken = |why: String| TinkerError::Internal(format!("{}: {why}", loaded.path.display()));
    if !about.weights.iter().any(|file| file == ADAPTER) {
        return Err(broken(format!(
            "it has no {ADAPTER}: save the weights by save_weights_for_sampler"
        )));
    }
    let alpha = match about.alpha {
        Some(alpha) => alpha,
        None => {
            let text = loaded.bytes("adapter_config.json").map_err(failed)?;
            let text = String::from_utf8_lossy(&text);
            let config = LoraConfig::from_json(&text).map_err(|e| broken(e.to_string()))?;
            config.alpha
        }
    };
    let tensors = loaded.tensors(ADAPTER).map_err(failed)?;
    let listed = tensors.names().into_iter().filter_map(|name| {
        let view = tensors.tensor(&name)?;
        Some(WeightsManifestTensor {
            blake3: blake3::hash(view.bytes()).to_hex().to_string(),
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            file: ADAPTER.to_owned(),
            delta: None,
            name,
        })
    });
    let folder = PublishedFolder {
        path: loaded.path.clone(),
        is_adapter: true,
        tensors: listed.collect(),
    };
    let tensors = Arc::new(StoredAdapter { tensors, folder });
    Ok(Adapter { alpha, tensors })
}

/// Adapters in memory, and the folder that they come from, which engines outside of this process read.
struct StoredAdapter {
    tensors: StoredTensors,
    folder: PublishedFolder,
}

impl TensorSource for StoredAdapter {
    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.tensor(name)
    }

    fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.tensors.info(name)
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        Some(&self.folder)
    }
}
