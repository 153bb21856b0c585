//! Puts the rows of each adapter side by side, so that a device computes them together.

use super::Plan;
use crate::forward::BatchSequence;

/// Orders the sequences of a planned pass by their adapters: first those without one. Within an adapter the
/// order stays.
pub(super) fn group_by_adapter(plan: &mut Plan) {
    let batch = &mut plan.batch;
    if batch.sequences.is_sorted_by_key(|s| s.adapter) {
        return;
    }
    let mut sequences = std::mem::take(&mut batch.sequences);
    let tokens = std::mem::take(&mut batch.tokens);
    let logit_rows = std::mem::take(&mut batch.logit_rows);
    sequences.sort_by_key(|s| s.adapter);
    // New index of each row of logits.
    let mut moved = vec![0; logit_rows.len()];
    for sequence in sequences {
        let old = sequence.rows.clone();
        let first = batch.tokens.len();
        batch.tokens.extend_from_slice(&tokens[old.clone()]);
        let from = logit_rows.partition_point(|&row| row < old.start);
        let to = logit_rows.partition_point(|&row| row < old.end);
        for (&row, index) in logit_rows[from..to].iter().zip(from..) {
            moved[index] = batch.logit_rows.len();
            batch.logit_rows.push(first + row - old.start);
        }
        batch.sequences.push(BatchSequence {
            rows: first..first + old.len(),
            ..sequence
        });
    }
    for slot in &mut plan.samples {
        slot.logits = moved[slot.logits];
    }
    for slot in &mut plan.scores {
        slot.logits = moved[slot.logits];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forward::Batch;
    use crate::scheduler::plan::{SampleSlot, ScoreSlot};
    use crate::sequence::OrderKey;
    use std::cmp::Reverse;

    #[test]
    fn rows_move_with_their_logits() {
        let sequence = |rows, adapter| BatchSequence {
            rows,
            past: 0,
            blocks: 0..1,
            adapter,
        };
        let key = OrderKey {
            priority: Reverse(0),
            arrival: 0,
        };
        let sample = |logits| SampleSlot {
            key,
            logits,
            drafted: 0,
        };
        let mut plan = Plan::default();
        plan.batch = Batch {
            tokens: vec![10, 11, 20, 30, 31, 32, 40],
            sequences: vec![
                sequence(0..2, Some(1)),
                sequence(2..3, None),
                sequence(3..6, Some(1)),
                sequence(6..7, Some(0)),
            ],
            block_table: vec![0],
            logit_rows: vec![1, 2, 3, 4, 5, 6],
        };
        // Two sequences share the row of the second one.
        plan.samples = vec![sample(0), sample(1), sample(1), sample(4), sample(5)];
        plan.scores = vec![ScoreSlot {
            key,
            logits: 2,
            position: 1,
            count: 2,
        }];
        group_by_adapter(&mut plan);
        assert_eq!(plan.batch.tokens, [20, 40, 10, 11, 30, 31, 32]);
        let grouped = plan
            .batch
            .sequences
            .iter()
            .map(|s| (s.rows.clone(), s.adapter));
        let expected = [
            (0..1, None),
            (1..2, Some(0)),
            (2..4, Some(1)),
            (4..7, Some(1)),
        ];
        assert_eq!(grouped.collect::<Vec<_>>(), expected);
        assert_eq!(plan.batch.logit_rows, [0, 1, 3, 4, 5, 6]);
        let rows: Vec<_> = plan.samples.iter().map(|s| s.logits).collect();
        assert_eq!(rows, [2, 0, 0, 5, 1]);
        assert_eq!(plan.scores[0].logits, 3);
        let before = plan.batch.clone();
        group_by_adapter(&mut plan);
        assert_eq!(plan.batch, before, "nothing moves twice");
    }
}
