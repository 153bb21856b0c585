//! StarPO-S: stabilized trajectory-level optimization (Wang et al. 2025, RAGEN,
//! arXiv 2504.20073).
//!
//! Of the groups, the quarter with the largest deviation of rewards trains; no KL term; the
//! upper clip raised to 0.28. On GRPO's advantage here; with `advantage = { type = "gae", ... }`
//! and a critic it is the paper's PPO form.

use super::grpo;
use crate::composition::{Composition, Filters};
use crate::kind::AlgorithmKind;

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
