//! Log-probabilities of chosen tokens under a linear head, without storing the logits.
//!
//! Forward and backward go through the vocabulary in panels; each panel's logits live in cache only.
//! A row's result does not depend on the other rows, on the number of threads or on their timing.

mod backward;
mod forward;
mod strips;

use std::f32::consts::LOG2_E;

use crate::attention::Workspaces;
use crate::buffer::Scratch;
use crate::device::Device;
use crate::simd::{exp, simd_fn};

/// Hidden states, the head's weights and the tokens asked about.
#[derive(Clone, Copy, Debug)]
pub struct LinearLogprob<'a> {
    /// Hidden states, `[n, dim]`.
    pub x: &'a [f32],
    /// Weights of the head, `[vocab, dim]`: logits are `x w^T / temperature`.
    pub w: &'a [f32],
    /// Width of a hidden state.
    pub dim: usize,
    /// Token asked about in each row, `[n]`, below `vocab`.
    pub targets: &'a [u32],
    /// Divides the logits, above 0; 1 for the plain model.
    pub temperature: f32,
}

/// Where [`linear_logprob_forward`] writes.
#[derive(Debug)]
pub struct LogprobOut<'a> {
    /// Natural log-probability of each row's target, `[n]`.
    pub logprob: &'a mut [f32],
    /// Log-sum-exp of each row's logits after division by the temperature, `[n]`.
    pub lse: &'a mut [f32],
    /// Entropy of each row's distribution in nats, `[n]`.
    pub entropy: Option<&'a mut [f32]>,
}

/// What [`linear_logprob_backward`] needs from the forward pass, and the gradients that arrive.
#[derive(Clone, Copy, Debug)]
pub struct LogprobGrad<'a> {
    /// Log-sum-exp of the forward pass, `[n]`.
    pub lse: &'a [f32],
    /// Gradient of each row's log-probability, `[n]`; rows with 0 here and in `entropy` cost nothing.
    pub d_logprob: &'a [f32],
    /// Entropy of the forward pass and its gradient, `[n]` each.
    pub entropy: Option<(&'a [f32], &'a [f32])>,
}

impl LogprobGrad<'_> {
    /// Whether `row` has a gradient at all.
    fn touches(&self, row: usize) -> bool {
        self.d_logprob[row] != 0.0
            || self
                .entropy
                .is_some_and(|(_, d_entropy)| d_entropy[row] != 0.0)
    }
}

/// Memory that the operators keep between calls.
#[derive(Debug, Default)]
pub struct LogprobScratch {
    rows: Scratch,
    columns: Scratch,
    stats: Scratch,
    d_rows: Scratch,
    d_logits: Scratch,
    workspaces: Workspaces,
}

impl LinearLogprob<'_> {
    fn vocab(&self) -> usize {
        self.w.len() / self.dim
    }

    fn check(&self) {
        assert!(
            self.dim > 0 && self.w.len().is_multiple_of(self.dim),
            "w is [vocab, {}]",
            self.dim
        );
        assert_eq!(
            self.x.len(),
            self.targets.len() * self.dim,
            "x holds one row for each target"
        );
        let vocab = self.vocab();
        for (row, &target) in self.targets.iter().enumerate() {
            assert!(
                (target as usize) < vocab,
                "row {row} asks for token {target} of {vocab}"
            );
        }
        let t = self.temperature;
        assert!(
            t > 0.0 && t.is_finite(),
            "temperature is {t}: it has to be above 0 and finite"
        );
    }

    /// What hidden states are multiplied with, so that logits come in units of `ln 2`.
    fn scale(&self) -> f32 {
        LOG2_E / self.temperature
    }
}

fn check_len(name: &str, len: usize, expected: usize) {
    assert_eq!(
        len, expected,
        "{name} holds {len} values, the input asks for {expected}"
    );
}

/// Log-probability, log-sum-exp and (on demand) entropy of each row.
///
/// # Panics
/// If lengths do not match, a target is not below `vocab`, or the temperature is not above 0.
pub fn linear_logprob_forward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    out: LogprobOut<'_>,
    scratch: &mut LogprobScratch,
) {
    input.check();
    let n = input.targets.len();
    check_len("logprob", out.logprob.len(), n);
    check_len("lse", out.lse.len(), n);
    if let Some(entropy) = &out.entropy {
        check_len("entropy", entropy.len(), n);
    }
    forward::forward(dev, input, out, scratch);
}

/// Overwrites `dx` `[n, dim]` with the gradient of `x`, and adds the gradient of `w` to `dw` `[vocab, dim]`.
///
/// With `p` the distribution, `H` its entropy and `y` the target, the gradient of the divided logits
/// is `d_logprob (onehot(y) - p) - d_entropy p (log p + H)`.
///
/// # Panics
/// If lengths do not match, a target is not below `vocab`, or the temperature is not above 0.
pub fn linear_logprob_backward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    grad: LogprobGrad<'_>,
    dx: &mut [f32],
    dw: Option<&mut [f32]>,
    scratch: &mut LogprobScratch,
) {
    input.check();
    let n = input.targets.len();
    check_len("lse", grad.lse.len(), n);
    check_len("d_logprob", grad.d_logprob.len(), n);
    check_len("dx", dx.len(), input.x.len());
    if let Some((entropy, d_entropy)) = grad.entropy {
        check_len("entropy", entropy.len(), n);
        check_len("d_entropy", d_entropy.len(), n);
    }
    if let Some(dw) = &dw {
        check_len("dw", dw.len(), input.w.len());
    }
    backward::backward(dev, input, &grad, dx, dw, scratch);
}

/// Largest value and log-sum-exp of a row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogSoftmaxStats {
    /// Largest logit.
    pub max: f32,
    /// Natural logarithm of the sum of exponentials; `logit - lse` is the log-probability.
    pub lse: f32,
}

/// [`LogSoftmaxStats`] of `logits`, on the calling thread.
///
/// # Panics
/// If `logits` is empty.
#[must_use]
pub fn log_softmax_stats(dev: &Device, logits: &[f32]) -> LogSoftmaxStats {
    assert!(
        !logits.is_empty(),
        "a row of logits holds at least one value"
    );
    // SAFETY: reads `logits` alone.
    let (max, total) = unsafe { max_and_total(dev, logits) };
    LogSoftmaxStats {
        max,
        lse: (f64::from(max) + total.ln()) as f32,
    }
}

/// Values whose exponentials are summed in f32 before they join the f64 total.
const STATS_CHUNK: usize = 1024;

simd_fn! {
    /// Largest value, and the sum of `e^(value - largest)`.
    fn max_and_total<V>(logits: &[f32]) -> (f32, f64) {
        let mut max = V::splat(f32::NEG_INFINITY);
        let whole = logits.len() / V::LANES * V::LANES;
        let (vectors, tail) = logits.split_at(whole);
        for chunk in vectors.chunks_exact(V::LANES) {
            max = max.max(V::load(chunk.as_ptr()));
        }
        let max = tail.iter().copied().fold(max.max_lane(), f32::max);
        let mut total: f64 = tail.iter().map(|&z| f64::from(z - max).exp()).sum();
        for chunk in vectors.chunks(STATS_CHUNK) {
            let mut sum = V::splat(0.0);
            for part in chunk.chunks_exact(V::LANES) {
                sum = sum.add(exp(V::load(part.as_ptr()).sub(V::splat(max))));
            }
            total += f64::from(sum.sum());
        }
        (max, total)
    }
}

#[cfg(test)]
mod tests;
