//! DAPO: decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476).
//!
//! GRPO's advantage; the upper clip raised to 0.28 so that unlikely tokens can grow; mean over
//! all tokens of the batch; groups with equal rewards leave and other tasks take their places, in
//! at most [`REFILL`] rounds (the paper goes on until the batch is full); `overlong` punishes length
//! softly (it needs the run's own limit, so it is off until given) and
//! `truncated = "mask"` keeps episodes that a limit cut out of the loss.

use super::grpo;
use crate::composition::{Composition, EqualGroups, Filters, Truncated};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Bounds a step to four times its episodes, also where no task is left that divides a group.
pub const REFILL: u32 = 3;

pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::Dapo,
        filters: Filters {
            truncated: Truncated::Mask,
            equal_groups: EqualGroups::Drop,
            refill: Some(REFILL),
            ..Filters::NONE
        },
        aggregation: Aggregation::TokenMean,
        loss: grpo::clip_loss(0.2, 0.28),
        ..grpo::preset()
    }
}
