//! One file an algorithm: its formula, paper and preset, and what only it computes.

pub mod agent_rl;
pub mod cispo;
pub mod dapo;
pub mod decoupled_ppo;
pub mod dpo;
pub mod dr_grpo;
pub mod erpo;
pub mod gigpo;
pub mod grpo;
pub mod grpo_roc;
pub mod gspo;
pub mod max_rl;
pub mod opd;
pub mod opd_top_k;
pub mod ppo;
pub mod process_grpo;
pub mod reinforce;
pub mod reinforce_pp;
pub mod reinforce_pp_baseline;
pub mod rloo;
pub mod sapo;
pub mod sft;
pub mod starpo_s;
pub mod turn_ppo;

mod normalize;

use crate::batch::Batch;
use crate::composition::{Advantage, Composition, ProcessRewards};
use crate::episode::{Episode, Path};
use crate::pipeline::AlgoError;
use crate::report::AlgoReport;
pub(crate) use normalize::normalize;

/// Fills in the advantages (and returns) of every path in the batch.
pub(crate) fn advantages(
    c: &Composition,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    match c.advantage {
        Advantage::Group { baseline, scale } => {
            grpo::advantages(baseline, scale, c.rewards.process, batch);
            Ok(())
        }
        Advantage::ReturnToGo { gamma } => reinforce_pp::advantages(c, gamma, batch),
        Advantage::Gae { gamma, lambda } => ppo::advantages(c, gamma, lambda, batch),
        Advantage::TurnGae {
            gamma_turn,
            lambda_turn,
            gamma,
            lambda,
        } => {
            let discounts = turn_ppo::Discounts {
                gamma_turn,
                lambda_turn,
                gamma,
                lambda,
            };
            turn_ppo::advantages(c, discounts, batch)
        }
        Advantage::Gigpo {
            omega,
            gamma,
            std_epsilon,
        } => {
            let parameters = gigpo::Parameters {
                omega,
                gamma,
                std_epsilon,
            };
            gigpo::advantages(c, parameters, batch, report)
        }
        Advantage::Preference { beta } => dpo::advantages(c, beta, batch, report),
        Advantage::One => {
            for i in batch.members().collect::<Vec<_>>() {
                batch.broadcast(i, 1.0);
            }
            Ok(())
        }
        Advantage::None => Ok(()),
    }
}

/// `−kl · (ℓ_behaviour − ℓ_ref)` on each sampled token of a path, 0 elsewhere: k1 as a reward.
pub(crate) fn kl_rewards(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<Vec<f64>, AlgoError> {
    if c.rewards.kl == 0.0 {
        return Ok(vec![0.0; path.tokens.len()]);
    }
    let reference = required(c, episode, path, "ref_logprobs", |c| {
        c.ref_logprobs.as_ref()
    })?;
    let penalty = |(t, reference): (usize, &f64)| match path.tokens[t].logprob {
        Some(logprob) if path.sampled[t] => -c.rewards.kl * (f64::from(logprob) - reference),
        _ => 0.0,
    };
    Ok(reference.iter().enumerate().map(penalty).collect())
}

/// Rewards placed where recursions find them: the KL penalty on each sampled token, process
/// rewards on the last token of their turn, the outcome on the last sampled token of the path.
pub(crate) fn token_rewards(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<Vec<f64>, AlgoError> {
    let mut rewards = kl_rewards(c, episode, path)?;
    if c.rewards.process == ProcessRewards::Sum {
        for step in &path.steps {
            rewards[step.last] += step.reward;
        }
    }
    if let Some(last) = path.sampled.iter().rposition(|&s| s) {
        rewards[last] += episode.outcome;
    }
    Ok(rewards)
}

/// What a critic expects behind a path: 0, unless a limit cut it and that is bootstrapped.
pub(crate) fn value_after(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
) -> Result<f64, AlgoError> {
    if !episode.bootstrapped {
        return Ok(0.0);
    }
    let leaf = path.tokens.last().map(|t| t.node);
    let values = episode.columns.map(|columns| &columns.values_after);
    let value = leaf.and_then(|leaf| values?.get(&leaf));
    value
        .map(|&v| f64::from(v))
        .ok_or_else(|| AlgoError::MissingColumn {
            algorithm: c.kind.name(),
            column: "values_after",
            episode: episode.trace.episode.clone(),
        })
}

/// A column that the algorithm cannot do without.
pub(crate) fn required(
    c: &Composition,
    episode: &Episode<'_>,
    path: &Path,
    column: &'static str,
    pick: impl Fn(&crate::EpisodeColumns) -> Option<&Vec<Vec<f32>>>,
) -> Result<Vec<f64>, AlgoError> {
    episode
        .column(path, pick)
        .ok_or_else(|| AlgoError::MissingColumn {
            algorithm: c.kind.name(),
            column,
            episode: episode.trace.episode.clone(),
        })
}
