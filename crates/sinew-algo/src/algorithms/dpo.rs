//! DPO: direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290), on pairs of the policy's own
//! episodes.
//!
//! The best and the worst episode of a group are a pair. The loss is `−log σ(m)` with the margin
//! `m = β·[(ℓ_π − ℓ_ref)(chosen) − (ℓ_π − ℓ_ref)(rejected)]` of whole episodes, β = 0.1. Its gradient is
//! `−β·σ(−m)·(∇ℓ_π(chosen) − ∇ℓ_π(rejected))`: REINFORCE with the advantages `±β·σ(−m)`. The margin uses the
//! current policy's log-probabilities when rows are created, so that the gradient is exact for one optimizer
//! step per batch. More steps are refused.

use super::{grpo, required};
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, EqualGroups, Filters};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use crate::report::{AlgoReport, PreferenceReport};
use sinew_types::{Aggregation, LossSpec, Surrogate};

/// Default composition.
pub(crate) fn preset() -> Composition {
    let base = grpo::preset();
    Composition {
        kind: AlgorithmKind::Dpo,
        advantage: Advantage::Preference { beta: 0.1 },
        filters: Filters {
            equal_groups: EqualGroups::Drop,
            ..Filters::NONE
        },
        aggregation: Aggregation::SequenceMeanTokenSum,
        loss: LossSpec {
            surrogate: Surrogate::Reinforce,
            ..base.loss
        },
        ..base
    }
}

/// Forms pairs and computes their advantages.
pub(crate) fn advantages(
    c: &Composition,
    beta: f64,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    let mut pairs = Vec::new();
    for group in &batch.groups {
        let members = group.members.iter().copied();
        let trainable: Vec<usize> = members
            .filter(|&i| batch.episodes[i].trained_tokens() > 0)
            .collect();
        let reward = |&i: &usize| batch.episodes[i].reward;
        // The earlier of equal episodes, in both directions.
        let best = trainable
            .iter()
            .rev()
            .copied()
            .max_by(|a, b| reward(a).total_cmp(&reward(b)));
        let worst = trainable
            .iter()
            .copied()
            .min_by(|a, b| reward(a).total_cmp(&reward(b)));
        if let (Some(best), Some(worst)) = (best, worst)
            && reward(&best) > reward(&worst)
        {
            pairs.push((best, worst));
        }
    }
    let mut stats = PreferenceReport::default();
    for (chosen, rejected) in pairs {
        let margin = beta * (log_ratio(c, chosen, batch)? - log_ratio(c, rejected, batch)?);
        let push = beta / (1.0 + margin.exp());
        batch.broadcast(chosen, push);
        batch.broadcast(rejected, -push);
        stats.pairs += 1;
        stats.accuracy += f64::from(u8::from(margin > 0.0));
        stats.margin += margin;
        // log(1 + e^−m) without overflow.
        stats.loss += (-margin).max(0.0) + (-margin.abs()).exp().ln_1p();
    }
    let count = (stats.pairs.max(1)) as f64;
    stats.accuracy /= count;
    stats.margin /= count;
    stats.loss /= count;
    report.preference = Some(stats);
    Ok(())
}

/// `Σ_t (ℓ_π − ℓ_ref)` over the trained tokens of an episode.
fn log_ratio(c: &Composition, episode: usize, batch: &Batch<'_>) -> Result<f64, AlgoError> {
    let episode = &batch.episodes[episode];
    let mut total = 0.0;
    for path in &episode.paths {
        let policy = required(c, episode, path, "prox_logprobs", |c| {
            c.prox_logprobs.as_ref()
        })?;
        let reference = required(c, episode, path, "ref_logprobs", |c| {
            c.ref_logprobs.as_ref()
        })?;
        let own = (0..policy.len()).filter(|&t| path.trains[t]);
        total += own.map(|t| policy[t] - reference[t]).sum::<f64>();
    }
    Ok(total)
}
