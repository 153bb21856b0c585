//! Weights as named tensors, and the manifest that publishes them.

use crate::ids::PolicyVersion;
use serde::{Deserialize, Serialize};

/// A borrowed f32 tensor, row-major.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub shape: &'a [usize],
    pub data: &'a [f32],
}

/// Named tensors in the names of the Hugging Face layout (`model.layers.0.self_attn.q_proj.weight`).
pub trait TensorSource: Send + Sync {
    /// Every name, in a stable order.
    fn names(&self) -> Vec<String>;

    fn tensor(&self, name: &str) -> Option<TensorView<'_>>;
}

/// What a trainer publishes and engines load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightsManifest {
    pub version: PolicyVersion,
    /// Version that this one is a delta to; `None` for a full set.
    pub base: Option<PolicyVersion>,
    pub tensors: Vec<WeightsManifestTensor>,
}

/// One tensor of a manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WeightsManifestTensor {
    pub name: String,
    pub shape: Vec<usize>,
    /// Path of the safetensors file that holds it, relative to the manifest.
    pub file: String,
    /// BLAKE3 of the tensor's bytes, hexadecimal.
    pub blake3: String,
}
