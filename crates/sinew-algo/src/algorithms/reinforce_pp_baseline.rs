//! REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).
//!
//! `R_i − mean(R)` of the group, equal for all tokens of an episode, then whitened over the batch. The mean
//! of the group removes the difficulty of the task, and the deviation of the batch sets the scale. The
//! paper's k2 KL term in the loss is off by default.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Normalize, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::ReinforcePpBaseline,
        advantage: Advantage::Group {
            baseline: Baseline::Mean,
            scale: Scale::One,
        },
        normalize: Normalize::Batch,
        aggregation: Aggregation::TokenMean,
        ..grpo::preset()
    }
}
