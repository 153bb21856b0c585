//! GRPO with process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3), in addition to the
//! outcome.
//!
//! Outcome and process rewards are normalized separately, so that neither dominates because of its scale.
//! `A_t` is the outcome's group advantage plus `weight` times the sum of the normalized rewards from the turn
//! of `t` on. `weight` is 1.

use super::grpo;
use crate::composition::{Composition, ProcessRewards, Rewards};
use crate::kind::AlgorithmKind;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::ProcessGrpo,
        rewards: Rewards {
            process: ProcessRewards::Separate { weight: 1.0 },
            ..Rewards::PLAIN
        },
        ..grpo::preset()
    }
}
