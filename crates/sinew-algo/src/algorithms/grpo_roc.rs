//! GRPO-RoC: resampling on correct (Shang et al. 2025, rStar2-Agent, arXiv 2508.20722).
//!
//! Reduces an oversampled group: failures are kept in proportion and in order, and successes with the fewest
//! tool errors and format errors are preferred, so that correct answers with wrong calls are not rewarded.
//! Half of the group is kept (32 sampled, 16 trained in the paper). DAPO's clip and token mean, no KL term,
//! groups with equal rewards are dropped.
//!
//! The environment counts errors in its metrics [`TOOL_ERRORS`], [`TOOL_CALLS`] and [`FORMAT_PENALTY`]. A
//! batch without [`TOOL_CALLS`] is an error, because the choice would be arbitrary. A missing penalty is 0.
//! Ties round to even, as in the released code.

use super::dapo;
use crate::batch::Batch;
use crate::composition::{Composition, EqualGroups, Filters, Resample};
use crate::error::AlgoError;
use crate::kind::AlgorithmKind;
use crate::report::AlgoReport;

/// Default composition.
pub(crate) fn preset() -> Composition {
    Composition {
        kind: AlgorithmKind::GrpoRoc,
        filters: Filters {
            equal_groups: EqualGroups::Drop,
            // Resolving the recipe sets `keep` to half of the run's group size.
            resample: Some(Resample {
                keep: 0,
                minimum: 2,
            }),
            ..Filters::NONE
        },
        ..dapo::preset()
    }
}

/// Metric with the number of failed tool calls.
pub const TOOL_ERRORS: &str = "tool_errors";
/// Metric with the number of tool calls.
pub const TOOL_CALLS: &str = "tool_calls";
/// Metric with the format penalty of the episode, 0 to 1.
pub const FORMAT_PENALTY: &str = "format_penalty";

/// Reduces every group with more than `keep` members.
pub(crate) fn resample(
    kind: AlgorithmKind,
    resample: Resample,
    batch: &mut Batch<'_>,
    report: &mut AlgoReport,
) -> Result<(), AlgoError> {
    let metrics = |i: usize| &batch.episodes[i].trace.outcome.metrics;
    let counted = |i| metrics(i).contains_key(TOOL_CALLS);
    if batch.members().next().is_some() && !batch.members().any(counted) {
        return Err(AlgoError::NoMetric {
            algorithm: kind.name(),
            metric: TOOL_CALLS,
        });
    }
    for g in 0..batch.groups.len() {
        let members = batch.groups[g].members.clone();
        if members.len() <= resample.keep {
            continue;
        }
        let kept = choose(resample, &members, batch);
        report.resampled_out += members.len() - kept.len();
        batch.groups[g].members = kept;
    }
    Ok(())
}

/// Chooses successes and failures in proportion, at least `minimum` of each if there are as many. Keeps the
/// order of `members`.
fn choose(resample: Resample, members: &[usize], batch: &Batch<'_>) -> Vec<usize> {
    let good = |&&i: &&usize| batch.episodes[i].reward > 0.0;
    let mut positives: Vec<usize> = members.iter().filter(good).copied().collect();
    let negatives: Vec<usize> = members.iter().filter(|i| !good(i)).copied().collect();
    let share = positives.len() as f64 * resample.keep as f64 / members.len() as f64;
    let least = resample.minimum.min(positives.len());
    let most = resample.keep - resample.minimum.min(negatives.len());
    // Failures fill the rest, and there may be too few.
    let least = least.max(resample.keep.saturating_sub(negatives.len()));
    let take = (share.round_ties_even() as usize).clamp(least, most.max(least));
    positives.sort_by(|&a, &b| penalty(batch, a).total_cmp(&penalty(batch, b)));
    positives.truncate(take);
    let mut kept = positives;
    kept.extend(negatives.iter().take(resample.keep - kept.len()));
    kept.sort_unstable();
    kept
}

/// `p_err + p_format`: share of failed tool calls (1/2 without calls) plus the format penalty. Computed from
/// the environment's metrics, not from words in tool output.
fn penalty(batch: &Batch<'_>, episode: usize) -> f64 {
    let metrics = &batch.episodes[episode].trace.outcome.metrics;
    let get = |name: &str| metrics.get(name).copied().filter(|v| v.is_finite());
    let calls = get(TOOL_CALLS).unwrap_or(0.0);
    let errors = if calls > 0.0 {
        (get(TOOL_ERRORS).unwrap_or(0.0) / calls).clamp(0.0, 1.0)
    } else {
        0.5
    };
    errors + get(FORMAT_PENALTY).unwrap_or(0.0).clamp(0.0, 1.0)
}
