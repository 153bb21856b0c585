//! RLOO: REINFORCE with a leave-one-out baseline (Kool et al. 2019; Ahmadian et al. 2024,
//! arXiv 2402.14740).
//!
//! `A_i = R_i − mean_{j≠i} R_j`, an unbiased baseline. The loss is `−A · ℓ_π` of the whole episode: the sum
//! of its token losses.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Rloo,
        advantage: Advantage::Group {
            baseline: Baseline::LeaveOneOut,
            scale: Scale::One,
        },
        aggregation: Aggregation::SequenceMeanTokenSum,
        loss: LossSpec {
            surrogate: Surrogate::Reinforce,
            ..base.loss
        },
        ..base
    }
}
