//! Tokens that were sampled at temperatures other than 1 are trained at them.

use crate::golden::{Row, assert_golden, assert_sum_of_rows, gradients, llama, spec};
use crate::{clip, fill_behaviour, fill_reference, full};
use sinew_train::{score_rows, score_top};
use sinew_types::{EpisodeId, LossSpec, PolicyVersion, TokenId, TrainRow};
use std::collections::BTreeMap;

#[derive(serde::Deserialize)]
struct Golden {
    clip: f32,
    kl: f32,
    entropy: f32,
    weight: f32,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    name: String,
    rows: Vec<Row>,
    loss: f64,
    norms: BTreeMap<String, f64>,
    final_norm: Vec<f64>,
}

#[test]
fn grpo_at_other_temperatures_is_that_of_pytorch() {
    let golden: Golden = serde_json::from_str(include_str!("../golden/temperature.json")).unwrap();
    let spec = spec(golden.clip, golden.kl, golden.entropy);
    for case in &golden.cases {
        let rows: Vec<TrainRow> = case
            .rows
            .iter()
            .map(|r| r.train_row(golden.weight))
            .collect();
        // Whole, and in micro-batches of a row each.
        for max_rows in [64, 12] {
            let (report, found) = gradients(llama(), max_rows, &rows, &spec);
            let (name, loss) = (&case.name, report.loss);
            assert!((loss - case.loss).abs() < 1e-6, "{name}: {loss}");
            assert_golden(name, &found, &case.norms, &case.final_norm);
        }
        // The loss at temperature 1 differs: the numbers above could not be right by chance.
        let plain: Vec<TrainRow> = rows.iter().cloned().map(at_one).collect();
        let (report, _) = gradients(llama(), 64, &plain, &spec);
        assert!((report.loss - case.loss).abs() > 1e-2, "{}", report.loss);
    }
}

fn at_one(row: TrainRow) -> TrainRow {
    TrainRow {
        temperatures: Vec::new(),
        ..row
    }
}

/// Answers to one prompt, which share tokens that were sampled at different temperatures.
fn mixed() -> Vec<TrainRow> {
    let rows = (0..6u32).map(|r| {
        let tokens: Vec<TokenId> = (0..18)
            .map(|i| (i * 7 + 3 + i / 14 * (r / 2)) % 61)
            .collect();
        let mut row = crate::row(&tokens, 10, 0.05, r as f32 - 2.3);
        let at = [0.7, 1.0, 1.2][r as usize % 3];
        row.temperatures = (0..18).map(|t| if t < 14 { at } else { 1.2 }).collect();
        row.episode = EpisodeId::new(format!("e{r}"));
        row.oldest_version = PolicyVersion(0);
        row
    });
    let mut rows: Vec<TrainRow> = rows.collect();
    fill_behaviour(&mut full(), &mut rows);
    rows
}

/// Packed together or one by one, at any temperatures: the gradient of a batch is the sum of its parts'.
#[test]
fn a_batch_that_mixes_temperatures_has_the_gradient_of_the_sum_of_its_parts() {
    let spec = LossSpec {
        entropy: 0.01,
        ..clip()
    };
    let rows = mixed();
    let (report, whole) = gradients(full(), 256, &rows, &spec);
    assert!(
        report.packed_tokens * 3 < report.naive_tokens,
        "prompts are shared"
    );
    // The policy that acted is the one that is trained, so the ratio is 1 everywhere.
    assert!(report.gap_max_abs.unwrap() < 1e-5, "{report:?}");
    assert_sum_of_rows(&whole, &rows, &spec);
}

#[test]
fn references_and_teachers_speak_at_the_token_s_temperature() {
    let rows = mixed();
    let mut filled = rows.clone();
    fill_reference(&mut full(), &mut filled);
    let tops = score_top(&mut full(), &rows, 256, 61).unwrap();
    for ((row, filled), tops) in rows.iter().zip(&filled).zip(&tops) {
        // The same weights: a reference has the log-probabilities of the sampler.
        let reference = filled.ref_logprobs.as_ref().unwrap();
        for t in 10..18 {
            assert!((reference[t] - row.behaviour_logprobs[t]).abs() < 1e-5);
            let mass: f64 = tops[t].iter().map(|top| f64::from(top.logprob).exp()).sum();
            assert!((mass - 1.0).abs() < 1e-5, "{mass}");
            let own = tops[t].iter().find(|top| top.id == row.tokens[t]).unwrap();
            assert!((own.logprob - reference[t]).abs() < 1e-5);
        }
    }
    let plain: Vec<TrainRow> = rows.iter().cloned().map(at_one).collect();
    let plain = score_rows(&mut full(), &plain, 256).unwrap();
    assert!((plain[0][12] - rows[0].behaviour_logprobs[12]).abs() > 1e-3);
}

#[test]
fn temperatures_that_nothing_is_sampled_at_are_refused() {
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-4, 1e3] {
        let mut rows = mixed();
        rows[1].temperatures[11] = bad;
        let error = score_rows(&mut full(), &rows, 256).unwrap_err().to_string();
        assert!(error.contains("e1: temperatures[11] is"), "{error}");
    }
    let mut rows = mixed();
    rows[0].temperatures.pop();
    let error = score_rows(&mut full(), &rows, 256).unwrap_err().to_string();
    assert!(
        error.contains("temperatures has 17 entries, expected 18"),
        "{error}"
    );
    // Untrained positions are not read.
    let mut rows = mixed();
    rows[0].temperatures[2] = 0.0;
    score_rows(&mut full(), &rows, 256).unwrap();
}
