//! REINFORCE++-baseline (Hu et al. 2025, arXiv 2501.03262).
//!
//! `R_i − mean(R)` of the group, the same for all tokens of an episode, then whitened over the
//! batch: the group's mean removes the task's difficulty, the batch's deviation scales. The
//! paper adds a k2 KL term to the loss; it is off unless a recipe asks for it.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Normalize, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

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
