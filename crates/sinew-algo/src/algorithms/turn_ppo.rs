//! PPO with bi-level advantages (Wang et al. 2025, VAGEN, arXiv 2510.16907, section 4.2).
//!
//! The advantages over turns are `δ_k = r_k + γ_turn·V_{k+1} − V_k`, `A_k = δ_k + γ_turn·λ_turn·A_{k+1}` and
//! `G_k = A_k + V_k`. Here `V_k` is the value at a turn's last token and `r_k` its process reward (plus the
//! outcome for the last turn). GAE over the tokens of each turn follows, with `G_k` as the reward of its last
//! token. Turns are those of the trace, also with reward 0.

use super::{grpo, ppo};
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, Normalize, ProcessRewards};
use crate::episode::Path;
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use sinew_types::{Aggregation, LossSpec};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::TurnPpo,
        advantage: Advantage::TurnGae {
            gamma_turn: 0.95,
            lambda_turn: 1.0,
            gamma: 1.0,
            lambda: 1.0,
        },
        normalize: Normalize::Batch,
        aggregation: Aggregation::TokenMean,
        loss: LossSpec {
            value: Some(ppo::VALUE),
            ..base.loss
        },
        ..base
    }
}

/// Discounts of turns and tokens, see [`Advantage::TurnGae`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Discounts {
    pub(crate) gamma_turn: f64,
    pub(crate) lambda_turn: f64,
    pub(crate) gamma: f64,
    pub(crate) lambda: f64,
}

/// Computes advantages and returns of all paths.
pub(crate) fn advantages(
    c: &Composition,
    discounts: Discounts,
    batch: &mut Batch<'_>,
) -> Result<(), AlgoError> {
    for i in batch.members().collect::<Vec<_>>() {
        let outcome = batch.episodes[i].outcome;
        for p in 0..batch.episodes[i].paths.len() {
            let episode = &batch.episodes[i];
            let path = &episode.paths[p];
            let values = super::required(c, episode, path, "values", |c| c.values.as_ref())?;
            let after = super::value_after(c, episode, path)?;
            let path = &mut batch.episodes[i].paths[p];
            bi_level(discounts, c.rewards.process, outcome, &values, after, path);
        }
    }
    Ok(())
}

/// Advantages of one path. `values` are those before each token, `after` is the one after the last token.
fn bi_level(
    d: Discounts,
    process: ProcessRewards,
    outcome: f64,
    values: &[f64],
    after: f64,
    path: &mut Path,
) {
    let count = path.steps.len();
    let earned = |k: usize| {
        let own = match process {
            ProcessRewards::Sum => path.steps[k].reward,
            ProcessRewards::Ignore | ProcessRewards::Separate { .. } => 0.0,
        };
        own + if k + 1 == count { outcome } else { 0.0 }
    };
    let turns: Vec<usize> = (0..count).collect();
    let rewards: Vec<f64> = turns.iter().map(|&k| earned(k)).collect();
    let last_values: Vec<f64> = path.steps.iter().map(|s| values[s.last]).collect();
    let mut turn_returns = vec![0.0; count];
    ppo::gae(
        d.gamma_turn,
        d.lambda_turn,
        &turns,
        &rewards,
        &last_values,
        after,
        |k, a| {
            turn_returns[k] = a + last_values[k];
        },
    );
    let mut returns = vec![0.0; values.len()];
    let mut token_rewards = vec![0.0; values.len()];
    for (step, turn_return) in path.steps.iter().zip(turn_returns) {
        token_rewards[step.last] = turn_return;
        let inside = step.first..=step.last;
        let positions: Vec<usize> = inside.filter(|&t| path.sampled[t]).collect();
        ppo::gae(
            d.gamma,
            d.lambda,
            &positions,
            &token_rewards,
            values,
            0.0,
            |t, a| {
                path.advantages[t] = a;
                returns[t] = a + values[t];
            },
        );
    }
    path.returns = Some(returns);
}
