//! From the episodes of a step to rows of training.

use crate::error::PipelineError;
use crate::formats::{self, FormatCounts};
use crate::ports::Learner;
use sinew_algo::{AlgoReport, Algorithm, Composition, TokenCounts, Truncated, count_tokens};
use sinew_grammar::Grammars;
use sinew_types::{EpisodeEnd, EpisodeId, GroupId, Trace, TrainRow};
use std::collections::{BTreeMap, BTreeSet};

/// Rows of one step, and what became of the episodes that gave none.
#[derive(Debug)]
pub struct Rows {
    pub rows: Vec<TrainRow>,
    pub tokens: TokenCounts,
    pub trained: Vec<EpisodeId>,
    pub dropped: BTreeMap<EpisodeId, String>,
    pub report: AlgoReport,
    pub formats: FormatCounts,
}

/// The groups of episodes, in the order of their ids.
pub(crate) fn by_group(traces: Vec<Trace>) -> Vec<Vec<Trace>> {
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    for trace in traces {
        groups.entry(trace.group.clone()).or_default().push(trace);
    }
    groups.into_values().collect()
}

impl Rows {
    /// Training rows of a step's groups. Episodes whose masks cannot be made again are failed ones from
    /// then on.
    ///
    /// # Errors
    /// What the algorithm or a model refuses.
    pub fn of(
        groups: &mut [Vec<Trace>],
        algorithm: &Algorithm,
        learner: &mut dyn Learner,
        grammars: &dyn Grammars,
    ) -> Result<Self, PipelineError> {
        let replayed = formats::replay_all(grammars, groups);
        let batch = algorithm.prepare(groups).map_err(PipelineError::system)?;
        let columns = learner.columns(algorithm, &batch, replayed.columns)?;
        let (rows, report) = batch.rows(&columns).map_err(PipelineError::system)?;
        let trained: BTreeSet<EpisodeId> = rows.iter().map(|r| r.episode.clone()).collect();
        let dropped = groups
            .iter()
            .flatten()
            .filter(|t| !trained.contains(&t.episode))
            .map(|t| {
                let why = match replayed.rejected.contains_key(&t.episode) {
                    true => "masks that cannot be made again".to_owned(),
                    false => why_dropped(t, algorithm.composition(), &report),
                };
                (t.episode.clone(), why)
            })
            .collect();
        let in_order = groups.iter().flatten().map(|t| &t.episode);
        let in_order = in_order.filter(|e| trained.contains(*e)).cloned();
        Ok(Self {
            tokens: count_tokens(groups.iter().flatten(), &rows),
            rows,
            trained: in_order.collect(),
            dropped,
            report,
            formats: replayed.counts,
        })
    }
}

/// Why an episode gave no row.
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
        _ if unscored => "nobody gave it a reward".into(),
        _ if cut && c.filters.truncated != Truncated::Keep => "cut by a limit".into(),
        _ if c.filters.only_success && !trace.outcome.success => "not a success".into(),
        _ if report.groups_equal.contains(&trace.group) => "equal rewards in the group".into(),
        _ if report.repair.dropped_groups.contains(&trace.group) => {
            "group with too many failed episodes".into()
        }
        _ if report.groups_too_small.contains(&trace.group) => "group too small".into(),
        _ if report.groups_filtered.contains(&trace.group) => "group filtered".into(),
        _ if c.filters.resample.is_some() => "no signal, or resampled out".into(),
        _ => "no signal".into(),
    }
}
