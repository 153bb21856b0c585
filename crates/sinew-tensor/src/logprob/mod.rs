//! Log-probabilities of chosen tokens under a linear head.
//!
//! Forward and backward go through the vocabulary in sections, whose logits are products of blocks of rows
//! ([`crate::gemm`]). A section's logits stay in cache; backward computes them again, except those for which
//! the caller grants memory ([`LogprobScratch::keeping`]): a quarter of the work. A row's log-probability
//! does not depend on the other rows, on the number of threads or on their timing, and no result on the kept
//! logits. A row can be restricted to some tokens ([`Masks`]); a mask that allows all of them gives the same
//! bits as no mask. The logits and gradients of AMX are products of rounded operands ([`crate::amx`]), as
//! those of the engine are. An adapter of the head ([`LowRank`]) is added without a merged copy of its
//! weights.

mod backward;
mod forward;
mod low_rank;
mod masks;

use std::f32::consts::LOG2_E;
use std::ops::Range;

use crate::buffer::Scratch;
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};

use forward::Stat;
pub use low_rank::{LowRank, LowRankGrads};
use low_rank::{LowRankScratch, SectionScratch};
pub use masks::Masks;

/// Tokens of a section. A constant, so that sums over the vocabulary do not depend on the rows.
const SECTION: usize = 2048;
/// Maximum rows of a block: with a section's logits (16 MiB) they stay in the last-level cache.
const BLOCK_ROWS: usize = 2048;
/// Rows that a task takes through a section.
const ROW_GRAIN: usize = 8;

/// Hidden states, the head's weights and the tokens asked about.
#[derive(Clone, Copy, Debug)]
pub struct LinearLogprob<'a> {
    /// Hidden states, `[n, dim]`.
    pub x: &'a [f32],
    /// Weights of the head, `[vocab, dim]`: a row's logits are `x w^T`, divided by its temperature.
    pub w: &'a [f32],
    /// Addition to these weights; `None`: none.
    pub low_rank: Option<LowRank<'a>>,
    /// Width of a hidden state.
    pub dim: usize,
    /// Token asked about in each row, `[n]`, below `vocab`.
    pub targets: &'a [u32],
    /// Divides each row's logits, `[n]`, above 0; empty: 1 for all, the plain model.
    pub temperatures: &'a [f32],
    /// The allowed tokens of each row: its distribution is the softmax over only them, and so are its entropy
    /// and gradients, which are exactly 0 at all others. `None`: all tokens.
    pub masks: Option<Masks<'a>>,
}

/// Outputs of [`linear_logprob_forward`].
#[derive(Debug)]
pub struct LogprobOut<'a> {
    /// Natural log-probability of each row's target, `[n]`.
    pub logprob: &'a mut [f32],
    /// Log-sum-exp of each row's logits after division by its temperature, `[n]`.
    pub lse: &'a mut [f32],
    /// Entropy of each row's distribution in nats, `[n]`.
    pub entropy: Option<&'a mut [f32]>,
}

/// Results of the forward pass that [`linear_logprob_backward`] reads, and the gradients of its
/// outputs.
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

/// Destinations of the head's gradients. What is `None` is not computed.
#[derive(Debug, Default)]
pub struct HeadGrads<'a> {
    /// Gradient of the weights, `[vocab, dim]`, added to.
    pub w: Option<&'a mut [f32]>,
    /// Gradients of the low-rank addition, which the input must have.
    pub low_rank: Option<LowRankGrads<'a>>,
}

/// Memory that the operators keep between calls.
#[derive(Debug, Default)]
pub struct LogprobScratch {
    /// Values of logits that forward may keep.
    limit: usize,
    kept: ForwardState,
    /// `[kept rows, vocab]`, rows [`row_stride`] apart.
    logits: Scratch,
    /// `[BLOCK_ROWS, SECTION]`, rows [`row_stride`] apart.
    section: Scratch,
    stats: Vec<Stat>,
    /// Rows of a backward pass, and of some of them hidden states and their gradients.
    order: Vec<u32>,
    rows: Scratch,
    d_rows: Scratch,
    low_rank: LowRankScratch,
}

/// The forward pass that the kept logits belong to.
#[derive(Debug, Default)]
struct ForwardState {
    /// The first rows have their logits kept.
    rows: usize,
    dim: usize,
    vocab: usize,
    temperatures: Vec<f32>,
    targets: Vec<u32>,
    lse: Vec<f32>,
}

impl LogprobScratch {
    /// Forward keeps the logits of as many rows as fit in `values` values, for the backward pass that follows
    /// with the same input. [`Default`] keeps none.
    #[must_use]
    pub fn keeping(values: usize) -> Self {
        Self {
            limit: values,
            ..Self::default()
        }
    }

    /// Bytes of all buffers; lists of one value a row are left out.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let buffers = [&self.logits, &self.section, &self.rows, &self.d_rows];
        buffers.map(Scratch::bytes).iter().sum::<usize>() + self.low_rank.bytes()
    }

    /// Rows whose logits are kept and are those of `input`; they can be used once.
    fn take_kept(&mut self, input: &LinearLogprob<'_>, lse: &[f32]) -> usize {
        let rows = std::mem::take(&mut self.kept.rows);
        let kept = &self.kept;
        let same = (kept.dim, kept.vocab) == (input.dim, input.vocab())
            && kept.temperatures == input.temperatures
            && kept.targets == input.targets
            && kept.lse == lse;
        if same { rows } else { 0 }
    }
}

/// Values from one row of `len` logits to the next: an odd number of cache lines. Sections and most
/// vocabularies are whole pages, and rows whole pages apart would share one set of the first cache level.
fn row_stride(len: usize) -> usize {
    const LINE: usize = 16;
    (len.div_ceil(LINE) | 1) * LINE
}

/// `range` in parts of nearly equal size, as few as `most` values in each allow.
fn parts(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let (start, len) = (range.start, range.len());
    let count = len.div_ceil(most);
    (0..count).map(move |i| start + i * len / count..start + (i + 1) * len / count)
}

/// The sections of a vocabulary.
fn sections(vocab: usize) -> impl Iterator<Item = Range<usize>> {
    (0..vocab)
        .step_by(SECTION)
        .map(move |first| first..(first + SECTION).min(vocab))
}

impl LinearLogprob<'_> {
    fn vocab(&self) -> usize {
        self.w.len() / self.dim
    }

    /// Panics on lengths that do not fit, targets outside the vocabulary or barred, and
    /// temperatures not above 0.
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
        if let Some(low_rank) = &self.low_rank {
            low_rank.check(vocab, self.dim);
        }
        for (row, &target) in self.targets.iter().enumerate() {
            assert!(
                (target as usize) < vocab,
                "row {row} asks for token {target} of {vocab}"
            );
        }
        if !self.temperatures.is_empty() {
            check_len("temperatures", self.temperatures.len(), self.targets.len());
        }
        if let Some(masks) = &self.masks {
            masks.check(self.targets);
        }
        for (row, &t) in self.temperatures.iter().enumerate() {
            assert!(
                t > 0.0 && t.is_finite(),
                "temperature of row {row} is {t}: it has to be above 0 and finite"
            );
        }
    }

    /// Weights of `tokens`, with an addition that is merged.
    fn weights<'s>(
        &'s self,
        exact: &Cpu,
        tokens: &Range<usize>,
        scratch: &'s mut SectionScratch,
    ) -> Mat<'s> {
        let low_rank = self.low_rank.as_ref();
        low_rank::section(exact, self.w, self.dim, low_rank, tokens, scratch)
    }

    /// The low-rank addition, if its products are to be added.
    fn added(&self) -> Option<&LowRank<'_>> {
        self.low_rank.as_ref().filter(|low_rank| !low_rank.merged)
    }

    /// Bits of the allowed tokens of `row`; `None`: all.
    fn mask(&self, row: usize) -> Option<&[u32]> {
        self.masks.and_then(|masks| masks.of(row))
    }

    fn temperature(&self, row: usize) -> f32 {
        self.temperatures.get(row).copied().unwrap_or(1.0)
    }

    /// The factor that makes a product of `row` a logit in units of `ln 2`: kernels compute powers
    /// of 2.
    fn scale(&self, row: usize) -> f32 {
        LOG2_E / self.temperature(row)
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
/// If lengths do not match, a target is not below `vocab` or barred, or a temperature is not above 0.
pub fn linear_logprob_forward(
    dev: &Cpu,
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

/// Logits of the rows `x` `[rows, dim]` under a head, `[rows, vocab]`, not divided by a temperature: those of
/// [`linear_logprob_forward`], to the bit.
///
/// # Panics
/// If lengths do not match.
pub fn head_logits(
    dev: &Cpu,
    x: Mat<'_>,
    w: &[f32],
    low_rank: Option<LowRank<'_>>,
    logits: &mut [f32],
    scratch: &mut LogprobScratch,
) {
    let (rows, dim) = (x.rows(), x.cols());
    let vocab = w.len() / dim;
    check_len("logits", logits.len(), rows * vocab);
    let (exact, low_rank) = (dev.with_f32_products(), low_rank.as_ref());
    if let Some(low_rank) = low_rank {
        low_rank.check(vocab, dim);
    }
    let LowRankScratch { inner, section, .. } = &mut scratch.low_rank;
    let added = low_rank.filter(|low_rank| !low_rank.merged);
    let added = added.map(|low_rank| (low_rank, &*low_rank.inner(&exact, x, inner)));
    for tokens in sections(vocab) {
        let to = &mut logits[tokens.start..];
        let w = low_rank::section(&exact, w, dim, low_rank, &tokens, section);
        let y = MatMut::with_ld(to, rows, tokens.len(), vocab);
        dev.matmul_nt(x, w, y, false);
        if let Some((low_rank, inner)) = added {
            let y = MatMut::with_ld(to, rows, tokens.len(), vocab);
            low_rank.add(&exact, inner, &tokens, y);
        }
    }
}

/// Overwrites `dx` `[n, dim]` with the gradient of `x`, and adds those of the head to `head`.
///
/// The gradient of the divided logits is `d_logprob (onehot(y) - p) - d_entropy p (log p + H)`, where `p` is
/// the distribution, `H` its entropy and `y` the target. It is 0 for barred tokens, and for all of a row
/// whose mask leaves one.
///
/// # Panics
/// If lengths do not match, a target is not below `vocab` or barred, a temperature is not above 0, or
/// gradients of a low-rank addition are asked for that the input does not have.
pub fn linear_logprob_backward(
    dev: &Cpu,
    input: &LinearLogprob<'_>,
    grad: LogprobGrad<'_>,
    dx: &mut [f32],
    head: HeadGrads<'_>,
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
    if let Some(dw) = &head.w {
        check_len("dw", dw.len(), input.w.len());
    }
    if let Some(grads) = &head.low_rank {
        let own = input.low_rank.as_ref();
        let own = own.expect("gradients of a low-rank addition need one in the input");
        check_len("gradient of a", grads.a.len(), own.a.len());
        check_len("gradient of b", grads.b.len(), own.b.len());
    }
    backward::backward(dev, input, &grad, dx, head, scratch);
}

/// The softmax of a row of logits that are in memory: the engine's. Log-probabilities have the bits of
/// [`linear_logprob_forward`] with the same logits, temperature and mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxRow {
    /// Largest allowed logit.
    max: f32,
    /// Sum of `2^(scale (logit - max))`.
    total: f64,
    /// `log2 e` over the temperature.
    scale: f32,
}

impl SoftmaxRow {
    /// The distribution over the tokens that `mask` allows (bit `v % 32` of word `v / 32`; none: all), on the
    /// calling thread.
    ///
    /// # Panics
    /// If `temperature` is not above 0, or no token is allowed.
    #[must_use]
    pub fn new(dev: &Cpu, logits: &[f32], temperature: f32, mask: Option<&[u32]>) -> Self {
        assert!(
            temperature > 0.0 && temperature.is_finite(),
            "temperature is {temperature}: it has to be above 0 and finite"
        );
        let row = forward::row(dev, logits, temperature, mask);
        assert!(row.total != 0.0, "a row of logits has an allowed token");
        row
    }

    /// Natural log-probability of an allowed token with this logit.
    #[must_use]
    pub fn logprob(&self, logit: f32) -> f32 {
        let above = f64::from(logit) - f64::from(self.max);
        let bits = above * f64::from(self.scale) - self.total.log2();
        (bits * std::f64::consts::LN_2) as f32
    }

    /// Natural logarithm of the sum of the exponentials of allowed logits, divided by the temperature.
    #[must_use]
    pub fn lse(&self) -> f32 {
        let bits = f64::from(self.max) * f64::from(self.scale) + self.total.log2();
        (bits * std::f64::consts::LN_2) as f32
    }
}

#[cfg(test)]
mod tests;
