//! Training rows of one step, as data.

use serde::{Deserialize, Serialize};
use sinew_algo::trust::{Sighting, Suspicion};
use sinew_algo::{AlgoReport, TokenCounts};
use sinew_types::{EpisodeId, GroupId, Trace, TrainRow};
use std::collections::BTreeMap;

/// Training rows of one step, and the fate of the episodes without a row.
#[derive(Debug)]
pub struct Rows {
    pub rows: Vec<TrainRow>,
    pub tokens: TokenCounts,
    pub trained: Vec<EpisodeId>,
    pub dropped: BTreeMap<EpisodeId, String>,
    pub report: AlgoReport,
    pub formats: FormatCounts,
    /// Episodes that were left out because of a suspicion flag of the recipe.
    pub suspicious: BTreeMap<EpisodeId, Suspicion>,
    /// Data of its episodes for the statistics of usual values, if suspicious ones are left out.
    pub sightings: Vec<Sighting>,
}

/// Number of tokens sampled under an output format, by their treatment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FormatCounts {
    /// Tokens whose mask left a choice; the masks were computed again for training.
    pub masked: usize,
    /// Tokens whose mask allowed only one token; they are never trained.
    pub forced: usize,
    /// Mean logarithm of the probability that the unmasked model gives to all allowed tokens together; near 0
    /// if it follows the formats by itself.
    pub log_mass: f64,
    /// Number of answers from servers that only received the format as advice.
    #[serde(default)]
    pub advised: usize,
    /// Number of these answers that follow the format.
    #[serde(default)]
    pub kept: usize,
    /// Number of episodes whose masks could not be computed again; they are not trained.
    pub rejected: usize,
}

impl FormatCounts {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Groups traces by their group id, in the order of the ids.
pub fn by_group(traces: Vec<Trace>) -> Vec<Vec<Trace>> {
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    for trace in traces {
        groups.entry(trace.group.clone()).or_default().push(trace);
    }
    groups.into_values().collect()
}
