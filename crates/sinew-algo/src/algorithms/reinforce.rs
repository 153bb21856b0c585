//! REINFORCE (Williams 1992): `L = −R · ℓ_π`, no baseline.
//!
//! The estimator with the largest variance, for tasks with one episode each and no critic. The mean of the
//! batch is the baseline if `normalize = "batch"`.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Reinforce,
        advantage: Advantage::Group {
            baseline: Baseline::Zero,
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
