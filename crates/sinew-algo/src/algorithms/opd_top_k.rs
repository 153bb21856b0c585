//! On-policy distillation of a teacher's distribution (Agarwal et al. 2024, arXiv 2306.13649).
//!
//! On the student's own samples, at every sampled token, `KL(π‖teacher)` (or the other way
//! around) over the teacher's `k` most likely tokens and all others together: a gradient for
//! every one of them instead of [`super::opd`]'s single-sample estimate. No rewards, no ratio; the
//! divergence is differentiated as it stands.

use super::grpo;
use crate::composition::{Advantage, Composition};
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, Divergence, LossSpec, Surrogate, TeacherSpec};

/// Eight tokens hold nearly all of a confident teacher's mass.
pub(crate) const TEACHER: TeacherSpec = TeacherSpec {
    top_k: 8,
    divergence: Divergence::Reverse,
    coefficient: 1.0,
};

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
