//! Turns the episodes of a step into rows of training.

use crate::formats;
use crate::ports::Learner;
use crate::trust;
use sinew_algo::trust::TrustConfig;
use sinew_algo::{AlgoReport, Algorithm, Composition, Truncated, count_tokens};
use sinew_grammar::Grammars;
use sinew_orchestrator::{Curriculum, EQUAL, PipelineError, Rows, SUSPICIOUS};
use sinew_types::{EpisodeEnd, EpisodeId, Trace};
use std::collections::BTreeSet;

/// Makes training rows of a step's groups; an episode without a group is compared with earlier ones in the
/// curriculum. Episodes whose masks cannot be made again count as failed from then on.
///
/// # Errors
/// Fails if the algorithm or a model does.
pub(crate) fn score(
    groups: &mut [Vec<Trace>],
    curriculum: &Curriculum,
    algorithm: &Algorithm,
    learner: &mut dyn Learner,
    grammars: &dyn Grammars,
    trust: &TrustConfig,
) -> Result<Rows, PipelineError> {
    let mut replayed = formats::replay_all(grammars, groups);
    for trace in groups.iter().filter(|g| g.len() == 1).flatten() {
        if let Some(earlier) = curriculum.earlier(trace.task.as_str()) {
            let columns = replayed.columns.entry(trace.episode.clone());
            columns.or_default().earlier = Some(earlier);
        }
    }
    let (suspicious, sightings) = trust::look(trust, groups, curriculum.sightings());
    let left_out = suspicious.keys().collect();
    let batch = algorithm.prepare_without(groups, &left_out);
    let batch = batch.map_err(PipelineError::system)?;
    let columns = learner.columns(algorithm, &batch, replayed.columns)?;
    let (rows, report) = batch.rows(&columns).map_err(PipelineError::system)?;
    let trained: BTreeSet<EpisodeId> = rows.iter().map(|r| r.episode.clone()).collect();
    let dropped = groups
        .iter()
        .flatten()
        .filter(|t| !trained.contains(&t.episode))
        .map(|t| {
            let rejected = replayed.rejected.contains_key(&t.episode);
            let why = match suspicious.get(&t.episode) {
                Some(seen) => format!("{SUSPICIOUS}{}", seen.flag),
                None if rejected => "masks that cannot be made again".to_owned(),
                None => why_dropped(t, algorithm.composition(), &report),
            };
            (t.episode.clone(), why)
        })
        .collect();
    let in_order = groups.iter().flatten().map(|t| &t.episode);
    let in_order = in_order.filter(|e| trained.contains(*e)).cloned();
    Ok(Rows {
        tokens: count_tokens(groups.iter().flatten(), &rows),
        rows,
        trained: in_order.collect(),
        dropped,
        report,
        formats: replayed.counts,
        suspicious,
        sightings,
    })
}

/// Reason why an episode gave no row.
fn why_dropped(trace: &Trace, c: &Composition, report: &AlgoReport) -> String {
    let broken = report
        .quarantined
        .iter()
        .any(|q| q.episode == trace.episode);
    let cut = matches!(trace.end, EpisodeEnd::Truncated { .. });
    let unscored = trace.outcome.unscored && report.unscored > 0;
    match &trace.end {
        EpisodeEnd::Failed { kind, .. } => format!("failed: {kind:?}").to_lowercase(),
        _ if broken => "broken".into(),
        _ if unscored => match &trace.outcome.unscored_reason {
            Some(reason) => format!("unscored: {reason}"),
            None => "unscored: no reward was given".into(),
        },
        _ if cut && c.filters.truncated != Truncated::Keep => "cut by a limit".into(),
        _ if c.filters.only_success && !trace.outcome.success => "not a success".into(),
        _ if report.groups_equal.contains(&trace.group) => EQUAL.into(),
        _ if report.repair.dropped_groups.contains(&trace.group) => {
            "group with too many failed episodes".into()
        }
        _ if report.groups_too_small.contains(&trace.group) => "group too small".into(),
        _ if report.groups_filtered.contains(&trace.group) => "group filtered".into(),
        _ if c.filters.resample.is_some() => "no signal, or resampled out".into(),
        _ => "no signal".into(),
    }
}
