//! On-policy distillation of a teacher's distribution (Agarwal et al. 2024, arXiv 2306.13649).
//!
//! The loss at every token of the student's own samples is `KL(π‖teacher)` (or the reverse) over the
//! teacher's `k` most likely tokens and one bucket for all others. It gives a gradient for each of these
//! tokens, in place of [`super::opd`]'s single-sample estimate. No rewards, no ratio.

use super::grpo;
use crate::composition::{Advantage, Composition};
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, Divergence, LossSpec, Surrogate, TeacherSpec};

/// Eight tokens have nearly all of the probability mass of a confident teacher.
pub(crate) const TEACHER: TeacherSpec = TeacherSpec {
    top_k: 8,
    divergence: Divergence::Reverse,
    coefficient: 1.0,
};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::OpdTopK,
        advantage: Advantage::None,
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            surrogate: Surrogate::Reinforce,
            teacher: Some(TEACHER),
            ..base.loss
        },
        ..base
    }
}
