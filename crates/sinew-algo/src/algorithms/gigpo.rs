//! GiGPO: group-in-group policy optimization (Feng et al. 2025, arXiv 2505.10978).
//!
//! `A = A_E + ω·A_S`. The episodes of a group are compared by `A_E = (R − mean)/F`. All turns of the group in
//! the same state (equal `state_hash`) are compared by `A_S = (R_k − mean)/F`, with the return
//! `R_k = Σ_{j≥k} γ^{j−k} r_j`, where the last turn earns the outcome. `F` is the standard deviation plus
//! 1e-6, or 1. A state that occurs once gives 0. ω = 1, γ = 0.95.
//!
//! The mean of `A_E` counts each episode once, independently of its number of turns.

use super::grpo;
use crate::batch::Batch;
use crate::composition::{Advantage, Composition, ProcessRewards};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use crate::report::AlgoReport;
use crate::stats;
use std::collections::BTreeMap;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::Gigpo,
        advantage: Advantage::Gigpo {
            omega: 1.0,
            gamma: 0.95,
            std_epsilon: Some(grpo::STD_EPSILON),
        },
        ..grpo::preset()
    }
}

/// Parameters of the estimator, see [`Advantage::Gigpo`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameters {
    pub(crate) omega: f64,
    pub(crate) gamma: f64,
    pub(crate) std_epsilon: Option<f64>,
}

/// A turn in a state: episode, path, step, return.
type Visit = (usize, usize, usize, f64);

/// Computes episode advantages plus step advantages.
pub(crate) fn advantages(
    c: &Composition,
    parameters: Parameters,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    let mut with_state = 0;
    for g in 0..batch.groups.len() {
        let group = batch.groups[g].clone();
        let rewards = batch.rewards(&group);
        let episode = relative(&rewards, parameters.std_epsilon);
        for (&i, advantage) in group.members.iter().zip(episode) {
            batch.broadcast(i, advantage);
        }
        let mut states: BTreeMap<u64, Vec<Visit>> = BTreeMap::new();
        for &i in &group.members {
            let visits = visits(c, parameters.gamma, i, batch);
            for (state, visit) in visits {
                match state {
                    Some(state) => states.entry(state).or_default().push(visit),
                    None => report.steps_without_state += 1,
                }
            }
        }
        with_state += states.values().map(Vec::len).sum::<usize>();
        for visits in states.values() {
            let returns: Vec<f64> = visits.iter().map(|v| v.3).collect();
            let step = relative(&returns, parameters.std_epsilon);
            for (&(i, p, s, _), advantage) in visits.iter().zip(step) {
                let path = &mut batch.episodes[i].paths[p];
                for t in path.steps[s].first..=path.steps[s].last {
                    if path.sampled[t] {
                        path.advantages[t] += parameters.omega * advantage;
                    }
                }
            }
        }
    }
    if with_state == 0 && report.steps_without_state > 0 && parameters.omega > 0.0 {
        return Err(AlgoError::NoStates {
            algorithm: c.kind.name(),
        });
    }
    Ok(())
}

/// `(x − mean)/F`. 0 if all values are equal or there is one.
fn relative(values: &[f64], std_epsilon: Option<f64>) -> Vec<f64> {
    if stats::all_equal(values) {
        return vec![0.0; values.len()];
    }
    let mean = stats::mean(values);
    let scale = std_epsilon.map_or(1.0, |epsilon| stats::std_unbiased(values) + epsilon);
    values.iter().map(|v| (v - mean) / scale).collect()
}

/// Turns that an episode owns, with their states and returns.
fn visits(
    c: &Composition,
    gamma: f64,
    episode: usize,
    batch: &Batch<'_>,
) -> Vec<(Option<u64>, Visit)> {
    let e = &batch.episodes[episode];
    let mut out = Vec::new();
    for (p, path) in e.paths.iter().enumerate() {
        let mut following = e.outcome;
        for (s, step) in path.steps.iter().enumerate().rev() {
            let own = match c.rewards.process {
                ProcessRewards::Sum => step.reward,
                ProcessRewards::Ignore | ProcessRewards::Separate { .. } => 0.0,
            };
            let last = s + 1 == path.steps.len();
            following = own + if last { following } else { gamma * following };
            if step.owned {
                out.push((step.state, (episode, p, s, following)));
            }
        }
    }
    out
}
