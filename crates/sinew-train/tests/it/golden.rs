//! Rows, losses and gradients of the golden files, and their comparison with the trainer's.

use crate::{clip, device, first_moments, full, trainer, with_first_moments};
use sinew_model::{Keep, ModelFiles, load_model};
use sinew_train::{ModelPolicy, StepReport, TrainerConfig};
use sinew_types::{
    KlEstimator, KlSpec, LossSpec, RowMasks, Surrogate, TokenId, TokenLogprob, TrainRow,
};
use std::collections::BTreeMap;
use std::path::Path;

/// A row as PyTorch got it.
#[derive(serde::Deserialize)]
pub(crate) struct Row {
    tokens: Vec<TokenId>,
    first: usize,
    advantage: f32,
    temperatures: Vec<f32>,
    behaviour: Vec<f32>,
    reference: Vec<f32>,
    /// Allowed tokens of each place, of a vocabulary of 97; `None`: all.
    allowed: Option<Vec<Option<Vec<TokenId>>>>,
    /// A teacher's tokens with their probabilities.
    teacher: Option<Vec<Vec<(TokenId, f32)>>>,
}

impl Row {
    pub(crate) fn train_row(&self, weight: f32) -> TrainRow {
        let mut row = crate::row(&self.tokens, self.first, weight, self.advantage);
        row.temperatures.clone_from(&self.temperatures);
        row.behaviour_logprobs.clone_from(&self.behaviour);
        row.ref_logprobs = Some(self.reference.clone());
        row.masks = self.allowed.as_deref().map(|allowed| masks(97, allowed));
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

/// Masks of a row whose tokens were drawn from `allowed`.
pub(crate) fn masks(vocab: usize, allowed: &[Option<Vec<TokenId>>]) -> RowMasks {
    let words = vocab.div_ceil(32);
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

/// The tiny llama that PyTorch's numbers are of.
pub(crate) fn llama() -> ModelPolicy {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sinew-model/tests/golden/llama");
    let params = load_model(&ModelFiles::Dir(folder)).unwrap().params;
    ModelPolicy::full(params, 64, Keep::All, device()).unwrap()
}

/// The loss of GRPO with these coefficients.
pub(crate) fn spec(clip_at: f32, kl: f32, entropy: f32) -> LossSpec {
    LossSpec {
        surrogate: Surrogate::Clip {
            low: clip_at,
            high: clip_at,
            dual: None,
        },
        kl: Some(KlSpec {
            estimator: KlEstimator::K3,
            coefficient: kl,
        }),
        entropy,
        ..clip()
    }
}

/// Gradients by the names of their tensors.
pub(crate) type Gradients = BTreeMap<String, Vec<f32>>;

/// One step's report and the gradients it took; the weights stay what they are.
pub(crate) fn gradients(
    policy: ModelPolicy,
    max_rows: usize,
    rows: &[TrainRow],
    spec: &LossSpec,
) -> (StepReport, Gradients) {
    let config = with_first_moments(TrainerConfig::new(max_rows, 1e-12));
    let mut trainer = trainer(policy, config);
    let report = trainer.step(rows, spec).unwrap();
    let named = first_moments(trainer.policy());
    (report, named.into_iter().collect())
}

fn norm(values: impl IntoIterator<Item = f32>) -> f64 {
    let squares = values.into_iter().map(|v| f64::from(v) * f64::from(v));
    squares.sum::<f64>().sqrt()
}

/// Compares gradients with PyTorch's: norms of all tensors, and every value of the final norm.
pub(crate) fn assert_golden(
    case: &str,
    found: &Gradients,
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

/// Panics if the difference of a tensor's gradients is more than `bound` of their norm.
pub(crate) fn assert_near(found: &Gradients, expected: &Gradients, bound: f64) {
    for (name, found) in found {
        let off = norm(found.iter().zip(&expected[name]).map(|(a, b)| a - b));
        let size = norm(found.iter().copied());
        assert!(off <= bound * size, "{name}: {off} of {size}");
    }
}

/// Panics unless the gradients of the rows, one by one, add up to those of the batch.
pub(crate) fn assert_sum_of_rows(whole: &Gradients, rows: &[TrainRow], spec: &LossSpec) {
    let mut sum = Gradients::new();
    for row in rows {
        let (_, part) = gradients(full(), 256, std::slice::from_ref(row), spec);
        for (name, values) in part {
            let to = sum.entry(name).or_insert_with(|| vec![0.0; values.len()]);
            to.iter_mut().zip(values).for_each(|(s, v)| *s += v);
        }
    }
    assert_near(whole, &sum, 1e-5);
}
