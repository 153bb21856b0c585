//! Divides a batch among several optimizer updates.

use sinew_types::{EpisodeId, SplitMix64, TrainRow};
use std::collections::HashMap;

/// Divides all trained rows into at most `parts` lists. The order of the episodes follows from `seed`, and
/// the parts differ by at most one episode. The rows of an episode stay together. Their tokens do not
/// influence the division.
pub(super) fn split(rows: &[TrainRow], parts: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut known: HashMap<&EpisodeId, usize> = HashMap::new();
    let mut episodes: Vec<Vec<usize>> = Vec::new();
    for (at, row) in rows.iter().enumerate() {
        if row.weights.iter().all(|&w| w == 0.0) {
            continue;
        }
        let next = episodes.len();
        let episode = *known.entry(&row.episode).or_insert(next);
        match episodes.get_mut(episode) {
            Some(rows) => rows.push(at),
            None => episodes.push(vec![at]),
        }
    }
    let n = episodes.len();
    let order = order(n, seed);
    let parts = parts.clamp(1, n.max(1));
    let part = |part: usize| {
        let dealt = &order[part * n / parts..(part + 1) * n / parts];
        let mut rows: Vec<usize> = dealt.iter().flat_map(|&e| episodes[e].clone()).collect();
        rows.sort_unstable();
        rows
    };
    (0..parts).map(part).collect()
}

/// A permutation of `0..n`, the same for the same seed (Fisher-Yates over SplitMix64).
fn order(n: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64::new(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}
