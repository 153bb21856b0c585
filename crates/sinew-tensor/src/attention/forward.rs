//! The forward kernel: one strip of queries against blocks of keys, with a running softmax.
//!
//! The largest score is rounded to an integer, so that rescaling is exact, and sums go key by key: a row has
//! the bits of attention over stored keys ([`crate::paged`]), wherever blocks begin, and whatever other rows
//! are in its strip.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use std::f32::consts::{LN_2, LOG2_E};

use super::kernel::{SLACK_ROWS, Task, apply_masks, carve};
use super::plan::{BLOCK_KEYS, MAX_LANES, Strip};
use super::tile::{In, LOWEST, Out, Product, exp2_below, transpose};
use crate::buffer::{Scratch, SharedMut};
use crate::simd::{Vector, simd_fn};

/// The targets of a task: its own rows and heads of `out` `[rows, out_width]` and `lse` `[rows,
/// heads]`.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    pub(super) out: SharedMut<'a>,
    pub(super) lse: SharedMut<'a>,
}

/// Memory of a task.
struct Memory<'a> {
    keys: &'a mut [f32],
    values: &'a mut [f32],
    /// Queries and later outputs, `[lanes, padded_dim]`.
    rows: &'a mut [f32],
    /// Transposed queries, `[padded_dim, lanes]`.
    queries: &'a mut [f32],
    /// Transposed outputs, `[padded_dim, lanes]`.
    sums: &'a mut [f32],
    /// Scores and then probabilities, `[keys, lanes]`.
    scores: &'a mut [f32],
}

impl<'a> Memory<'a> {
    fn new(task: &Task<'_>, scratch: &'a mut Scratch) -> Self {
        let dim = task.padded_dim();
        let local = (task.chunk.locals + SLACK_ROWS) * dim;
        let lanes = MAX_LANES * dim;
        let block = (BLOCK_KEYS + SLACK_ROWS) * MAX_LANES;
        let mut rest = scratch.take(2 * local + 3 * lanes + block);
        Self {
            keys: carve(&mut rest, local),
            values: carve(&mut rest, local),
            rows: carve(&mut rest, lanes),
            queries: carve(&mut rest, lanes),
            sums: carve(&mut rest, lanes),
            scores: carve(&mut rest, block),
        }
    }
}

/// All strips of a task, each by the number of vectors that it fills.
#[inline(always)]
unsafe fn forward_task<V: Product>(task: &Task<'_>, to: Output<'_>, scratch: &mut Scratch) {
    let mut memory = Memory::new(task, scratch);
    task.gather_keys(memory.keys, memory.values);
    for strip in &task.chunk.strips {
        match (strip.rows.len() * task.group.count).div_ceil(V::LANES) {
            1 => forward_strip::<V, 1>(task, strip, to, &mut memory),
            2 => forward_strip::<V, 2>(task, strip, to, &mut memory),
            _ => forward_strip::<V, 3>(task, strip, to, &mut memory),
        }
    }
}

simd_fn! {
    /// Attention of all strips of the task.
    ///
    /// # Safety
    /// No other task may write the same rows and heads.
    pub(super) fn forward_chunk<V: Product>(task: &Task<'_>, to: Output<'_>, scratch: &mut Scratch) {
        forward_task::<V>(task, to, scratch);
    }
}

/// One strip of `NV` vectors of lanes: all its blocks of keys, then the division by the sums.
#[inline(always)]
unsafe fn forward_strip<V: Product, const NV: usize>(
    task: &Task<'_>,
    strip: &Strip,
    to: Output<'_>,
    memory: &mut Memory<'_>,
) {
    let (dim, width) = (task.padded_dim(), NV * V::LANES);
    let scale = LOG2_E / (task.shape.head_dim() as f32).sqrt();
    task.gather_queries(strip, scale, width, memory.rows);
    let rows = Out {
        ptr: memory.rows.as_mut_ptr(),
        stride: dim,
    };
    let queries = Out {
        ptr: memory.queries.as_mut_ptr(),
        stride: width,
    };
    let sums = Out {
        ptr: memory.sums.as_mut_ptr(),
        stride: width,
    };
    let scores = Out {
        ptr: memory.scores.as_mut_ptr(),
        stride: width,
    };
    transpose::<V>(width, dim, rows.as_in(), queries);
    memory.sums[..dim * width].fill(0.0);
    let mut softmax = Softmax::<V, NV> {
        max: [V::splat(LOWEST); NV],
        total: [V::splat(0.0); NV],
    };
    for block in &strip.blocks {
        let keys = In {
            ptr: memory.keys.as_ptr().add(block.local * dim),
            stride: dim,
        };
        let values = In {
            ptr: memory.values.as_ptr().add(block.local * dim),
            stride: dim,
        };
        let key_rows = block.len.next_multiple_of(V::STEP);
        let head_dim = task.shape.head_dim();
        V::product::<NV, false>(key_rows, head_dim, keys, queries.as_in(), scores, false);
        if !block.spans.is_empty() {
            apply_masks::<V, NV>(strip, block, task.group.count, scores.ptr);
        }
        softmax.add_block(block.len, scores.ptr, dim, sums.ptr);
        V::product::<NV, true>(dim, block.len, values, scores.as_in(), sums, true);
    }
    for d in 0..dim {
        for (v, total) in softmax.total.iter().enumerate() {
            let at = sums.ptr.add((d * NV + v) * V::LANES);
            V::load(at).div(*total).store(at);
        }
    }
    transpose::<V>(dim, width, sums.as_in(), rows);
    store_strip::<V, NV>(task, strip, to, memory.rows, &softmax);
}

/// The running softmax of a strip, one entry a lane; scores are in units of `ln 2`.
struct Softmax<V: Vector, const NV: usize> {
    /// Largest score so far, rounded to an integer.
    max: [V; NV],
    /// Sum of `2^(score - max)` so far.
    total: [V; NV],
}

impl<V: Vector, const NV: usize> Softmax<V, NV> {
    /// Turns the block's scores `[keys, lanes]` into `2^(score - max)`; where the largest score
    /// rises, scales down `total` and the outputs so far, `sums` `[dim, lanes]`.
    ///
    /// # Safety
    /// See [`Vector`].
    #[inline(always)]
    unsafe fn add_block(&mut self, keys: usize, scores: *mut f32, dim: usize, sums: *mut f32) {
        let mut max = self.max;
        for key in 0..keys {
            for (v, m) in max.iter_mut().enumerate() {
                *m = m.max(V::load(scores.add((key * NV + v) * V::LANES)));
            }
        }
        for (v, max) in max.iter_mut().enumerate() {
            *max = max.round();
            if max.sub(self.max[v]).max_lane() > 0.0 {
                let shrink = exp2_below(self.max[v], *max);
                self.total[v] = self.total[v].mul(shrink);
                for d in 0..dim {
                    let at = sums.add((d * NV + v) * V::LANES);
                    V::load(at).mul(shrink).store(at);
                }
            }
        }
        self.max = max;
        for key in 0..keys {
            for (v, &max) in max.iter().enumerate() {
                let at = scores.add((key * NV + v) * V::LANES);
                let p = exp2_below(V::load(at), max);
                p.store(at);
                self.total[v] = self.total[v].add(p);
            }
        }
    }
}

/// Copies outputs `[lanes, padded_dim]` and log-sum-exps of a strip to their rows.
#[inline(always)]
unsafe fn store_strip<V: Vector, const NV: usize>(
    task: &Task<'_>,
    strip: &Strip,
    to: Output<'_>,
    rows: &[f32],
    softmax: &Softmax<V, NV>,
) {
    let (mut max, mut total) = ([0.0; MAX_LANES], [0.0; MAX_LANES]);
    for v in 0..NV {
        softmax.max[v].store(max.as_mut_ptr().add(v * V::LANES));
        softmax.total[v].store(total.as_mut_ptr().add(v * V::LANES));
    }
    let (dim, padded) = (task.shape.head_dim(), task.padded_dim());
    for (lane, row, head) in task.lanes(strip) {
        let at = row * task.shape.out_width() + head * dim;
        to.out
            .range(at..at + dim)
            .copy_from_slice(&rows[lane * padded..][..dim]);
        let at = row * task.shape.heads() + head;
        to.lse.range(at..at + 1)[0] = max[lane] * LN_2 + total[lane].ln();
    }
}
