//! Tokens that were drawn from only some of the vocabulary are trained accordingly.

use crate::golden::{
    Row, assert_golden, assert_near, assert_sum_of_rows, gradients, llama, masks, spec,
};
use crate::{clip, fill_behaviour, fill_reference, full};
use sinew_train::pack::pack;
use sinew_train::{score_rows, score_top};
use sinew_types::{Divergence, LossSpec, RowMasks, TeacherSpec, TokenId, TokenLogprob, TrainRow};
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
struct Golden {
    clip: f32,
    kl: f32,
    entropy: f32,
    teacher: f32,
    weight: f32,
    rows: Vec<Row>,
    loss: f64,
    norms: BTreeMap<String, f64>,
    final_norm: Vec<f64>,
}

#[test]
fn grpo_over_allowed_tokens_is_that_of_pytorch() {
    let golden: Golden = serde_json::from_str(include_str!("../golden/masked.json")).unwrap();
    let spec = LossSpec {
        teacher: Some(TeacherSpec {
            top_k: 2,
            divergence: Divergence::Reverse,
            coefficient: golden.teacher,
        }),
        ..spec(golden.clip, golden.kl, golden.entropy)
    };
    let row = |row: &Row| row.train_row(golden.weight);
    let rows: Vec<TrainRow> = golden.rows.iter().map(row).collect();
    // Whole, and in micro-batches of a row each.
    for max_rows in [64, 12] {
        let (report, found) = gradients(llama(), max_rows, &rows, &spec);
        assert!((report.loss - golden.loss).abs() < 2e-6, "{}", report.loss);
        assert_golden("masked", &found, &golden.norms, &golden.final_norm);
    }
    // The loss without masks differs: the numbers above could not be right by chance.
    let plain: Vec<TrainRow> = rows.iter().cloned().map(unmasked).collect();
    let (report, _) = gradients(llama(), 64, &plain, &spec);
    assert!((report.loss - golden.loss).abs() > 1e-2, "{}", report.loss);
}

fn unmasked(row: TrainRow) -> TrainRow {
    TrainRow { masks: None, ..row }
}

/// Three answers to one prompt: they share tokens, one of which was drawn from other tokens in one of them.
fn answers() -> Vec<TrainRow> {
    let rows = (0..3u32).map(|r| {
        let tokens: Vec<TokenId> = (0..16).map(|i| (i * 7 + 3 + i / 13 * r) % 61).collect();
        let allowed = |t: usize| {
            let count = match (r, t) {
                (_, 0..=8 | 15) => return None,
                (2, 10) => 5,
                _ => [2, 31, 1, 40][t % 4],
            };
            let ids = (0..count).map(|i| (tokens[t] + 11 * i) % 61);
            Some(ids.collect::<Vec<TokenId>>())
        };
        let allowed: Vec<_> = (0..16).map(allowed).collect();
        let mut row = crate::row(&tokens, 9, 0.05, r as f32 - 0.8);
        row.masks = Some(masks(61, &allowed));
        row
    });
    let mut rows: Vec<TrainRow> = rows.collect();
    fill_behaviour(&mut full(), &mut rows);
    rows
}

#[test]
fn tokens_share_a_computation_only_where_their_masks_are_the_same() {
    let packing = pack(&answers(), 256).unwrap();
    let batch = &packing.micro_batches[0];
    let item = |row: usize, t: u32| {
        let terms = &batch.rows.iter().find(|p| p.row == row).unwrap().terms;
        terms.iter().find(|term| term.t == t).unwrap().item
    };
    for t in [9, 11, 12] {
        assert_eq!(
            (item(0, t), item(0, t)),
            (item(1, t), item(2, t)),
            "token {t}"
        );
    }
    assert_eq!(item(0, 10), item(1, 10));
    assert_ne!(item(0, 10), item(2, 10), "drawn from other tokens");
    assert_eq!(batch.items[item(0, 15) as usize].mask, RowMasks::ALL);
    let words = batch.masks.words;
    let mut sets: Vec<&[u32]> = batch.masks.table.chunks(words).collect();
    assert_eq!(words, 2);
    let all = sets.len();
    sets.dedup();
    assert_eq!(sets.len(), all, "each mask once");
    // The trie is the same as without masks.
    let plain: Vec<TrainRow> = answers().into_iter().map(unmasked).collect();
    assert_eq!(
        packing.computed_tokens,
        pack(&plain, 256).unwrap().computed_tokens
    );
}

#[test]
fn at_the_sampling_weights_the_ratio_is_one_and_forced_tokens_teach_nothing() {
    let spec = LossSpec {
        entropy: 0.01,
        ..clip()
    };
    let rows = answers();
    let (report, whole) = gradients(full(), 256, &rows, &spec);
    assert_eq!(report.gap_max_abs, Some(0.0), "{report:?}");
    // Tokens without a choice have log-probability 0 and no gradient, trained or not.
    let mut freed = rows.clone();
    for row in &mut freed {
        let masks = row.masks.as_ref().unwrap();
        for t in 9..16 {
            let ones = masks
                .mask(t)
                .map(|m| m.iter().map(|w| w.count_ones()).sum());
            if ones == Some(1u32) {
                assert_eq!(row.behaviour_logprobs[t], 0.0);
                row.weights[t] = 0.0;
            }
        }
    }
    let (_, without) = gradients(full(), 256, &freed, &spec);
    assert_near(&whole, &without, 1e-6);
    assert_sum_of_rows(&whole, &rows, &spec);
}

#[test]
fn references_and_teachers_choose_among_the_same_tokens() {
    let rows = answers();
    let mut filled = rows.clone();
    fill_reference(&mut full(), &mut filled);
    let tops = score_top(&mut full(), &rows, 256, 61).unwrap();
    for ((row, filled), tops) in rows.iter().zip(&filled).zip(&tops) {
        // The same weights: a reference has the log-probabilities of the sampler.
        assert_eq!(filled.ref_logprobs.as_ref(), Some(&row.behaviour_logprobs));
        let masks = row.masks.as_ref().unwrap();
        for (t, top) in tops.iter().enumerate().skip(9) {
            let allowed = (0..61).filter(|&id| masks.allows(t, id)).count();
            assert_eq!(top.len(), allowed);
            assert!(top.iter().all(|top| masks.allows(t, top.id)));
            let mass: f64 = top.iter().map(|top| f64::from(top.logprob).exp()).sum();
            assert!((mass - 1.0).abs() < 1e-5, "{mass}");
        }
    }
    let plain: Vec<TrainRow> = rows.iter().cloned().map(unmasked).collect();
    let plain = score_rows(&mut full(), &plain, 256).unwrap();
    assert!((plain[0][10] - rows[0].behaviour_logprobs[10]).abs() > 1e-2);
}

#[test]
fn masks_that_do_not_fit_are_refused() {
    let refused = |edit: &dyn Fn(&mut TrainRow)| {
        let mut rows = answers();
        edit(&mut rows[1]);
        score_rows(&mut full(), &rows, 256).unwrap_err().to_string()
    };
    let other = refused(&|row| row.masks = Some(masks(200, &vec![Some((0..61).collect()); 16])));
    assert!(other.contains("masks of 7 words"), "{other}");
    let barred = refused(&|row| {
        let masks = row.masks.as_mut().unwrap();
        masks.table.fill(0);
    });
    assert!(barred.contains("bars token"), "{barred}");
    let teacher = refused(&|row| {
        let barred = (0..61).find(|&id| !row.masks.as_ref().unwrap().allows(10, id));
        let mut tops = vec![Vec::new(); 16];
        tops[10].push(TokenLogprob {
            id: barred.unwrap(),
            logprob: -1.0,
        });
        row.teacher_top = Some(tops);
    });
    assert!(teacher.contains("teacher_top"), "{teacher}");
}
