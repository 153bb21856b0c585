//! Log-probabilities of chosen tokens under a linear head, without storing the logits.
//!
//! Forward and backward go through the vocabulary in panels; each panel's logits live in cache only.
//! A row's result does not depend on the other rows, on the number of threads or on their timing.

use crate::device::Device;

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

/// Memory that the operators keep between calls.
#[derive(Debug, Default)]
pub struct LogprobScratch {}

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

    fn logits(&self, row: usize) -> Vec<f64> {
        let x = &self.x[row * self.dim..][..self.dim];
        self.w
            .chunks_exact(self.dim)
            .map(|w| {
                let dot: f64 = x
                    .iter()
                    .zip(w)
                    .map(|(&a, &b)| f64::from(a) * f64::from(b))
                    .sum();
                dot / f64::from(self.temperature)
            })
            .collect()
    }
}

/// Log-probability, log-sum-exp and (on demand) entropy of each row.
///
/// # Panics
/// If lengths do not match, a target is not below `vocab`, or the temperature is not above 0.
pub fn linear_logprob_forward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    mut out: LogprobOut<'_>,
    scratch: &mut LogprobScratch,
) {
    let _ = (dev, scratch);
    input.check();
    for (row, &target) in input.targets.iter().enumerate() {
        let logits = input.logits(row);
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = max + logits.iter().map(|z| (z - max).exp()).sum::<f64>().ln();
        out.logprob[row] = (logits[target as usize] - lse) as f32;
        out.lse[row] = lse as f32;
        if let Some(entropy) = &mut out.entropy {
            entropy[row] = logits
                .iter()
                .map(|z| (z - lse).exp() * (lse - z))
                .sum::<f64>() as f32;
        }
    }
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
    mut dw: Option<&mut [f32]>,
    scratch: &mut LogprobScratch,
) {
    let _ = (dev, scratch);
    input.check();
    let dim = input.dim;
    for (row, &target) in input.targets.iter().enumerate() {
        let mut d_row = vec![0.0f64; dim];
        let x = &input.x[row * dim..][..dim];
        for (token, z) in input.logits(row).into_iter().enumerate() {
            let log_p = z - f64::from(grad.lse[row]);
            let hit = if token == target as usize { 1.0 } else { 0.0 };
            let mut dz = f64::from(grad.d_logprob[row]) * (hit - log_p.exp());
            if let Some((entropy, d_entropy)) = grad.entropy {
                dz -= f64::from(d_entropy[row]) * log_p.exp() * (log_p + f64::from(entropy[row]));
            }
            dz /= f64::from(input.temperature);
            for (d, w) in d_row.iter_mut().zip(&input.w[token * dim..]) {
                *d += dz * f64::from(*w);
            }
            if let Some(dw) = &mut dw {
                for (g, x) in dw[token * dim..].iter_mut().zip(x) {
                    *g += (dz * f64::from(*x)) as f32;
                }
            }
        }
        for (out, d) in dx[row * dim..].iter_mut().zip(d_row) {
            *out = d as f32;
        }
    }
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
    let _ = dev;
    assert!(
        !logits.is_empty(),
        "a row of logits holds at least one value"
    );
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|z| f64::from(z - max).exp()).sum();
    LogSoftmaxStats {
        max,
        lse: max + sum.ln() as f32,
    }
}
