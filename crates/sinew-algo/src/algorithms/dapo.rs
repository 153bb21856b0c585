//! DAPO: decoupled clip and dynamic sampling (Yu et al. 2025, arXiv 2503.14476).
//!
//! The advantage is GRPO's. The upper clip is 0.28, so that unlikely tokens can grow. The loss is the mean
//! over all tokens of the batch. Groups with equal rewards are dropped and replaced by other tasks in at most
//! [`REFILL`] rounds (the paper continues until the batch is full). `overlong` is a soft length penalty. It
//! is off by default, because it needs the length limit of the run. `truncated = "mask"` excludes truncated
//! episodes from the loss.

use super::grpo;
use crate::composition::{Composition, EqualGroups, Filters, Truncated};
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Limits a step to four times its episodes, also if no task has groups with different rewards.
pub const REFILL: u32 = 3;

/// Default composition.
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
