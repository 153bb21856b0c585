use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

fn row(tokens: &[TokenId], weights: &[f32]) -> TrainRow {
    let n = tokens.len();
    TrainRow {
        episode: EpisodeId::new("e"),
        tokens: tokens.to_vec(),
        weights: weights.to_vec(),
        advantages: vec![1.0; n],
        behaviour_logprobs: vec![-1.0; n],
        ..TrainRow::default()
    }
}

/// Tokens along a packed row's segments.
fn spelled(batch: &MicroBatch, packed: &PackedRow) -> Vec<TokenId> {
    let mut out = Vec::new();
    let mut parent = None;
    for &s in &packed.segments {
        let segment = batch.layout.segments()[s as usize];
        assert_eq!(segment.parent, parent);
        parent = Some(s);
        let (start, len) = (segment.start as usize, segment.len as usize);
        out.extend_from_slice(&batch.tokens[start..start + len]);
    }
    out
}

#[test]
fn a_group_computes_its_prompt_once() {
    // Two answers of one question, the second continues where the first's last token differs.
    let rows = [
        row(&[1, 2, 3, 7, 8], &[0.0, 0.0, 0.0, 0.25, 0.25]),
        row(&[1, 2, 3, 7, 9, 5], &[0.0, 0.0, 0.0, 0.25, 0.5, 0.0]),
    ];
    let packing = pack(&rows, 64).unwrap();
    assert_eq!(packing.micro_batches.len(), 1);
    let batch = &packing.micro_batches[0];
    // Neither the last trained token nor anything after it has to be computed.
    assert_eq!(batch.tokens, [1, 2, 3, 7]);
    assert_eq!((packing.computed_tokens, packing.naive_tokens), (4, 11));
    let item = |row, target| LossItem {
        row,
        target,
        temperature: 1.0,
        mask: RowMasks::ALL,
    };
    assert_eq!(batch.items, [item(2, 7), item(3, 8), item(3, 9)]);
    let items: Vec<u32> = batch.rows[1].terms.iter().map(|t| t.item).collect();
    assert_eq!(items, [0, 2], "the common token is one item for both rows");
}

/// A row that trains its last token, with one expert for each token in one layer; `None`: not recorded.
fn routed(tokens: &[TokenId], experts: Option<&[u8]>) -> TrainRow {
    let mut weights = vec![0.0; tokens.len()];
    weights[tokens.len() - 1] = 1.0;
    let span = |experts: &[u8]| RouteSpan {
        start: 0,
        layers: 1,
        top_k: 1,
        wide: false,
        experts: experts.into(),
    };
    let mut row = row(tokens, &weights);
    row.routes = experts.map(span).into_iter().collect();
    row
}

#[test]
fn prefixes_are_shared_where_their_experts_are_the_same() {
    let free = RouteTable::FREE;
    let rows = [
        routed(&[1, 2, 3, 7], Some(&[5, 6, 7])),
        routed(&[1, 2, 3, 8], Some(&[5, 6, 9])),
        routed(&[1, 2, 4, 8], Some(&[5, 0])),
        routed(&[1, 2, 3, 9], None),
    ];
    let packing = pack_routed(&rows, 64, true).unwrap();
    let [batch] = &packing.micro_batches[..] else {
        panic!("{packing:?}");
    };
    for packed in &batch.rows {
        assert_eq!(spelled(batch, packed), rows[packed.row].tokens[..3]);
    }
    // The row without experts comes first; its token 1 is not that of the three others.
    assert_eq!(batch.tokens, [1, 2, 3, 1, 2, 4, 2, 3, 3]);
    let expected = [free, free, free, 5, 0, free, 6, 7, 9];
    assert_eq!(batch.routes.experts, expected);
    assert_eq!((batch.routes.layers, batch.routes.top_k), (1, 1));
    assert_eq!((batch.routes.known, packing.routed_tokens), (5, 5));
    assert_eq!((batch.packed_tokens, packing.computed_tokens), (9, 9));
    let flat = pack_routed(&rows, 64, false).unwrap();
    assert_eq!((flat.computed_tokens, flat.routed_tokens), (12, 8));
    // Models whose routers choose share all of it.
    let packing = pack(&rows, 64).unwrap();
    assert_eq!((packing.computed_tokens, packing.routed_tokens), (4, 0));
    assert_eq!(packing.micro_batches[0].routes, RouteTable::default());
    let mut other = routed(&[1, 2], Some(&[5, 6]));
    other.routes[0].layers = 2;
    let rows = [rows[0].clone(), other];
    let refused = pack_routed(&rows, 64, true).unwrap_err().to_string();
    assert!(
        refused.contains("2 layers x 1, rows before it of 1 x 1"),
        "{refused}"
    );
}

/// The trie is computed once, whatever the temperatures; what is asked of it is not the same item.
#[test]
fn a_token_at_two_temperatures_is_two_items() {
    let mut rows = vec![row(&[1, 2, 3], &[0.0, 0.5, 0.5]); 3];
    rows[1].temperatures = vec![1.0, 0.7, 1.0];
    rows[2].temperatures = vec![1.0; 3];
    let batch = &pack(&rows, 64).unwrap().micro_batches[0];
    assert_eq!(batch.tokens, [1, 2]);
    let items: Vec<_> = batch.items.iter().map(|i| (i.row, i.temperature)).collect();
    assert_eq!(items, [(0, 0.7), (0, 1.0), (1, 1.0)]);
    let terms = |r: usize| -> Vec<u32> { batch.rows[r].terms.iter().map(|t| t.item).collect() };
    assert_eq!([terms(0), terms(1), terms(2)], [[1, 2], [0, 2], [1, 2]]);
}

#[test]
fn cuts_fall_between_groups() {
    let group = |q: TokenId| {
        (0..3).map(move |a| {
            row(
                &[1, 1, q, q, q, 50 + a, 60, 0],
                &[0., 0., 0., 0., 0., 1., 1., 1.],
            )
        })
    };
    // Interleaved, as rollouts finish.
    let (a, b): (Vec<_>, Vec<_>) = (group(20).collect(), group(30).collect());
    let rows: Vec<TrainRow> = a.into_iter().zip(b).flat_map(|(a, b)| [a, b]).collect();
    let packing = pack(&rows, 12).unwrap();
    assert_eq!(packing.micro_batches.len(), 2);
    let sets: Vec<Vec<usize>> = packing
        .micro_batches
        .iter()
        .map(|m| m.rows.iter().map(|r| r.row).collect())
        .collect();
    assert_eq!(sets, [vec![0, 2, 4], vec![1, 3, 5]]);
}

#[test]
fn rows_that_cannot_be_packed_are_named() {
    let long = row(&[1; 9], &[0., 0., 0., 0., 0., 0., 0., 0., 1.]);
    assert!(matches!(
        pack(std::slice::from_ref(&long), 7),
        Err(PackError::RowTooLong {
            tokens: 8,
            max_tokens: 7,
            ..
        })
    ));
    assert_eq!(pack(&[long], 8).unwrap().computed_tokens, 8);
    let first = row(&[1, 2], &[1.0, 1.0]);
    assert!(matches!(pack(&[first], 8), Err(PackError::Row(_))));
}

#[test]
fn rows_without_weight_are_counted_and_left_out() {
    let packing = pack(&[row(&[1, 2, 3], &[0.0; 3]), row(&[], &[])], 8).unwrap();
    assert_eq!(packing.untrained_rows, 2);
    assert!(packing.micro_batches.is_empty());
}

fn rows() -> impl Strategy<Value = Vec<TrainRow>> {
    // A small alphabet makes prefixes collide.
    let token = (0u32..3, prop_oneof![Just(0.0f32), 0.5f32..1.0]);
    let one = prop::collection::vec(token, 0..12).prop_map(|tokens| {
        let ids: Vec<TokenId> = tokens.iter().map(|t| t.0).collect();
        let mut weights: Vec<f32> = tokens.iter().map(|t| t.1).collect();
        if let Some(first) = weights.first_mut() {
            *first = 0.0;
        }
        row(&ids, &weights)
    });
    prop::collection::vec(one, 0..14)
}

/// Distinct non-empty prefixes that some trained token depends on: the least any trie can hold.
fn distinct_prefixes(rows: &[TrainRow]) -> usize {
    let mut seen = HashSet::new();
    for row in rows {
        if let Some(last) = row.weights.iter().rposition(|&w| w != 0.0) {
            (1..=last).for_each(|n| {
                seen.insert(row.tokens[..n].to_vec());
            });
        }
    }
    seen.len()
}

/// Rows that `row` attends to, in order of position; the last one is `row` itself.
fn visible_rows(batch: &MicroBatch, row: u32) -> Vec<u32> {
    let segments = batch.layout.segments();
    let own = segments.iter().rposition(|s| s.start <= row).unwrap();
    let ancestors = std::iter::successors(segments[own].parent, |&p| segments[p as usize].parent);
    let mut rows: Vec<u32> = (segments[own].start..=row).rev().collect();
    for parent in ancestors.map(|p| segments[p as usize]) {
        rows.extend((parent.start..parent.start + parent.len).rev());
    }
    rows.reverse();
    rows
}

proptest! {
    #[test]
    fn paths_spell_rows_and_every_weight_occurs_once(rows in rows(), max_tokens in 11usize..40) {
        let packing = pack(&rows, max_tokens).unwrap();
        let mut terms = HashSet::new();
        let mut sum = 0.0f64;
        for batch in &packing.micro_batches {
            prop_assert!(batch.tokens.len() <= max_tokens);
            prop_assert_eq!(batch.tokens.len(), batch.layout.rows());
            for packed in &batch.rows {
                let row = &rows[packed.row];
                let path = spelled(batch, packed);
                prop_assert_eq!(&path[..], &row.tokens[..path.len()]);
                for term in &packed.terms {
                    let (t, item) = (term.t as usize, batch.items[term.item as usize]);
                    prop_assert!(terms.insert((packed.row, t)), "token twice");
                    prop_assert_eq!(item.target, row.tokens[t]);
                    // The predicting trie row sees exactly tokens[..t].
                    let seen: Vec<TokenId> = visible_rows(batch, item.row)
                        .iter().map(|&r| batch.tokens[r as usize]).collect();
                    prop_assert_eq!(&seen[..], &row.tokens[..t]);
                    sum += f64::from(row.weights[t]);
                }
            }
        }
        let expected: f64 = rows.iter().flat_map(|r| &r.weights).map(|&w| f64::from(w)).sum();
        prop_assert!((sum - expected).abs() < 1e-9);
        let trained = rows.iter().flat_map(|r| &r.weights).filter(|&&w| w != 0.0).count();
        prop_assert_eq!(terms.len(), trained);
    }

    #[test]
    fn one_micro_batch_computes_no_more_than_needed(rows in rows()) {
        let packing = pack(&rows, 1000).unwrap();
        prop_assert!(packing.micro_batches.len() <= 1);
        prop_assert_eq!(packing.computed_tokens, distinct_prefixes(&rows));
    }

    #[test]
    fn no_order_of_cuts_computes_less(rows in rows()) {
        // Brute force over all ways to cut the sorted rows, up to 2^9 of them.
        let max_tokens = 14;
        let sorted = sorted_rows(&rows, max_tokens, false, true).unwrap();
        prop_assume!(sorted.len() <= 10);
        let size = |r: &Range<usize>| {
            sorted[r.clone()].iter().map(|n| n.tokens.len() - n.shared).sum::<usize>()
                + sorted[r.start].shared
        };
        let best = (0u32..1 << sorted.len().saturating_sub(1)).filter_map(|cuts| {
            let mut pieces = Vec::new();
            let mut start = 0;
            for end in 1..=sorted.len() {
                if end == sorted.len() || cuts >> (end - 1) & 1 == 1 {
                    pieces.push(start..end);
                    start = end;
                }
            }
            let sizes: Vec<usize> = pieces.iter().map(size).collect();
            sizes.iter().all(|&s| s <= max_tokens).then(|| sizes.iter().sum::<usize>())
        }).min();
        prop_assert_eq!(pack(&rows, max_tokens).unwrap().computed_tokens, best.unwrap_or(0));
    }
}

#[test]
fn flat_rows_share_nothing_and_train_the_same_tokens() {
    let rows = [
        row(&[1, 2, 3, 4], &[0.0, 0.0, 0.5, 0.5]),
        row(&[1, 2, 3, 5, 6], &[0.0, 0.0, 0.5, 0.5, 0.5]),
        row(&[1, 2, 3, 4], &[0.0, 0.0, 0.5, 0.5]),
    ];
    let (shared, flat) = (pack(&rows, 64).unwrap(), pack_flat(&rows, 64).unwrap());
    assert!(shared.computed_tokens < flat.computed_tokens);
    let needed: usize = rows.iter().map(|row| row.tokens.len() - 1).sum();
    assert_eq!(flat.computed_tokens, needed);
    let [batch] = &flat.micro_batches[..] else {
        panic!("one micro-batch");
    };
    assert_eq!(batch.layout.segments().len(), rows.len());
    assert!(batch.layout.segments().iter().all(|s| s.parent.is_none()));
    let terms = |packing: &Packing| -> usize {
        let rows = packing.micro_batches.iter().flat_map(|m| &m.rows);
        rows.map(|row| row.terms.len()).sum()
    };
    assert_eq!(terms(&flat), terms(&shared));
    let cut = pack_flat(&rows, 8).unwrap();
    assert_eq!(cut.micro_batches.len(), 2);
}
