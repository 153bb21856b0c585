//! AgentRL's task advantage normalization (arXiv 2510.04206).
//!
//! The advantage is GRPO's, then `Ã_{i,s,g,t,k} = (Â_{i,s,g,t,k} − μ_i)/σ_i` with mean and deviation over all
//! trained tokens of task `i` in the batch, so that tasks of different difficulty and length have equal
//! influence. A task `i` of the paper is an environment (ALFWorld, DB, KG, OS, WebShop) with many prompts
//! `s`: here an environment of a recipe's mixture, see [`sinew_types::Trace::environment`]. GRPO's advantages
//! already have mean 0 and deviation 1 over the episodes of one prompt; if there is only one environment, the
//! whole batch is whitened. The paper combines it with cross-policy sampling: the current policy and one that
//! is a few updates old sample the turns of an episode (`rollout.cross_policy`).

use super::grpo;
use crate::composition::{Composition, Normalize};
use crate::kind::AlgorithmKind;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::AgentRl,
        normalize: Normalize::Environment,
        ..grpo::preset()
    }
}
