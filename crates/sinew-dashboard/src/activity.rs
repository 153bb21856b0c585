//! Work, waits and faults of a run, from the records of steps. Pure, except for the file of samples.

use crate::error::ViewError;
use serde_json::{Value, json};
use sinew_orchestrator::{SampleStatus, StepRecord, Totals};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;

/// Steps and samples that a timeline has at most, the newest steps.
const MAX_STEPS: usize = 600;
const MAX_SAMPLES: usize = 1500;
/// Causes of failed steps that are shown, the newest.
const MAX_CAUSES: usize = 100;

/// Activity of engine and trainer, a step at a time, and samples of the rollouts if the run wrote some.
pub(crate) fn timeline(folder: &Path, steps: &[StepRecord]) -> Value {
    let totals = Totals::of(steps);
    let recent = &steps[steps.len().saturating_sub(MAX_STEPS)..];
    let rows: Vec<Value> = recent
        .iter()
        .map(|r| {
            let engine: f64 = r.waits.rows()[..4].iter().map(|(_, s)| s).sum();
            json!({
                "step": r.step, "to": r.wall_s, "from": (r.wall_s - engine).max(0.0),
                "waits": r.waits, "rollout_s": r.rollout_s, "train_s": r.train_s,
                "publish_s": r.publish_s, "checkpoint_s": r.checkpoint_s,
                "tool_s": r.rollout.tool_s, "generate_s": r.rollout.generate_s,
                "episodes": r.rollout.episodes, "sampled_tokens_per_s": r.sampled_tokens_per_s,
            })
        })
        .collect();
    json!({
        "steps": rows,
        "left_out": steps.len() - recent.len(),
        "totals": totals.waits,
        "staleness": totals.staleness,
        "wall_s": steps.last().map(|s| s.wall_s),
        "samples": sinew_view::timeline(folder, MAX_SAMPLES),
    })
}

/// Seconds and phases of a window that is not named, at most.
const LAST_S: f64 = 60.0;
const LAST_SPANS: usize = 2000;
/// Phases that a window has at most, the first ones.
const MAX_SPANS: usize = 6000;
/// Points of the numbers in flight.
const PARTS: usize = 240;

/// The phases of episodes within a window of time, of which either end may be left out, and how many there
/// are.
///
/// # Errors
/// If the window is none.
pub(crate) fn phases(
    folder: &Path,
    (from, to): (Option<f64>, Option<f64>),
) -> Result<Value, ViewError> {
    let asked = (
        from.unwrap_or(f64::NEG_INFINITY),
        to.unwrap_or(f64::INFINITY),
    );
    // NaN is below nothing.
    if asked.0.partial_cmp(&asked.1) != Some(Ordering::Less) {
        return Err(ViewError::request("from: allowed: a time before `to`"));
    }
    let mut found = sinew_view::phases(folder, asked);
    let kept = found.kept;
    let many = found.spans.len().saturating_sub(LAST_SPANS);
    let newest = found.spans.get(many).map_or(0.0, |s| s.2);
    let window = kept.map(|(first, last)| {
        let to = to.unwrap_or(last);
        let least = if many > 0 { newest } else { first };
        (from.unwrap_or((to - LAST_S).max(least).min(to)), to)
    });
    if let Some((from, to)) = window {
        found.spans.retain(|s| s.2 >= from && s.2 - s.3 <= to);
    }
    let flight = window.map(|window| sinew_view::flight(&found.spans, window, PARTS));
    let all = found.spans.len();
    found.spans.truncate(MAX_SPANS);
    Ok(json!({
        "kept": kept, "older_gone": found.older_gone, "window": window, "count": all, "flight": flight,
        "spans": found.spans,
    }))
}

/// Reasons and causes over the steps of a run.
pub(crate) fn errors(steps: &[StepRecord]) -> Value {
    let mut dropped = BTreeMap::<&str, usize>::new();
    let mut samples = SampleStatus::default();
    for r in steps {
        samples.add(&r.samples);
        for (reason, n) in &r.dropped {
            *dropped.entry(reason).or_default() += n;
        }
    }
    let cause = |r: &StepRecord| {
        let cause = r.failed_cause.as_deref()?;
        Some(
            json!({ "step": r.step, "failed": r.rollout.failed, "of": r.rollout.episodes, "cause": cause }),
        )
    };
    let causes: Vec<Value> = steps
        .iter()
        .rev()
        .filter_map(cause)
        .take(MAX_CAUSES)
        .collect();
    let mut dropped: Vec<(&str, usize)> = dropped.into_iter().collect();
    dropped.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let samples = samples
        .numbers()
        .into_iter()
        .map(|(name, count, first)| json!({ "name": name, "count": count, "first": first }))
        .collect::<Vec<_>>();
    let sum = |of: fn(&StepRecord) -> usize| steps.iter().map(of).sum::<usize>();
    json!({
        "episodes": sum(|r| r.rollout.episodes),
        "failed": sum(|r| r.rollout.failed),
        "retried": sum(|r| r.retried),
        "recovered": sum(|r| r.recovered),
        "skipped_updates": sum(|r| r.skipped_updates),
        "dropped": dropped,
        "causes": causes,
        "samples": samples,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_summed_and_the_most_frequent_comes_first() {
        let step = |reason: &str, n| StepRecord {
            dropped: [(reason.to_owned(), n)].into(),
            failed_cause: Some("engine: gone".into()),
            ..StepRecord::default()
        };
        let errors = errors(&[step("a", 1), step("b", 3), step("a", 1)]);
        assert_eq!(errors["dropped"], json!([["b", 3], ["a", 2]]));
        assert_eq!(errors["causes"].as_array().unwrap().len(), 3);
    }
}
