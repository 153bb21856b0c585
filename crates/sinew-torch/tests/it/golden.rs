//! The golden files of `sinew-train` whose model is a decoder: losses and gradients of `transformers` in f64.
//!
//! The others need no policy: `loss.json` has log-probabilities as inputs, and `teacher.json` a table of
//! bigrams. They test losses and derivatives by log-probabilities, which are the same Rust code for every
//! policy.

use crate::bench::{Bench, MAX_TOKENS, row, weights};
use crate::trained::{Fresh, Job};
use sinew_train::TrainerConfig;
use sinew_train::optim::AdamWConfig;
use sinew_types::{
    Correction, Divergence, KlEstimator, KlSpec, LossSpec, RowMasks, Surrogate, TeacherSpec,
    TokenId, TokenLogprob, TrainRow,
};
use std::collections::BTreeMap;
use std::path::Path;

/// Epsilon of the optimizer, far above all gradients.
const EPSILON: f32 = 1e4;
/// Learning rate of the optimizer: an update subtracts 64 gradients from the weights, so that their rounding
/// changes a gradient by little.
const RATE: f32 = 64.0 * EPSILON;
const VOCABULARY: usize = 97;

#[derive(serde::Deserialize)]
struct Temperatures {
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
    #[serde(flatten)]
    expected: Expected,
}

#[derive(serde::Deserialize)]
struct Masked {
    clip: f32,
    kl: f32,
    entropy: f32,
    teacher: f32,
    weight: f32,
    rows: Vec<Row>,
    #[serde(flatten)]
    expected: Expected,
}

/// The loss, the norm of each tensor's gradient, and all gradients of the last norm.
#[derive(serde::Deserialize)]
struct Expected {
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
    /// Allowed tokens of each place; `None`: all.
    allowed: Option<Vec<Option<Vec<TokenId>>>>,
    /// A teacher's tokens with their probabilities.
    teacher: Option<Vec<Vec<(TokenId, f32)>>>,
}

impl Row {
    fn train_row(&self, weight: f32) -> TrainRow {
        let mut row = row(&self.tokens, self.first);
        row.weights[self.first..].fill(weight);
        row.advantages.fill(self.advantage);
        row.temperatures.clone_from(&self.temperatures);
        row.behaviour_logprobs.clone_from(&self.behaviour);
        row.ref_logprobs = Some(self.reference.clone());
        row.masks = self.allowed.as_deref().map(masks);
        let top = |top: &Vec<(TokenId, f32)>| {
            let entry = |&(id, p): &(TokenId, f32)| TokenLogprob {
                id,
                logprob: p.ln(),
            };
            top.iter().map(entry).collect()
        };
        let tops = self.teacher.as_ref();
        row.teacher_top = tops.map(|tops| tops.iter().map(top).collect());
        row
    }
}

/// Masks of a row whose tokens were sampled from `allowed`.
fn masks(allowed: &[Option<Vec<TokenId>>]) -> RowMasks {
    let words = VOCABULARY.div_ceil(32);
    let mask = |ids: &Vec<TokenId>| {
        let mut mask = vec![0u32; words];
        for id in ids {
            mask[*id as usize / 32] |= 1 << (id % 32);
        }
        mask
    };
    let each: Vec<Option<Vec<u32>>> = allowed.iter().map(|ids| ids.as_ref().map(mask)).collect();
    RowMasks::gather(words, each.iter().map(Option::as_deref))
}

fn spec(clip: f32, kl: f32, entropy: f32) -> LossSpec {
    LossSpec {
        surrogate: Surrogate::Clip {
            low: clip,
            high: clip,
            dual: None,
        },
        correction: Correction::None,
        kl: Some(KlSpec {
            estimator: KlEstimator::K3,
            coefficient: kl,
        }),
        entropy,
        value: None,
        teacher: None,
    }
}

/// Compares a step with PyTorch's numbers: all rows in one micro-batch, and a micro-batch for each row.
/// `max_loss` is the bound on the difference of losses, that of the embedded trainer's test.
fn compare(
    name: &str,
    torch: &mut Fresh,
    rows: &[TrainRow],
    spec: &LossSpec,
    golden: &Expected,
    max_loss: f64,
) {
    for micro_batch_tokens in [MAX_TOKENS as usize, 12] {
        let adamw = AdamWConfig {
            beta1: 0.0,
            beta2: 0.0,
            epsilon: EPSILON,
            weight_decay: 0.0,
        };
        let job = Job {
            rows,
            spec,
            settings: TrainerConfig {
                adamw,
                max_grad_norm: None,
                ..TrainerConfig::new(micro_batch_tokens, RATE)
            },
            steps: 1,
        };
        let policy = torch.policy();
        let before = weights(policy);
        let loss = job.reports(policy)[0].loss;
        assert!((loss - golden.loss).abs() < max_loss, "{name}: {loss}");
        let after = weights(policy);
        assert_eq!(after.len(), golden.norms.len(), "{name}");
        for (tensor, expected) in &golden.norms {
            let pairs = before[tensor].1.iter().zip(&after[tensor].1);
            let found: Vec<f64> = pairs.map(|(a, b)| gradient(*a, *b)).collect();
            let norm = found.iter().map(|g| g * g).sum::<f64>().sqrt();
            assert!(
                (norm / expected - 1.0).abs() < 2e-5,
                "{name} {tensor}: {norm} and {expected}"
            );
            if tensor == "model.norm.weight" {
                assert_eq!(found.len(), golden.final_norm.len());
                let mut pairs = found.iter().zip(&golden.final_norm);
                assert!(pairs.all(|(a, b)| (a - b).abs() < 1e-6), "{name}");
            }
        }
    }
}

/// The gradient of an update without moments: `before − after = rate · g / (|g| + epsilon)`.
fn gradient(before: f32, after: f32) -> f64 {
    let change = f64::from(before) - f64::from(after);
    change * f64::from(EPSILON) / (f64::from(RATE) - change.abs())
}

pub(crate) fn files_of_the_embedded_trainer(bench: &Bench) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-model/tests/golden/llama");
    let mut torch = Fresh::of(bench, "first-golden", bench.open(&folder, |_| {}));
    let text = include_str!("../../../sinew-train/tests/golden/temperature.json");
    let golden: Temperatures = serde_json::from_str(text).unwrap();
    let plain = spec(golden.clip, golden.kl, golden.entropy);
    for case in &golden.cases {
        let rows: Vec<TrainRow> = case
            .rows
            .iter()
            .map(|row| row.train_row(golden.weight))
            .collect();
        compare(&case.name, &mut torch, &rows, &plain, &case.expected, 1e-6);
    }
    let text = include_str!("../../../sinew-train/tests/golden/masked.json");
    let golden: Masked = serde_json::from_str(text).unwrap();
    let taught = LossSpec {
        teacher: Some(TeacherSpec {
            top_k: 2,
            divergence: Divergence::Reverse,
            coefficient: golden.teacher,
        }),
        ..spec(golden.clip, golden.kl, golden.entropy)
    };
    let row = |row: &Row| row.train_row(golden.weight);
    let rows: Vec<TrainRow> = golden.rows.iter().map(row).collect();
    compare("masked", &mut torch, &rows, &taught, &golden.expected, 2e-6);
}
