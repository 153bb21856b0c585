//! Rows as lanes: the layout in which logits are computed.
//!
//! Rows are cut into strips of up to three vectors. A strip's hidden states are held transposed,
//! `[dim, lanes]`, so that a logit of each row is one lane of a sum over broadcast weights.

use crate::attention::Workspaces;
use crate::attention::tile::{In, Out, lanes, transpose};
use crate::buffer::SharedMut;
use crate::device::Device;
use crate::simd::simd_fn;

/// Vectors of a strip: with 8 weights at a time they fill the registers.
pub(super) const STRIP_VECTORS: usize = 3;
/// Most lanes of a strip.
pub(super) const MAX_LANES: usize = 16 * STRIP_VECTORS;
/// Bytes of weights that stay in the second cache level beside a strip.
const PANEL_BYTES: usize = 300 << 10;
/// Rows of weights come in multiples of this, the most that kernels broadcast at once.
pub(super) const ROW_STEP: usize = 8;

/// How rows and weights are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Number of rows.
    pub(super) rows: usize,
    /// Values of a hidden state, and the same rounded up to whole vectors.
    pub(super) dim: usize,
    pub(super) padded: usize,
    /// Vectors and lanes of a strip.
    pub(super) vectors: usize,
    pub(super) width: usize,
    pub(super) strips: usize,
}

impl Cut {
    pub(super) fn new(dev: &Device, rows: usize, dim: usize) -> Self {
        let lanes = lanes(dev);
        let vectors = rows.div_ceil(lanes).clamp(1, STRIP_VECTORS);
        let width = vectors * lanes;
        Self {
            rows,
            dim,
            padded: dim.next_multiple_of(16),
            vectors,
            width,
            strips: rows.div_ceil(width),
        }
    }

    /// Values of a strip's transposed hidden states.
    pub(super) fn strip_len(&self) -> usize {
        self.padded * self.width
    }

    /// Rows of strip `strip`.
    pub(super) fn strip_rows(&self, strip: usize) -> std::ops::Range<usize> {
        strip * self.width..((strip + 1) * self.width).min(self.rows)
    }

    /// Rows of weights in a panel, a multiple of [`ROW_STEP`].
    pub(super) fn panel_rows(&self) -> usize {
        (PANEL_BYTES / (4 * self.padded)).clamp(16, 512) / ROW_STEP * ROW_STEP
    }
}

/// Where [`load_rows`] writes.
pub(super) struct Loaded<'a> {
    /// Hidden states times a scale, transposed: `[strips, padded, width]`.
    pub(super) columns: &'a mut [f32],
    /// Hidden states in panels of two vectors, see [`Right::Panels`](crate::attention::tile::Right),
    /// `strips * width` rows; rows beyond the active ones are zero.
    pub(super) panels: Option<&'a mut [f32]>,
}

/// Brings the hidden states of `active` rows into the forms that kernels read.
pub(super) fn load_rows(
    dev: &Device,
    cut: &Cut,
    active: &[u32],
    (x, scale): (&[f32], f32),
    to: Loaded<'_>,
    workspaces: &Workspaces,
) {
    let columns = SharedMut::new(to.columns);
    let panels = to.panels.map(SharedMut::new);
    let panel_width = 2 * lanes(dev);
    dev.pool().parallel_for(cut.strips, &|strip| {
        workspaces.with(|memory| {
            let len = cut.strip_len();
            let rows = memory.take(len);
            rows.fill(0.0);
            for (to, &row) in rows
                .chunks_exact_mut(cut.padded)
                .zip(&active[cut.strip_rows(strip)])
            {
                to[..cut.dim].copy_from_slice(&x[row as usize * cut.dim..][..cut.dim]);
            }
            // SAFETY: strips are disjoint.
            let columns = unsafe { columns.range(strip * len..(strip + 1) * len) };
            // SAFETY: both hold `width * padded` values, multiples of a vector.
            unsafe { transposed(dev, cut.width, cut.padded, rows, columns) };
            columns.iter_mut().for_each(|x| *x *= scale);
            let Some(panels) = panels else { return };
            for (i, row) in rows.chunks_exact(cut.padded).enumerate() {
                for (part, from) in row.chunks(panel_width).enumerate() {
                    let panel = part * panel_width * cut.strips * cut.width;
                    let at = panel + (strip * cut.width + i) * from.len();
                    // SAFETY: each row and panel has its own part.
                    unsafe { panels.range(at..at + from.len()) }.copy_from_slice(from);
                }
            }
        });
    });
}

simd_fn! {
    /// Transposes `[rows, cols]`, both whole vectors.
    ///
    /// # Safety
    /// `from` and `to` hold `rows * cols` values.
    pub(super) fn transposed<V>(rows: usize, cols: usize, from: &[f32], to: &mut [f32]) {
        let from = In { ptr: from.as_ptr(), stride: cols };
        transpose::<V>(rows, cols, from, Out { ptr: to.as_mut_ptr(), stride: rows });
    }
}

/// Rows `first..first + count` of the weights in a form that kernels may read in whole steps and
/// vectors: the weights themselves, or a copy filled up with zeros in `copy`.
pub(super) fn padded_weights<'a>(
    cut: &Cut,
    w: &'a [f32],
    first: usize,
    count: usize,
    copy: &'a mut [f32],
) -> In {
    let rows = &w[first * cut.dim..(first + count) * cut.dim];
    if cut.dim == cut.padded && count.is_multiple_of(ROW_STEP) {
        return In {
            ptr: rows.as_ptr(),
            stride: cut.dim,
        };
    }
    let copy = &mut copy[..count.next_multiple_of(ROW_STEP) * cut.padded];
    copy.fill(0.0);
    for (to, from) in copy
        .chunks_exact_mut(cut.padded)
        .zip(rows.chunks_exact(cut.dim))
    {
        to[..cut.dim].copy_from_slice(from);
    }
    In {
        ptr: copy.as_ptr(),
        stride: cut.padded,
    }
}
