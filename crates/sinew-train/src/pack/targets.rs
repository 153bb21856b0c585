//! Rows with any targets: tokens that need not be the row's own next ones, several in one place.

use super::{Asked, LossItem, MaskTable, PackError, Packing, RowPart, micro_batch, packing, sort};
use sinew_types::{RowMasks, TokenId};

/// A token whose log-probability is asked for, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Index of the last token of the row that it follows.
    pub after: u32,
    /// The token.
    pub token: TokenId,
}

/// A sequence with the tokens whose log-probabilities are asked for, at temperature 1 and over the whole
/// vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct TargetRow<'a> {
    /// Tokens that the model sees.
    pub tokens: &'a [TokenId],
    /// Targets in the order of their places; there can be several, or none, in one place.
    pub targets: &'a [Target],
}

/// Packs rows like [`pack`](super::pack()), for log-probabilities of any targets. Prefixes are computed
/// once if
/// `share`; otherwise as in [`pack_flat`](super::pack_flat). Rows without targets count as untrained.
///
/// # Errors
/// If a target is out of its place, or a row is longer than `max_tokens`.
pub fn pack_targets(
    rows: &[TargetRow<'_>],
    max_tokens: usize,
    share: bool,
) -> Result<Packing, PackError> {
    let mut sorted = Vec::with_capacity(rows.len());
    for (index, row) in rows.iter().enumerate() {
        check_places(index, row)?;
        let Some(last) = row.targets.last() else {
            continue;
        };
        let tokens = last.after as usize + 1;
        if tokens > max_tokens {
            return Err(PackError::TargetRowTooLong {
                row: index,
                tokens,
                max_tokens,
            });
        }
        sorted.push(RowPart {
            row: index,
            tokens: &row.tokens[..tokens],
            routes: Vec::new(),
            route_shape: (0, 0),
            shared: 0,
        });
    }
    sort(&mut sorted, share);
    let lens = rows.iter().map(|row| row.tokens.len());
    packing(&sorted, max_tokens, lens, |piece| {
        let asked = piece.iter().map(|part| asked_by(&rows[part.row]));
        micro_batch(piece, MaskTable::default(), asked.collect())
    })
}

fn asked_by(row: &TargetRow<'_>) -> Vec<Asked> {
    let ask = |(t, target): (u32, &Target)| Asked {
        t,
        after: target.after,
        item: LossItem {
            row: 0,
            target: target.token,
            temperature: 1.0,
            mask: RowMasks::ALL,
        },
        tops: Vec::new(),
    };
    (0u32..).zip(row.targets).map(ask).collect()
}

/// Refuses targets after a token that does not exist, or out of order.
fn check_places(index: usize, row: &TargetRow<'_>) -> Result<(), PackError> {
    let mut earliest = 0;
    for (at, target) in row.targets.iter().enumerate() {
        if target.after < earliest || target.after as usize >= row.tokens.len() {
            return Err(PackError::TargetPlace {
                row: index,
                index: at,
                after: target.after,
                tokens: row.tokens.len(),
            });
        }
        earliest = target.after;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pack::MicroBatch;

    fn target(after: u32, token: TokenId) -> Target {
        Target { after, token }
    }

    /// The items that a packed row asks for: tokens before the target, and the target.
    fn asked(batch: &MicroBatch, row: usize) -> Vec<(TokenId, TokenId)> {
        let packed = batch.rows.iter().find(|p| p.row == row).unwrap();
        let item = |term: &super::super::Term| batch.items[term.item as usize];
        let items = packed.terms.iter().map(item);
        items
            .map(|i| (batch.tokens[i.row as usize], i.target))
            .collect()
    }

    #[test]
    fn targets_need_not_be_the_next_tokens_and_prefixes_are_shared() {
        let (a, b) = ([1, 2, 3, 4], [1, 2, 3, 5]);
        let of_a = [target(1, 9), target(1, 8), target(3, 7)];
        let of_b = [target(0, 2), target(1, 9), target(2, 2), target(2, 2)];
        let rows = [
            TargetRow {
                tokens: &a,
                targets: &of_a,
            },
            TargetRow {
                tokens: &b,
                targets: &of_b,
            },
        ];
        let packing = pack_targets(&rows, 64, true).unwrap();
        let [batch] = &packing.micro_batches[..] else {
            panic!("one micro-batch");
        };
        // Row b ends before its last token, which nothing asks for.
        assert_eq!(batch.tokens, [1, 2, 3, 4]);
        assert_eq!((packing.computed_tokens, packing.naive_tokens), (4, 8));
        assert_eq!(asked(batch, 0), [(2, 9), (2, 8), (4, 7)]);
        assert_eq!(asked(batch, 1), [(1, 2), (2, 9), (3, 2), (3, 2)]);
        assert_eq!(batch.items.len(), 5, "equal questions are one item");
        // The shorter row sorts first.
        assert_eq!(batch.rows[0].row, 1);
        let t: Vec<u32> = batch.rows[0].terms.iter().map(|term| term.t).collect();
        assert_eq!(t, [0, 1, 2, 3]);
        let flat = pack_targets(&rows, 64, false).unwrap();
        assert_eq!(flat.computed_tokens, 7);
        let segments = flat.micro_batches[0].layout.segments();
        assert!(segments.iter().all(|s| s.parent.is_none()));
    }

    #[test]
    fn rows_without_targets_are_left_out_and_bad_places_are_refused() {
        let tokens = [1, 2, 3];
        let pack = |targets: &[Target], max: usize| {
            let row = TargetRow {
                tokens: &tokens,
                targets,
            };
            pack_targets(&[row], max, true)
        };
        let empty = pack(&[], 8).unwrap();
        assert_eq!((empty.untrained_rows, empty.micro_batches.len()), (1, 0));
        assert!(matches!(
            pack(&[target(3, 0)], 8),
            Err(PackError::TargetPlace { after: 3, .. })
        ));
        assert!(matches!(
            pack(&[target(1, 0), target(0, 0)], 8),
            Err(PackError::TargetPlace { index: 1, .. })
        ));
        assert!(matches!(
            pack(&[target(2, 0)], 2),
            Err(PackError::TargetRowTooLong { tokens: 3, .. })
        ));
    }
}
