//! Root mean square normalization (Zhang & Sennrich 2019, arXiv 1910.07467).
//!
//! Whole rows for the norms of layers, groups of columns for the per-head norms of queries and
//! keys.

use std::cell::RefCell;

use super::row_grain;
use crate::buffer::{Scratch, SharedMut};
use crate::cpu::Cpu;
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

/// Maximum row blocks of the weight gradient: more than any sensible thread count, few enough that summing
/// them is cheap. The split depends only on the shape, and so does the order of the sum.
const MAX_BLOCKS: usize = 32;

thread_local! {
    /// Partial sums of weight gradients, of the thread that calls.
    static PARTIAL: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Number of groups of `dim` columns in rows of `cols`.
fn groups(cols: usize, dim: usize) -> usize {
    assert!(
        dim > 0 && cols.is_multiple_of(dim),
        "{cols} columns are no multiple of the {dim} weights"
    );
    cols / dim
}

/// `y = x * rstd * w` with `rstd = 1 / sqrt(mean(x²) + eps)`, over groups of `w.len()` columns.
///
/// `x`, `y`: `[m, groups * dim]` with unit column stride; `w`: `[dim]`; `rstd`: `[m * groups]`, kept
/// for the backward pass. One group normalizes whole rows; `heads` groups give the per-head
/// normalization of queries and keys in Qwen3.
///
/// # Panics
/// If the shapes do not fit each other.
pub fn rms_norm(dev: &Cpu, x: Mat<'_>, w: &[f32], eps: f32, y: MatMut<'_>, rstd: &mut [f32]) {
    let groups = groups(x.cols(), w.len());
    assert_eq!((x.rows(), x.cols()), (y.rows(), y.cols()), "x and y");
    assert_eq!(x.col_stride(), 1, "column stride of x");
    assert_eq!(
        rstd.len(),
        x.rows() * groups,
        "rstd for {} rows of {groups} groups",
        x.rows()
    );
    let rstd = SharedMut::new(rstd);
    dev.pool()
        .parallel_ranges(x.rows(), row_grain(x.cols()), &|rows| {
            for i in rows {
                // SAFETY: row `i` is in bounds, and only this task writes its parts of `y` and `rstd`.
                unsafe {
                    let rstd = rstd.range(i * groups..(i + 1) * groups);
                    let (x, y) = (
                        x.as_ptr().add(i * x.row_stride()),
                        y.as_ptr().add(i * y.row_stride()),
                    );
                    forward_row(dev, x, w, eps, y, rstd);
                }
            }
        });
}

/// [`rms_norm`] of `x` onto itself, for inference: nothing is kept for a backward pass.
pub fn rms_norm_in_place(dev: &Cpu, x: MatMut<'_>, w: &[f32], eps: f32) {
    let groups = groups(x.cols(), w.len());
    dev.pool()
        .parallel_ranges(x.rows(), row_grain(x.cols()), &|rows| {
            for i in rows {
                for g in 0..groups {
                    // SAFETY: row `i` and group `g` are in bounds and belong to this task; the kernel
                    // reads each value before it writes it.
                    unsafe {
                        let x = x.as_ptr().add(i * x.row_stride() + g * w.len());
                        forward_row(dev, x, w, eps, x, &mut [0.0]);
                    }
                }
            }
        });
}

simd_fn! {
/// Normalizes `rstd.len()` groups that lie behind each other. `x` may equal `y`.
fn forward_row<V>(x: *const f32, w: &[f32], eps: f32, y: *mut f32, rstd: &mut [f32]) {
    let dim = w.len();
    for (g, rstd) in rstd.iter_mut().enumerate() {
        let (x, y) = (x.add(g * dim), y.add(g * dim));
        let mut sums = [V::splat(0.0); 4];
        let mut j = 0;
        while j < dim {
            for (u, sum) in sums.iter_mut().enumerate() {
                let at = j + u * V::LANES;
                if at < dim {
                    let v = V::load_upto(x.add(at), dim - at);
                    *sum = v.fma(v, *sum);
                }
            }
            j += 4 * V::LANES;
        }
        let sum = sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum();
        *rstd = 1.0 / (sum / dim as f32 + eps).sqrt();
        let scale = V::splat(*rstd);
        let mut j = 0;
        while j < dim {
            let left = dim - j;
            let v = V::load_upto(x.add(j), left).mul(scale).mul(V::load_upto(w.as_ptr().add(j), left));
            v.store_upto(y.add(j), left);
            j += V::LANES;
        }
    }
}
}

/// Gradient of [`rms_norm`]: `dx (+)= ...`, `dw += ...`, with `x`, `w` and `rstd` of the forward pass.
///
/// Shapes as there; `dx` like `x`, overwritten or, with `accumulate`, added to.
pub fn rms_norm_backward(
    dev: &Cpu,
    x: Mat<'_>,
    w: &[f32],
    rstd: &[f32],
    dy: Mat<'_>,
    dx: MatMut<'_>,
    dw: &mut [f32],
    accumulate: bool,
) {
    let dim = w.len();
    let groups = groups(x.cols(), dim);
    assert_eq!((x.rows(), x.cols()), (dy.rows(), dy.cols()), "x and dy");
    assert_eq!((x.rows(), x.cols()), (dx.rows(), dx.cols()), "x and dx");
    assert_eq!(
        (x.col_stride(), dy.col_stride()),
        (1, 1),
        "column strides of x and dy"
    );
    assert_eq!(
        rstd.len(),
        x.rows() * groups,
        "rstd for {} rows of {groups} groups",
        x.rows()
    );
    assert_eq!(dw.len(), dim, "dw");
    let rows_each = x
        .rows()
        .div_ceil(MAX_BLOCKS)
        .max(row_grain(x.cols()).min(16));
    let blocks = x.rows().div_ceil(rows_each);
    PARTIAL.with_borrow_mut(|scratch| {
        let partial = scratch.take(blocks * dim);
        partial.fill(0.0);
        let shared = SharedMut::new(partial);
        dev.pool().parallel_for(blocks, &|block| {
            for i in block * rows_each..((block + 1) * rows_each).min(x.rows()) {
                // SAFETY: row `i` is in bounds, and only this task touches its part of `dx` and the
                // partial sums of its block.
                unsafe {
                    let dw = shared.range(block * dim..(block + 1) * dim);
                    backward_row(
                        dev,
                        x.as_ptr().add(i * x.row_stride()),
                        w,
                        &rstd[i * groups..(i + 1) * groups],
                        dy.as_ptr().add(i * dy.row_stride()),
                        dx.as_ptr().add(i * dx.row_stride()),
                        dw,
                        accumulate,
                    );
                }
            }
        });
        for part in scratch.take(blocks * dim).chunks_exact(dim) {
            dw.iter_mut().zip(part).for_each(|(dw, part)| *dw += part);
        }
    });
}

simd_fn! {
/// One row: with `g = dy w` and `n = x rstd`, `dx = rstd (g - n mean(g n))` and `dw += dy n`.
fn backward_row<V>(
    x: *const f32, w: &[f32], rstd: &[f32], dy: *const f32, dx: *mut f32, dw: &mut [f32], accumulate: bool,
) {
    let dim = w.len();
    let (w, dw) = (w.as_ptr(), dw.as_mut_ptr());
    for (g, &rstd) in rstd.iter().enumerate() {
        let (x, dy, dx) = (x.add(g * dim), dy.add(g * dim), dx.add(g * dim));
        let scale = V::splat(rstd);
        let mut dot = V::splat(0.0);
        let mut j = 0;
        while j < dim {
            let left = dim - j;
            let n = V::load_upto(x.add(j), left).mul(scale);
            let t = V::load_upto(dy.add(j), left).mul(n);
            dot = t.fma(V::load_upto(w.add(j), left), dot);
            V::load_upto(dw.add(j), left).add(t).store_upto(dw.add(j), left);
            j += V::LANES;
        }
        let mean = V::splat(-dot.sum() / dim as f32);
        let mut j = 0;
        while j < dim {
            let left = dim - j;
            let n = V::load_upto(x.add(j), left).mul(scale);
            let g = V::load_upto(dy.add(j), left).mul(V::load_upto(w.add(j), left));
            let mut d = n.fma(mean, g).mul(scale);
            if accumulate {
                d = d.add(V::load_upto(dx.add(j), left));
            }
            d.store_upto(dx.add(j), left);
            j += V::LANES;
        }
    }
}
}
