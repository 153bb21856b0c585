//! The trainer's side: versions for engines of other processes.

use super::delta;
use super::tensors::TensorFile;
use super::{DELTA_PARTS, DELTAS, LATEST, MAX_DELTA, MAX_PAUSE, TENSORS};
use crate::folder::{FolderError, Stage, WeightsFolder, bytes_as, io, remove, write};
use sinew_types::{
    DeltaSpan, Lineage, PolicyVersion, TensorSource, WeightsId, WeightsManifest,
    WeightsManifestTensor,
};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A published set of whole tensors, which differences are of.
#[derive(Debug)]
struct Anchor {
    manifest: WeightsManifest,
    file: TensorFile,
}

/// Publishes versions in a separate folder, which is best on `/dev/shm`: there a version is in the memory of
/// the host once, for all engines.
#[derive(Debug)]
pub struct SharedWeights {
    folder: WeightsFolder,
    root: PathBuf,
    /// Lineage of all versions of this session.
    lineage: Lineage,
    /// Differences are published where they are smaller.
    deltas: bool,
    /// Versions that are published whole before a difference is tried again.
    whole_left: u32,
    /// Length of the last such pause, in versions.
    pause: u32,
    anchor: Option<Anchor>,
    /// The version before, which an engine may be reading.
    before: Option<WeightsId>,
}

/// Result of an attempt at a difference.
#[derive(Debug, Default)]
struct Difference {
    /// The manifest of the differences; `None`: the version is to be published whole.
    manifest: Option<WeightsManifest>,
    /// The differences were too large a part of the whole.
    is_large: bool,
}

/// A published version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishedVersion {
    /// Version of the weights.
    pub version: PolicyVersion,
    /// The version that it is a difference of.
    pub base: Option<PolicyVersion>,
    /// Bytes of its tensors, or of their differences.
    pub bytes: u64,
}

impl SharedWeights {
    /// Publishes versions of `lineage` in `folder`. Nothing else may lie there.
    pub fn new(folder: WeightsFolder, lineage: Lineage, deltas: bool) -> Self {
        Self {
            root: folder.root().to_owned(),
            folder,
            lineage,
            deltas,
            whole_left: 0,
            pause: 0,
            anchor: None,
            before: None,
        }
    }

    /// Publishes a version: tensors first, the manifest after them, then the name that engines look at. An
    /// engine that reads an earlier one is not disturbed, and none is waited for.
    ///
    /// # Errors
    /// If a tensor is missing, the medium refuses, or a newer owner of the run exists. The version before
    /// stays the newest then.
    pub fn publish(
        &mut self,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<PublishedVersion, FolderError> {
        let id = WeightsId::new(version, self.lineage);
        let stage = self.folder.stage(id)?;
        let staged = match self.tried_difference(&stage, version, weights)? {
            Some(manifest) => manifest,
            None => self.folder.whole(&stage, id, weights)?,
        };
        let target = self.folder.finish(&stage, &staged)?;
        let bytes = match staged.base {
            Some(_) => length(&target.join(DELTAS))?,
            None => length(&target.join(TENSORS))?,
        };
        let base = staged.base;
        if base.is_none() {
            let path = target.join(TENSORS);
            self.anchor = Some(Anchor {
                file: TensorFile::open(&path).map_err(io("open", &path))?,
                manifest: staged,
            });
        }
        self.point_to(id)?;
        self.prune(id)?;
        self.before = Some(id);
        Ok(PublishedVersion {
            version,
            base,
            bytes,
        })
    }

    /// Versions that are published whole before a difference is tried again.
    #[cfg(test)]
    pub(super) fn whole_left(&self) -> u32 {
        self.whole_left
    }

    /// The differences to the anchor, unless one was too large a short time ago: then its computing would be
    /// for nothing again.
    fn tried_difference(
        &mut self,
        stage: &Stage,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<Option<WeightsManifest>, FolderError> {
        if self.whole_left > 0 {
            self.whole_left -= 1;
            return Ok(None);
        }
        let Difference { manifest, is_large } = self.difference(stage, version, weights)?;
        if is_large {
            self.pause = (self.pause * 2).clamp(1, MAX_PAUSE);
            self.whole_left = self.pause;
        } else if manifest.is_some() {
            self.pause = 0;
        }
        Ok(manifest)
    }

    /// Writes the differences to the anchor, if there is one of the same tensors and they are smaller.
    fn difference(
        &self,
        stage: &Stage,
        version: PolicyVersion,
        weights: &dyn TensorSource,
    ) -> Result<Difference, FolderError> {
        let Some(anchor) = self.anchor.as_ref().filter(|_| self.deltas) else {
            return Ok(Difference::default());
        };
        let base = anchor.manifest.version;
        let whole = |t: &WeightsManifestTensor| t.shape.iter().product::<usize>() * t.dtype.bytes();
        let all: usize = anchor.manifest.tensors.iter().map(whole).sum();
        let names = anchor.manifest.tensors.iter().map(|t| &t.name);
        let same = weights.names().iter().eq(names);
        if base == version || !same {
            return Ok(Difference::default());
        }
        let path = stage.path.join(DELTAS);
        let mut file = File::create(&path).map_err(io("create", &path))?;
        let (mut offset, mut seen, mut listed) = (0, 0, Vec::new());
        for tensor in &anchor.manifest.tensors {
            let name = &tensor.name;
            let view = weights.tensor(name);
            let view = view.ok_or_else(|| FolderError::Missing(name.clone()))?;
            if view.shape() != tensor.shape {
                return give_up(&path, false);
            }
            let new = bytes_as(view, tensor.dtype);
            // The anchor is of this process, but its file may have been removed by another.
            let Ok(old) = anchor.file.read(name, new.len()) else {
                return give_up(&path, false);
            };
            let bytes = delta::encode(&old, &new, tensor.dtype.bytes());
            let bytes = bytes.map_err(io("pack", &path))?;
            file.write_all(&bytes).map_err(io("write", &path))?;
            listed.push(WeightsManifestTensor {
                file: DELTAS.to_owned(),
                blake3: blake3::hash(&new).to_hex().to_string(),
                delta: Some(DeltaSpan {
                    offset,
                    bytes: bytes.len() as u64,
                }),
                ..tensor.clone()
            });
            offset += bytes.len() as u64;
            seen += whole(tensor);
            // A part of the tensors shows how large the rest will be.
            if offset as f64 > MAX_DELTA * seen.max(all / DELTA_PARTS) as f64 {
                return give_up(&path, true);
            }
        }
        file.sync_all().map_err(io("sync", &path))?;
        let manifest = WeightsManifest {
            version,
            lineage: self.lineage,
            base: Some(base),
            tensors: listed,
        };
        Ok(Difference {
            manifest: Some(manifest),
            is_large: false,
        })
    }

    /// Names the newest version, in one step.
    fn point_to(&self, id: WeightsId) -> Result<(), FolderError> {
        let part = self.root.join(format!(".{LATEST}.part"));
        write(&part, id.folder_name().as_bytes())?;
        self.folder.check_fence()?;
        let latest = self.root.join(LATEST);
        fs::rename(&part, &latest).map_err(io("rename", &part))
    }

    /// Removes all versions but this one, the one before and the anchor: also those of earlier sessions,
    /// which may have gone further than the checkpoint that this one began at, and those that were never
    /// whole.
    fn prune(&self, id: WeightsId) -> Result<(), FolderError> {
        let anchor = self.anchor.as_ref().map(|a| a.manifest.id());
        let kept = [Some(id), self.before, anchor];
        for entry in fs::read_dir(&self.root).map_err(io("read", &self.root))? {
            let entry = entry.map_err(io("read", &self.root))?;
            let file = entry.file_name();
            let file = file.to_string_lossy();
            let found = file.parse::<WeightsId>().ok();
            let begun = file.starts_with(".v") && file.ends_with(".part");
            if begun || (found.is_some() && !kept.contains(&found)) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

/// Takes back what was written of a difference.
fn give_up(path: &Path, is_large: bool) -> Result<Difference, FolderError> {
    fs::remove_file(path).map_err(io("remove", path))?;
    Ok(Difference {
        manifest: None,
        is_large,
    })
}

fn length(path: &Path) -> Result<u64, FolderError> {
    let metadata = fs::metadata(path).map_err(io("look at", path))?;
    Ok(metadata.len())
}
