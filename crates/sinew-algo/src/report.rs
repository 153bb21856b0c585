//! What became of a batch: every episode that does not train is counted, with the reason.

use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, GroupId};
use std::collections::BTreeMap;

/// An episode that is not fit to train on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quarantined {
    pub episode: EpisodeId,
    pub reason: String,
}

/// Summary of a set of numbers; zeros for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    pub count: usize,
    pub mean: f64,
    /// Unbiased.
    pub std: f64,
    pub min: f64,
    pub max: f64,
}

impl Moments {
    /// Of the given values.
    pub fn of(values: &[f64]) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        Self {
            count: values.len(),
            mean: crate::stats::mean(values),
            std: crate::stats::std_unbiased(values),
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

/// Means over preference pairs, before the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    pub pairs: usize,
    /// `−log σ(margin)`.
    pub loss: f64,
    /// Share of pairs whose margin is positive.
    pub accuracy: f64,
    pub margin: f64,
}

/// What repair did with the groups of a batch ([`crate::GroupRepair`]). A group is in one line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RepairReport {
    /// Groups in which episodes failed after all retries.
    pub broken_groups: usize,
    /// Of these: went on with the episodes they had.
    pub viable_groups: usize,
    /// Went on with their failed episodes masked.
    pub masked_groups: usize,
    pub masked_episodes: usize,
    /// Were filled up by repeating episodes.
    pub padded_groups: usize,
    pub repeated_episodes: usize,
    /// Left the batch, though there was something to compare; `groups_too_small` has the others.
    pub dropped_groups: Vec<GroupId>,
}

/// What [`crate::Algorithm::rows`] did.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlgoReport {
    pub groups: usize,
    pub episodes: usize,
    /// Episodes that fell to the system, by part; they are in no baseline.
    pub failed: BTreeMap<String, usize>,
    /// Episodes without a reward, where rewards are read; they are in no baseline and train nothing.
    #[serde(default)]
    pub unscored: usize,
    /// Episodes that a limit cut, whatever became of them.
    pub truncated: usize,
    /// Of these, how many the recipe's policy masked or excluded.
    pub truncated_untrained: usize,
    /// Episodes that broke an invariant or had a reward that is no number.
    pub quarantined: Vec<Quarantined>,
    /// What became of groups with failed episodes.
    pub repair: RepairReport,
    /// Groups with fewer than two usable episodes left where two are compared.
    pub groups_too_small: Vec<GroupId>,
    /// Groups whose rewards are all equal.
    pub groups_equal: Vec<GroupId>,
    /// Groups that `keep_top_std` left out.
    pub groups_filtered: Vec<GroupId>,
    /// Episodes that resampling left out.
    pub resampled_out: usize,
    /// Episodes left out for not being successes.
    pub unsuccessful_out: usize,
    /// Turns without a state hash, where states are compared.
    pub steps_without_state: usize,
    /// Episodes whose advantage is 0 everywhere, so that their rows were left out.
    pub without_signal: usize,
    pub rows: usize,
    pub trained_episodes: usize,
    pub trained_tokens: usize,
    /// Episodes and tokens in the loss's denominators.
    pub denominator_episodes: usize,
    pub denominator_tokens: usize,
    /// Of usable episodes, as compared (after shaping).
    pub reward: Moments,
    /// Of usable episodes; 0 for none.
    pub success_rate: f64,
    /// Over trained tokens.
    pub advantage: Moments,
    /// Of preference pairs, where there are any.
    pub preference: Option<PreferenceReport>,
}
