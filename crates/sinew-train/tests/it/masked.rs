//! Tokens that were drawn from only some of the vocabulary are trained accordingly.

use crate::temperature::{assert_golden, gradients, llama, norm};
use crate::{clip, fill_reference, full};
use sinew_train::pack::pack;
use sinew_train::{score_rows, score_top};
use sinew_types::{
    Divergence, KlEstimator, KlSpec, LossSpec, RowMasks, TeacherSpec, TokenId, TokenLogprob,
    TrainRow,
};
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

#[derive(serde::Deserialize)]
struct Row {
    tokens: Vec<TokenId>,
    first: usize,
    advantage: f32,
    temperatures: Vec<f32>,
    behaviour: Vec<f32>,
    reference: Vec<f32>,
    allowed: Vec<Option<Vec<TokenId>>>,
    teacher: Vec<Vec<(TokenId, f32)>>,
}

impl Row {
    fn train_row(&self, weight: f32) -> TrainRow {
        let mut row = crate::row(&self.tokens, self.first, weight, self.advantage);
        row.temperatures.clone_from(&self.temperatures);
        row.behaviour_logprobs.clone_from(&self.behaviour);
        row.ref_logprobs = Some(self.reference.clone());
        row.masks = Some(masks(97, &self.allowed));
        let top = |top: &Vec<(TokenId, f32)>| {
            let entry = |&(id, p): &(TokenId, f32)| TokenLogprob {
                id,
                logprob: p.ln(),
            };
            top.iter().map(entry).collect()
        };
        row.teacher_top = Some(self.teacher.iter().map(top).collect());
        row
    }
}

/// Masks of a row whose tokens were drawn from `allowed`.
fn masks(vocab: usize, allowed: &[Option<Vec<TokenId>>]) -> RowMasks {
    let words = vocab.div_ceil(32);
    let mut masks = RowMasks {
        words_per_mask: words as u32,
        table: vec![],
        rows: vec![],
    };
    for ids in allowed {
        let Some(ids) = ids else {
            masks.rows.push(RowMasks::ALL);
            continue;
        };
        let start = masks.table.len();
        masks.rows.push((start / words) as u32);
        masks.table.resize(start + words, 0);
        for &id in ids {
            masks.table[start + id as usize / 32] |= 1 << (id % 32);
        }
    }
    masks
}

#[test]
fn grpo_over_allowed_tokens_is_that_of_pytorch() {
    let golden: Golden = serde_json::from_str(include_str!("../golden/masked.json")).unwrap();
    let spec = LossSpec {
        surrogate: sinew_types::Surrogate::Clip {
            low: golden.clip,
            high: golden.clip,
            dual: None,
        },
        kl: Some(KlSpec {
            estimator: KlEstimator::K3,
            coefficient: golden.kl,
        }),
        entropy: golden.entropy,
        teacher: Some(TeacherSpec {
            top_k: 2,
            divergence: Divergence::Reverse,
            coefficient: golden.teacher,
        }),
        ..clip()
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
    let scored = score_rows(&mut full(), &rows, 256).unwrap();
    for (row, column) in rows.iter_mut().zip(scored) {
        row.behaviour_logprobs = column;
    }
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
    for (name, whole) in &whole {
        let off = norm(whole.iter().zip(&without[name]).map(|(a, b)| a - b));
        assert!(off <= 1e-6 * norm(whole.iter().copied()), "{name}: {off}");
    }
    // Rows one by one: their gradients add up to the batch's.
    let mut sum: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    for row in &rows {
        let (_, part) = gradients(full(), 256, std::slice::from_ref(row), &spec);
        for (name, values) in part {
            let to = sum.entry(name).or_insert_with(|| vec![0.0; values.len()]);
            to.iter_mut().zip(values).for_each(|(s, v)| *s += v);
        }
    }
    for (name, whole) in &whole {
        let off = norm(whole.iter().zip(&sum[name]).map(|(a, b)| a - b));
        assert!(off < 1e-5 * norm(whole.iter().copied()), "{name}: {off}");
    }
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
