//! Held-out measurements of a run, between two commits and for its end.

use sinew_orchestrator::{EpisodeStats, EvalRecord};
use sinew_types::EpisodeId;

/// What was measured so far.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    /// What an earlier session wrote of its first measurement.
    pub(super) written: Option<EvalRecord>,
    /// Since the last commit.
    pub(crate) uncommitted: Vec<EvalRecord>,
    /// Of the first weights, also where an earlier session measured them.
    pub(crate) before: EpisodeStats,
    /// Of the last weights.
    pub(crate) after: EpisodeStats,
    /// First episodes of both.
    pub(crate) examples: Vec<EpisodeId>,
    /// Why the last one says little.
    pub(crate) trouble: Option<String>,
}

impl Measurements {
    pub(crate) fn new(evals: &[EvalRecord]) -> Self {
        Self {
            written: evals.iter().find(|r| r.when == "before").cloned(),
            ..Self::default()
        }
    }
}
