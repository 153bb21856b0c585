//! Dr. GRPO: GRPO done right (Liu et al. 2025, arXiv 2503.20783).
//!
//! `A_i = R_i − mean(R)`, without the standard deviation, which favours easy and hard tasks. The loss is
//! `Σ_i Σ_t L / (B · length)` with a constant length, without the mean over an episode's tokens, which
//! favours short correct and long wrong answers.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Default length, for the generation budget. A recipe sets it in `aggregation`. It affects only gradient
/// clipping if the optimizer is Adam.
pub const LENGTH: f32 = 1024.0;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::DrGrpo,
        advantage: Advantage::Group {
            baseline: Baseline::Mean,
            scale: Scale::One,
        },
        aggregation: Aggregation::SequenceMeanTokenSumNorm { length: LENGTH },
        ..grpo::preset()
    }
}
