//! The result of a whole run.

use crate::record::{EpisodeStats, TokenSummary, Totals, is_zero};
use crate::verdict::Verdict;
use serde::{Deserialize, Serialize};
use sinew_types::EpisodeId;

/// Episodes of a whole run by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    pub trained: usize,
    /// Left out for a recorded reason (no difference within the group, failed, ...).
    pub dropped: usize,
    pub trained_twice: usize,
    /// Trained, and no longer in the store; or stored for a step that was trained, but neither
    /// trained nor dropped.
    pub lost: usize,
    /// Episodes that wait for rewards from outside; another session goes on with them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub waiting: usize,
}

/// A run that came to its end.
#[derive(Clone, Debug, Default)]
pub struct RunOutcome {
    /// Held-out tasks under the first weights, and under the last ones.
    pub before: EpisodeStats,
    pub after: EpisodeStats,
    /// First episodes of the measurements before and after.
    pub examples: Vec<EpisodeId>,
    /// `trained_twice` and `lost` must be 0.
    pub samples: SampleCounts,
    pub tokens: TokenSummary,
    pub wall_s: f64,
    /// Waits of engine and trainer, and the age of rows.
    pub totals: Totals,
    /// Judgement of the run as a whole.
    pub verdict: Option<Verdict>,
    /// Reasons why the run did not do its work, if so.
    pub trouble: Vec<String>,
}
