//! Weights that the ranks wrote into a folder.
//!
//! Tensors are read by position from files that stay open: the folder may be renamed or removed meanwhile.
//! No memory map: a file that shrinks while it is read becomes an error, where a map would end the process.

use crate::error::TorchError;
use safetensors::tensor::Metadata;
use sinew_types::{
    Dtype, PolicyVersion, PublishedFolder, TensorInfo, TensorSource, TensorView,
    WeightsManifestTensor,
};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

/// Maximum bytes of a file's list of tensors.
const MAX_HEADER: u64 = 64 << 20;
/// Ends of the names of temporary folders.
const STAGING: &str = ".trainer";

/// Makes the empty temporary folder of a version, and removes those of other versions but `keep`, which an
/// engine may still read.
///
/// # Errors
/// If the file system refuses.
pub(crate) fn staging(
    root: &Path,
    version: PolicyVersion,
    keep: Option<PolicyVersion>,
) -> Result<PathBuf, TorchError> {
    let name = |version: PolicyVersion| format!(".v{:08}{STAGING}", version.0);
    fs::create_dir_all(root).map_err(TorchError::io("create", root))?;
    let kept = keep.filter(|keep| *keep != version).map(name);
    for entry in fs::read_dir(root).map_err(TorchError::io("list", root))? {
        let entry = entry.map_err(TorchError::io("list", root))?;
        let found = entry.file_name().to_string_lossy().into_owned();
        let own = found.starts_with(".v") && found.ends_with(STAGING);
        if own && Some(&found) != kept.as_ref() {
            let path = entry.path();
            fs::remove_dir_all(&path).map_err(TorchError::io("remove", &path))?;
        }
    }
    let path = root.join(name(version));
    fs::create_dir(&path).map_err(TorchError::io("create", &path))?;
    Ok(path)
}

/// The place of a tensor.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Index in the files.
    file: usize,
    /// Index in the published list.
    tensor: usize,
    /// First byte in the file.
    offset: u64,
}

/// The tensors of a folder that the ranks wrote, each read when it is asked for.
#[derive(Debug)]
pub struct FolderTensors {
    published: PublishedFolder,
    files: Vec<File>,
    places: HashMap<String, Place>,
}

impl FolderTensors {
    /// Opens all files of a folder and compares their lists of tensors with the published one. No tensor is
    /// read.
    ///
    /// # Errors
    /// If a file cannot be read, or a tensor is missing, of another type or shape, or cut.
    pub fn open(published: PublishedFolder) -> Result<Self, TorchError> {
        let mut by_file: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (index, tensor) in published.tensors.iter().enumerate() {
            by_file.entry(&tensor.file).or_default().push(index);
        }
        let (mut files, mut places) = (Vec::new(), HashMap::new());
        for (name, indices) in by_file {
            let path = inside(&published.path, name)?;
            let listed = Listed::open(&path)?;
            for tensor in indices {
                let wanted = &published.tensors[tensor];
                let offset = listed.find(&path, wanted)?;
                let place = Place {
                    file: files.len(),
                    tensor,
                    offset,
                };
                if places.insert(wanted.name.clone(), place).is_some() {
                    return Err(damaged(&path, &format!("`{}` is named twice", wanted.name)));
                }
            }
            files.push(listed.file);
        }
        Ok(Self {
            published,
            files,
            places,
        })
    }

    fn entry(&self, name: &str) -> Option<(Place, &WeightsManifestTensor)> {
        let place = *self.places.get(name)?;
        Some((place, self.published.tensors.get(place.tensor)?))
    }
}

impl TensorSource for FolderTensors {
    fn names(&self) -> Vec<String> {
        let tensors = self.published.tensors.iter();
        tensors.map(|tensor| tensor.name.clone()).collect()
    }

    /// Reads the tensor. `None` also if its file cannot be read any more.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (place, tensor) = self.entry(name)?;
        let mut bytes = vec![0; info(tensor).bytes()];
        let file = self.files.get(place.file)?;
        file.read_exact_at(&mut bytes, place.offset).ok()?;
        TensorView::new(tensor.dtype, &tensor.shape, Cow::Owned(bytes)).ok()
    }

    fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        let (_, tensor) = self.entry(name)?;
        Some(info(tensor))
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        Some(&self.published)
    }
}

fn info(tensor: &WeightsManifestTensor) -> TensorInfo<'_> {
    TensorInfo {
        dtype: tensor.dtype,
        shape: &tensor.shape,
    }
}

/// The path of a file below a folder.
fn inside(folder: &Path, name: &str) -> Result<PathBuf, TorchError> {
    let path = folder.join(name);
    let mut parts = Path::new(name).components();
    if !name.is_empty() && parts.all(|part| matches!(part, Component::Normal(_))) {
        return Ok(path);
    }
    Err(damaged(&path, "its path leaves the folder"))
}

fn damaged(path: &Path, why: &str) -> TorchError {
    TorchError::Answer {
        verb: "publish",
        why: format!("{}: {why}", path.display()),
    }
}

/// An open file with its list of tensors.
struct Listed {
    file: File,
    length: u64,
    /// First byte of the data.
    start: u64,
    metadata: Metadata,
}

impl Listed {
    fn open(path: &Path) -> Result<Self, TorchError> {
        let io = || TorchError::io("read", path);
        let file = File::open(path).map_err(io())?;
        let length = file.metadata().map_err(io())?.len();
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(io())?;
        let start = u64::from_le_bytes(prefix).saturating_add(8);
        if start > length.min(MAX_HEADER) {
            return Err(damaged(path, "its list of tensors is longer than allowed"));
        }
        let mut header = vec![0; start as usize - 8];
        file.read_exact_at(&mut header, 8).map_err(io())?;
        let metadata =
            serde_json::from_slice(&header).map_err(|e| damaged(path, &e.to_string()))?;
        Ok(Self {
            file,
            length,
            start,
            metadata,
        })
    }

    /// The first byte of a tensor, which must be as it was published.
    fn find(&self, path: &Path, wanted: &WeightsManifestTensor) -> Result<u64, TorchError> {
        let name = &wanted.name;
        let wrong = |why: &str| damaged(path, &format!("`{name}` {why}"));
        let found = self.metadata.info(name);
        let found = found.ok_or_else(|| wrong("is not there"))?;
        let dtype = match wanted.dtype {
            Dtype::F32 => safetensors::Dtype::F32,
            Dtype::F16 => safetensors::Dtype::F16,
            Dtype::Bf16 => safetensors::Dtype::BF16,
        };
        if found.dtype != dtype || found.shape != wanted.shape {
            return Err(wrong(&format!(
                "is {:?} {:?}, published as {} {:?}",
                found.dtype,
                found.shape,
                wanted.dtype.name(),
                wanted.shape
            )));
        }
        let (from, to) = found.data_offsets;
        let end = self.start.saturating_add(to as u64);
        if end > self.length || to.checked_sub(from) != Some(info(wanted).bytes()) {
            return Err(wrong("is cut"));
        }
        Ok(self.start + from as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView as Stored;

    fn published(dir: &Path, shape: &[usize]) -> PublishedFolder {
        let values = [1.0f32, 2.0, 3.0, 4.0];
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let view = Stored::new(safetensors::Dtype::F32, vec![2, 2], &bytes).unwrap();
        safetensors::serialize_to_file([("a.weight", view)], None, &dir.join("model.safetensors"))
            .unwrap();
        PublishedFolder {
            path: dir.to_owned(),
            is_adapter: false,
            tensors: vec![WeightsManifestTensor {
                name: "a.weight".into(),
                dtype: Dtype::F32,
                shape: shape.to_vec(),
                file: "model.safetensors".into(),
                blake3: String::new(),
                delta: None,
            }],
        }
    }

    #[test]
    fn tensors_are_read_after_their_folder_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let tensors = FolderTensors::open(published(dir.path(), &[2, 2])).unwrap();
        drop(dir);
        assert_eq!(tensors.names(), ["a.weight"]);
        let view = tensors.tensor("a.weight").unwrap();
        assert_eq!(Some(view.info()), tensors.info("a.weight"));
        assert_eq!(*view.into_f32(), [1.0, 2.0, 3.0, 4.0]);
        assert!(tensors.tensor("b").is_none());
        assert!(tensors.folder().is_some_and(|folder| !folder.is_adapter));
    }

    #[test]
    fn files_that_differ_from_the_list_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let refused = |edit: &dyn Fn(&mut PublishedFolder), part: &str| {
            let mut folder = published(dir.path(), &[2, 2]);
            edit(&mut folder);
            let error = FolderTensors::open(folder).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        refused(&|f| f.tensors[0].shape = vec![4], "published as F32 [4]");
        refused(&|f| f.tensors[0].dtype = Dtype::Bf16, "published as BF16");
        refused(&|f| f.tensors[0].name = "b".into(), "`b` is not there");
        refused(&|f| f.tensors[0].file = "../x".into(), "leaves the folder");
        refused(&|f| f.tensors[0].file = "other".into(), "cannot read");
        let cut = dir.path().join("model.safetensors");
        let folder = published(dir.path(), &[2, 2]);
        let bytes = fs::read(&cut).unwrap();
        fs::write(&cut, &bytes[..bytes.len() - 4]).unwrap();
        let error = FolderTensors::open(folder).unwrap_err().to_string();
        assert!(error.contains("is cut"), "{error}");
    }

    #[test]
    fn only_the_last_version_stays_beside_a_new_one() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("weights");
        let v = PolicyVersion;
        for (version, keep) in [(1, None), (2, Some(v(1))), (3, Some(v(2))), (3, Some(v(3)))] {
            let path = staging(&root, v(version), keep).unwrap();
            assert!(fs::read_dir(&path).unwrap().next().is_none());
            fs::write(path.join("file"), "").unwrap();
        }
        fs::create_dir(root.join("v00000001")).unwrap();
        staging(&root, v(4), Some(v(3))).unwrap();
        let names = fs::read_dir(&root).unwrap();
        let mut names: Vec<_> = names.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(
            names,
            [".v00000003.trainer", ".v00000004.trainer", "v00000001"]
        );
    }
}
