//! SAPO: soft adaptive policy optimization (Qwen team 2025, arXiv 2511.20347).
//!
//! The advantage is GRPO's. A gate replaces the clip: `−(4/τ)·σ(τ(r−1))·A` reduces the gradient as the ratio
//! moves away from 1, faster for tokens with negative advantage (τ = 1.05 compared with 1).

use super::grpo;
use crate::composition::Composition;
use crate::kind::AlgorithmKind;
use sinew_types::{LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Sapo,
        loss: LossSpec {
            surrogate: Surrogate::Soft {
                tau_pos: 1.0,
                tau_neg: 1.05,
            },
            ..base.loss
        },
        ..base
    }
}
