//! Softmax statistics of each row, gathered over sections of the vocabulary.
//!
//! Sections are joined like parts of an online softmax (Milakov & Gimelshein 2018): the larger maximum stays,
//! the other sum is scaled down. Sums are `f32` vectors within a section, and `f64` between sections.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are vector arithmetic throughout"
)]

use std::f32::consts::LOG2_E;
use std::f64::consts::LN_2;
use std::ops::Range;

use super::low_rank::LowRankScratch;
use super::masks::{self, SECTION_WORDS, bits};
use super::{BLOCK_ROWS, LinearLogprob, LogprobOut, LogprobScratch, ROW_GRAIN, SECTION};
use super::{ForwardState, SoftmaxRow, parts, row_stride, sections};
use crate::attention::tile::exp2;
use crate::buffer::SharedMut;
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};
use crate::simd::{Vector, simd_fn};

/// Statistics of a row after some sections; logits in units of `ln 2` are products times a scale.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stat {
    /// Largest product.
    max: f32,
    /// Sum of `2^(logit - max)`; 0 before the first section.
    total: f64,
    /// Sum of `2^(logit - max) (logit - max)`, if entropy is requested.
    weighted: f64,
    /// The target's product.
    target: f32,
}

impl Stat {
    /// Joins the statistics of another section.
    fn join(&mut self, other: Self, scale: f32) {
        // Sections whose tokens are all barred.
        if other.total == 0.0 {
            return;
        }
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

/// The forward pass: blocks of rows, and for each the sections of the vocabulary. The first rows
/// keep their logits, as many as the scratch allows.
pub(super) fn forward(
    dev: &Cpu,
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
    let (entropy, exact) = (out.entropy.is_some(), dev.with_f32_products());
    for rows in parts(0..kept, BLOCK_ROWS).chain(parts(kept..n, BLOCK_ROWS)) {
        let x = Mat::new(&input.x[rows.start * dim..rows.end * dim], rows.len(), dim);
        let LowRankScratch { inner, section, .. } = &mut scratch.low_rank;
        let added = input.added();
        let added = added.map(|low_rank| (low_rank, &*low_rank.inner(&exact, x, inner)));
        for tokens in sections(vocab) {
            let (to, ld) = if rows.start < kept {
                let start = rows.start * all_stride + tokens.start;
                (&mut logits[start..], all_stride)
            } else {
                (&mut temporary[..], stride)
            };
            let y = MatMut::with_ld(to, rows.len(), tokens.len(), ld);
            dev.matmul_nt(x, input.weights(&exact, &tokens, section), y, false);
            if let Some((low_rank, inner)) = added {
                let y = MatMut::with_ld(to, rows.len(), tokens.len(), ld);
                low_rank.add(&exact, inner, &tokens, y);
            }
            let stats = &mut scratch.stats[rows.clone()];
            let products = Products {
                values: to,
                ld,
                rows: rows.clone(),
                tokens,
            };
            scan(dev, input, products, entropy, stats);
        }
    }
    finish(&scratch.stats, out, &mut scratch.kept, input);
    scratch.kept.rows = kept;
}

/// Products of some rows with a section of the vocabulary.
struct Products<'a> {
    values: &'a [f32],
    /// Number of values from row to row.
    ld: usize,
    rows: Range<usize>,
    tokens: Range<usize>,
}

/// Adds a section's products to the statistics of its rows.
fn scan(
    dev: &Cpu,
    input: &LinearLogprob<'_>,
    products: Products<'_>,
    entropy: bool,
    stats: &mut [Stat],
) {
    let Products {
        values,
        ld,
        rows,
        tokens,
    } = products;
    let stats = SharedMut::new(stats);
    dev.pool().parallel_ranges(rows.len(), ROW_GRAIN, &|part| {
        for i in part {
            let products = &values[i * ld..][..tokens.len()];
            // SAFETY: each row is in one part.
            let stat = unsafe { &mut stats.range(i..i + 1)[0] };
            let scale = input.scale(rows.start + i);
            let mask = input.mask(rows.start + i);
            stat.join(
                scan_some(dev, products, mask, &tokens, scale, entropy),
                scale,
            );
            let target = input.targets[rows.start + i] as usize;
            if tokens.contains(&target) {
                stat.target = products[target - tokens.start];
            }
        }
    });
}

/// Statistics of a section's products, over the tokens that `mask` allows.
fn scan_some(
    dev: &Cpu,
    products: &[f32],
    mask: Option<&[u32]>,
    tokens: &Range<usize>,
    scale: f32,
    entropy: bool,
) -> Stat {
    match mask {
        // SAFETY: the kernels read only the slices.
        None => unsafe { scan_row(dev, products, scale, entropy) },
        Some(mask) => {
            let words = masks::section(mask, tokens);
            // SAFETY: as above.
            unsafe { scan_masked(dev, products, &words, scale, entropy) }
        }
    }
}

/// Statistics of a whole row of products that are in memory.
pub(super) fn row(
    dev: &Cpu,
    products: &[f32],
    temperature: f32,
    mask: Option<&[u32]>,
) -> SoftmaxRow {
    let scale = LOG2_E / temperature;
    let mut stat = Stat::default();
    for tokens in sections(products.len()) {
        let products = &products[tokens.clone()];
        stat.join(scan_some(dev, products, mask, &tokens, scale, false), scale);
    }
    SoftmaxRow {
        max: stat.max,
        total: stat.total,
        scale,
    }
}

simd_fn! {
    /// Statistics of some products of a row.
    fn scan_row<V>(products: &[f32], scale: f32, entropy: bool) -> Stat {
        scan_tokens::<V, false>(products, &[0; SECTION_WORDS], scale, entropy)
    }
}

simd_fn! {
    /// [`scan_row`] over the tokens whose bits are set: with all of them, the same bits.
    fn scan_masked<V>(products: &[f32], words: &[u32; SECTION_WORDS], scale: f32, entropy: bool) -> Stat {
        scan_tokens::<V, true>(products, words, scale, entropy)
    }
}

/// Products in whole vectors.
fn whole<V: Vector>(products: &[f32]) -> usize {
    products.len() / V::LANES * V::LANES
}

/// The largest allowed product; minus infinity if there is none.
#[inline(always)]
unsafe fn largest<V: Vector, const MASKED: bool>(
    products: &[f32],
    words: &[u32; SECTION_WORDS],
) -> f32 {
    let (from, whole) = (products.as_ptr(), whole::<V>(products));
    let lowest = V::splat(f32::NEG_INFINITY);
    let mut max = lowest;
    let mut at = 0;
    while at < whole {
        let mut product = V::load(from.wrapping_add(at));
        if MASKED {
            product = product.select(bits(words, at, V::LANES), lowest);
        }
        max = max.max(product);
        at += V::LANES;
    }
    let mut max = max.max_lane();
    for (i, &product) in products.iter().enumerate().skip(whole) {
        if !MASKED || bits(words, i, 1) == 1 {
            max = max.max(product);
        }
    }
    max
}

/// The kernel of both: the largest product first, then the sums. `entropy` adds the weighted sum.
#[inline(always)]
unsafe fn scan_tokens<V: Vector, const MASKED: bool>(
    products: &[f32],
    words: &[u32; SECTION_WORDS],
    scale: f32,
    entropy: bool,
) -> Stat {
    let max = largest::<V, MASKED>(products, words);
    let mut stat = Stat {
        max,
        ..Stat::default()
    };
    // Nothing is allowed: differences to this largest product would be NaN.
    if MASKED && max == f32::NEG_INFINITY {
        return stat;
    }
    let (from, whole) = (products.as_ptr(), whole::<V>(products));
    let mut sum = V::splat(0.0);
    let mut weighted = V::splat(0.0);
    let mut at = 0;
    while at < whole {
        let set = if MASKED {
            bits(words, at, V::LANES)
        } else {
            !0
        };
        if set != 0 {
            let mut below = V::load(from.wrapping_add(at))
                .sub(V::splat(max))
                .mul(V::splat(scale));
            if MASKED {
                below = below.select(set, V::splat(0.0));
            }
            let mut e = exp2(below);
            if MASKED {
                e = e.select(set, V::splat(0.0));
            }
            sum = sum.add(e);
            if entropy {
                weighted = e.fma(below, weighted);
            }
        }
        at += V::LANES;
    }
    stat.total = f64::from(sum.sum());
    stat.weighted = f64::from(weighted.sum());
    for (i, &product) in products.iter().enumerate().skip(whole) {
        if !MASKED || bits(words, i, 1) == 1 {
            let below = (f64::from(product) - f64::from(max)) * f64::from(scale);
            stat.total += below.exp2();
            stat.weighted += below.exp2() * below;
        }
    }
    stat
}

/// Log-probabilities, log-sum-exps and entropies from the statistics of whole rows; records the
/// input that the kept logits belong to.
fn finish(stats: &[Stat], out: LogprobOut<'_>, kept: &mut ForwardState, input: &LinearLogprob<'_>) {
    for (row, stat) in stats.iter().enumerate() {
        let softmax = SoftmaxRow {
            max: stat.max,
            total: stat.total,
            scale: input.scale(row),
        };
        out.logprob[row] = softmax.logprob(stat.target);
        out.lse[row] = softmax.lse();
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
