//! GRPO with process supervision (Shao et al. 2024, arXiv 2402.03300, section 4.1.3), next to the
//! outcome.
//!
//! Outcome and process rewards are normalized apart: `A_t` is the outcome's group advantage plus
//! `weight` times the sum of the normalized rewards of the turns from `t`'s on. A large outcome
//! cannot drown the process rewards, nor the other way around. `weight` is 1.

use super::grpo;
use crate::composition::{Composition, ProcessRewards, Rewards};
use crate::kind::AlgorithmKind;

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
