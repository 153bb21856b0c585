//! Common parts of the forward and backward kernels: the task, and the loading and storing of rows.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use super::AttentionShape;
use super::plan::{Chunk, KeyBlock, MAX_LANES, Strip};
use crate::simd::Vector;

/// Rows behind the last local row that kernels may read or rewrite unchanged: they work on keys in
/// multiples of up to 8.
pub(super) const SLACK_ROWS: usize = 8;

/// Query heads that one task handles: they share a key head.
#[derive(Clone, Copy, Debug)]
pub(super) struct HeadGroup {
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) kv_head: usize,
}

/// A chunk of the plan for one group of heads.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    pub(super) shape: &'a AttentionShape,
    pub(super) chunk: &'a Chunk,
    pub(super) group: HeadGroup,
    pub(super) qkv: &'a [f32],
}

impl Task<'_> {
    /// `head_dim` rounded up to whole vectors of any set.
    pub(super) fn padded_dim(&self) -> usize {
        padded_dim(self.shape)
    }

    /// Query heads of the strip's rows, in the order of lanes: `(lane, row, head)`.
    pub(super) fn lanes<'s>(
        &self,
        strip: &'s Strip,
    ) -> impl Iterator<Item = (usize, usize, usize)> + use<'s> {
        let HeadGroup { first, count, .. } = self.group;
        let rows = strip.rows.iter().enumerate();
        rows.flat_map(move |(i, &row)| {
            (0..count).map(move |h| (i * count + h, row as usize, first + h))
        })
    }

    /// Copies keys and values of the chunk's rows next to each other, `[locals + SLACK_ROWS, padded_dim]`
    /// each.
    pub(super) fn gather_keys(&self, keys: &mut [f32], values: &mut [f32]) {
        let (dim, padded) = (self.shape.head_dim(), self.padded_dim());
        for run in &self.chunk.runs {
            for i in 0..run.len {
                let to = (run.local + i) * padded;
                let key = self.shape.key_at(run.row + i, self.group.kv_head);
                let value = self.shape.value_at(run.row + i, self.group.kv_head);
                copy_padded(&mut keys[to..to + padded], &self.qkv[key..key + dim]);
                copy_padded(&mut values[to..to + padded], &self.qkv[value..value + dim]);
            }
        }
        keys[self.chunk.locals * padded..].fill(0.0);
        values[self.chunk.locals * padded..].fill(0.0);
    }

    /// Copies the strip's queries, times `scale`, to `[width, padded_dim]`.
    pub(super) fn gather_queries(&self, strip: &Strip, scale: f32, width: usize, out: &mut [f32]) {
        let (dim, padded) = (self.shape.head_dim(), self.padded_dim());
        for (lane, row, head) in self.lanes(strip) {
            let query = &self.qkv[self.shape.query_at(row, head)..][..dim];
            let to = &mut out[lane * padded..(lane + 1) * padded];
            for (o, q) in to.iter_mut().zip(query) {
                *o = q * scale;
            }
            to[dim..].fill(0.0);
        }
        out[strip.rows.len() * self.group.count * padded..width * padded].fill(0.0);
    }
}

/// `head_dim` rounded up to whole vectors of any set.
pub(super) fn padded_dim(shape: &AttentionShape) -> usize {
    shape.head_dim().next_multiple_of(16)
}

/// Copies `from` to the start of `to` and fills the rest with zeros.
pub(crate) fn copy_padded(to: &mut [f32], from: &[f32]) {
    to[..from.len()].copy_from_slice(from);
    to[from.len()..].fill(0.0);
}

/// Takes `len` values, a multiple of 16, off the front of `rest`.
pub(crate) fn carve<'a>(rest: &mut &'a mut [f32], len: usize) -> &'a mut [f32] {
    let (part, tail) = std::mem::take(rest).split_at_mut(len);
    *rest = tail;
    part
}

/// Writes the bias of each lane's scores: 0 for rows in `seen_by`, minus infinity for others.
pub(super) fn lane_bias(seen_by: u64, strip: &Strip, heads: usize, bias: &mut [f32; MAX_LANES]) {
    for row in 0..strip.rows.len() {
        let value = if seen_by >> row & 1 == 1 {
            0.0
        } else {
            f32::NEG_INFINITY
        };
        bias[row * heads..(row + 1) * heads].fill(value);
    }
}

/// Adds minus infinity to the scores `[keys, NV * LANES]` of a block that rows must not see.
///
/// # Safety
/// See [`Vector`]; `scores` covers the block's keys.
#[inline(always)]
pub(super) unsafe fn apply_masks<V: Vector, const NV: usize>(
    strip: &Strip,
    block: &KeyBlock,
    heads: usize,
    scores: *mut f32,
) {
    let mut bias = [0.0; MAX_LANES];
    let mut row = scores;
    for span in &strip.spans[block.spans.clone()] {
        lane_bias(span.seen_by, strip, heads, &mut bias);
        for _ in 0..span.len {
            for v in 0..NV {
                let at = row.add(v * V::LANES);
                V::load(at)
                    .add(V::load(bias.as_ptr().add(v * V::LANES)))
                    .store(at);
            }
            row = row.add(NV * V::LANES);
        }
    }
}
