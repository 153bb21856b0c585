//! Softmax statistics of each row, gathered over sections of the vocabulary.

use std::f64::consts::LN_2;
use std::ops::Range;

use super::{BLOCK_ROWS, LinearLogprob, LogprobOut, LogprobScratch, ROW_GRAIN, SECTION};
use super::{Kept, parts, row_stride, sections};
use crate::attention::tile::exp2;
use crate::buffer::SharedMut;
use crate::device::Device;
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

/// What is known of a row after some sections; logits in units of `ln 2` are products times a scale.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stat {
    /// Largest product.
    max: f32,
    /// Sum of `2^(logit - max)`; 0 before the first section.
    total: f64,
    /// Sum of `2^(logit - max) (logit - max)`, where entropy is wanted.
    weighted: f64,
    /// The target's product.
    target: f32,
}

impl Stat {
    /// Joins the statistics of another section.
    fn join(&mut self, other: Self, scale: f32) {
        if self.total == 0.0 {
            (self.max, self.total, self.weighted) = (other.max, other.total, other.weighted);
            return;
        }
        let max = self.max.max(other.max);
        let (mut total, mut weighted) = (0.0, 0.0);
        for part in [*self, other] {
            let below = (f64::from(part.max) - f64::from(max)) * f64::from(scale);
            let factor = below.exp2();
            total += factor * part.total;
            weighted += factor * (part.weighted + below * part.total);
        }
        (self.max, self.total, self.weighted) = (max, total, weighted);
    }
}

pub(super) fn forward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    out: LogprobOut<'_>,
    scratch: &mut LogprobScratch,
) {
    let (n, vocab, dim) = (input.targets.len(), input.vocab(), input.dim);
    let (all_stride, stride) = (row_stride(vocab), row_stride(SECTION.min(vocab)));
    let kept = n.min(scratch.limit / all_stride);
    let logits = scratch.logits.take(kept * all_stride);
    let temporary = scratch.section.take(BLOCK_ROWS.min(n) * stride);
    scratch.stats.clear();
    scratch.stats.resize(n, Stat::default());
    let entropy = out.entropy.is_some();
    for rows in parts(0..kept, BLOCK_ROWS).chain(parts(kept..n, BLOCK_ROWS)) {
        let x = Mat::new(&input.x[rows.start * dim..rows.end * dim], rows.len(), dim);
        for tokens in sections(vocab) {
            let (to, ld) = if rows.start < kept {
                let start = rows.start * all_stride + tokens.start;
                (&mut logits[start..], all_stride)
            } else {
                (&mut temporary[..], stride)
            };
            let y = MatMut::with_ld(to, rows.len(), tokens.len(), ld);
            dev.matmul_nt(x, input.weights(&tokens), y, false);
            let stats = &mut scratch.stats[rows.clone()];
            scan(dev, input, (to, ld), (rows.clone(), tokens), entropy, stats);
        }
    }
    finish(&scratch.stats, out, &mut scratch.kept, input);
    scratch.kept.rows = kept;
}

/// Adds a section's products, `ld` values from row to row, to the statistics of its rows.
fn scan(
    dev: &Device,
    input: &LinearLogprob<'_>,
    (products, ld): (&[f32], usize),
    (rows, tokens): (Range<usize>, Range<usize>),
    entropy: bool,
    stats: &mut [Stat],
) {
    let stats = SharedMut::new(stats);
    dev.pool().parallel_ranges(rows.len(), ROW_GRAIN, &|part| {
        for i in part {
            let products = &products[i * ld..][..tokens.len()];
            // SAFETY: each row is in one part.
            let stat = unsafe { &mut stats.range(i..i + 1)[0] };
            let scale = input.scale(rows.start + i);
            // SAFETY: the kernel reads the slice alone.
            stat.join(unsafe { scan_row(dev, products, scale, entropy) }, scale);
            let target = input.targets[rows.start + i] as usize;
            if tokens.contains(&target) {
                stat.target = products[target - tokens.start];
            }
        }
    });
}

simd_fn! {
    /// Statistics of some products of a row.
    fn scan_row<V>(products: &[f32], scale: f32, entropy: bool) -> Stat {
        let (vectors, tail) = products.split_at(products.len() / V::LANES * V::LANES);
        let mut max = V::splat(f32::NEG_INFINITY);
        for part in vectors.chunks_exact(V::LANES) {
            max = max.max(V::load(part.as_ptr()));
        }
        let max = tail.iter().copied().fold(max.max_lane(), f32::max);
        let mut sum = V::splat(0.0);
        let mut weighted = V::splat(0.0);
        for part in vectors.chunks_exact(V::LANES) {
            let below = V::load(part.as_ptr()).sub(V::splat(max)).mul(V::splat(scale));
            let e = exp2(below);
            sum = sum.add(e);
            if entropy {
                weighted = e.fma(below, weighted);
            }
        }
        let mut stat = Stat {
            max,
            total: f64::from(sum.sum()),
            weighted: f64::from(weighted.sum()),
            target: 0.0,
        };
        for &product in tail {
            let below = (f64::from(product) - f64::from(max)) * f64::from(scale);
            stat.total += below.exp2();
            stat.weighted += below.exp2() * below;
        }
        stat
    }
}

/// Log-probabilities, log-sum-exps and entropies from the statistics of whole rows; notes what the kept
/// logits are of.
fn finish(stats: &[Stat], out: LogprobOut<'_>, kept: &mut Kept, input: &LinearLogprob<'_>) {
    for (row, stat) in stats.iter().enumerate() {
        let scale = f64::from(input.scale(row));
        let max = f64::from(stat.max);
        let above = (f64::from(stat.target) - max) * scale - stat.total.log2();
        out.logprob[row] = (above * LN_2) as f32;
        out.lse[row] = ((max * scale + stat.total.log2()) * LN_2) as f32;
    }
    if let Some(entropy) = out.entropy {
        for (entropy, stat) in entropy.iter_mut().zip(stats) {
            let mean_below = stat.weighted / stat.total;
            *entropy = ((stat.total.log2() - mean_below) * LN_2) as f32;
        }
    }
    (kept.dim, kept.vocab) = (input.dim, input.vocab());
    kept.temperatures.clear();
    kept.temperatures.extend_from_slice(input.temperatures);
    kept.targets.clear();
    kept.targets.extend_from_slice(input.targets);
    kept.lse.clear();
    kept.lse.extend_from_slice(out.lse);
}
