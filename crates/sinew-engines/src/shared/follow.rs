//! The engine's side: the newest version, verified.

use super::tensors::{TensorFile, invalid};
use super::{DELTAS, LATEST, MANIFEST, TENSORS, delta};
use sinew_types::{
    DeltaSpan, PolicyVersion, TensorSource, TensorView, WeightsId, WeightsManifest,
    WeightsManifestTensor,
};
use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Most bytes of a manifest; a thousand tensors take about 200 KB.
const MAX_MANIFEST: u64 = 64 << 20;

/// Reasons why published weights are not taken.
#[derive(Debug, thiserror::Error)]
pub enum FollowError {
    /// A file of the version could not be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder that was read.
        path: PathBuf,
        /// Error of the operating system, or of a file that is malformed or too large.
        source: io::Error,
    },
    /// A sum, a length or a name differs from the manifest.
    #[error("{}: tensor `{tensor}`: {why}; these weights are not loaded", path.display())]
    Tensor {
        /// Folder of the version.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Reason in words.
        why: String,
    },
}

/// Looks at a folder that a trainer publishes in.
#[derive(Debug)]
pub struct WeightsFollower {
    root: PathBuf,
    /// Hash of the manifest that was taken last, which contains version, lineage and the sums of all
    /// tensors: a version may be published again with other weights.
    taken: Option<blake3::Hash>,
}

/// Published weights, verified by their checksums.
#[derive(Debug)]
pub struct FollowedWeights {
    manifest: WeightsManifest,
    tensors: Vec<Vec<u8>>,
}

impl FollowedWeights {
    /// The update that made them.
    pub fn version(&self) -> PolicyVersion {
        self.manifest.version
    }

    /// Version and lineage.
    pub fn id(&self) -> WeightsId {
        self.manifest.id()
    }

    /// The version that they were published as a difference of.
    pub fn base(&self) -> Option<PolicyVersion> {
        self.manifest.base
    }
}

impl TensorSource for FollowedWeights {
    fn names(&self) -> Vec<String> {
        self.manifest
            .tensors
            .iter()
            .map(|t| t.name.clone())
            .collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let listed = &self.manifest.tensors;
        let at = listed.iter().position(|t| t.name == name)?;
        let (tensor, bytes) = (listed.get(at)?, self.tensors.get(at)?);
        TensorView::new(tensor.dtype, &tensor.shape, Cow::Borrowed(bytes)).ok()
    }
}

impl WeightsFollower {
    /// Follows a folder, which need not be there yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            taken: None,
        }
    }

    /// The newest version with all its tensors, if it is not the one that was given last. One that is not
    /// taken for a reason is examined again at the next call.
    ///
    /// # Errors
    /// If it cannot be read, or a checksum is wrong. The publisher may have removed it meanwhile: then the
    /// next look finds a newer one.
    pub fn look(&mut self) -> Result<Option<FollowedWeights>, FollowError> {
        let Some(id) = self.latest()? else {
            return Ok(None);
        };
        let folder = self.root.join(id.folder_name());
        let path = folder.join(MANIFEST);
        let bytes = limited(&path, MAX_MANIFEST)?;
        let hash = blake3::hash(&bytes);
        if self.taken == Some(hash) {
            return Ok(None);
        }
        let manifest = manifest_of(&path, &bytes, id)?;
        let tensors = self.read(&folder, &manifest)?;
        self.taken = Some(hash);
        Ok(Some(FollowedWeights { manifest, tensors }))
    }

    /// Checks a version in `root`, whether or not it is the newest one: all of its tensors are there, and the
    /// checksum of each is right.
    ///
    /// # Errors
    /// If a file cannot be read, or a checksum is wrong.
    pub fn verify(root: &Path, id: WeightsId) -> Result<(), FollowError> {
        let folder = root.join(id.folder_name());
        let path = folder.join(MANIFEST);
        let manifest = manifest_of(&path, &limited(&path, MAX_MANIFEST)?, id)?;
        Self::new(root).read(&folder, &manifest).map(drop)
    }

    /// The weights that `LATEST` names; `None` before the first version.
    fn latest(&self) -> Result<Option<WeightsId>, FollowError> {
        let path = self.root.join(LATEST);
        let text = match limited(&path, 64) {
            Err(FollowError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(None);
            }
            read => read?,
        };
        let text = String::from_utf8_lossy(&text);
        let id = text.trim().parse::<WeightsId>();
        let id = id.map_err(|e| refused(&path, invalid(e.to_string())))?;
        Ok(Some(id))
    }

    /// All tensors of a version, verified.
    fn read(&self, folder: &Path, manifest: &WeightsManifest) -> Result<Vec<Vec<u8>>, FollowError> {
        let whole = match manifest.base {
            // Differences are of an anchor of the same session.
            Some(base) => {
                let base = WeightsId::new(base, manifest.lineage);
                self.root.join(base.folder_name())
            }
            None => folder.to_owned(),
        };
        let whole = whole.join(TENSORS);
        let base = TensorFile::open(&whole).map_err(|e| refused(&whole, e))?;
        let path = folder.join(DELTAS);
        let deltas = match manifest.base {
            Some(_) => Some(File::open(&path).map_err(|e| refused(&path, e))?),
            None => None,
        };
        let read = |tensor: &WeightsManifestTensor| {
            let wrong = |why: String| FollowError::Tensor {
                path: folder.to_owned(),
                tensor: tensor.name.clone(),
                why,
            };
            let elements = tensor
                .shape
                .iter()
                .try_fold(1usize, |n, d| n.checked_mul(*d));
            let expected = elements.and_then(|n| n.checked_mul(tensor.dtype.bytes()));
            let expected = expected.ok_or_else(|| wrong("its shape is too large".into()))?;
            let bytes = base.read(&tensor.name, expected);
            let mut bytes = bytes.map_err(|e| wrong(e.to_string()))?;
            match (&deltas, tensor.delta) {
                (Some(file), Some(span)) => {
                    let delta = stretch(file, span).map_err(|e| wrong(e.to_string()))?;
                    if !delta::apply(&mut bytes, &delta, tensor.dtype.bytes()) {
                        return Err(wrong("its difference is of another tensor".into()));
                    }
                }
                (None, None) => {}
                _ => return Err(wrong("it is not published as the others are".into())),
            }
            if blake3::hash(&bytes).to_hex().as_str() == tensor.blake3 {
                Ok(bytes)
            } else {
                Err(wrong("its checksum is wrong".into()))
            }
        };
        manifest.tensors.iter().map(read).collect()
    }
}

/// The manifest in a file, which must be that of `id`.
fn manifest_of(path: &Path, bytes: &[u8], id: WeightsId) -> Result<WeightsManifest, FollowError> {
    let manifest: WeightsManifest =
        serde_json::from_slice(bytes).map_err(|e| refused(path, invalid(e.to_string())))?;
    if manifest.id() == id {
        return Ok(manifest);
    }
    let why = format!("it is of {}, its folder of {id}", manifest.id());
    Err(refused(path, invalid(why)))
}

fn refused(path: &Path, source: io::Error) -> FollowError {
    FollowError::Io {
        path: path.to_owned(),
        source,
    }
}

/// A small file.
fn limited(path: &Path, limit: u64) -> Result<Vec<u8>, FollowError> {
    let failed = |e| refused(path, e);
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    let read = file
        .take(limit + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if read as u64 > limit {
        Err(refused(
            path,
            invalid(format!("it has more than {limit} bytes")),
        ))
    } else {
        Ok(bytes)
    }
}

/// A part of a file, within its length.
fn stretch(file: &File, span: DeltaSpan) -> io::Result<Vec<u8>> {
    let length = file.metadata()?.len();
    if span
        .offset
        .checked_add(span.bytes)
        .is_none_or(|end| end > length)
    {
        return Err(invalid("its difference lies behind the end of the file"));
    }
    let mut bytes = vec![0; span.bytes as usize];
    file.read_exact_at(&mut bytes, span.offset)?;
    Ok(bytes)
}
