//! Gradients of hidden states and weights, over sections of the vocabulary.
//!
//! The logits of each block of rows and each section, kept or computed again, become their gradients in
//! place. Their product with the section's weights adds to the gradient of the rows, and their product with
//! the rows to the gradient of the section's weights. A low-rank addition takes its gradients from the same
//! gradients of logits.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are vector arithmetic throughout"
)]

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::low_rank::LowRankScratch;
use super::masks::{SECTION_WORDS, bits, section, single};
use super::{
    BLOCK_ROWS, HeadGrads, LinearLogprob, LogprobGrad, LogprobScratch, ROW_GRAIN, SECTION,
};
use super::{parts, row_stride, sections};
use crate::attention::tile::exp2;
use crate::buffer::SharedMut;
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};
use crate::simd::{Vector, simd_fn};

/// One backward pass.
struct Pass<'a> {
    dev: &'a Cpu,
    /// The same device with products of `f32` operands.
    exact: Cpu,
    input: &'a LinearLogprob<'a>,
    grad: &'a LogprobGrad<'a>,
}

/// The backward pass. Rows without a gradient are skipped: blocks in which most rows have one are
/// computed as a whole, the rows of all others are gathered first.
pub(super) fn backward(
    dev: &Cpu,
    input: &LinearLogprob<'_>,
    grad: &LogprobGrad<'_>,
    dx: &mut [f32],
    mut head: HeadGrads<'_>,
    scratch: &mut LogprobScratch,
) {
    dx.fill(0.0);
    let (n, vocab, dim) = (input.targets.len(), input.vocab(), input.dim);
    let kept = scratch.take_kept(input, grad.lse);
    let pass = Pass {
        dev,
        exact: dev.with_f32_products(),
        input,
        grad,
    };
    let active = |rows: Range<usize>| rows.filter(|&row| pass.touches(row));
    // Rows that are computed again: of the kept ones those of blocks in which few have a gradient.
    let again = &mut scratch.order;
    again.clear();
    let stride = row_stride(vocab);
    let logits = scratch.logits.take(kept * stride);
    for rows in parts(0..kept, BLOCK_ROWS) {
        let few = 4 * active(rows.clone()).count() < 3 * rows.len();
        if few {
            again.extend(active(rows).map(|row| row as u32));
            continue;
        }
        let x = &input.x[rows.start * dim..rows.end * dim];
        let dx = &mut dx[rows.start * dim..rows.end * dim];
        let logits = &mut logits[rows.start * stride..rows.end * stride];
        let row = |i: usize| rows.start + i;
        let logits = Logits::Kept(logits);
        pass.block(row, x, logits, dx, &mut head, &mut scratch.low_rank);
    }
    again.extend(active(kept..n).map(|row| row as u32));
    let most = BLOCK_ROWS.min(again.len());
    let section = scratch.section.take(most * row_stride(SECTION.min(vocab)));
    let (gathered, d_gathered) = (
        scratch.rows.take(most * dim),
        scratch.d_rows.take(most * dim),
    );
    for part in parts(0..again.len(), BLOCK_ROWS) {
        let rows = &again[part];
        let x = &mut gathered[..rows.len() * dim];
        for (to, &row) in x.chunks_exact_mut(dim).zip(rows) {
            to.copy_from_slice(&input.x[row as usize * dim..][..dim]);
        }
        let dx_part = &mut d_gathered[..rows.len() * dim];
        let row = |i: usize| rows[i] as usize;
        let logits = Logits::Again(section);
        pass.block(row, x, logits, dx_part, &mut head, &mut scratch.low_rank);
        for (from, &row) in dx_part.chunks_exact(dim).zip(rows) {
            dx[row as usize * dim..][..dim].copy_from_slice(from);
        }
    }
}

/// The place of a block's logits.
enum Logits<'a> {
    /// All logits, `[rows, vocab]`, with rows [`row_stride`] apart.
    Kept(&'a mut [f32]),
    /// Memory for those of a section, likewise.
    Again(&'a mut [f32]),
}

impl Pass<'_> {
    /// Whether `row` has a gradient at all: not where its mask leaves no choice.
    fn touches(&self, row: usize) -> bool {
        let vocab = self.input.vocab();
        self.grad.touches(row) && !self.input.mask(row).is_some_and(|mask| single(mask, vocab))
    }

    /// The gradients that a block of rows makes: overwrites `dx`, adds to `head`. Row `i` of the block is row
    /// `row(i)` of the input.
    fn block(
        &self,
        row: impl Fn(usize) -> usize + Sync,
        x: &[f32],
        mut logits: Logits<'_>,
        dx: &mut [f32],
        head: &mut HeadGrads<'_>,
        memory: &mut LowRankScratch,
    ) {
        let (dev, exact) = (self.dev, &self.exact);
        let (dim, vocab, low_rank) = (self.input.dim, self.input.vocab(), &self.input.low_rank);
        let count = x.len() / dim;
        let x = Mat::new(x, count, dim);
        let inner: &[f32] = match low_rank {
            Some(low_rank) => low_rank.inner(exact, x, &mut memory.inner),
            None => &[],
        };
        let d_inner = memory.d_inner.take(inner.len());
        for tokens in sections(vocab) {
            let weights = self.input.weights(exact, &tokens, &mut memory.section);
            let (values, ld) = match &mut logits {
                Logits::Kept(all) => (&mut all[tokens.start..], row_stride(vocab)),
                Logits::Again(section) => {
                    let stride = row_stride(SECTION.min(vocab));
                    let y = MatMut::with_ld(section, count, tokens.len(), stride);
                    dev.matmul_nt(x, weights, y, false);
                    if let Some(low_rank) = self.input.added() {
                        let y = MatMut::with_ld(section, count, tokens.len(), stride);
                        low_rank.add(exact, inner, &tokens, y);
                    }
                    (&mut section[..], stride)
                }
            };
            self.grade(&row, count, values, ld, &tokens);
            let d_logits = Mat::with_ld(values, count, tokens.len(), ld);
            let to = MatMut::new(dx, count, dim);
            dev.matmul_nn(d_logits, weights, to, tokens.start > 0);
            if let Some(dw) = head.w.as_deref_mut() {
                let dw = &mut dw[tokens.start * dim..tokens.end * dim];
                let to = MatMut::new(dw, tokens.len(), dim);
                dev.matmul_tn(d_logits, x, to, true);
            }
            if let Some(low_rank) = low_rank {
                let db = head.low_rank.as_mut().map(|grads| &mut *grads.b);
                low_rank.section_backward(exact, d_logits, &tokens, inner, d_inner, db);
            }
        }
        if let Some(low_rank) = low_rank {
            let da = head.low_rank.as_mut().map(|grads| &mut *grads.a);
            low_rank.rows_backward(exact, x, d_inner, dx, da);
        }
    }

    /// Turns the products of a section into the gradients of the products, in place.
    fn grade(
        &self,
        row: &(impl Fn(usize) -> usize + Sync),
        count: usize,
        values: &mut [f32],
        ld: usize,
        tokens: &Range<usize>,
    ) {
        let values = SharedMut::new(values);
        self.dev.pool().parallel_ranges(count, ROW_GRAIN, &|part| {
            for i in part {
                // SAFETY: each row is in one part, and rows do not overlap.
                let values = unsafe { values.range(i * ld..i * ld + tokens.len()) };
                let row = row(i);
                let (scale, curve) = (self.input.scale(row), self.curve(row));
                match self.input.mask(row) {
                    // SAFETY: the kernels change only the slice.
                    None => unsafe { grade_row(self.dev, values, scale, &curve) },
                    Some(mask) => {
                        let words = section(mask, tokens);
                        // SAFETY: as above.
                        unsafe { grade_masked(self.dev, values, &words, scale, &curve) };
                    }
                }
                let target = self.input.targets[row] as usize;
                if tokens.contains(&target) {
                    values[target - tokens.start] += curve.target;
                }
            }
        });
    }

    /// The constants of a row's gradient; all 0 if it has none.
    fn curve(&self, row: usize) -> Curve {
        if !self.touches(row) {
            return Curve::default();
        }
        let (grad, temperature) = (self.grad, self.input.temperature(row));
        let target = grad.d_logprob[row] / temperature;
        let mut curve = Curve {
            lse: grad.lse[row] * LOG2_E,
            base: -target,
            slope: 0.0,
            target,
        };
        if let Some((entropy, d_entropy)) = grad.entropy {
            curve.base -= d_entropy[row] * entropy[row] / temperature;
            curve.slope = -d_entropy[row] * LN_2 / temperature;
        }
        curve
    }
}

/// Constants that turn a logit `z` of a row, in units of `ln 2`, into the gradient of its product:
/// with `b = z - lse`, `2^b (base + slope b)`, and `target` on top for the target.
#[derive(Default)]
struct Curve {
    /// Log-sum-exp in units of `ln 2`.
    lse: f32,
    base: f32,
    /// Factor of `b`: the part of the entropy's gradient.
    slope: f32,
    /// Gradient of the log-probability over the temperature.
    target: f32,
}

simd_fn! {
    /// Gradients of a row's products in place of the products.
    fn grade_row<V>(values: &mut [f32], scale: f32, curve: &Curve) {
        grade_tokens::<V, false>(values, &[0; SECTION_WORDS], scale, curve);
    }
}

simd_fn! {
    /// [`grade_row`] for the tokens whose bits are set; exactly 0 for the others.
    fn grade_masked<V>(values: &mut [f32], words: &[u32; SECTION_WORDS], scale: f32, curve: &Curve) {
        grade_tokens::<V, true>(values, words, scale, curve);
    }
}

/// The kernel of both, in whole vectors and a shorter last one.
#[inline(always)]
unsafe fn grade_tokens<V: Vector, const MASKED: bool>(
    values: &mut [f32],
    words: &[u32; SECTION_WORDS],
    scale: f32,
    curve: &Curve,
) {
    let less = V::splat(-curve.lse);
    let (scale, base, slope) = (V::splat(scale), V::splat(curve.base), V::splat(curve.slope));
    for (i, part) in values.chunks_mut(V::LANES).enumerate() {
        let set = if MASKED {
            bits(words, i * V::LANES, V::LANES)
        } else {
            !0
        };
        let mut d = V::splat(0.0);
        if set != 0 {
            let below = V::load_upto(part.as_ptr(), part.len()).fma(scale, less);
            d = exp2(below).mul(slope.fma(below, base));
            if MASKED {
                d = d.select(set, V::splat(0.0));
            }
        }
        d.store_upto(part.as_mut_ptr(), part.len());
    }
}
