//! Decoupled PPO, for samples of older weights (Hilton et al. 2022, arXiv 2110.00641; AReaL,
//! Fu et al. 2025, arXiv 2505.24298).
//!
//! The clip is around a proximal policy `p` (the weights before the update), and an importance weight
//! corrects the difference to the sampling policy `b`: `L = w·max(−rA, −clip(r)A)` with `r = π/p`, `w = p/b`.
//! Tokens with `w > 5` have no loss, but count in the denominator. The advantage is GRPO's.

use super::grpo;
use crate::composition::Composition;
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, Correction, LossSpec, RejectionLevel, RejectionMetric};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::DecoupledPpo,
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            correction: Correction::Reject {
                metric: RejectionMetric::Ratio,
                level: RejectionLevel::Token,
                upper: 5.0,
            },
            ..base.loss
        },
        ..base
    }
}
