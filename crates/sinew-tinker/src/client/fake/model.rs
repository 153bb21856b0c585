//! The models of the service for tests.

use crate::types::{Datum, FbOutput, Tensor, TensorValues};
use std::collections::BTreeMap;

/// Number of tokens.
pub(in crate::client) const VOCAB: usize = 8;

/// A model: the logits of the next token are a row of the table, chosen by the last token.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::client) struct Table {
    pub(in crate::client) logits: Vec<f32>,
    gradient: Vec<f32>,
}

impl Table {
    /// The base model.
    pub(super) fn base() -> Self {
        let logits = (0..VOCAB * VOCAB).map(|i| (i as f32 * 0.7).sin());
        Self::of(logits.collect())
    }

    pub(super) fn of(logits: Vec<f32>) -> Self {
        Self {
            gradient: vec![0.0; logits.len()],
            logits,
        }
    }

    /// Log-probabilities of the tokens after `last`.
    pub(super) fn after(&self, last: u32) -> Vec<f32> {
        let at = last as usize * VOCAB;
        let row = &self.logits[at..at + VOCAB];
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let sum: f32 = row.iter().map(|x| (x - largest).exp()).sum();
        row.iter().map(|x| x - largest - sum.ln()).collect()
    }

    /// Computes a `cross_entropy` of datums.
    pub(super) fn pass(&mut self, data: &[Datum], forward_only: bool) -> FbOutput {
        let (mut outputs, mut loss) = (Vec::new(), 0.0);
        for datum in data {
            let (targets, weights) = (&datum.inputs["target_tokens"], &datum.inputs["weights"]);
            let TensorValues::I64(ids) = &targets.values else {
                panic!("targets are integers");
            };
            let TensorValues::F32(scales) = &weights.values else {
                panic!("weights are numbers");
            };
            let width = ids.len() / datum.tokens.len();
            let mut logprobs = Vec::new();
            for (at, (&id, &scale)) in ids.iter().zip(scales).enumerate() {
                let last = datum.tokens[at / width];
                let after = self.after(last);
                let logprob = after[id as usize];
                logprobs.push(logprob);
                loss -= f64::from(scale * logprob);
                if !forward_only && scale != 0.0 {
                    self.add(last, id as usize, &after, scale);
                }
            }
            let tensor = Tensor {
                shape: targets.shape.clone(),
                values: TensorValues::F32(logprobs),
            };
            outputs.push(BTreeMap::from([("logprobs".to_owned(), tensor)]));
        }
        FbOutput {
            output_type: "ArrayRecord".to_owned(),
            outputs,
            metrics: BTreeMap::from([("loss:sum".to_owned(), loss)]),
        }
    }

    /// Adds the gradient of one target.
    fn add(&mut self, last: u32, target: usize, after: &[f32], scale: f32) {
        let at = last as usize * VOCAB;
        for (id, logprob) in after.iter().enumerate() {
            let is_target = if id == target { 1.0 } else { 0.0 };
            self.gradient[at + id] -= scale * (is_target - logprob.exp());
        }
    }

    /// One step of gradient descent; returns the norm of the gradients.
    pub(super) fn step(&mut self, lr: f32) -> f64 {
        let squares = self.gradient.iter().map(|g| f64::from(*g) * f64::from(*g));
        let norm = squares.sum::<f64>().sqrt();
        for (logit, gradient) in self.logits.iter_mut().zip(&self.gradient) {
            *logit -= lr * gradient;
        }
        self.gradient.fill(0.0);
        norm
    }

    /// Samples tokens until a stop id or `max_tokens`: the one whose probability passes a number of the seed.
    pub(super) fn sample(
        &self,
        last: u32,
        max_tokens: u32,
        stop: &[u32],
        seed: u64,
    ) -> Vec<(u32, f32)> {
        let (mut last, mut state, mut tokens) = (last, seed, Vec::new());
        for _ in 0..max_tokens {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let mut left = (state >> 40) as f32 / (1u64 << 24) as f32;
            let after = self.after(last);
            let chosen = after.iter().position(|logprob| {
                left -= logprob.exp();
                left < 0.0
            });
            last = chosen.unwrap_or(VOCAB - 1) as u32;
            tokens.push((last, after[last as usize]));
            if stop.contains(&last) {
                break;
            }
        }
        tokens
    }
}
