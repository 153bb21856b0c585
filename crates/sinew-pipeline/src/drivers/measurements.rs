//! Held-out measurements of a run, between two commits and for its end.

use sinew_orchestrator::{EpisodeStats, EvalRecord, HeldOutGain, HeldOutScores};
use sinew_types::EpisodeId;

/// Measurements so far.
#[derive(Debug, Default)]
pub(crate) struct Measurements {
    /// First measurement, as an earlier session wrote it.
    pub(super) written: Option<EvalRecord>,
    /// Measurements since the last commit.
    pub(crate) uncommitted: Vec<EvalRecord>,
    /// Measurement of the first weights, also if an earlier session made it.
    pub(crate) before: EpisodeStats,
    /// Scores of that measurement by task; `None`: its episodes are gone.
    pub(super) first_scores: Option<HeldOutScores>,
    /// Measurement of the last weights.
    pub(crate) after: EpisodeStats,
    /// Gain of the last weights over the first ones.
    pub(crate) gain: Option<HeldOutGain>,
    /// First episodes of both.
    pub(crate) examples: Vec<EpisodeId>,
    /// Reason why the last one is weak.
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
