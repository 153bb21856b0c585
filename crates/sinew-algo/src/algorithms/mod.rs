//! Algorithms, one file each: formula, paper, preset and specific computations.

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
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use crate::report::AlgoReport;
pub(crate) use normalize::normalize;

impl AlgorithmKind {
    /// Default composition of the algorithm.
    pub fn preset(self) -> Composition {
        match self {
            Self::Grpo => grpo::preset(),
            Self::DrGrpo => dr_grpo::preset(),
            Self::Dapo => dapo::preset(),
            Self::Gspo => gspo::preset(),
            Self::Sapo => sapo::preset(),
            Self::Cispo => cispo::preset(),
            Self::MaxRl => max_rl::preset(),
            Self::StarpoS => starpo_s::preset(),
            Self::GrpoRoc => grpo_roc::preset(),
            Self::Gigpo => gigpo::preset(),
            Self::ProcessGrpo => process_grpo::preset(),
            Self::AgentRl => agent_rl::preset(),
            Self::Erpo => erpo::preset(),
            Self::Rloo => rloo::preset(),
            Self::Reinforce => reinforce::preset(),
            Self::ReinforcePp => reinforce_pp::preset(),
            Self::ReinforcePpBaseline => reinforce_pp_baseline::preset(),
            Self::Ppo => ppo::preset(),
            Self::TurnPpo => turn_ppo::preset(),
            Self::DecoupledPpo => decoupled_ppo::preset(),
            Self::Opd => opd::preset(),
            Self::OpdTopK => opd_top_k::preset(),
            Self::Dpo => dpo::preset(),
            Self::Sft => sft::preset(),
        }
    }
}

/// Computes advantages and returns of all paths in the batch.
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

/// KL penalty as a reward, `−kl · (ℓ_behaviour − ℓ_ref)` (k1), at each sampled token of a path. 0 elsewhere.
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

/// Rewards per token for recursions: the KL penalty on each sampled token, process rewards on the last token
/// of their turn, and the outcome on the last sampled token of the path.
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

/// Critic's value after a path. 0 unless the episode was truncated and is bootstrapped.
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

/// Values of a required column along a path.
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
