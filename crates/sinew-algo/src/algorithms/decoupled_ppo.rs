//! Decoupled PPO, for samples of older weights (Hilton et al. 2022, arXiv 2110.00641; AReaL,
//! Fu et al. 2025, arXiv 2505.24298).
//!
//! The clip is around a proximal policy `p` (the weights before the update), and the gap to the
//! policy that sampled is an importance weight: `L = w·max(−rA, −clip(r)A)` with
//! `r = π/p`, `w = p/b`. Tokens with `w > 5` leave the loss; the denominator keeps them. GRPO's
//! advantage.

use super::grpo;
use crate::composition::Composition;
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, Correction, LossSpec, RejectionLevel, RejectionMetric};

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
