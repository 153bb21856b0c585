//! Softmax statistics of each row, gathered over slabs of the vocabulary.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use std::f64::consts::LN_2;
use std::ops::Range;

use super::strips::{Cut, Loaded, MAX_LANES, ROW_STEP, load_rows, padded_weights};
use super::{LinearLogprob, LogprobOut, LogprobScratch};
use crate::attention::tile::{In, Out, Product, exp2};
use crate::buffer::{Scratch, SharedMut};
use crate::device::Device;
use crate::simd::{Vector, simd_fn};

/// Slabs of a large vocabulary; each is a task. A constant, so that sums do not depend on threads.
const SLABS: usize = 32;
/// Rows of weights that are worth a task.
const LEAST_SLAB: usize = 64;
/// A logit below all others.
const LOWEST: f32 = -1e30;

/// Statistics of one row over one slab; logits are in units of `ln 2`.
#[derive(Clone, Copy)]
enum Stat {
    /// Largest logit.
    Max,
    /// Sum of `2^(logit - max)`.
    Total,
    /// Sum of `2^(logit - max) (logit - max)`.
    Weighted,
    /// The target's logit, if the slab has it.
    Target,
}
const STATS: usize = 4;

struct Slab<'a> {
    cut: &'a Cut,
    input: &'a LinearLogprob<'a>,
    /// Transposed hidden states, `[strips, padded, width]`.
    columns: &'a [f32],
    tokens: Range<usize>,
    entropy: bool,
}

pub(super) fn forward(
    dev: &Device,
    input: &LinearLogprob<'_>,
    out: LogprobOut<'_>,
    scratch: &mut LogprobScratch,
) {
    let cut = Cut::new(dev, input.targets.len(), input.dim);
    let all: Vec<u32> = (0..cut.rows as u32).collect();
    let len = cut.strips * cut.strip_len();
    let columns = scratch.columns.take(len);
    let to = Loaded {
        columns: &mut *columns,
        panels: None,
    };
    load_rows(
        dev,
        &cut,
        &all,
        (input.x, input.scale()),
        to,
        &scratch.workspaces,
    );
    let columns = &*columns;
    let vocab = input.vocab();
    let slab_rows = vocab
        .div_ceil(SLABS)
        .next_multiple_of(ROW_STEP)
        .max(LEAST_SLAB);
    let slabs = vocab.div_ceil(slab_rows);
    let stats_len = cut.strips * STATS * cut.width;
    let stats = scratch.stats.take(slabs * stats_len);
    let shared = SharedMut::new(stats);
    let entropy = out.entropy.is_some();
    dev.pool().parallel_for(slabs, &|i| {
        let tokens = i * slab_rows..((i + 1) * slab_rows).min(vocab);
        let slab = Slab {
            cut: &cut,
            input,
            columns,
            tokens,
            entropy,
        };
        // SAFETY: slabs have statistics of their own.
        let stats = unsafe { shared.range(i * stats_len..(i + 1) * stats_len) };
        scratch.workspaces.with(|memory| {
            // SAFETY: `columns` and `stats` have the lengths that the kernel asks for.
            unsafe { scan_slab(dev, &slab, stats, memory) }
        });
    });
    merge(dev, input, &cut, stats, slab_rows, out);
}

simd_fn! {
    /// Statistics `[strips, STATS, width]` of all rows over the slab.
    ///
    /// # Safety
    /// The slab's columns and `stats` have the lengths above.
    fn scan_slab<V: Product>(slab: &Slab<'_>, stats: &mut [f32], memory: &mut Scratch) {
        match slab.cut.vectors {
            1 => scan::<V, 1>(slab, stats, memory),
            2 => scan::<V, 2>(slab, stats, memory),
            _ => scan::<V, 3>(slab, stats, memory),
        }
    }
}

#[inline(always)]
unsafe fn scan<V: Product, const NV: usize>(
    slab: &Slab<'_>,
    stats: &mut [f32],
    memory: &mut Scratch,
) {
    let cut = slab.cut;
    let panel_rows = cut.panel_rows();
    let (scores, copy) = memory
        .take(panel_rows * (MAX_LANES + cut.padded))
        .split_at_mut(panel_rows * MAX_LANES);
    let scores = Out {
        ptr: scores.as_mut_ptr(),
        stride: cut.width,
    };
    for strip in stats.chunks_exact_mut(STATS * cut.width) {
        strip.fill(0.0);
        strip[Stat::Max as usize * cut.width..][..cut.width].fill(LOWEST);
    }
    for first in slab.tokens.clone().step_by(panel_rows) {
        let count = panel_rows.min(slab.tokens.end - first);
        let weights = padded_weights(cut, slab.input.w, first, count, copy);
        for (strip, stats) in stats.chunks_exact_mut(STATS * cut.width).enumerate() {
            let from = slab.columns[strip * cut.strip_len()..].as_ptr();
            let columns = In {
                ptr: from,
                stride: cut.width,
            };
            let rows = count.next_multiple_of(V::STEP);
            V::product::<NV, false>(rows, cut.dim, weights, columns, scores, false);
            if slab.entropy {
                update::<V, NV, true>(count, scores.ptr, stats);
            } else {
                update::<V, NV, false>(count, scores.ptr, stats);
            }
            let targets = &slab.input.targets[cut.strip_rows(strip)];
            for (lane, &target) in targets.iter().enumerate() {
                let token = (target as usize).wrapping_sub(first);
                if token < count {
                    stats[Stat::Target as usize * cut.width + lane] =
                        *scores.ptr.add(token * cut.width + lane);
                }
            }
        }
    }
}

/// Adds the logits of `count` tokens, `[count, lanes]`, to a strip's statistics.
#[inline(always)]
unsafe fn update<V: Vector, const NV: usize, const ENTROPY: bool>(
    count: usize,
    scores: *const f32,
    stats: &mut [f32],
) {
    let mut v = 0;
    while v < NV {
        let at = |stat: Stat| (stat as usize * NV + v) * V::LANES;
        let before = V::load(stats.as_ptr().add(at(Stat::Max)));
        let mut max = before;
        for token in 0..count {
            max = max.max(V::load(scores.add((token * NV + v) * V::LANES)));
        }
        let shrink = exp2(before.sub(max));
        let mut total = V::load(stats.as_ptr().add(at(Stat::Total)));
        let mut weighted = V::load(stats.as_ptr().add(at(Stat::Weighted)));
        if ENTROPY {
            // A sum over logits relative to the old largest becomes one relative to the new; where
            // there was none yet, `total` is 0 and the first factor finite.
            weighted = before.sub(max).mul(total).add(weighted).mul(shrink);
        }
        total = total.mul(shrink);
        for token in 0..count {
            let below = V::load(scores.add((token * NV + v) * V::LANES)).sub(max);
            let e = exp2(below);
            total = total.add(e);
            if ENTROPY {
                weighted = e.fma(below, weighted);
            }
        }
        max.store(stats.as_mut_ptr().add(at(Stat::Max)));
        total.store(stats.as_mut_ptr().add(at(Stat::Total)));
        weighted.store(stats.as_mut_ptr().add(at(Stat::Weighted)));
        v += 1;
    }
}

/// Joins the slabs of each row, in their order and in f64.
fn merge(
    dev: &Device,
    input: &LinearLogprob<'_>,
    cut: &Cut,
    stats: &[f32],
    slab_rows: usize,
    out: LogprobOut<'_>,
) {
    let strip_len = STATS * cut.width;
    let (logprob, lse) = (SharedMut::new(out.logprob), SharedMut::new(out.lse));
    let entropy = out.entropy.map(SharedMut::new);
    dev.pool().parallel_for(cut.strips, &|strip| {
        for (lane, row) in cut.strip_rows(strip).enumerate() {
            let stat = |slab: &[f32], stat: Stat| {
                f64::from(slab[strip * strip_len + stat as usize * cut.width + lane])
            };
            let slabs = || stats.chunks_exact(cut.strips * strip_len);
            let max = slabs()
                .map(|s| stat(s, Stat::Max))
                .fold(f64::NEG_INFINITY, f64::max);
            let (mut total, mut weighted) = (0.0, 0.0);
            for slab in slabs() {
                let below = stat(slab, Stat::Max) - max;
                let factor = below.exp2();
                let sum = stat(slab, Stat::Total);
                total += factor * sum;
                weighted += factor * (stat(slab, Stat::Weighted) + below * sum);
            }
            let slab = input.targets[row] as usize / slab_rows;
            let target = slabs()
                .nth(slab)
                .map_or(f64::NAN, |s| stat(s, Stat::Target));
            let log_total = max + total.log2();
            // SAFETY: each row lies in one strip.
            unsafe {
                logprob.range(row..row + 1)[0] = ((target - log_total) * LN_2) as f32;
                lse.range(row..row + 1)[0] = (log_total * LN_2) as f32;
                if let Some(entropy) = entropy {
                    entropy.range(row..row + 1)[0] =
                        ((total.log2() - weighted / total) * LN_2) as f32;
                }
            }
        }
    });
}
