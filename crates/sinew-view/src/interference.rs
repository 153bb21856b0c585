//! Interference between the environments of a mixture: the effect of training one on the held-out success of
//! another.
//!
//! Each environment has a share of the training episodes between two held-out measurements. An entry of the
//! table is the mean change of the success of one environment, from one measurement to the next, weighted by
//! the shares of the other. The diagonal holds an environment's gain by its own training, the rest its gain
//! or loss by others. Equal shares in all intervals give equal entries in a row: the effects cannot be
//! separated then.

use sinew_orchestrator::{EvalRecord, StepRecord};
use std::collections::{BTreeMap, BTreeSet};

/// Environments that a table has at most.
const MOST: usize = 12;

/// Change of held-out success, by the environment that is measured and the one that is trained.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Interference {
    /// Environments in the order of their names.
    pub(crate) names: Vec<String>,
    /// A row for each that is measured; `None` where the other one was never trained.
    pub(crate) changes: Vec<Vec<Option<f64>>>,
}

/// The table of a run; `None` without a mixture or without two measurements.
pub(crate) fn interference(steps: &[StepRecord], evals: &[EvalRecord]) -> Option<Interference> {
    let names: BTreeSet<&String> = evals.iter().flat_map(|e| e.stats.by_env.keys()).collect();
    let names: Vec<String> = names.into_iter().take(MOST).cloned().collect();
    if names.len() < 2 || evals.len() < 2 {
        return None;
    }
    let mut sums = vec![vec![(0.0, 0.0); names.len()]; names.len()];
    for pair in evals.windows(2) {
        let [before, after] = pair else { continue };
        let shares = shares(steps, (before.step, after.step));
        for (row, measured) in names.iter().enumerate() {
            let success = |e: &EvalRecord| Some(e.stats.by_env.get(measured)?.success);
            let (Some(b), Some(a)) = (success(before), success(after)) else {
                continue;
            };
            for (column, trained) in names.iter().enumerate() {
                let share = shares.get(trained.as_str()).copied().unwrap_or(0.0);
                let sum: &mut (f64, f64) = &mut sums[row][column];
                *sum = (sum.0 + share * (a - b), sum.1 + share);
            }
        }
    }
    let mean = |(sum, shares): (f64, f64)| (shares > 0.0).then(|| sum / shares);
    let changes = sums
        .into_iter()
        .map(|row| row.into_iter().map(mean).collect());
    Some(Interference {
        names,
        changes: changes.collect(),
    })
}

/// Shares of the training episodes of the steps behind `from`, up to `to`.
fn shares(steps: &[StepRecord], (from, to): (u64, u64)) -> BTreeMap<&str, f64> {
    let mut counts: BTreeMap<&str, f64> = BTreeMap::new();
    for step in steps.iter().filter(|s| s.step > from && s.step <= to) {
        for (name, stats) in &step.rollout.by_env {
            *counts.entry(name).or_default() += stats.episodes as f64;
        }
    }
    let all: f64 = counts.values().sum();
    counts.values_mut().for_each(|n| *n /= all.max(1.0));
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_orchestrator::EpisodeStats;

    fn stats(of: [(&str, usize, f64); 2]) -> EpisodeStats {
        let own = of.map(|(name, episodes, success)| {
            let own = EpisodeStats {
                episodes,
                success,
                ..EpisodeStats::default()
            };
            (name.to_owned(), own)
        });
        EpisodeStats {
            by_env: own.into(),
            ..EpisodeStats::default()
        }
    }

    fn step(step: u64, a: usize, b: usize) -> StepRecord {
        StepRecord {
            step,
            rollout: stats([("a", a, 0.5), ("b", b, 0.5)]),
            ..StepRecord::default()
        }
    }

    fn eval(step: u64, a: f64, b: f64) -> EvalRecord {
        EvalRecord {
            when: "during".into(),
            step,
            wall_s: 0.0,
            stats: stats([("a", 1, a), ("b", 1, b)]),
            gain: None,
        }
    }

    #[test]
    fn what_is_trained_gains_and_what_it_costs_others_shows() {
        // While `a` trains, it gains 0.4 and `b` loses 0.2; while `b` trains, it gains 0.5 and `a` stays.
        let steps = [step(1, 8, 0), step(2, 8, 0), step(3, 0, 8), step(4, 0, 8)];
        let evals = [eval(0, 0.1, 0.4), eval(2, 0.5, 0.2), eval(4, 0.5, 0.7)];
        let table = interference(&steps, &evals).unwrap();
        assert_eq!(table.names, ["a", "b"]);
        let rounded: Vec<Vec<i64>> = table
            .changes
            .iter()
            .map(|row| {
                row.iter()
                    .map(|c| (c.unwrap() * 100.0).round() as i64)
                    .collect()
            })
            .collect();
        assert_eq!(rounded, [[40, 0], [-20, 50]]);
        // Never trained: nothing is known.
        let table = interference(&steps[..2], &evals[..2]).unwrap();
        assert_eq!(
            (table.changes[1][0].is_some(), table.changes[1][1]),
            (true, None)
        );
    }

    #[test]
    fn one_environment_or_one_measurement_has_no_table() {
        let evals = [eval(0, 0.1, 0.4), eval(2, 0.5, 0.2)];
        assert_eq!(interference(&[], &evals[..1]), None);
        let mut alone = evals;
        for e in &mut alone {
            e.stats.by_env.remove("b");
        }
        assert_eq!(interference(&[], &alone), None);
    }
}
