//! PPO with a critic (Schulman et al. 2017, arXiv 1707.06347) and generalized advantage
//! estimation (Schulman et al. 2015, arXiv 1506.02438).
//!
//! `δ_t = ρ_t + γ·V_{t+1} − V_t`, `A_t = δ_t + γλ·A_{t+1}`, returns `A + V`, where `t + 1` is the next
//! sampled token: text of the environment is not an action, and the recursion skips it. The value after the
//! last token is 0, or the critic's for truncated episodes with `truncated = "bootstrap"`. γ = λ = 1.
//! Advantages are whitened over the batch, the loss is the mean over all tokens, and the value loss is ½·0.5
//! of the larger of plain and clipped (0.2) squared error.

use super::grpo;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, Normalize};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec};

/// Coefficient and clip of the value loss.
pub(crate) const VALUE: (f32, Option<f32>) = (0.5, Some(0.2));

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Ppo,
        advantage: Advantage::Gae {
            gamma: 1.0,
            lambda: 1.0,
        },
        normalize: Normalize::Batch,
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            value: Some(VALUE),
            ..base.loss
        },
        ..base
    }
}

/// Computes GAE over the sampled tokens of each path.
pub(crate) fn advantages(
    c: &Composition,
    gamma: f64,
    lambda: f64,
    batch: &mut Batch<'_>,
) -> Result<(), AlgoError> {
    for i in batch.members().collect::<Vec<_>>() {
        for p in 0..batch.episodes[i].paths.len() {
            let episode = &batch.episodes[i];
            let rewards = super::token_rewards(c, episode, &episode.paths[p])?;
            let path = &episode.paths[p];
            let values = super::required(c, episode, path, "values", |c| c.values.as_ref())?;
            let after = super::value_after(c, episode, path)?;
            let path = &mut batch.episodes[i].paths[p];
            let positions: Vec<usize> = (0..rewards.len()).filter(|&t| path.sampled[t]).collect();
            let mut returns = vec![0.0; rewards.len()];
            gae(
                gamma,
                lambda,
                &positions,
                &rewards,
                &values,
                after,
                |t, a| {
                    path.advantages[t] = a;
                    returns[t] = a + values[t];
                },
            );
            path.returns = Some(returns);
        }
    }
    Ok(())
}

/// GAE backward over `positions` with the discounts γ and λ. `after` is the value after the last position, 0
/// at the end of an episode. Calls `each` with position and advantage.
pub(crate) fn gae(
    gamma: f64,
    lambda: f64,
    positions: &[usize],
    rewards: &[f64],
    values: &[f64],
    after: f64,
    mut each: impl FnMut(usize, f64),
) {
    let mut next_value = after;
    let mut running = 0.0;
    for &t in positions.iter().rev() {
        let delta = rewards[t] + gamma * next_value - values[t];
        running = delta + gamma * lambda * running;
        next_value = values[t];
        each(t, running);
    }
}
