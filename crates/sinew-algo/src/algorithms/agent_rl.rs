//! AgentRL's task advantage normalization (arXiv 2510.04206).
//!
//! GRPO's advantage, then `Ã = (Â − μ_i)/σ_i` with mean and deviation over all trained tokens of
//! task `i` in the batch, so that tasks of different difficulty and length pull alike. A task of the
//! paper is an environment with many prompts (ALFWorld, DB, KG, OS, WebShop): here the task kind.
//! Over the episodes of one prompt, GRPO's advantages have mean 0 and deviation 1 already. The paper
//! runs it with cross-policy sampling: the turns of an episode are drawn by the current policy and by
//! one that is a few updates old (`rollout.cross_policy` of a recipe).

use super::grpo;
use crate::composition::{Composition, Normalize};
use crate::kind::AlgorithmKind;

pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::AgentRl,
        normalize: Normalize::Environment,
        ..grpo::preset()
    }
}
