//! GSPO: group sequence policy optimization (Zheng et al. 2025, arXiv 2507.18071).
//!
//! The advantage is GRPO's. The ratio is that of the whole sequence, `s = exp(mean_t(ℓ_π − ℓ_old))`, with a
//! clip range for a mean: 3e-4 below, 4e-4 above (section 5.1).

use super::grpo;
use crate::composition::Composition;
use crate::kind::AlgorithmKind;
use sinew_types::{LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Gspo,
        loss: LossSpec {
            surrogate: Surrogate::SequenceClip {
                low: 3e-4,
                high: 4e-4,
            },
            ..base.loss
        },
        ..base
    }
}
