//! Weights as named tensors, and the manifest that publishes them.

use crate::ids::{Lineage, PolicyVersion, WeightsId};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper 16 bits of a binary32.
    #[serde(rename = "BF16")]
    Bf16,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name in safetensors files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

/// Bytes that are not those of a tensor of this type and shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes are not a tensor of {} {shape:?}, which has {expected}", .dtype.name())]
pub struct TensorSizeError {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape that was claimed.
    pub shape: Vec<usize>,
    /// Bytes that were given.
    pub bytes: usize,
    /// Bytes that such a tensor has.
    pub expected: usize,
}

/// The type and shape of a tensor, without its elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Sizes, the outermost first; `[out, in]` for matrices.
    pub shape: &'a [usize],
}

impl TensorInfo<'_> {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }
}

/// A tensor in host memory: row-major, little-endian. The storage is borrowed, or a copy where the tensor
/// lies elsewhere (on a GPU, or in another type). Its length always fits type and shape.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    info: TensorInfo<'a>,
    storage: Cow<'a, [u8]>,
}

// Values are seen as bytes as they lie in memory, and the format is little-endian.
const _: () = assert!(cfg!(target_endian = "little"));

impl<'a> TensorView<'a> {
    /// A tensor from its type, shape and bytes.
    ///
    /// # Errors
    /// If the storage does not have the bytes of such a tensor.
    pub fn new(
        dtype: Dtype,
        shape: &'a [usize],
        storage: Cow<'a, [u8]>,
    ) -> Result<Self, TensorSizeError> {
        let info = TensorInfo { dtype, shape };
        if storage.len() == info.bytes() {
            return Ok(Self { info, storage });
        }
        Err(TensorSizeError {
            dtype,
            shape: shape.to_vec(),
            bytes: storage.len(),
            expected: info.bytes(),
        })
    }

    /// Borrowed `f32` values.
    ///
    /// # Errors
    /// Fails as [`TensorView::new`] does.
    pub fn f32(shape: &'a [usize], values: &'a [f32]) -> Result<Self, TensorSizeError> {
        Self::new(
            Dtype::F32,
            shape,
            Cow::Borrowed(bytemuck::cast_slice(values)),
        )
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.info.dtype
    }

    /// Sizes, the outermost first.
    pub fn shape(&self) -> &'a [usize] {
        self.info.shape
    }

    /// Type and shape.
    pub fn info(&self) -> TensorInfo<'a> {
        self.info
    }

    /// All elements as bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.storage
    }

    /// All elements as bytes, without a copy where they are borrowed.
    pub fn into_bytes(self) -> Cow<'a, [u8]> {
        self.storage
    }

    /// All elements as `f32`: without a copy where they are borrowed `f32`.
    pub fn into_f32(self) -> Cow<'a, [f32]> {
        if let (Dtype::F32, Cow::Borrowed(bytes)) = (self.info.dtype, &self.storage)
            && let Ok(values) = bytemuck::try_cast_slice(bytes)
        {
            return Cow::Borrowed(values);
        }
        let bytes = &*self.storage;
        let pairs = bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
        Cow::Owned(match self.info.dtype {
            Dtype::F32 => {
                let fours = bytes.chunks_exact(4);
                fours
                    .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                    .collect()
            }
            Dtype::F16 => pairs
                .map(|pair| f16::from_le_bytes(pair).to_f32())
                .collect(),
            Dtype::Bf16 => pairs
                .map(|pair| bf16::from_le_bytes(pair).to_f32())
                .collect(),
        })
    }
}

/// Named tensors in the names of the Hugging Face layout (`model.layers.0.self_attn.q_proj.weight`).
///
/// Tensors on a device are copied to the host one by one, as they are requested: readers ask for one after
/// the other and keep none longer than needed.
pub trait TensorSource: Send + Sync {
    /// Every name, in a stable order.
    fn names(&self) -> Vec<String>;

    /// The tensor with its elements.
    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;

    /// Only type and shape. A source whose elements have to be copied overrides it.
    fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.tensor(name).map(|view| view.info())
    }

    /// The folder that holds exactly these tensors, if a trainer wrote them to one. Engines that read folders
    /// then need no second copy.
    fn folder(&self) -> Option<&PublishedFolder> {
        None
    }

    /// Address of the weights at a service that computes with them (`tinker://...`). Such a source has no
    /// tensors: only engines of that service can use it.
    fn address(&self) -> Option<&str> {
        None
    }
}

/// Weights that a trainer wrote as safetensors files in the Hugging Face layout.
#[derive(Clone, Debug, PartialEq)]
pub struct PublishedFolder {
    /// The folder. Its owner replaces it with the next version: whoever needs the files longer links them.
    pub path: PathBuf,
    /// Whether it holds LoRA adapters (PEFT's layout) and not the whole model.
    pub is_adapter: bool,
    /// All tensors with their files and checksums.
    pub tensors: Vec<WeightsManifestTensor>,
}

impl fmt::Debug for dyn TensorSource + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tensors = self.names();
        f.debug_struct("TensorSource")
            .field("tensors", &tensors.len())
            .finish_non_exhaustive()
    }
}

impl<T: TensorSource + ?Sized> TensorSource for &T {
    fn names(&self) -> Vec<String> {
        (**self).names()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        (**self).tensor(name)
    }

    fn info(&self, name: &str) -> Option<TensorInfo<'_>> {
        (**self).info(name)
    }

    fn folder(&self) -> Option<&PublishedFolder> {
        (**self).folder()
    }

    fn address(&self) -> Option<&str> {
        (**self).address()
    }
}

/// A few tensors as a source, in the order given.
#[derive(Clone, Debug, Default)]
pub struct TensorList<'a>(pub Vec<(String, TensorView<'a>)>);

impl TensorSource for TensorList<'_> {
    fn names(&self) -> Vec<String> {
        self.0.iter().map(|(name, _)| name.clone()).collect()
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (_, view) = self.0.iter().find(|(own, _)| own == name)?;
        Some(TensorView {
            info: view.info,
            storage: Cow::Borrowed(&view.storage),
        })
    }
}

/// The list of weights that a trainer publishes and engines load: all tensors, as they are or as differences.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightsManifest {
    /// The update that produced the weights.
    pub version: PolicyVersion,
    /// The session of the trainer that produced them.
    pub lineage: Lineage,
    /// The version that differences are of, of the same lineage; `None`: all tensors are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<PolicyVersion>,
    /// All tensors of the model.
    pub tensors: Vec<WeightsManifestTensor>,
}

impl WeightsManifest {
    /// Version and lineage of the weights.
    pub fn id(&self) -> WeightsId {
        WeightsId::new(self.version, self.lineage)
    }
}

/// One tensor of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightsManifestTensor {
    /// Name in the Hugging Face layout.
    pub name: String,
    /// Type of its elements in the file.
    #[serde(default = "published_before")]
    pub dtype: Dtype,
    /// Sizes, the outermost first.
    pub shape: Vec<usize>,
    /// Path of the safetensors file that holds it, relative to the manifest.
    pub file: String,
    /// BLAKE3 of the tensor's bytes, hexadecimal; of a difference, of the bytes that it leads to.
    pub blake3: String,
    /// Place of its difference to the base in the file, if it is published as one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delta: Option<DeltaSpan>,
}

/// Byte range of a file with the difference of a tensor to the base weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeltaSpan {
    /// First byte in the file.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Manifests without a type are of files with `f32`, or only the file names the type.
fn published_before() -> Dtype {
    Dtype::F32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_reads_as_f32_and_lengths_are_checked() {
        let values = [1.0f32, -2.5, 0.0];
        let view = TensorView::f32(&[3], &values).unwrap();
        assert!(matches!(view.clone().into_f32(), Cow::Borrowed(v) if v == values));
        let owned = TensorView::new(Dtype::F32, &[3], Cow::Owned(view.bytes().to_vec()));
        assert_eq!(*owned.unwrap().into_f32(), values);
        let halves: Vec<u8> = values
            .iter()
            .flat_map(|v| f16::from_f32(*v).to_le_bytes())
            .collect();
        let view = TensorView::new(Dtype::F16, &[3, 1], halves.into()).unwrap();
        assert_eq!(*view.into_f32(), values);
        let brains: Vec<u8> = values
            .iter()
            .flat_map(|v| bf16::from_f32(*v).to_le_bytes())
            .collect();
        let list = TensorList(vec![(
            "b".into(),
            TensorView::new(Dtype::Bf16, &[3], brains.into()).unwrap(),
        )]);
        assert_eq!(
            list.info("b").map(|i| (i.dtype, i.bytes())),
            Some((Dtype::Bf16, 6))
        );
        assert_eq!(*list.tensor("b").unwrap().into_f32(), values);
        let error = TensorView::f32(&[2, 2], &values).unwrap_err();
        assert_eq!(
            error.to_string(),
            "12 bytes are not a tensor of F32 [2, 2], which has 16"
        );
    }
}
