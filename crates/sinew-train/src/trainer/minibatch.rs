//! Dividing a batch among several optimizer updates.

use sinew_types::{SplitMix64, TrainRow};

/// Share of some rows in the batch's mean, rows without a trained token left out.
pub(super) fn share(rows: &[TrainRow], which: impl IntoIterator<Item = usize>) -> f64 {
    let trains = |row: &&TrainRow| row.weights.iter().any(|&w| w != 0.0);
    let rows = which.into_iter().map(|r| &rows[r]);
    rows.filter(trains).map(|row| row.share).sum()
}

/// At most `parts` lists of rows, together all trained rows, as even in tokens as groups allow.
///
/// Rows are sorted by tokens, so that rows that share a prefix fall into one part; near each even
/// boundary the cut is made where the least prefix is shared, so that groups stay whole.
pub(super) fn split(rows: &[TrainRow], parts: usize) -> Vec<Vec<usize>> {
    let mut sorted: Vec<usize> = (0..rows.len())
        .filter(|&r| rows[r].weights.iter().any(|&w| w != 0.0))
        .collect();
    sorted.sort_by(|&a, &b| rows[a].tokens.cmp(&rows[b].tokens).then(a.cmp(&b)));
    let n = sorted.len();
    let parts = parts.clamp(1, n.max(1));
    let shared = |at: usize| {
        let pair = rows[sorted[at - 1]]
            .tokens
            .iter()
            .zip(&rows[sorted[at]].tokens);
        pair.take_while(|(a, b)| a == b).count()
    };
    let window = n / (4 * parts);
    let mut out = Vec::with_capacity(parts);
    let mut start = 0;
    for part in 1..parts {
        let even = part * n / parts;
        let low = (even - window.min(even)).max(start + 1);
        let high = (even + window).min(n - (parts - part)).max(low);
        let cut = (low..=high)
            .min_by_key(|&at| (shared(at), at.abs_diff(even)))
            .unwrap_or(even);
        out.push(sorted[start..cut].to_vec());
        start = cut;
    }
    out.push(sorted[start..].to_vec());
    out
}

/// A permutation of `0..n`, the same for the same seed (Fisher-Yates over SplitMix64).
pub(super) fn order(n: usize, seed: u64) -> Vec<usize> {
    let mut random = SplitMix64::new(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i, (random.next_u64() % (i as u64 + 1)) as usize);
    }
    order
}
