//! Independent check that every sampled token is trained at most once. It uses only traces and rows, not the
//! code that builds rows.

use serde::{Deserialize, Serialize};
use sinew_types::{EpisodeId, NodeId, TokenId, TokenKind, Trace, TrainRow};
use std::collections::{BTreeMap, HashMap};

/// Token counts of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenCounts {
    /// Tokens sampled by the policy, in all traces.
    pub sampled: usize,
    /// Sampled tokens with weight in exactly one row.
    pub trained_once: usize,
    /// Sampled tokens with weight in several rows. Must be 0.
    pub trained_twice: usize,
    /// Sampled tokens without weight. The report has the reason for their episodes.
    pub untrained: usize,
    /// Tokens with weight that the policy did not sample. Must be 0.
    pub forced_trained: usize,
    /// Tokens with weight in a row that matches no path of a trace. Must be 0.
    pub stray: usize,
}

impl TokenCounts {
    /// True if all counts that must be 0 are 0.
    pub fn holds(&self) -> bool {
        self.trained_twice == 0 && self.forced_trained == 0 && self.stray == 0
    }

    /// Adds the counts of another batch.
    pub fn add(&mut self, other: &Self) {
        self.sampled += other.sampled;
        self.trained_once += other.trained_once;
        self.trained_twice += other.trained_twice;
        self.untrained += other.untrained;
        self.forced_trained += other.forced_trained;
        self.stray += other.stray;
    }
}

/// Position of a token: node and offset.
type Place = (NodeId, usize);

/// Counts in how many of `rows` each token of `traces` has a weight.
pub fn count_tokens<'a>(
    traces: impl IntoIterator<Item = &'a Trace>,
    rows: &[TrainRow],
) -> TokenCounts {
    let mut counts = TokenCounts::default();
    let mut by_episode: BTreeMap<&EpisodeId, Vec<&TrainRow>> = BTreeMap::new();
    for row in rows {
        by_episode.entry(&row.episode).or_default().push(row);
    }
    for trace in traces {
        let own = by_episode.remove(&trace.episode).unwrap_or_default();
        count_trace(trace, &own, &mut counts);
    }
    let strays = by_episode.into_values().flatten();
    counts.stray += strays.map(|row| trained(row).count()).sum::<usize>();
    counts
}

/// Positions with a weight other than 0.
fn trained(row: &TrainRow) -> impl Iterator<Item = usize> + '_ {
    let weights = row.weights.iter().enumerate();
    weights.filter(|(_, w)| **w != 0.0).map(|(t, _)| t)
}

/// Adds the counts of one trace and its rows.
fn count_trace(trace: &Trace, rows: &[&TrainRow], counts: &mut TokenCounts) {
    let mut weights: HashMap<Place, usize> = HashMap::new();
    // Paths with equal ids match one row each.
    let mut paths: HashMap<Vec<TokenId>, Vec<Vec<Place>>> = HashMap::new();
    if !rows.is_empty() {
        for leaf in trace.leaves().into_iter().rev() {
            let (ids, places) = path(trace, leaf);
            paths.entry(ids).or_default().push(places);
        }
    }
    for row in rows {
        match paths.get_mut(&row.tokens).and_then(Vec::pop) {
            Some(places) => {
                for t in trained(row) {
                    *weights.entry(places[t]).or_default() += 1;
                }
            }
            None => counts.stray += trained(row).count(),
        }
    }
    for (id, node) in trace.nodes.iter().enumerate() {
        for offset in 0..node.tokens.len() {
            let times = weights.get(&(id as NodeId, offset)).copied().unwrap_or(0);
            match (node.kind, times) {
                (TokenKind::Sampled, _) if !node.forced(offset) => {
                    counts.sampled += 1;
                    counts.trained_once += usize::from(times == 1);
                    counts.trained_twice += usize::from(times > 1);
                    counts.untrained += usize::from(times == 0);
                }
                (_, 0) => {}
                _ => counts.forced_trained += 1,
            }
        }
    }
}

/// Ids and positions of the tokens from the root to `leaf`.
fn path(trace: &Trace, leaf: NodeId) -> (Vec<TokenId>, Vec<Place>) {
    let mut nodes = Vec::new();
    let mut at = Some(leaf);
    while let Some(id) = at {
        let Some(node) = trace.nodes.get(id as usize) else {
            break;
        };
        nodes.push((id, node));
        at = Some(node.parent);
    }
    let mut ids = Vec::new();
    let mut places = Vec::new();
    for (id, node) in nodes.into_iter().rev() {
        ids.extend_from_slice(&node.tokens);
        places.extend((0..node.tokens.len()).map(|offset| (id, offset)));
    }
    (ids, places)
}
