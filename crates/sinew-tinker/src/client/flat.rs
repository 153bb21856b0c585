//! Micro-batches as datums of the protocol: every path of the trie by itself, items as target tokens.
//!
//! The service knows neither shared prefixes nor single items: a datum is a whole sequence with as many
//! targets at each place as the place with most items has. Targets of other places have weight 0.

use crate::types::{Datum, Tensor, TensorValues};
use sinew_train::PolicyError;
use sinew_train::pack::MicroBatch;
use sinew_types::{RowMasks, TokenId};
use std::collections::BTreeMap;
use std::ops::Range;

/// Name of the tensor of targets.
const TARGETS: &str = "target_tokens";
/// Name of the tensor of weights.
const WEIGHTS: &str = "weights";
/// Name of the tensor of log-probabilities in results.
pub(super) const LOGPROBS: &str = "logprobs";

/// A sequence with its targets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FlatDatum {
    pub(super) tokens: Vec<TokenId>,
    /// Targets at each place, at least 1.
    pub(super) width: usize,
    /// `[tokens, width]`.
    pub(super) targets: Vec<TokenId>,
}

/// The place of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) datum: usize,
    /// Index in the targets of the datum.
    pub(super) index: usize,
}

/// A micro-batch as datums.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FlatBatch {
    pub(super) datums: Vec<FlatDatum>,
    /// One place for each item.
    pub(super) places: Vec<Place>,
}

impl FlatDatum {
    /// The datum with these weights `[tokens, width]`.
    pub(super) fn with_weights(&self, weights: Vec<f32>) -> Datum {
        let n = self.tokens.len();
        let shape = match self.width {
            1 => vec![n],
            width => vec![n, width],
        };
        let ids = self.targets.iter().map(|&id| i64::from(id)).collect();
        let tensor = |values| Tensor {
            shape: shape.clone(),
            values,
        };
        Datum {
            tokens: self.tokens.clone(),
            inputs: BTreeMap::from([
                (TARGETS.to_owned(), tensor(TensorValues::I64(ids))),
                (WEIGHTS.to_owned(), tensor(TensorValues::F32(weights))),
            ]),
        }
    }

    /// The datum with weight 0 everywhere, for passes without gradients.
    pub(super) fn unweighted(&self) -> Datum {
        self.with_weights(vec![0.0; self.targets.len()])
    }

    /// Bytes in a request, before compression.
    fn bytes(&self) -> usize {
        4 * self.tokens.len() + 12 * self.targets.len()
    }
}

impl FlatBatch {
    /// Takes a micro-batch apart.
    ///
    /// # Errors
    /// If an item has a temperature other than 1 or a mask, which the protocol does not have.
    pub(super) fn of(batch: &MicroBatch) -> Result<Self, PolicyError> {
        check_items(batch)?;
        let segments = batch.layout.segments();
        let mut is_parent = vec![false; segments.len()];
        for parent in segments.iter().filter_map(|s| s.parent) {
            is_parent[parent as usize] = true;
        }
        // A segment that several paths share belongs to the first of them.
        let mut owner = vec![usize::MAX; segments.len()];
        let mut sequences: Vec<Vec<TokenId>> = Vec::new();
        for leaf in (0..segments.len()).filter(|&s| !is_parent[s]) {
            let mut path = vec![leaf];
            while let Some(parent) = path.last().and_then(|&s| segments[s].parent) {
                path.push(parent as usize);
            }
            let mut tokens = Vec::new();
            for &segment in path.iter().rev() {
                let (start, len) = (segments[segment].start, segments[segment].len);
                tokens.extend_from_slice(&batch.tokens[start as usize..(start + len) as usize]);
                owner[segment] = owner[segment].min(sequences.len());
            }
            sequences.push(tokens);
        }
        let position = |row: u32| {
            let segment = segments.partition_point(|s| s.start <= row) - 1;
            let inside = row - segments[segment].start;
            (
                owner[segment],
                (segments[segment].position + inside) as usize,
            )
        };
        Ok(Self::placed(batch, sequences, position))
    }

    /// Gives each item a column at its place.
    fn placed(
        batch: &MicroBatch,
        sequences: Vec<Vec<TokenId>>,
        position: impl Fn(u32) -> (usize, usize),
    ) -> Self {
        let mut counts: Vec<Vec<usize>> = sequences.iter().map(|s| vec![0; s.len()]).collect();
        let mut columns = Vec::with_capacity(batch.items.len());
        for item in &batch.items {
            let (datum, at) = position(item.row);
            columns.push((datum, at, counts[datum][at]));
            counts[datum][at] += 1;
        }
        let mut datums: Vec<FlatDatum> = sequences
            .into_iter()
            .zip(&counts)
            .map(|(tokens, counts)| {
                let width = counts.iter().copied().max().unwrap_or(1).max(1);
                FlatDatum::filled(tokens, width)
            })
            .collect();
        let mut places = Vec::with_capacity(columns.len());
        for (item, (datum, at, column)) in batch.items.iter().zip(columns) {
            let index = at * datums[datum].width + column;
            datums[datum].targets[index] = item.target;
            places.push(Place { datum, index });
        }
        Self { datums, places }
    }
}

impl FlatDatum {
    /// A sequence whose targets are its own next tokens; the last place has its own token.
    fn filled(tokens: Vec<TokenId>, width: usize) -> Self {
        let next = (0..tokens.len()).map(|i| tokens[(i + 1).min(tokens.len() - 1)]);
        let targets = next.flat_map(|id| std::iter::repeat_n(id, width)).collect();
        Self {
            tokens,
            width,
            targets,
        }
    }
}

/// Refuses items that a service cannot score.
fn check_items(batch: &MicroBatch) -> Result<(), PolicyError> {
    for item in &batch.items {
        if item.temperature != 1.0 {
            return Err(PolicyError::failed(format!(
                "temperature {}: the Tinker protocol has log-probabilities at temperature 1 only",
                item.temperature
            )));
        }
        if item.mask != RowMasks::ALL {
            return Err(PolicyError::failed(
                "tokens under an output format: the Tinker protocol has no masks",
            ));
        }
    }
    Ok(())
}

/// Cuts datums into requests of at most `most_bytes` and `most` datums each; a longer datum is alone.
pub(super) fn requests<'a>(
    datums: impl IntoIterator<Item = &'a FlatDatum>,
    most: usize,
    most_bytes: usize,
) -> Vec<Range<usize>> {
    let (mut all, mut start, mut bytes, mut end) = (Vec::new(), 0, 0, 0);
    for datum in datums {
        let own = datum.bytes();
        let is_full = bytes + own > most_bytes || end - start >= most.max(1);
        if end > start && is_full {
            all.push(start..end);
            (start, bytes) = (end, 0);
        }
        bytes += own;
        end += 1;
    }
    if end > start {
        all.push(start..end);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::testing::row;
    use sinew_train::pack::{pack, pack_flat};
    use sinew_types::TrainRow;

    fn flat(rows: &[TrainRow]) -> FlatBatch {
        let packing = pack(rows, 1000).unwrap();
        FlatBatch::of(&packing.micro_batches[0]).unwrap()
    }

    #[test]
    fn a_row_is_its_tokens_before_the_last_target() {
        let mut one = row(&[5, 6, 7, 8], 2);
        let datum = flat(std::slice::from_ref(&one));
        assert_eq!(datum.datums.len(), 1);
        assert_eq!(datum.datums[0].tokens, [5, 6, 7]);
        assert_eq!(datum.datums[0].targets, [6, 7, 8]);
        let indices: Vec<usize> = datum.places.iter().map(|p| p.index).collect();
        assert_eq!(indices, [1, 2], "only sampled tokens are items");
        let sent = datum.datums[0].with_weights(vec![0.0, 0.5, -0.5]);
        assert_eq!(sent.inputs[TARGETS].shape, [3]);
        assert_eq!(
            sent.inputs[WEIGHTS].values,
            TensorValues::F32(vec![0.0, 0.5, -0.5])
        );
        one.temperatures = vec![0.7; 4];
        let packing = pack(&[one], 1000).unwrap();
        let refused = FlatBatch::of(&packing.micro_batches[0]).unwrap_err();
        assert!(refused.to_string().contains("temperature 0.7"), "{refused}");
    }

    #[test]
    fn shared_prefixes_are_written_out_and_each_item_has_one_place() {
        let rows = [
            row(&[1, 2, 3, 4], 1),
            row(&[1, 2, 3, 5, 6], 1),
            row(&[1, 9], 1),
        ];
        let shared = flat(&rows);
        let mut sequences: Vec<&[TokenId]> = shared.datums.iter().map(|d| &d.tokens[..]).collect();
        sequences.sort_unstable();
        assert_eq!(sequences, [&[1, 2, 3, 5][..]]);
        // 4 and 5 are both targets after [1, 2, 3], 2 and 9 after [1].
        assert_eq!(shared.datums[0].width, 2);
        let packing = pack(&rows, 1000).unwrap();
        let items = &packing.micro_batches[0].items;
        assert_eq!(shared.places.len(), items.len());
        for (item, place) in items.iter().zip(&shared.places) {
            assert_eq!(shared.datums[place.datum].targets[place.index], item.target);
        }
        let mut places: Vec<(usize, usize)> =
            shared.places.iter().map(|p| (p.datum, p.index)).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places.len(), items.len());
        let sent = shared.datums[0].unweighted();
        assert_eq!(sent.inputs[TARGETS].shape, [4, 2]);
    }

    #[test]
    fn rows_that_share_nothing_have_one_target_at_each_place() {
        let rows = [row(&[1, 2, 3, 4], 1), row(&[1, 2, 3, 5, 6], 1)];
        let packing = pack_flat(&rows, 1000).unwrap();
        let flat = FlatBatch::of(&packing.micro_batches[0]).unwrap();
        let widths: Vec<usize> = flat.datums.iter().map(|d| d.width).collect();
        assert_eq!(widths, [1, 1]);
        assert_eq!(flat.datums[0].tokens, [1, 2, 3]);
        assert_eq!(flat.datums[0].targets, [2, 3, 4]);
        assert_eq!(flat.datums[1].targets, [2, 3, 5, 6]);
    }

    #[test]
    fn requests_are_cut_by_bytes_and_by_number() {
        let datums: Vec<FlatDatum> = [10, 10, 30, 1, 1]
            .map(|n| FlatDatum::filled(vec![1; n], 1))
            .into();
        // 16 bytes a token.
        assert_eq!(requests(&datums, 9, 320), [0..2, 2..3, 3..5]);
        assert_eq!(requests(&datums, 1, 320).len(), 5);
        assert_eq!(requests(&datums, 9, 1 << 20).len(), 1);
        assert!(requests(&[], 9, 320).is_empty());
    }
}
