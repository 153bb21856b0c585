//! REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).
//!
//! Token rewards `ρ_t = −kl·k1_t`, process rewards at their turn's end, the outcome at the last
//! sampled token; returns `G_t = ρ_t + γ·G_{t+1}` over the sampled tokens, carried across what
//! the environment wrote; whitened over the batch. No critic, no groups. The KL penalty is off
//! unless a recipe asks for it.

use super::grpo;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, Normalize};
use crate::kind::AlgorithmKind;
use crate::pipeline::AlgoError;
use sinew_types::Aggregation;

pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::ReinforcePp,
        advantage: Advantage::ReturnToGo { gamma: 1.0 },
        normalize: Normalize::Batch,
        aggregation: Aggregation::TokenMean,
        ..grpo::preset()
    }
}

/// `G_t` of every sampled token.
pub(crate) fn advantages(
    c: &Composition,
    gamma: f64,
    batch: &mut Batch<'_>,
) -> Result<(), AlgoError> {
    for i in batch.members().collect::<Vec<_>>() {
        for p in 0..batch.episodes[i].paths.len() {
            let episode = &batch.episodes[i];
            let rewards = super::token_rewards(c, episode, &episode.paths[p])?;
            let path = &mut batch.episodes[i].paths[p];
            let mut following = 0.0;
            for t in (0..rewards.len()).rev().filter(|&t| path.sampled[t]) {
                following = rewards[t] + gamma * following;
                path.advantages[t] = following;
            }
        }
    }
    Ok(())
}
