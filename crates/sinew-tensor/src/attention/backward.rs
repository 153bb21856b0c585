//! The backward kernel: recomputes the probabilities of a strip block by block and sums five
//! products.
//!
//! The formulas for scores `s`, probabilities `p`, output gradients `do` and `delta = sum(out · do)` of a row
//! (FlashAttention-2, Dao 2023, algorithm 2) are: `dv += pᵀ do`, `dp = do vᵀ`, `ds = p (dp - delta)`,
//! `dq += ds k`, `dk += dsᵀ q`.
//!
//! Gradients of queries are complete when a strip is done. Gradients of keys and values collect contributions
//! of many strips: each task sums those of its chunk into its own memory, and [`reduce_rows`] then adds up
//! the chunks in their order.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use super::kernel::{SLACK_ROWS, Task, apply_masks, carve, copy_padded, padded_dim};
use super::plan::{BLOCK_KEYS, Chunk, KeyBlock, MAX_LANES, Strip};
use super::tile::{In, Out, Product, exp2, transpose};
use super::{AttentionShape, BackwardInput};
use crate::buffer::{Scratch, SharedMut};
use crate::simd::{Vector, simd_fn};

/// The targets of a task.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    /// `[rows, qkv_width]`; the task writes the queries of its rows and heads.
    pub(super) d_qkv: SharedMut<'a>,
    /// Sums for the chunk's keys and then values, `[2, locals + SLACK_ROWS, padded_dim]`.
    pub(super) d_keys: SharedMut<'a>,
}

/// Values of [`Output::d_keys`] for a chunk.
pub(super) fn partial_len(shape: &AttentionShape, chunk: &Chunk) -> usize {
    2 * (chunk.locals + SLACK_ROWS) * padded_dim(shape)
}

/// Memory of a task; `[lanes, padded_dim]` is called rows, its transpose columns.
struct Memory<'a> {
    keys: &'a mut [f32],
    values: &'a mut [f32],
    query_rows: &'a mut [f32],
    query_columns: &'a mut [f32],
    d_out_rows: &'a mut [f32],
    d_out_columns: &'a mut [f32],
    d_query_columns: &'a mut [f32],
    /// Scores and then probabilities, `[keys, lanes]`.
    scores: &'a mut [f32],
    /// Gradients of probabilities and then of scores, `[keys, lanes]`.
    d_scores: &'a mut [f32],
    /// Minus the log-sum-exp of each lane in units of `ln 2`.
    shift: [f32; MAX_LANES],
    /// `sum(out * d_out)` of each lane.
    delta: [f32; MAX_LANES],
}

impl<'a> Memory<'a> {
    fn new(task: &Task<'_>, scratch: &'a mut Scratch) -> Self {
        let dim = task.padded_dim();
        let local = (task.chunk.locals + SLACK_ROWS) * dim;
        let lanes = MAX_LANES * dim;
        let block = (BLOCK_KEYS + SLACK_ROWS) * MAX_LANES;
        let mut rest = scratch.take(2 * local + 5 * lanes + 2 * block);
        Self {
            keys: carve(&mut rest, local),
            values: carve(&mut rest, local),
            query_rows: carve(&mut rest, lanes),
            query_columns: carve(&mut rest, lanes),
            d_out_rows: carve(&mut rest, lanes),
            d_out_columns: carve(&mut rest, lanes),
            d_query_columns: carve(&mut rest, lanes),
            scores: carve(&mut rest, block),
            d_scores: carve(&mut rest, block),
            shift: [0.0; MAX_LANES],
            delta: [0.0; MAX_LANES],
        }
    }
}

/// All strips of a task, each by the number of vectors that it fills.
#[inline(always)]
unsafe fn backward_task<V: Product>(
    task: &Task<'_>,
    input: &BackwardInput<'_>,
    to: Output<'_>,
    scratch: &mut Scratch,
) {
    let mut memory = Memory::new(task, scratch);
    task.gather_keys(memory.keys, memory.values);
    let d_keys = to.d_keys.range(0..to.d_keys.len());
    d_keys.fill(0.0);
    for strip in &task.chunk.strips {
        match (strip.rows.len() * task.group.count).div_ceil(V::LANES) {
            1 => backward_strip::<V, 1>(task, strip, input, to, &mut memory),
            2 => backward_strip::<V, 2>(task, strip, input, to, &mut memory),
            _ => backward_strip::<V, 3>(task, strip, input, to, &mut memory),
        }
    }
    // Queries were scaled by log2(e) / sqrt(head_dim), of which the gradient of keys keeps the root.
    for value in &mut d_keys[..(task.chunk.locals + SLACK_ROWS) * task.padded_dim()] {
        *value *= LN_2;
    }
}

simd_fn! {
    /// Gradients of all strips of the task.
    ///
    /// # Safety
    /// No other task may write the same rows and heads of `d_qkv`, and `d_keys` has to belong to the task.
    pub(super) fn backward_chunk<V: Product>(
        task: &Task<'_>,
        input: &BackwardInput<'_>,
        to: Output<'_>,
        scratch: &mut Scratch,
    ) {
        backward_task::<V>(task, input, to, scratch);
    }
}

/// Brings in queries, output gradients and the two numbers of each lane.
#[inline(always)]
unsafe fn load_strip<V: Vector>(
    task: &Task<'_>,
    strip: &Strip,
    input: &BackwardInput<'_>,
    width: usize,
    memory: &mut Memory<'_>,
) {
    let (dim, padded) = (task.shape.head_dim(), task.padded_dim());
    task.gather_queries(
        strip,
        LOG2_E / (dim as f32).sqrt(),
        width,
        memory.query_rows,
    );
    // Lanes without a row: no score survives the shift, so that they add nothing.
    memory.shift = [f32::NEG_INFINITY; MAX_LANES];
    memory.delta = [0.0; MAX_LANES];
    memory.d_out_rows[strip.rows.len() * task.group.count * padded..width * padded].fill(0.0);
    for (lane, row, head) in task.lanes(strip) {
        let at = row * task.shape.out_width() + head * dim;
        let (out, d_out) = (&input.out[at..at + dim], &input.d_out[at..at + dim]);
        copy_padded(
            &mut memory.d_out_rows[lane * padded..(lane + 1) * padded],
            d_out,
        );
        memory.delta[lane] = dot::<V>(out, d_out);
        memory.shift[lane] = -input.lse[row * task.shape.heads() + head] * LOG2_E;
    }
    let queries = In::rows(memory.query_rows, padded);
    let columns = Out::rows(memory.query_columns, width);
    transpose::<V>(width, padded, queries, columns);
    let d_outs = In::rows(memory.d_out_rows, padded);
    let columns = Out::rows(memory.d_out_columns, width);
    transpose::<V>(width, padded, d_outs, columns);
}

/// The dot product of two slices of equal length.
#[inline(always)]
unsafe fn dot<V: Vector>(a: &[f32], b: &[f32]) -> f32 {
    let whole = a.len() / V::LANES * V::LANES;
    let mut sum = V::splat(0.0);
    for i in (0..whole).step_by(V::LANES) {
        sum = V::load(a.as_ptr().add(i)).fma(V::load(b.as_ptr().add(i)), sum);
    }
    let tail: f32 = a[whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
    sum.sum() + tail
}

/// One strip of `NV` vectors of lanes: gradients of its queries, and its part of those of keys and
/// values.
#[inline(always)]
unsafe fn backward_strip<V: Product, const NV: usize>(
    task: &Task<'_>,
    strip: &Strip,
    input: &BackwardInput<'_>,
    to: Output<'_>,
    memory: &mut Memory<'_>,
) {
    let (dim, padded, width) = (task.shape.head_dim(), task.padded_dim(), NV * V::LANES);
    load_strip::<V>(task, strip, input, width, memory);
    memory.d_query_columns[..padded * width].fill(0.0);
    for block in &strip.blocks {
        backward_block::<V, NV>(task, strip, block, to, memory);
    }
    let columns = In::rows(memory.d_query_columns, width);
    let rows = Out::rows(memory.query_rows, padded);
    transpose::<V>(padded, width, columns, rows);
    let scale = 1.0 / (dim as f32).sqrt();
    for (lane, row, head) in task.lanes(strip) {
        let at = task.shape.query_at(row, head);
        let from = &memory.query_rows[lane * padded..][..dim];
        for (o, d) in to.d_qkv.range(at..at + dim).iter_mut().zip(from) {
            *o = d * scale;
        }
    }
}

/// The part of one block of keys in the gradients of the strip's queries and of its own keys and
/// values.
#[inline(always)]
unsafe fn backward_block<V: Product, const NV: usize>(
    task: &Task<'_>,
    strip: &Strip,
    block: &KeyBlock,
    to: Output<'_>,
    memory: &mut Memory<'_>,
) {
    let (dim, padded, width) = (task.shape.head_dim(), task.padded_dim(), NV * V::LANES);
    let first = block.local * padded;
    let key_rows = block.len.next_multiple_of(V::STEP);
    let keys = In::rows(&memory.keys[first..], padded);
    let values = In::rows(&memory.values[first..], padded);
    let queries = In::rows(memory.query_columns, width);
    let d_outs = In::rows(memory.d_out_columns, width);
    let scores = Out::rows(memory.scores, width);
    let d_scores = Out::rows(memory.d_scores, width);
    V::product::<NV, false>(key_rows, dim, keys, queries, scores, false);
    V::product::<NV, false>(key_rows, dim, values, d_outs, d_scores, false);
    if !block.spans.is_empty() {
        apply_masks::<V, NV>(strip, block, task.group.count, scores.ptr);
    }
    grade_block::<V, NV>(block, key_rows, memory, scores.ptr, d_scores.ptr);
    let (scores, d_scores) = (scores.as_in(), d_scores.as_in());
    let d_queries = Out::rows(memory.d_query_columns, width);
    V::product::<NV, true>(padded, block.len, keys, d_scores, d_queries, true);
    let lanes = strip.rows.len() * task.group.count;
    let query_rows = In::rows(memory.query_rows, padded);
    let d_out_rows = In::rows(memory.d_out_rows, padded);
    let values_at = (task.chunk.locals + SLACK_ROWS) * padded;
    let sums = |at: usize| Out {
        ptr: to.d_keys.as_ptr().add(at),
        stride: padded,
    };
    V::accumulate(key_rows, padded, lanes, d_scores, query_rows, sums(first));
    let d_values = sums(values_at + first);
    V::accumulate(key_rows, padded, lanes, scores, d_out_rows, d_values);
}

/// Turns scores into probabilities and gradients of probabilities into gradients of scores; zeroes
/// the rows behind the block's keys, up to `key_rows`.
#[inline(always)]
unsafe fn grade_block<V: Vector, const NV: usize>(
    block: &KeyBlock,
    key_rows: usize,
    memory: &Memory<'_>,
    scores: *mut f32,
    d_scores: *mut f32,
) {
    let mut shift = [V::splat(0.0); NV];
    let mut delta = [V::splat(0.0); NV];
    for v in 0..NV {
        shift[v] = V::load(memory.shift.as_ptr().add(v * V::LANES));
        delta[v] = V::load(memory.delta.as_ptr().add(v * V::LANES));
    }
    for key in 0..block.len {
        for v in 0..NV {
            let at = (key * NV + v) * V::LANES;
            let p = exp2(V::load(scores.add(at)).add(shift[v]));
            p.store(scores.add(at));
            let d = p.mul(V::load(d_scores.add(at)).sub(delta[v]));
            d.store(d_scores.add(at));
        }
    }
    for i in block.len * NV..key_rows * NV {
        V::splat(0.0).store(scores.add(i * V::LANES));
        V::splat(0.0).store(d_scores.add(i * V::LANES));
    }
}

/// One term of [`reduce_rows`]: a chunk with its sums for one key head. Terms come in the order of
/// chunks.
pub(super) struct Partial<'a> {
    pub(super) chunk: &'a Chunk,
    pub(super) d_keys: &'a [f32],
    pub(super) kv_head: usize,
}

/// Writes the gradients of keys and values of `rows` into `d_qkv`.
///
/// # Safety
/// No other task may write these rows' keys and values.
pub(super) unsafe fn reduce_rows(
    shape: &AttentionShape,
    partials: &[Partial<'_>],
    rows: Range<usize>,
    d_qkv: SharedMut<'_>,
) {
    let (dim, padded) = (shape.head_dim(), padded_dim(shape));
    let width = shape.kv_heads() * dim;
    for row in rows.clone() {
        let at = shape.key_at(row, 0);
        d_qkv.range(at..at + 2 * width).fill(0.0);
    }
    for partial in partials {
        let values_at = (partial.chunk.locals + SLACK_ROWS) * padded;
        for run in &partial.chunk.runs {
            let start = rows.start.max(run.row);
            let end = rows.end.min(run.row + run.len);
            for row in start..end {
                let from = (run.local + row - run.row) * padded;
                let key = shape.key_at(row, partial.kv_head);
                add(d_qkv.range(key..key + dim), &partial.d_keys[from..]);
                let value = shape.value_at(row, partial.kv_head);
                add(
                    d_qkv.range(value..value + dim),
                    &partial.d_keys[values_at + from..],
                );
            }
        }
    }
}

/// `to += from`.
fn add(to: &mut [f32], from: &[f32]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += f;
    }
}
