//! The result of a whole run.

use crate::gain::HeldOutGain;
use crate::record::{EpisodeStats, TokenSummary, Totals, is_zero};
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use sinew_types::EpisodeId;

/// Number of episodes of a whole run, by their fate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    pub trained: usize,
    /// Episodes that were left out for a recorded reason (no difference within the group, failed, ...).
    pub dropped: usize,
    pub trained_twice: usize,
    /// Episodes that were trained but are no longer in the store, or that belong to a trained step but were
    /// neither trained nor dropped.
    pub lost: usize,
    /// Episodes that wait for rewards from outside; another session continues with them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting: usize,
}

/// A run that came to its end.
#[derive(Clone, Debug, Default)]
pub struct RunOutcome {
    /// Statistics of the held-out tasks with the first weights.
    pub before: EpisodeStats,
    /// Statistics of the held-out tasks with the last weights.
    pub after: EpisodeStats,
    /// Gain between both, paired by task; `None` if they share no scored task.
    pub gain: Option<HeldOutGain>,
    /// The first episodes of the measurements before and after training.
    pub examples: Vec<EpisodeId>,
    /// Fate of all episodes. `trained_twice` and `lost` must be 0.
    pub samples: SampleCounts,
    pub tokens: TokenSummary,
    pub wall_s: f64,
    /// Waiting times of engine and trainer, and the staleness of rows.
    pub totals: Totals,
    /// Judgement of the run as a whole.
    pub verdict: Option<Verdict>,
    /// Reasons why the run did not finish its work; empty if it did.
    pub trouble: Vec<String>,
}
