//! ERPO: environment-level advantage normalization (AutoForge, 2025).
//!
//! `A_i = (R_i − mean(group)) / (σ_environment + ε)`: the baseline is the group's, the deviation
//! that of `R − mean` over all episodes of the same task kind, which a group of few episodes
//! estimates badly.

use super::grpo::{self, STD_EPSILON};
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;

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
