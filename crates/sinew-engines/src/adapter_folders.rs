//! Folders of adapters that requests name, for servers that read them.
//!
//! ```text
//! WEIGHTS_DIR/adapters/0/owner                    locked as long as the engine lives
//!                        my-lora-v3-9f3c12ab-0/   adapter_config.json, adapter_model.safetensors
//! ```
//!
//! The layout is PEFT's. A folder stays as long as requests can name its adapter, since a server may read it
//! again. Folders of engines that have ended are removed by the next one.

use crate::folder::{FolderError, WeightsFolder, io, link_files, remove, write};
use serde_json::json;
use sinew_types::{Adapter, AdapterName, PublishedFolder};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Folder of all adapters, in that of the weights.
const ADAPTERS: &str = "adapters";
/// The file that a living engine holds locked.
const OWNER: &str = "owner";
const TENSORS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// The folders of one engine. Its own folder is made with the first adapter and removed with the engine.
#[derive(Debug, Default)]
pub(crate) struct AdapterFolders {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    own: Option<OwnFolder>,
    /// Folder of each adapter that requests can name.
    kept: BTreeMap<AdapterName, PathBuf>,
}

/// The folder of this engine.
#[derive(Debug)]
struct OwnFolder {
    path: PathBuf,
    /// Locked until it is closed.
    _owner: File,
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // The next engine removes the folder if this fails.
        let _ = remove(&self.path);
    }
}

impl AdapterFolders {
    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        // Each change is one step.
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes an adapter under a name that no other one has; returns the folder, an absolute path. Files
    /// that a trainer wrote are linked, not written again.
    ///
    /// # Errors
    /// If its tensors are not those of an adapter, the disk refuses, or a newer owner of the run exists.
    pub(crate) fn write(
        &self,
        weights: &WeightsFolder,
        server_name: &str,
        adapter: &Adapter,
    ) -> Result<PathBuf, FolderError> {
        weights.check_fence()?;
        let own = self.with(|state| {
            if state.own.is_none() {
                state.own = Some(OwnFolder::create(weights.root())?);
            }
            let own = state.own.as_ref().map(|own| own.path.clone());
            Ok::<_, FolderError>(own.unwrap_or_default())
        })?;
        let path = own.join(server_name);
        remove(&path)?;
        fs::create_dir(&path).map_err(io("create", &path))?;
        let written = match adapter.tensors.folder() {
            Some(PublishedFolder {
                path: from,
                is_adapter: true,
                ..
            }) => link_files(from, &path),
            _ => write_peft(weights, &path, adapter),
        };
        if let Err(error) = written {
            remove(&path)?;
            return Err(error);
        }
        Ok(path)
    }

    /// Keeps the folder of an adapter that was loaded in place of the one before, or removes it again.
    pub(crate) fn settle(&self, name: &AdapterName, folder: PathBuf, loaded: bool) {
        let unused = if loaded {
            self.with(|state| state.kept.insert(name.clone(), folder))
        } else {
            Some(folder)
        };
        discard(unused);
    }

    /// Removes the folder of an adapter that requests cannot name any more.
    pub(crate) fn remove(&self, name: &AdapterName) {
        discard(self.with(|state| state.kept.remove(name)));
    }
}

/// Removes a folder that nobody needs. It is in the way of nothing if that fails.
fn discard(folder: Option<PathBuf>) {
    if let Some(folder) = folder
        && let Err(error) = remove(&folder)
    {
        tracing::debug!(%error, "folder of an adapter not removed");
    }
}

impl OwnFolder {
    /// Makes a folder that no other engine has, and removes those of engines that have ended.
    fn create(weights: &Path) -> Result<Self, FolderError> {
        let root = weights.join(ADAPTERS);
        fs::create_dir_all(&root).map_err(io("create", &root))?;
        let root = root.canonicalize().map_err(io("find", &root))?;
        remove_abandoned(&root)?;
        let mut number = 0u64;
        loop {
            let path = root.join(number.to_string());
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    number += 1;
                    continue;
                }
                Err(error) => return Err(io("create", &path)(error)),
            }
            let owner = path.join(OWNER);
            let file = File::create(&owner).map_err(io("create", &owner))?;
            match file.try_lock() {
                // Somebody may have taken it for abandoned in between, and removed it.
                Ok(()) if owner.exists() => return Ok(Self { path, _owner: file }),
                Ok(()) | Err(TryLockError::WouldBlock) => number += 1,
                Err(TryLockError::Error(error)) => return Err(io("lock", &owner)(error)),
            }
        }
    }
}

/// Removes the folders of engines that have ended: nobody holds their locks.
fn remove_abandoned(root: &Path) -> Result<(), FolderError> {
    for entry in fs::read_dir(root).map_err(io("read", root))? {
        let path = entry.map_err(io("read", root))?.path();
        // One without the file is being made.
        let Ok(owner) = File::open(path.join(OWNER)) else {
            continue;
        };
        if owner.try_lock().is_ok() {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Writes an adapter in PEFT's layout: its tensors, and a configuration that follows from their names and
/// shapes.
fn write_peft(weights: &WeightsFolder, path: &Path, adapter: &Adapter) -> Result<(), FolderError> {
    let config = peft_config(adapter).map_err(|why| FolderError::Format {
        path: path.join(CONFIG),
        why,
    })?;
    weights.write_tensors(&path.join(TENSORS), &*adapter.tensors)?;
    write(&path.join(CONFIG), config.as_bytes())
}

/// The `adapter_config.json` of PEFT.
fn peft_config(adapter: &Adapter) -> Result<String, String> {
    let (mut rank, mut targets) = (None, BTreeSet::new());
    for name in adapter.tensors.names() {
        let parts = name.rsplit_once(".lora_");
        let parts = parts.filter(|(_, kind)| ["A.weight", "B.weight"].contains(kind));
        let (module, kind) = parts.ok_or_else(|| {
            format!("tensor `{name}` is not a `lora_A.weight` or `lora_B.weight`")
        })?;
        targets.insert(module.rsplit('.').next().unwrap_or_default().to_owned());
        let inner = usize::from(kind.starts_with('B'));
        let info = adapter.tensors.info(&name);
        let found = info.and_then(|info| info.shape.get(inner).copied());
        let found = found.ok_or_else(|| format!("tensor `{name}` is not a matrix"))?;
        if *rank.get_or_insert(found) != found {
            return Err(format!(
                "tensor `{name}` is of rank {found}, others are not"
            ));
        }
    }
    let rank = rank.ok_or("no tensor in the set")?;
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": null,
        "r": rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "target_modules": targets,
    });
    Ok(format!("{config:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::FolderDtype;
    use sinew_types::{TensorList, TensorSource, TensorView};
    use std::sync::Arc;

    const A: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    const B: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    const HEAD: &str = "base_model.model.lm_head.lora_A.weight";

    fn adapter(tensors: &[(&str, &'static [usize])]) -> Adapter {
        let tensors = tensors.iter().map(|(name, shape)| {
            let view = TensorView::f32(shape, &[0.5; 6]).unwrap();
            ((*name).to_owned(), view)
        });
        Adapter {
            alpha: 16.0,
            tensors: Arc::new(TensorList(tensors.collect())),
        }
    }

    fn name(text: &str) -> AdapterName {
        AdapterName::new(text).unwrap()
    }

    #[test]
    fn tensors_are_written_as_peft_reads_them() {
        let dir = tempfile::tempdir().unwrap();
        let weights = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
        let folders = AdapterFolders::default();
        let adapter = adapter(&[(A, &[2, 3]), (B, &[3, 2]), (HEAD, &[2, 3])]);
        let path = folders.write(&weights, "x-v1-0", &adapter).unwrap();
        let config = fs::read_to_string(path.join(CONFIG)).unwrap();
        let config: serde_json::Value = serde_json::from_str(&config).unwrap();
        assert_eq!(
            (&config["r"], &config["lora_alpha"]),
            (&json!(2), &json!(16.0))
        );
        assert_eq!(config["target_modules"], json!(["lm_head", "q_proj"]));
        let bytes = fs::read(path.join(TENSORS)).unwrap();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(read.tensor(B).unwrap().shape(), [3, 2]);
        // A folder of a trainer is linked.
        let written = PublishedFolder {
            path: path.clone(),
            is_adapter: true,
            tensors: Vec::new(),
        };
        struct Written(PublishedFolder);
        impl TensorSource for Written {
            fn names(&self) -> Vec<String> {
                panic!("it is written already")
            }
            fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
                None
            }
            fn folder(&self) -> Option<&PublishedFolder> {
                Some(&self.0)
            }
        }
        let of = |written| Adapter {
            alpha: 16.0,
            tensors: Arc::new(Written(written)),
        };
        let linked = folders.write(&weights, "x-v2-1", &of(written)).unwrap();
        assert_eq!(fs::read(linked.join(TENSORS)).unwrap(), bytes);
        folders.settle(&name("x"), path.clone(), true);
        folders.settle(&name("x"), linked.clone(), true);
        assert!(
            !path.exists() && linked.exists(),
            "the one before is removed"
        );
        let again = PublishedFolder {
            path: linked.clone(),
            is_adapter: true,
            tensors: Vec::new(),
        };
        let refused = folders.write(&weights, "x-v3-2", &of(again)).unwrap();
        folders.settle(&name("x"), refused.clone(), false);
        assert!(!refused.exists() && linked.exists());
        folders.remove(&name("x"));
        assert!(!linked.exists());
    }

    #[test]
    fn what_is_no_adapter_is_named() {
        const MATRIX: &[usize] = &[2, 3];
        const VECTOR: &[usize] = &[6];
        for (tensors, expected) in [
            (vec![], "no tensor"),
            (vec![("model.norm.weight", VECTOR)], "model.norm.weight"),
            (vec![(A, MATRIX), (B, MATRIX)], "is of rank"),
            (vec![(B, VECTOR)], "not a matrix"),
        ] {
            let why = peft_config(&adapter(&tensors)).unwrap_err();
            assert!(why.contains(expected), "{why}");
        }
    }

    #[test]
    fn folders_of_engines_that_have_ended_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let weights = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
        let one = adapter(&[(A, &[2, 3])]);
        let (living, dropped) = (AdapterFolders::default(), AdapterFolders::default());
        let kept = living.write(&weights, "a", &one).unwrap();
        let gone = dropped.write(&weights, "a", &one).unwrap();
        assert_ne!(kept, gone);
        drop(dropped);
        assert!(!gone.exists());
        // One that was killed leaves its folder, and no lock.
        let killed = dir.path().join(ADAPTERS).join("77");
        fs::create_dir(&killed).unwrap();
        fs::write(killed.join(OWNER), "").unwrap();
        let next = AdapterFolders::default();
        next.write(&weights, "a", &one).unwrap();
        assert!(!killed.exists() && kept.exists());
    }
}
