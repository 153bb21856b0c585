//! AgentRL's task advantage normalization (arXiv 2510.04206).
//!
//! GRPO's advantage, then `Ã = (Â − μ_i)/σ_i` with mean and deviation over all trained tokens of
//! task `i` in the batch, so that tasks of different difficulty and length pull alike. The paper
//! runs it with cross-policy sampling: the turns of an episode are drawn by the current policy and
//! by one that is a few updates old (`rollout.cross_policy` of a recipe).

use super::grpo;
use crate::composition::{Composition, Normalize};
use crate::kind::AlgorithmKind;

pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::AgentRl,
        normalize: Normalize::Task,
        ..grpo::preset()
    }
}
