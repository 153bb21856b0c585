//! GRPO: group relative policy optimization (Shao et al. 2024, arXiv 2402.03300).
//!
//! `A_i = (R_i − mean(R)) / (std(R) + ε)` over the group, equal for all tokens of an episode. The standard
//! deviation is unbiased, and ε = 1e-6. The loss is PPO's token clip with the mean over episodes of the mean
//! over tokens. The paper's KL term (k3, 0.04) is off by default.
//!
//! This file also computes the baselines and scales of related algorithms.

use crate::batch::{Batch, lone};
use crate::composition::{
    Advantage, Baseline, Composition, Filters, Normalize, ProcessRewards, Rewards, Scale,
};
use crate::kind::AlgorithmKind;
use crate::stats;
use sinew_types::{Aggregation, LossSpec, Surrogate};
use std::collections::BTreeMap;

/// Added to a standard deviation before dividing.
pub const STD_EPSILON: f64 = 1e-6;

/// PPO's token clip without further terms.
pub(crate) fn clip_loss(low: f32, high: f32) -> LossSpec {
    LossSpec::new(Surrogate::Clip {
        low,
        high,
        dual: None,
    })
}

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::Grpo,
        advantage: Advantage::Group {
            baseline: Baseline::Mean,
            scale: Scale::GroupStd {
                epsilon: STD_EPSILON,
            },
        },
        normalize: Normalize::None,
        distill: 0.0,
        rewards: Rewards::PLAIN,
        filters: Filters::NONE,
        aggregation: Aggregation::SequenceMeanTokenMean,
        loss: clip_loss(0.2, 0.2),
    }
}

/// Computes `(R − baseline) / scale` for each group, and normalized process rewards if configured.
pub(crate) fn advantages(
    baseline: Baseline,
    scale: Scale,
    process: ProcessRewards,
    batch: &mut Batch<'_>,
) {
    let environment_std = environment_std(batch);
    for g in 0..batch.groups.len() {
        let group = batch.groups[g].clone();
        let rewards = batch.rewards(&group);
        let earlier = lone(&batch.episodes, &group.members);
        for (k, &i) in group.members.iter().enumerate() {
            let advantage = if group.equal && baseline != Baseline::Zero {
                0.0
            } else {
                let compared = earlier.filter(|_| baseline != Baseline::Zero);
                let base = compared.map(|earlier| earlier.mean());
                let base = base.unwrap_or_else(|| baseline_of(baseline, &rewards, k));
                let centred = rewards[k] - base;
                let environment = batch.episodes[i].trace.environment();
                match scale {
                    Scale::One => centred,
                    Scale::GroupStd { epsilon } => {
                        let own = || stats::std_unbiased(&rewards);
                        centred / (compared.map_or_else(own, |e| e.std_with(rewards[k])) + epsilon)
                    }
                    Scale::EnvironmentStd { epsilon } => {
                        let std = environment_std.get(environment).copied();
                        centred / (std.unwrap_or(0.0) + epsilon)
                    }
                    Scale::GroupMean => max_rl(
                        centred,
                        compared.map_or(stats::mean(&rewards), |e| e.mean()),
                    ),
                }
            };
            batch.broadcast(i, advantage);
        }
        if let ProcessRewards::Separate { weight } = process {
            add_process(weight, &group.members, batch);
        }
    }
}

/// Baseline of episode `k` of a group.
fn baseline_of(baseline: Baseline, rewards: &[f64], k: usize) -> f64 {
    match baseline {
        Baseline::Zero => 0.0,
        Baseline::Mean => stats::mean(rewards),
        Baseline::LeaveOneOut => {
            let others = rewards.len().saturating_sub(1).max(1) as f64;
            (rewards.iter().sum::<f64>() - rewards[k]) / others
        }
    }
}

/// Advantage of MaxRL.
fn max_rl(centred: f64, mean: f64) -> f64 {
    if mean > 0.0 { centred / mean } else { 0.0 }
}

/// Unbiased standard deviation of the rewards of each environment.
fn environment_std(batch: &Batch<'_>) -> BTreeMap<String, f64> {
    let mut rewards: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for i in batch.members() {
        let name = batch.episodes[i].trace.environment().to_owned();
        let of_environment = rewards.entry(name).or_default();
        of_environment.push(batch.episodes[i].reward);
    }
    let std = |(name, values): (String, Vec<f64>)| (name, stats::std_unbiased(&values));
    rewards.into_iter().map(std).collect()
}

/// `A_t += weight · Σ_{turns from t's on} (r − mean)/(std + ε)`, with mean and standard deviation over the
/// process rewards of all turns of the group (Shao et al. 2024, section 4.1.3). A turn that branches share
/// counts once. Turns with reward 0 count.
fn add_process(weight: f64, members: &[usize], batch: &mut Batch<'_>) {
    let paths = members.iter().flat_map(|&i| &batch.episodes[i].paths);
    let owned = paths.flat_map(|p| p.steps.iter().filter(|s| s.owned));
    let rewards: Vec<f64> = owned.map(|s| s.reward).collect();
    if stats::all_equal(&rewards) {
        return;
    }
    let mean = stats::mean(&rewards);
    let std = stats::std_unbiased(&rewards) + STD_EPSILON;
    for &i in members {
        for path in &mut batch.episodes[i].paths {
            let mut tail = 0.0;
            for step in path.steps.iter().rev() {
                tail += (step.reward - mean) / std;
                for t in step.first..=step.last {
                    if path.sampled[t] {
                        path.advantages[t] += weight * tail;
                    }
                }
            }
        }
    }
}
