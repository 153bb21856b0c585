//! Folders of checkpoints: each is written once, complete or absent, and removed as a whole.
//!
//! ```text
//! STATE/models/MODEL/live-NONCE/step-00000000/     weights and optimizer that a restart continues from
//!                    state-NONCE/step-00000000/    a state that a client saved
//!                    sampler-NONCE/step-00000000/  weights for sampling
//! ```
//!
//! The journal names the folders that count. Others are left over from a kill, and are removed at the start.

use super::types::{ExternalFile, LoraSpec, ModelId};
use crate::TinkerError;
use serde::{Deserialize, Serialize};
use sinew_train::checkpoint::{CheckpointError, CheckpointStore, Draft, LoadedCheckpoint, Part};
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folder of all models, in the state folder.
const MODELS: &str = "models";
/// Folder of a checkpoint's files, as [`CheckpointStore`] names the first.
const FIRST: &str = "step-00000000";
/// File with the description of a checkpoint.
const ABOUT: &str = "tinker.json";
/// Version of that file; others are refused.
const FORMAT: u32 = 1;

/// The description of a checkpoint, in its folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct About {
    format: u32,
    /// Name of the base model.
    pub(super) base_model: String,
    /// Adapters; `None`: all weights.
    pub(super) lora: Option<LoraSpec>,
    /// Updates of the optimizer's state, which is the exponent of its bias correction.
    pub(super) updates: u64,
    /// Files with weights.
    pub(super) weights: Vec<String>,
    /// Adapters for sampling: they are scaled by `alpha / rank`.
    pub(super) alpha: Option<f32>,
}

impl About {
    /// The description of a checkpoint whose files are not written yet.
    pub(super) fn new(base_model: &str, lora: Option<LoraSpec>, updates: u64) -> Self {
        Self {
            format: FORMAT,
            base_model: base_model.to_owned(),
            lora,
            updates,
            weights: Vec::new(),
            alpha: None,
        }
    }
}

/// A failure of the disk is the server's, and so is one of the model.
pub(super) fn failed(error: CheckpointError) -> TinkerError {
    match error {
        CheckpointError::Policy(error) => TinkerError::Policy(error),
        other => TinkerError::Internal(other.to_string()),
    }
}

/// The folders below a state folder.
#[derive(Clone, Debug)]
pub(super) struct Folders {
    root: PathBuf,
}

impl Folders {
    /// The folders below `root`.
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// Name of a new folder of a model, relative to the state folder. `nonce` makes it unique.
    pub(super) fn name(model: &ModelId, kind: &str, nonce: &str) -> String {
        let model = model.as_str().replace(':', "-");
        format!("{MODELS}/{model}/{kind}-{nonce}")
    }

    /// Writes a checkpoint: `fill` writes the files and completes the description. Returns its bytes.
    ///
    /// # Errors
    /// If the disk refuses or `fill` fails; then there is no checkpoint.
    pub(super) fn write(
        &self,
        folder: &str,
        about: About,
        fill: impl FnOnce(&mut Draft<'_>, &mut About) -> Result<(), TinkerError>,
    ) -> Result<u64, TinkerError> {
        let written = self.try_write(folder, about, fill);
        if written.is_err() {
            self.remove(folder);
        }
        written
    }

    fn try_write(
        &self,
        folder: &str,
        mut about: About,
        fill: impl FnOnce(&mut Draft<'_>, &mut About) -> Result<(), TinkerError>,
    ) -> Result<u64, TinkerError> {
        let path = self.root.join(folder);
        let store = CheckpointStore::open(&path, 1).map_err(failed)?;
        let mut draft = store.begin(0).map_err(failed)?;
        fill(&mut draft, &mut about)?;
        let text = serde_json::to_vec_pretty(&about)
            .map_err(|e| TinkerError::Internal(format!("{ABOUT}: {e}")))?;
        let part = Part::Bytes {
            file: ABOUT.to_owned(),
            bytes: text,
        };
        draft.write(&part).map_err(failed)?;
        let written = draft.commit().map_err(failed)?;
        size(&written).map_err(|e| TinkerError::Internal(format!("{}: {e}", written.display())))
    }

    /// Opens a checkpoint and verifies its checksums.
    ///
    /// # Errors
    /// If it is missing, damaged or of another format.
    pub(super) fn read(&self, folder: &str) -> Result<(LoadedCheckpoint, About), TinkerError> {
        let path = self.root.join(folder);
        let broken = |why: String| TinkerError::Internal(format!("{}: {why}", path.display()));
        if !path.is_dir() {
            return Err(broken("the checkpoint is missing".to_owned()));
        }
        let store = CheckpointStore::open(&path, 1).map_err(failed)?;
        let loaded = store.load().map_err(failed)?;
        let loaded = loaded.ok_or_else(|| broken("the checkpoint is empty".to_owned()))?;
        let text = loaded.bytes(ABOUT).map_err(failed)?;
        let about: About =
            serde_json::from_slice(&text).map_err(|e| broken(format!("{ABOUT}: {e}")))?;
        if about.format != FORMAT {
            let format = about.format;
            return Err(broken(format!(
                "{ABOUT} has format {format}, this program reads {FORMAT}"
            )));
        }
        Ok((loaded, about))
    }

    /// Copies a checkpoint. Files are linked where the file system allows it: they never change.
    ///
    /// # Errors
    /// If the disk refuses; what was copied is removed.
    pub(super) fn copy(&self, from: &str, to: &str) -> io::Result<()> {
        let (from, target) = (self.root.join(from), self.root.join(to));
        let copied = copy_dir(&from, &target);
        if copied.is_err() {
            self.remove(to);
        }
        copied
    }

    /// The files of a checkpoint, in the order of their names.
    pub(super) fn files(&self, folder: &str) -> io::Result<Vec<ExternalFile>> {
        let path = self.root.join(folder).join(FIRST);
        let mut files = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let about = entry.metadata()?;
            if about.is_file() {
                files.push(ExternalFile {
                    name: entry.file_name().to_string_lossy().into_owned(),
                    file: entry.path(),
                    bytes: about.len(),
                });
            }
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    /// Removes a folder, best effort: the next start removes what stays.
    pub(super) fn remove(&self, folder: &str) {
        let path = self.root.join(folder);
        if let Err(error) = fs::remove_dir_all(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), %error, "a checkpoint was not removed");
        }
        // Fails while the model has others.
        let _ = path.parent().map(fs::remove_dir);
    }

    /// Removes all folders that are not in `keep`.
    pub(super) fn sweep(&self, keep: &BTreeSet<String>) -> io::Result<()> {
        let models = self.root.join(MODELS);
        let listed = match fs::read_dir(&models) {
            Ok(listed) => listed,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(e),
        };
        for model in listed {
            let model = model?;
            for entry in fs::read_dir(model.path())? {
                let name = entry?.file_name();
                let (model, name) = (model.file_name(), name.to_string_lossy().into_owned());
                let folder = format!("{MODELS}/{}/{name}", model.to_string_lossy());
                if !keep.contains(&folder) {
                    self.remove(&folder);
                }
            }
        }
        Ok(())
    }
}

/// Bytes of all files of a folder.
fn size(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let about = entry.metadata()?;
        bytes += if about.is_dir() {
            size(&entry.path())?
        } else {
            about.len()
        };
    }
    Ok(bytes)
}

fn copy_dir(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else if fs::hard_link(entry.path(), &target).is_err() {
            fs::copy(entry.path(), &target)?;
            fs::File::open(&target)?.sync_all()?;
        }
    }
    fs::File::open(to)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(folders: &Folders, folder: &str, text: &str) -> u64 {
        let about = About::new("tiny", None, 3);
        let written = folders.write(folder, about, |draft, about| {
            let part = Part::Bytes {
                file: "weights".to_owned(),
                bytes: text.as_bytes().to_vec(),
            };
            about.weights.push("weights".to_owned());
            draft.write(&part).map_err(failed)
        });
        written.unwrap()
    }

    #[test]
    fn checkpoints_are_written_read_copied_and_swept() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::new(dir.path());
        let model = ModelId::from("s:train:0");
        let first = Folders::name(&model, "live", "01");
        assert_eq!(first, "models/s-train-0/live-01");
        assert!(put(&folders, &first, "hello") > 5);
        let second = Folders::name(&model, "weights-a", "02");
        folders.copy(&first, &second).unwrap();
        let (loaded, about) = folders.read(&second).unwrap();
        assert_eq!(loaded.bytes("weights").unwrap(), b"hello");
        assert_eq!((about.updates, about.weights.len()), (3, 1));
        folders.sweep(&BTreeSet::from([second.clone()])).unwrap();
        assert!(folders.read(&first).is_err());
        folders.read(&second).unwrap();
        folders.remove(&second);
        assert!(!dir.path().join("models/s-train-0").exists());
        folders.sweep(&BTreeSet::new()).unwrap();
    }

    #[test]
    fn a_failed_write_leaves_no_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::new(dir.path());
        let about = About::new("tiny", None, 0);
        let refused = folders.write("models/m/live-1", about, |_, _| {
            Err(TinkerError::Internal("no".to_owned()))
        });
        assert_eq!(refused, Err(TinkerError::Internal("no".to_owned())));
        assert!(folders.read("models/m/live-1").is_err());
    }
}
