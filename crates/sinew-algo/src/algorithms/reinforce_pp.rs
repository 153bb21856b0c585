//! REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).
//!
//! Token rewards are `ρ_t = −kl·k1_t`, plus process rewards at the end of their turn and the outcome at the
//! last sampled token. Returns are `G_t = ρ_t + γ·G_{t+1}` over the sampled tokens, skipping text of the
//! environment, and are whitened over the batch. No critic, no groups. The KL penalty is off by default.

use super::grpo;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, Normalize};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use sinew_types::Aggregation;

/// Default composition.
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
