//! Tokens that were sampled at temperatures other than 1 are trained at them.

use crate::{clip, device, fill_reference, first_moments, full, trainer, with_first_moments};
use sinew_model::{Keep, ModelFiles, load_model};
use sinew_train::{ModelPolicy, StepReport, TrainerConfig, score_rows, score_top};
use sinew_types::{EpisodeId, KlEstimator, KlSpec, LossSpec, PolicyVersion, TokenId, TrainRow};
use std::collections::BTreeMap;
use std::path::Path;

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

#[derive(serde::Deserialize)]
struct Row {
    tokens: Vec<TokenId>,
    first: usize,
    advantage: f32,
    temperatures: Vec<f32>,
    behaviour: Vec<f32>,
    reference: Vec<f32>,
}

impl Row {
    fn train_row(&self, weight: f32) -> TrainRow {
        let mut row = crate::row(&self.tokens, self.first, weight, self.advantage);
        row.temperatures.clone_from(&self.temperatures);
        row.behaviour_logprobs.clone_from(&self.behaviour);
        row.ref_logprobs = Some(self.reference.clone());
        row
    }
}

/// The tiny llama that PyTorch's numbers are of.
pub(crate) fn llama() -> ModelPolicy {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-model/tests/golden/llama");
    let params = load_model(&ModelFiles::Dir(folder)).unwrap().params;
    ModelPolicy::full(params, 64, Keep::All, device()).unwrap()
}

/// One step's report and, by name, the gradients it took; the weights stay what they are.
pub(crate) fn gradients(
    policy: ModelPolicy,
    max_rows: usize,
    rows: &[TrainRow],
    spec: &LossSpec,
) -> (StepReport, BTreeMap<String, Vec<f32>>) {
    let config = with_first_moments(TrainerConfig::new(max_rows, 1e-12));
    let mut trainer = trainer(policy, config);
    let report = trainer.step(rows, spec).unwrap();
    let named = first_moments(trainer.policy());
    (report, named.into_iter().collect())
}

pub(crate) fn norm(values: impl IntoIterator<Item = f32>) -> f64 {
    let squares = values.into_iter().map(|v| f64::from(v) * f64::from(v));
    squares.sum::<f64>().sqrt()
}

/// Compares gradients with PyTorch's: norms of all tensors, and every value of the final norm.
pub(crate) fn assert_golden(
    case: &str,
    found: &BTreeMap<String, Vec<f32>>,
    norms: &BTreeMap<String, f64>,
    final_norm: &[f64],
) {
    assert_eq!(found.len(), norms.len());
    for (tensor, expected) in norms {
        let error = (norm(found[tensor].iter().copied()) / expected - 1.0).abs();
        assert!(error < 2e-5, "{case} {tensor}: {error}");
    }
    for (g, e) in found["model.norm.weight"].iter().zip(final_norm) {
        assert!((f64::from(*g) - e).abs() < 1e-6, "{case}: {g} {e}");
    }
}

fn golden_spec(golden: &Golden) -> LossSpec {
    LossSpec {
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
        ..clip()
    }
}

#[test]
fn grpo_at_other_temperatures_is_that_of_pytorch() {
    let golden: Golden = serde_json::from_str(include_str!("../golden/temperature.json")).unwrap();
    let spec = golden_spec(&golden);
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
    let scored = score_rows(&mut full(), &rows, 256).unwrap();
    for (row, column) in rows.iter_mut().zip(scored) {
        row.behaviour_logprobs = column;
    }
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
        let size = norm(whole.iter().copied());
        assert!(off < 1e-5 * size, "{name}: {off} of {size}");
    }
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
