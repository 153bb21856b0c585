//! Rows for tests.

use sinew_types::{EpisodeId, TokenId, TrainRow};

/// A row whose tokens from `first` on are trained.
pub(crate) fn row(tokens: &[TokenId], first: usize) -> TrainRow {
    let n = tokens.len();
    let weight = |t: usize| if t < first { 0.0 } else { 1.0 };
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights: (0..n).map(weight).collect(),
        advantages: vec![1.0; n],
        behaviour_logprobs: vec![-1.0; n],
        ..TrainRow::default()
    }
}
