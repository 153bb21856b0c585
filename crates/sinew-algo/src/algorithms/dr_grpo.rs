//! Dr. GRPO: GRPO done right (Liu et al. 2025, arXiv 2503.20783).
//!
//! `A_i = R_i − mean(R)`, without the standard deviation that favours easy and hard tasks, and
//! `Σ_i Σ_t L / (B · length)` with a constant length, without the mean over an episode's own
//! tokens that favours short right and long wrong answers.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// The constant that stands for the generation budget; a recipe sets its own in `aggregation`.
/// With Adam it acts on gradient clipping alone.
pub const LENGTH: f32 = 1024.0;

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
