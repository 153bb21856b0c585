//! Rows of one training step, as data.

use serde::{Deserialize, Serialize};
use sinew_algo::trust::{Sighting, Suspicion};
use sinew_algo::{AlgoReport, TokenCounts};
use sinew_types::{EpisodeId, GroupId, Trace, TrainRow};
use std::collections::BTreeMap;

/// Rows of one step, and what became of the episodes that gave none.
#[derive(Debug)]
pub struct Rows {
    pub rows: Vec<TrainRow>,
    pub tokens: TokenCounts,
    pub trained: Vec<EpisodeId>,
    pub dropped: BTreeMap<EpisodeId, String>,
    pub report: AlgoReport,
    pub formats: FormatCounts,
    /// Episodes that a flag of the recipe left out.
    pub suspicious: BTreeMap<EpisodeId, Suspicion>,
    /// Contribution of its episodes to the usual values, if suspicious ones are left out.
    pub sightings: Vec<Sighting>,
}

/// Tokens of a step that were held to formats, by what became of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FormatCounts {
    /// Tokens drawn from a mask with a choice; their masks were made again.
    pub masked: usize,
    /// Tokens without a choice: never trained.
    pub forced: usize,
    /// Mean logarithm of the probability that the model gave to the allowed tokens together: near 0 where it
    /// keeps to the formats by itself.
    pub log_mass: f64,
    /// Answers of servers that were given a format as advice, and how many of them kept to it.
    #[serde(default)]
    pub advised: usize,
    #[serde(default)]
    pub kept: usize,
    /// Episodes whose masks could not be made again: not trained.
    pub rejected: usize,
}

impl FormatCounts {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The groups of episodes, in the order of their ids.
pub fn by_group(traces: Vec<Trace>) -> Vec<Vec<Trace>> {
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    for trace in traces {
        groups.entry(trace.group.clone()).or_default().push(trace);
    }
    groups.into_values().collect()
}
