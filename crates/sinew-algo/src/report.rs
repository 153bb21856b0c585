//! Report of a batch. Every episode that does not train is counted, with the reason.

use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, GroupId};
use std::collections::BTreeMap;

/// An episode that cannot be trained on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Quarantined {
    /// Id of the episode.
    pub episode: EpisodeId,
    /// Violated invariant or invalid reward.
    pub reason: String,
}

/// Statistics of a set of numbers. All zero for an empty set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Moments {
    /// Number of values.
    pub count: usize,
    /// Mean value.
    pub mean: f64,
    /// Unbiased standard deviation.
    pub std: f64,
    /// Minimum value.
    pub min: f64,
    /// Maximum value.
    pub max: f64,
}

impl Moments {
    /// Computes the statistics of `values`.
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

/// Means over preference pairs before the optimizer step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PreferenceReport {
    /// Number of pairs.
    pub pairs: usize,
    /// `−log σ(margin)`.
    pub loss: f64,
    /// Share of pairs with a positive margin.
    pub accuracy: f64,
    /// Margin `β·[(ℓ_π − ℓ_ref)(chosen) − (ℓ_π − ℓ_ref)(rejected)]`.
    pub margin: f64,
}

/// Effects of repair ([`crate::GroupRepair`]). A group counts in one line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RepairReport {
    /// Groups with failed episodes after all retries.
    pub broken_groups: usize,
    /// Broken groups that continued with their usable episodes.
    pub viable_groups: usize,
    /// Broken groups that continued with failed episodes masked.
    pub masked_groups: usize,
    /// Masked episodes.
    pub masked_episodes: usize,
    /// Broken groups that were filled by repeating episodes.
    pub padded_groups: usize,
    /// Repetitions of episodes.
    pub repeated_episodes: usize,
    /// Broken groups that were dropped although they could be compared. `groups_too_small` has the others.
    pub dropped_groups: Vec<GroupId>,
}

/// Report of [`crate::Prepared::rows`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AlgoReport {
    /// Groups of the batch.
    pub groups: usize,
    /// Episodes of the batch.
    pub episodes: usize,
    /// Episodes that the system failed, by component. They are in no baseline.
    pub failed: BTreeMap<String, usize>,
    /// Episodes without a reward. They are in no baseline and do not train.
    #[serde(default)]
    pub unscored: usize,
    /// Truncated episodes.
    pub truncated: usize,
    /// Truncated episodes that were masked or excluded.
    pub truncated_untrained: usize,
    /// Episodes with an invalid trace or reward.
    pub quarantined: Vec<Quarantined>,
    /// Effects of repair.
    pub repair: RepairReport,
    /// Groups with too few usable episodes for a comparison.
    pub groups_too_small: Vec<GroupId>,
    /// Groups with equal rewards.
    pub groups_equal: Vec<GroupId>,
    /// Groups that `keep_top_std` removed.
    pub groups_filtered: Vec<GroupId>,
    /// Episodes that resampling removed.
    pub resampled_out: usize,
    /// Episodes removed because they were not successful.
    pub unsuccessful_out: usize,
    /// Turns without a state hash, for algorithms that compare states.
    pub steps_without_state: usize,
    /// Episodes whose rows were left out because all advantages are 0.
    pub without_signal: usize,
    /// Created rows.
    pub rows: usize,
    /// Episodes with rows.
    pub trained_episodes: usize,
    /// Tokens with weight.
    pub trained_tokens: usize,
    /// Episodes in the denominator of the loss.
    pub denominator_episodes: usize,
    /// Tokens in the denominator of the loss.
    pub denominator_tokens: usize,
    /// Shaped rewards of usable episodes.
    pub reward: Moments,
    /// Share of successful episodes among usable ones. 0 if there are none.
    pub success_rate: f64,
    /// Advantages of trained tokens.
    pub advantage: Moments,
    /// Statistics of preference pairs, if the algorithm uses them.
    pub preference: Option<PreferenceReport>,
}
