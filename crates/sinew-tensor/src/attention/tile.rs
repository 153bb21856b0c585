//! Products of small blocks held in cache, the inner loops of attention and log-probability kernels.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use crate::device::{Device, KernelSet};
use crate::simd::Vector;

/// Lanes of the vectors that the device's kernels use.
pub(crate) fn lanes(dev: &Device) -> usize {
    match dev.kernels() {
        KernelSet::Portable | KernelSet::Avx2 => 8,
        KernelSet::Avx512 => 16,
    }
}

/// Coefficients of `2^f` for `f` in -0.5..=0.5 from degree 6 down, least relative error (1.6e-8).
const EXP2: [f32; 7] = [
    0.000_153_458_12,
    0.001_339_993_1,
    0.009_618_489,
    0.055_503_286,
    0.240_226_46,
    0.693_147_2,
    1.0,
];

/// `2^x` for `x <= 127`, relative error below 1.2e-7 where the result is a normal number; 0 far below,
/// also for minus infinity; NaN stays.
///
/// # Safety
/// See [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp2<V: Vector>(x: V) -> V {
    let x = x.max(V::splat(-200.0));
    let n = x.round();
    let f = x.sub(n);
    let mut p = V::splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = p.fma(f, V::splat(*c));
    }
    p.scale2(n)
}

/// A block of memory read or written by [`product`]: pointer and values from one row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Block<P> {
    pub(crate) ptr: P,
    pub(crate) stride: usize,
}

/// A block to read.
pub(crate) type In = Block<*const f32>;
/// A block to write.
pub(crate) type Out = Block<*mut f32>;

impl Out {
    /// The same block, to read.
    pub(crate) fn as_in(self) -> In {
        In {
            ptr: self.ptr.cast_const(),
            stride: self.stride,
        }
    }
}

/// `c[i][j] = (add ? c[i][j] : 0) + sum_k a(i, k) b[k][j]` for `i < MR`, `j < NV * LANES`.
///
/// `a(i, k)` is `a[i][k]`, or `a[k][i]` with `BY_COLUMN`. The sum goes in order of `k`, so a value
/// does not depend on its neighbours.
///
/// # Safety
/// See [`Vector`]; `a`, `b` and `c` cover the ranges above.
#[inline(always)]
unsafe fn tile<V: Vector, const MR: usize, const NV: usize, const BY_COLUMN: bool>(
    depth: usize,
    a: In,
    b: In,
    c: Out,
    add: bool,
) {
    // Counted loops: compilers keep `sum` in registers only if all its indices become constants.
    let mut sum = [[V::splat(0.0); NV]; MR];
    if add {
        let mut i = 0;
        while i < MR {
            let mut v = 0;
            while v < NV {
                sum[i][v] = V::load(c.ptr.add(i * c.stride + v * V::LANES));
                v += 1;
            }
            i += 1;
        }
    }
    let mut k = 0;
    while k < depth {
        let mut right = [V::splat(0.0); NV];
        let mut v = 0;
        while v < NV {
            right[v] = V::load(b.ptr.add(k * b.stride + v * V::LANES));
            v += 1;
        }
        let mut i = 0;
        while i < MR {
            let at = if BY_COLUMN {
                k * a.stride + i
            } else {
                i * a.stride + k
            };
            let left = V::splat(*a.ptr.add(at));
            let mut v = 0;
            while v < NV {
                sum[i][v] = left.fma(right[v], sum[i][v]);
                v += 1;
            }
            i += 1;
        }
        k += 1;
    }
    let mut i = 0;
    while i < MR {
        let mut v = 0;
        while v < NV {
            sum[i][v].store(c.ptr.add(i * c.stride + v * V::LANES));
            v += 1;
        }
        i += 1;
    }
}

/// [`tile`] for `rows` rows, a multiple of `MR`.
///
/// # Safety
/// As [`tile`], for `rows` rows.
#[inline(always)]
pub(crate) unsafe fn product<V: Vector, const MR: usize, const NV: usize, const BY_COLUMN: bool>(
    rows: usize,
    depth: usize,
    a: In,
    b: In,
    c: Out,
    add: bool,
) {
    debug_assert!(rows.is_multiple_of(MR));
    for i in (0..rows).step_by(MR) {
        let from = if BY_COLUMN { i } else { i * a.stride };
        let a = Block {
            ptr: a.ptr.add(from),
            stride: a.stride,
        };
        let c = Block {
            ptr: c.ptr.add(i * c.stride),
            stride: c.stride,
        };
        tile::<V, MR, NV, BY_COLUMN>(depth, a, b, c, add);
    }
}

/// `c[i][j] += sum_k a[i][k] b[k][j]` for `i < rows` (a multiple of `MR`) and `j < cols` (of `LANES`).
///
/// # Safety
/// As [`tile`], for `rows` rows and `cols` columns.
#[inline(always)]
pub(crate) unsafe fn accumulate<V: Vector, const MR: usize>(
    rows: usize,
    cols: usize,
    depth: usize,
    a: In,
    b: In,
    c: Out,
) {
    let mut j = 0;
    while j < cols {
        let b = Block {
            ptr: b.ptr.add(j),
            stride: b.stride,
        };
        let c = Block {
            ptr: c.ptr.add(j),
            stride: c.stride,
        };
        if cols - j >= 2 * V::LANES {
            product::<V, MR, 2, false>(rows, depth, a, b, c, true);
            j += 2 * V::LANES;
        } else {
            product::<V, MR, 1, false>(rows, depth, a, b, c, true);
            j += V::LANES;
        }
    }
}

/// Writes the transpose of `rows x cols`, multiples of `LANES`.
///
/// # Safety
/// See [`Vector`]; `src` covers `rows x cols` and `dst` `cols x rows`.
#[inline(always)]
pub(crate) unsafe fn transpose<V: Vector>(rows: usize, cols: usize, src: In, dst: Out) {
    for i in (0..rows).step_by(V::LANES) {
        for j in (0..cols).step_by(V::LANES) {
            let from = src.ptr.add(i * src.stride + j);
            V::transpose(
                from,
                src.stride,
                V::LANES,
                dst.ptr.add(j * dst.stride + i),
                dst.stride,
            );
        }
    }
}
