//! Filters that remove episodes and groups from a batch. The report has their effects.

use crate::batch::{Batch, lone};
use crate::composition::{Composition, EqualGroups, ProcessRewards};
use crate::error::AlgoError;
use crate::report::AlgoReport;
use crate::stats;

/// Removes groups with too few usable episodes for a comparison.
pub(crate) fn small_groups(c: &Composition, batch: &mut Batch<'_>, report: &mut AlgoReport) {
    let least = if c.advantage.compares() { 2 } else { 1 };
    for group in &mut batch.groups {
        let reported = report.repair.dropped_groups.contains(&group.id);
        let compared = lone(&batch.episodes, &group.members).is_some();
        if group.members.len() < least && !reported && !compared {
            report.groups_too_small.push(group.id.clone());
            group.members.clear();
        }
    }
}

/// Marks groups with equal rewards, and removes them if configured.
pub(crate) fn equal_groups(c: &Composition, batch: &mut Batch<'_>, report: &mut AlgoReport) {
    if !c.advantage.compares() {
        return;
    }
    for g in 0..batch.groups.len() {
        let group = &batch.groups[g];
        if group.members.is_empty() {
            continue;
        }
        let mut rewards = batch.rewards(group);
        rewards.extend(lone(&batch.episodes, &group.members).map(|earlier| earlier.mean()));
        let mut equal = stats::all_equal(&rewards);
        if matches!(c.rewards.process, ProcessRewards::Separate { .. }) {
            let members = group.members.iter();
            let paths = members.flat_map(|&i| &batch.episodes[i].paths);
            let steps = paths.flat_map(|p| p.steps.iter().filter(|s| s.owned));
            equal &= stats::all_equal(&steps.map(|s| s.reward).collect::<Vec<_>>());
        }
        if equal {
            let group = &mut batch.groups[g];
            group.equal = true;
            report.groups_equal.push(group.id.clone());
            if c.filters.equal_groups == EqualGroups::Drop {
                group.members.clear();
            }
        }
    }
}

/// StarPO-S (Wang et al. 2025, arXiv 2504.20073): keeps the share of groups with the largest reward
/// deviation, at least one. The earlier one of equal groups stays.
pub(crate) fn top_std(c: &Composition, batch: &mut Batch<'_>, report: &mut AlgoReport) {
    let Some(share) = c.filters.keep_top_std else {
        return;
    };
    let std = |g: usize| stats::std_unbiased(&batch.rewards(&batch.groups[g]));
    let mut ranked: Vec<(f64, usize)> = (0..batch.groups.len())
        .filter(|&g| !batch.groups[g].members.is_empty())
        .map(|g| (std(g), g))
        .collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let keep = ((ranked.len() as f64 * share).round_ties_even() as usize).max(1);
    let mut out: Vec<usize> = ranked.iter().skip(keep).map(|&(_, g)| g).collect();
    out.sort_unstable();
    for g in out {
        // Groups with equal rewards are already in the report.
        if !batch.groups[g].equal {
            report.groups_filtered.push(batch.groups[g].id.clone());
        }
        batch.groups[g].members.clear();
    }
}

/// Rejection-sampling fine-tuning: removes unsuccessful episodes.
pub(crate) fn only_success(c: &Composition, batch: &mut Batch<'_>, report: &mut AlgoReport) {
    if !c.filters.only_success {
        return;
    }
    let episodes = &batch.episodes;
    for group in &mut batch.groups {
        let before = group.members.len();
        group.members.retain(|&i| episodes[i].trace.outcome.success);
        report.unsuccessful_out += before - group.members.len();
    }
}

/// GRPO-RoC: see [`crate::algorithms::grpo_roc`].
pub(crate) fn resample(
    c: &Composition,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    match c.filters.resample {
        Some(resample) => crate::algorithms::grpo_roc::resample(c.kind, resample, batch, report),
        None => Ok(()),
    }
}
