//! Weights that the engines of a session begin with.

use sinew_types::{Fence, Lineage, PolicyVersion, TensorSource};
use std::sync::Arc;

/// Weights that an engine begins with, their version, and the lineage of all weights of the session.
#[derive(Clone)]
pub(crate) struct FirstWeights {
    pub(crate) version: PolicyVersion,
    pub(crate) lineage: Lineage,
    pub(crate) tensors: Arc<dyn TensorSource>,
    /// Fence of this process, without which no weights are published.
    pub(crate) fence: Fence,
}
