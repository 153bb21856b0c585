//! MaxRL: the advantage of maximum-likelihood training, as in prime-rl.
//!
//! `A_i = (R_i − mean) / mean` within the group, 0 where the mean is not positive: with rewards
//! of 0 and 1 the expected gradient is that of `log p(success)`, so that rare successes weigh
//! more. Rewards must not be negative to mean this.

use super::grpo;
use crate::composition::{Advantage, Baseline, Composition, Scale};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

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
