//! MaxRL: the advantage of maximum-likelihood training, as in prime-rl.
//!
//! `A_i = (R_i − mean) / mean` within the group, 0 if the mean is not positive. Rewards of 0 and 1 give the
//! expected gradient of `log p(success)`, so that rare successes have more weight. Requires non-negative
//! rewards.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::MaxRl,
        advantage: Advantage::Group {
            baseline: Baseline::Mean,
            scale: Scale::GroupMean,
        },
        aggregation: Aggregation::TokenMean,
        ..grpo::preset()
    }
}
