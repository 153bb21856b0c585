//! ERPO: environment-level advantage normalization (Cai et al. 2025, AutoForge, arXiv 2512.22857).
//!
//! `A_i = (R_i − mean(group)) / (σ_environment + ε)`, equation 4. The baseline is that of the group. The
//! deviation is that of the rewards `R` of all episodes of the environment, because a small group gives a
//! poor estimate. It is that of the batch if a run has one environment.

use super::grpo::{self, STD_EPSILON};
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::Erpo,
        advantage: Advantage::Group {
            baseline: Baseline::Mean,
            scale: Scale::EnvironmentStd {
                epsilon: STD_EPSILON,
            },
        },
        ..grpo::preset()
    }
}
