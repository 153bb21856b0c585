//! Rows of one training step, as data.

use crate::formats::FormatCounts;
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

/// The groups of episodes, in the order of their ids.
pub fn by_group(traces: Vec<Trace>) -> Vec<Vec<Trace>> {
    let mut groups: BTreeMap<GroupId, Vec<Trace>> = BTreeMap::new();
    for trace in traces {
        groups.entry(trace.group.clone()).or_default().push(trace);
    }
    groups.into_values().collect()
}
