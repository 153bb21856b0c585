//! CISPO: clipped importance-sampling policy optimization (MiniMax 2025, MiniMax-M1,
//! arXiv 2506.13585).
//!
//! `L = −sg(clamp(r, 1−low, 1+high))·A·ℓ_π`: the weight is limited, and every token keeps its gradient. The
//! lower limit is off (`low = 1`), the upper one is 5. The loss is the mean over all tokens.

use super::grpo;
use crate::composition::Composition;
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Cispo,
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            surrogate: Surrogate::Cispo {
                low: 1.0,
                high: 4.0,
            },
            ..base.loss
        },
        ..base
    }
}
