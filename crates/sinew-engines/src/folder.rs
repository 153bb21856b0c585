//! Publishes weights as directories that servers load: `transformers` layout, checksums, complete
//! or not there.
//!
//! ```text
//! WEIGHTS_DIR/v00000012-9f3c12ab/model.safetensors   all tensors, in f32 or bf16
//!                                manifest.json       version, lineage, tensors, a BLAKE3 sum of each
//!                                config.json, ...    copies of the start model's small files
//! ```
//!
//! A version is written under the hidden name `.v00000012-9f3c12ab.part`, synchronized, and renamed when it
//! is complete: a reader never sees a part of one.

use half::{bf16, f16};
use safetensors::tensor::{Dtype, View};
use sinew_types::{
    Fence, FenceError, PublishedFolder, TensorSource, TensorView, WeightsId, WeightsManifest,
    WeightsManifestTensor,
};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The one file of tensors: `safetensors` with the metadata `format = pt`, as `transformers`
/// expects.
const TENSORS: &str = "model.safetensors";
/// Written last, so a directory with this file is complete.
const MANIFEST: &str = "manifest.json";
/// Files of the start directory up to this size are published with the weights: configuration and
/// tokenizer, not weights.
const MAX_COMPANION_BYTES: u64 = 32 << 20;

/// Number type of published tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderDtype {
    /// Exact: an engine that computes in f32 has the trainer's weights bit for bit.
    F32,
    /// Rounded to nearest; half the size. Most servers compute in it, so they would round anyway.
    Bf16,
}

/// Reasons for which weights were not published. Nothing was put in place then.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The file system refused an operation.
    #[error("{what} {path}: {error}")]
    Io {
        /// The operation as a verb, such as `create`.
        what: &'static str,
        /// File or folder of the operation.
        path: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// The source names a tensor that it does not have.
    #[error("tensor `{0}` is named but not there")]
    Missing(String),
    /// The source names no tensor.
    #[error("no tensor in the set")]
    Empty,
    /// The manifest or the tensors could not be written as a file.
    #[error("write {path}: {why}")]
    Format {
        /// File that was written.
        path: PathBuf,
        /// Reason in words.
        why: String,
    },
    /// Another process owns the run now.
    #[error(transparent)]
    Fence(#[from] FenceError),
}

/// Folder in which weights are published: one directory for each version, seen by trainer and servers under
/// the same path.
#[derive(Clone, Debug)]
pub struct WeightsFolder {
    root: PathBuf,
    /// The model that the servers were started with, for `config.json` and the tokenizer.
    base: Option<PathBuf>,
    dtype: FolderDtype,
    /// Whether an output matrix is written where the model uses its embedding.
    untied: bool,
    /// Number of versions that stay on disk, besides those in use: 2, so that a server that still reads the
    /// last one is not disturbed.
    keep: usize,
    /// Checked before a version gets its name.
    fence: Fence,
}

/// A version that is being written.
#[derive(Debug)]
pub(crate) struct Stage {
    /// The folder of all versions, as an absolute path.
    root: PathBuf,
    /// Temporary folder of the version.
    pub(crate) path: PathBuf,
    /// Final path of that folder.
    target: PathBuf,
}

/// The input embedding, and the output matrix, which is the same tensor in models with tied
/// embeddings.
const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";

/// A tensor of a safetensors file: shape, type, bytes.
struct FileTensor<'a> {
    shape: &'a [usize],
    bytes: Cow<'a, [u8]>,
    dtype: Dtype,
}

impl View for &FileTensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

impl WeightsFolder {
    /// Publishes under `root`, which all servers see under the same path. The small files of `base`
    /// are copied to each version.
    pub fn new(root: impl Into<PathBuf>, base: Option<PathBuf>, dtype: FolderDtype) -> Self {
        Self {
            root: root.into(),
            base,
            dtype,
            untied: false,
            keep: 2,
            fence: Fence::default(),
        }
    }

    /// Refuses to publish once `fence` does not allow it. The default allows everything.
    #[must_use]
    pub fn fenced(mut self, fence: Fence) -> Self {
        self.fence = fence;
        self
    }

    /// Whether a model whose output matrix is its embedding is written with both tensors. Servers that were
    /// started with both need this: vLLM 0.32 on a CPU packs the output matrix once, and keeps that copy when
    /// it loads new weights, unless the matrix is a separate tensor. Default: `false`.
    #[must_use]
    pub fn untied(mut self, untied: bool) -> Self {
        self.untied = untied;
        self
    }

    /// Writes `weights` and returns the directory, an absolute path. A directory of the same version and
    /// lineage is replaced. Versions older than the one before this one are removed, and those of other
    /// lineages up to this version, unless they are `in_use`. Files that a trainer wrote are linked, not
    /// written again.
    ///
    /// # Errors
    /// If a tensor is missing, the disk refuses, or a newer owner of the run exists. Nothing half-written is
    /// left under the name.
    pub fn publish(
        &self,
        id: WeightsId,
        weights: &dyn TensorSource,
        in_use: &BTreeSet<WeightsId>,
    ) -> Result<PathBuf, FolderError> {
        let stage = self.stage(id)?;
        let manifest = match weights.folder() {
            Some(written) => self.adopt(&stage, id, written)?,
            None => self.whole(&stage, id, weights)?,
        };
        let target = self.finish(&stage, &manifest)?;
        self.prune(&stage.root, id, in_use)?;
        Ok(target)
    }

    /// Whether this process may still publish.
    pub(crate) fn check_fence(&self) -> Result<(), FolderError> {
        Ok(self.fence.check()?)
    }

    /// Folder of all versions.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Begins a version: an empty folder under a hidden name.
    pub(crate) fn stage(&self, id: WeightsId) -> Result<Stage, FolderError> {
        fs::create_dir_all(&self.root).map_err(io("create", &self.root))?;
        let root = self.root.canonicalize().map_err(io("find", &self.root))?;
        let path = root.join(format!(".{}.part", id.folder_name()));
        remove(&path)?;
        fs::create_dir(&path).map_err(io("create", &path))?;
        let target = root.join(id.folder_name());
        Ok(Stage { root, path, target })
    }

    /// Writes all tensors of a version, and the small files of the start model.
    pub(crate) fn whole(
        &self,
        stage: &Stage,
        id: WeightsId,
        weights: &dyn TensorSource,
    ) -> Result<WeightsManifest, FolderError> {
        self.copy_companions(&stage.path)?;
        Ok(WeightsManifest {
            version: id.version,
            lineage: id.lineage,
            base: None,
            tensors: self.write_tensors(&stage.path.join(TENSORS), weights)?,
        })
    }

    /// Links the files of a trainer into a version, and copies the small files of the start model.
    fn adopt(
        &self,
        stage: &Stage,
        id: WeightsId,
        written: &PublishedFolder,
    ) -> Result<WeightsManifest, FolderError> {
        if written.tensors.is_empty() {
            return Err(FolderError::Empty);
        }
        // The configuration of adapters is theirs, not that of the model.
        if !written.is_adapter {
            self.copy_companions(&stage.path)?;
        }
        link_files(&written.path, &stage.path)?;
        Ok(WeightsManifest {
            version: id.version,
            lineage: id.lineage,
            base: None,
            tensors: written.tensors.clone(),
        })
    }

    /// Writes the manifest, which comes last: a directory that has one is complete. Then the version gets its
    /// name.
    pub(crate) fn finish(
        &self,
        stage: &Stage,
        manifest: &WeightsManifest,
    ) -> Result<PathBuf, FolderError> {
        let path = stage.path.join(MANIFEST);
        let bytes = serde_json::to_vec_pretty(manifest).map_err(|e| FolderError::Format {
            path: path.clone(),
            why: e.to_string(),
        })?;
        write(&path, &bytes)?;
        if let Err(fenced) = self.fence.check() {
            remove(&stage.path)?;
            return Err(fenced.into());
        }
        remove(&stage.target)?;
        fs::rename(&stage.path, &stage.target).map_err(io("rename", &stage.path))?;
        Ok(stage.target.clone())
    }

    /// Writes all tensors into one file and syncs it; returns their list with checksums. Holds all
    /// tensors of the file in memory if their type has to be converted.
    pub(crate) fn write_tensors(
        &self,
        path: &Path,
        weights: &dyn TensorSource,
    ) -> Result<Vec<WeightsManifestTensor>, FolderError> {
        let mut names = weights.names();
        if names.is_empty() {
            return Err(FolderError::Empty);
        }
        let copied = self.untied && !names.iter().any(|name| name == OUTPUT);
        if copied && names.iter().any(|name| name == EMBEDDING) {
            names.push(OUTPUT.to_owned());
        }
        let mut stored = Vec::with_capacity(names.len());
        let mut listed = Vec::with_capacity(names.len());
        for name in &names {
            let source = if copied && name == OUTPUT {
                EMBEDDING
            } else {
                name
            };
            let view = weights.tensor(source);
            let view = view.ok_or_else(|| FolderError::Missing(name.clone()))?;
            let shape = view.shape();
            let (own, dtype) = match self.dtype {
                FolderDtype::F32 => (sinew_types::Dtype::F32, Dtype::F32),
                FolderDtype::Bf16 => (sinew_types::Dtype::Bf16, Dtype::BF16),
            };
            let bytes = bytes_as(view, own);
            listed.push(WeightsManifestTensor {
                name: name.clone(),
                dtype: own,
                shape: shape.to_vec(),
                file: TENSORS.to_owned(),
                blake3: blake3::hash(&bytes).to_hex().to_string(),
                delta: None,
            });
            stored.push(FileTensor {
                shape,
                bytes,
                dtype,
            });
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let named = names.iter().zip(&stored);
        let written = safetensors::serialize_to_file(named, Some(metadata), path);
        written.map_err(|e| FolderError::Format {
            path: path.to_owned(),
            why: e.to_string(),
        })?;
        let file = File::open(path).map_err(io("open", path))?;
        file.sync_all().map_err(io("sync", path))?;
        Ok(listed)
    }

    /// Copies the small files of the start directory: all but `*.safetensors*`, up to 32 MiB each.
    fn copy_companions(&self, to: &Path) -> Result<(), FolderError> {
        let Some(base) = &self.base else {
            return Ok(());
        };
        for entry in fs::read_dir(base).map_err(io("read", base))? {
            let entry = entry.map_err(io("read", base))?;
            let path = entry.path();
            let metadata = fs::metadata(&path).map_err(io("look at", &path))?;
            let name = entry.file_name();
            let weights = name.to_string_lossy().contains(".safetensors");
            if metadata.is_file() && metadata.len() <= MAX_COMPANION_BYTES && !weights {
                fs::copy(&path, to.join(&name)).map_err(io("copy", &path))?;
            }
        }
        Ok(())
    }

    /// Removes all versions but the newest ones of this lineage up to this one, and those in use. Later
    /// versions stay: another run may write here.
    fn prune(
        &self,
        root: &Path,
        id: WeightsId,
        in_use: &BTreeSet<WeightsId>,
    ) -> Result<(), FolderError> {
        let mut found = BTreeSet::new();
        for entry in fs::read_dir(root).map_err(io("read", root))? {
            let entry = entry.map_err(io("read", root))?;
            let name = entry.file_name().to_string_lossy().parse::<WeightsId>();
            found.extend(name.ok().filter(|other| other.version <= id.version));
        }
        let own = found.iter().rev().filter(|o| o.lineage == id.lineage);
        let kept: BTreeSet<WeightsId> = own.take(self.keep).copied().collect();
        for old in found.difference(&kept).filter(|old| !in_use.contains(*old)) {
            remove(&root.join(old.folder_name()))?;
        }
        Ok(())
    }
}

/// Links all files of a folder into another one. Files of another file system are copied.
pub(crate) fn link_files(from: &Path, to: &Path) -> Result<(), FolderError> {
    for entry in fs::read_dir(from).map_err(io("read", from))? {
        let file = entry.map_err(io("read", from))?.path();
        let to = to.join(file.file_name().unwrap_or_default());
        remove_file(&to)?;
        // Another file system has no links.
        if fs::hard_link(&file, &to).is_err() {
            fs::copy(&file, &to).map_err(io("copy", &file))?;
            let copy = File::open(&to).map_err(io("open", &to))?;
            copy.sync_all().map_err(io("sync", &to))?;
        }
    }
    Ok(())
}

/// The elements of a tensor in the type of the file, little-endian. Borrowed if the type is the
/// same.
pub(crate) fn bytes_as(view: TensorView<'_>, dtype: sinew_types::Dtype) -> Cow<'_, [u8]> {
    use sinew_types::Dtype;
    if view.dtype() == dtype {
        return view.into_bytes();
    }
    let values = view.into_f32();
    match dtype {
        Dtype::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Dtype::F16 => values
            .iter()
            .flat_map(|v| f16::from_f32(*v).to_le_bytes())
            .collect(),
        Dtype::Bf16 => values
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect(),
    }
}

pub(crate) fn io(
    what: &'static str,
    path: &Path,
) -> impl FnOnce(std::io::Error) -> FolderError + use<> {
    let path = path.to_owned();
    move |error| FolderError::Io { what, path, error }
}

pub(crate) fn remove(path: &Path) -> Result<(), FolderError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

fn remove_file(path: &Path) -> Result<(), FolderError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<(), FolderError> {
    let mut file = File::create(path).map_err(io("create", path))?;
    file.write_all(bytes).map_err(io("write", path))?;
    file.sync_all().map_err(io("sync", path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_types::{Lineage, PolicyVersion};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn id(version: u64) -> WeightsId {
        WeightsId::new(PolicyVersion(version), Lineage(0xaa))
    }

    fn unused() -> BTreeSet<WeightsId> {
        BTreeSet::new()
    }

    struct Two([f32; 4]);

    impl TensorSource for Two {
        fn names(&self) -> Vec<String> {
            vec!["a".to_owned(), "b".to_owned()]
        }

        fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
            let shape: &[usize] = if name == "a" { &[2, 2] } else { &[4] };
            TensorView::f32(shape, &self.0).ok()
        }
    }

    #[test]
    fn a_version_is_complete_checked_and_old_ones_go() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        fs::create_dir(&base).unwrap();
        fs::write(base.join("config.json"), "{}").unwrap();
        fs::write(base.join("model.safetensors"), "old").unwrap();
        let root = dir.path().join("weights");
        let folder = WeightsFolder::new(&root, Some(base), FolderDtype::Bf16);
        let weights = Two([1.0, -2.5, 0.0, 3.0]);
        for version in [1, 2, 3] {
            folder.publish(id(version), &weights, &unused()).unwrap();
        }
        let path = folder.publish(id(3), &weights, &unused()).unwrap();
        assert_eq!(
            versions(&root),
            ["v00000002-000000aa", "v00000003-000000aa"]
        );
        assert!(path.join("config.json").exists());
        let bytes = fs::read(path.join(TENSORS)).unwrap();
        let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let a = read.tensor("a").unwrap();
        assert_eq!((a.shape(), a.dtype()), (&[2, 2][..], Dtype::BF16));
        let values: Vec<f32> = a
            .data()
            .chunks(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
            .collect();
        assert_eq!(values, weights.0);
        let manifest = fs::read(path.join(MANIFEST)).unwrap();
        let manifest: WeightsManifest = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(manifest.id(), id(3));
        assert_eq!(
            manifest.tensors[0].blake3,
            blake3::hash(a.data()).to_hex().to_string()
        );
    }

    /// The names of the versions in a folder.
    fn versions(root: &Path) -> Vec<String> {
        let entries = fs::read_dir(root).unwrap();
        let names = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// A run that continues from a checkpoint publishes the same numbers again, with other weights.
    #[test]
    fn another_lineage_has_folders_of_its_own_until_its_versions_are_reached() {
        let dir = tempfile::tempdir().unwrap();
        let folder = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
        let weights = Two([1.0, 2.0, 3.0, 4.0]);
        let publish = |id: WeightsId, in_use: &BTreeSet<WeightsId>| {
            folder.publish(id, &weights, in_use).unwrap();
            versions(dir.path())
        };
        publish(id(12), &unused());
        publish(id(13), &unused());
        let resumed = |version| WeightsId::new(PolicyVersion(version), Lineage(0xbb));
        assert_eq!(
            publish(resumed(12), &unused()),
            ["v00000012-000000bb", "v00000013-000000aa"]
        );
        let used = BTreeSet::from([id(13)]);
        assert_eq!(
            publish(resumed(13), &used),
            [
                "v00000012-000000bb",
                "v00000013-000000aa",
                "v00000013-000000bb"
            ]
        );
        assert_eq!(
            publish(resumed(14), &unused()),
            ["v00000013-000000bb", "v00000014-000000bb"]
        );
    }

    #[test]
    fn a_tied_model_is_written_untied_where_servers_need_it() {
        struct Tied;
        impl TensorSource for Tied {
            fn names(&self) -> Vec<String> {
                vec![EMBEDDING.into()]
            }

            fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
                let view = TensorView::f32(&[1, 2], &[1.0, 2.0]).ok();
                view.filter(|_| name == EMBEDDING)
            }
        }
        let dir = tempfile::tempdir().unwrap();
        for (untied, expected) in [(false, 1), (true, 2)] {
            let folder = WeightsFolder::new(dir.path(), None, FolderDtype::F32).untied(untied);
            let path = folder.publish(id(1), &Tied, &unused()).unwrap();
            let bytes = fs::read(path.join(TENSORS)).unwrap();
            let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(read.len(), expected);
            if untied {
                let (head, embedding) = (read.tensor(OUTPUT), read.tensor(EMBEDDING));
                assert_eq!(head.unwrap().data(), embedding.unwrap().data());
            }
        }
    }

    #[test]
    fn nothing_is_left_of_a_set_that_lies() {
        struct Lies;
        impl TensorSource for Lies {
            fn names(&self) -> Vec<String> {
                vec!["a".to_owned()]
            }
            fn tensor(&self, _: &str) -> Option<TensorView<'_>> {
                None
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let folder = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
        let error = folder.publish(id(1), &Lies, &unused()).unwrap_err();
        assert!(error.to_string().contains("`a`"), "{error}");
        assert!(!dir.path().join("v00000001-000000aa").exists());
    }

    #[test]
    fn an_old_owner_publishes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let newest = Arc::new(AtomicU64::new(1));
        let read = Arc::clone(&newest);
        let read = move || Ok::<_, String>(read.load(Ordering::SeqCst));
        let folder = WeightsFolder::new(dir.path(), None, FolderDtype::F32);
        let folder = folder.fenced(Fence::new(1, "runs/a", Arc::new(read)));
        let path = folder.publish(id(1), &Two([1.0; 4]), &unused()).unwrap();
        let before = fs::read(path.join(TENSORS)).unwrap();
        newest.store(2, Ordering::SeqCst);
        for version in [1, 2] {
            let refused = folder.publish(id(version), &Two([2.0; 4]), &unused());
            assert!(matches!(refused, Err(FolderError::Fence(_))), "{refused:?}");
        }
        assert_eq!(fs::read(path.join(TENSORS)).unwrap(), before);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    /// Two tensors that a trainer wrote itself.
    struct Written(PublishedFolder);

    impl TensorSource for Written {
        fn names(&self) -> Vec<String> {
            vec!["a".to_owned(), "b".to_owned()]
        }

        fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
            panic!("{name} is read again");
        }

        fn folder(&self) -> Option<&PublishedFolder> {
            Some(&self.0)
        }
    }

    #[test]
    fn files_of_a_trainer_are_linked_and_outlive_its_folder() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        fs::create_dir(&base).unwrap();
        fs::write(base.join("config.json"), "{}").unwrap();
        let own = WeightsFolder::new(dir.path().join("own"), None, FolderDtype::F32);
        let path = own
            .publish(id(4), &Two([1.0, 2.0, 3.0, 4.0]), &unused())
            .unwrap();
        let manifest = fs::read(path.join(MANIFEST)).unwrap();
        let manifest: WeightsManifest = serde_json::from_slice(&manifest).unwrap();
        fs::remove_file(path.join(MANIFEST)).unwrap();
        let mut folder = PublishedFolder {
            path: path.clone(),
            is_adapter: false,
            tensors: manifest.tensors.clone(),
        };
        let engines = WeightsFolder::new(dir.path().join("w"), Some(base), FolderDtype::F32);
        let published = engines
            .publish(id(5), &Written(folder.clone()), &unused())
            .unwrap();
        fs::remove_dir_all(&path).unwrap();
        assert!(published.join("config.json").exists());
        let bytes = fs::read(published.join(TENSORS)).unwrap();
        assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok());
        let listed = fs::read(published.join(MANIFEST)).unwrap();
        let listed: WeightsManifest = serde_json::from_slice(&listed).unwrap();
        assert_eq!(listed.id(), id(5));
        assert_eq!(listed.tensors, manifest.tensors);
        folder.tensors.clear();
        let empty = engines.publish(id(6), &Written(folder), &unused());
        assert!(matches!(empty, Err(FolderError::Empty)));
        assert!(!dir.path().join("w/v00000006-000000aa").exists());
    }
}
