//! Weights that are at a service.

use sinew_types::{TensorSource, TensorView};

/// Weights at an address of a service, for its own samplers. There are no tensors of them here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceWeights {
    path: String,
}

impl ServiceWeights {
    /// The weights at `tinker://MODEL_ID/sampler_weights/NAME`.
    pub fn new(path: impl Into<String>) -> Self {
        Self { path: path.into() }
    }
}

impl TensorSource for ServiceWeights {
    fn names(&self) -> Vec<String> {
        Vec::new()
    }

    fn tensor(&self, _name: &str) -> Option<TensorView<'_>> {
        None
    }

    fn address(&self) -> Option<&str> {
        Some(&self.path)
    }
}
