//! SFT on the policy's own successes: rejection-sampling fine-tuning, expert iteration (Anthony et al. 2017;
//! Yuan et al. 2023, arXiv 2308.01825).
//!
//! The loss is `−ℓ_π` on the sampled tokens of successful episodes, with the mean over all tokens. The
//! setting `only_success = false` imitates every episode, which is distillation if a teacher sampled them.

use super::grpo;
use crate::composition::{Advantage, Composition, Filters};
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Sft,
        advantage: Advantage::One,
        filters: Filters {
            only_success: true,
            ..Filters::NONE
        },
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            surrogate: Surrogate::CrossEntropy,
            ..base.loss
        },
        ..base
    }
}
