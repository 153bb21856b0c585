//! StarPO-S: stabilized trajectory-level optimization (Wang et al. 2025, RAGEN,
//! arXiv 2504.20073).
//!
//! Trains on the quarter of groups with the largest reward deviation. No KL term, and an upper clip of 0.28.
//! The preset uses GRPO's advantage. The setting `advantage = { type = "gae", ... }` and a critic give the
//! paper's PPO form.

use super::grpo;
use crate::composition::{Composition, Filters};
use crate::kind::AlgorithmKind;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::StarpoS,
        filters: Filters {
            keep_top_std: Some(0.25),
            ..Filters::NONE
        },
        loss: grpo::clip_loss(0.2, 0.28),
        ..grpo::preset()
    }
}
