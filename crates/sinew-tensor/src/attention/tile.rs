//! Products of small blocks held in cache, the inner loops of attention and log-probability kernels.

#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "the kernels are pointer arithmetic throughout"
)]

use crate::cpu::{Cpu, KernelSet};
use crate::simd::Vector;

/// Lanes of the vectors that the device's kernels use.
pub(crate) fn lanes(dev: &Cpu) -> usize {
    match dev.kernels() {
        KernelSet::Portable | KernelSet::Neon | KernelSet::Avx2 => 8,
        KernelSet::Avx512 | KernelSet::Amx => 16,
    }
}

/// Coefficients of `2^f` for `f` in -0.5..=0.5 from degree 6 down, least relative error (1.6e-8).
const EXP2: [f32; 7] = [
    0.000_153_458_12,
    0.001_339_993_1,
    0.009_618_489,
    0.055_503_286,
    0.240_226_46,
    std::f32::consts::LN_2,
    1.0,
];

/// Exponent at which [`exp2`] reaches 0: far below any share of a sum of probabilities that matters, far
/// above denormal numbers, which cost a hundred cycles each.
const LEAST_EXPONENT: f32 = -100.0;

/// `2^x` for `x <= 127`, with an error below 1.2e-7 of the value plus `2^-100`; exactly 0 from -100
/// down, also for minus infinity; NaN stays.
///
/// # Safety
/// See [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp2<V: Vector>(x: V) -> V {
    let x = x.max(V::splat(LEAST_EXPONENT));
    let n = x.round();
    let f = x.sub(n);
    let mut p = V::splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = p.fma(f, V::splat(*c));
    }
    p.scale2(n).sub(V::splat(1.0 / (1u128 << 100) as f32))
}

/// Lower bound of all scores, which are products of queries and keys in units of `ln 2`; the last number that
/// [`Vector::round`] makes an integer.
const LEAST_SCORE: f32 = -4_194_304.0;

/// Largest score of no keys: also below all scores, and so far above [`LEAST_SCORE`] that rows without
/// visible keys have probabilities of 0.
pub(crate) const LOWEST: f32 = LEAST_SCORE / 2.0;

/// `2^(x - top)` for an integer `top` of at least the nearest integer to `x`, with the same bits, exponent
/// aside, whatever `top` is; exactly 0 where that would be below about `2^-100`, also for minus infinity; NaN
/// stays.
///
/// So a running softmax whose largest score is rounded to an integer may rescale by powers of two, which is
/// exact: its sums do not depend on where blocks of keys begin and end.
///
/// # Safety
/// See [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp2_below<V: Vector>(x: V, top: V) -> V {
    let x = x.max(V::splat(LEAST_SCORE));
    let n = x.round();
    let f = x.sub(n);
    let mut p = V::splat(EXP2[0]);
    for c in &EXP2[1..] {
        p = p.fma(f, V::splat(*c));
    }
    let least = V::splat(LEAST_EXPONENT);
    let n = n.sub(top).max(least);
    // 0 at the least exponent, 1 above it.
    let some = n.sub(least).min(V::splat(1.0));
    p.scale2(n).mul(some)
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

impl In {
    /// Rows of `stride` values, from the first value on.
    pub(crate) fn rows(values: &[f32], stride: usize) -> Self {
        let ptr = values.as_ptr();
        Self { ptr, stride }
    }
}

impl Out {
    /// Rows of `stride` values, from the first value on.
    pub(crate) fn rows(values: &mut [f32], stride: usize) -> Self {
        let ptr = values.as_mut_ptr();
        Self { ptr, stride }
    }

    /// Returns the same block for reading.
    pub(crate) fn as_in(self) -> In {
        In {
            ptr: self.ptr.cast_const(),
            stride: self.stride,
        }
    }
}

/// Products of blocks, compiled per kernel set and not inlined, so that their loops have all registers.
pub(crate) trait Product: Vector {
    /// Rows that are computed together; callers give a multiple.
    const STEP: usize;

    /// `c[i][j] = (add ? c[i][j] : 0) + sum_k a(i, k) b[k][j]` for `i < rows`, `j < NV * LANES`, where
    /// `a(i, k)` is `a[i][k]`, or `a[k][i]` with `BY_COLUMN`.
    ///
    /// The sum goes in order of `k`: a value depends neither on its neighbours nor on its place.
    ///
    /// # Safety
    /// See [`Vector`]; `a`, `b` and `c` cover the ranges above, and `c` overlaps neither.
    unsafe fn product<const NV: usize, const BY_COLUMN: bool>(
        rows: usize,
        depth: usize,
        a: In,
        b: In,
        c: Out,
        add: bool,
    );

    /// `c[i][j] += sum_k a[i][k] b[k][j]` for `i < rows` (a multiple of `STEP`) and `j < cols` (of
    /// `LANES`).
    ///
    /// # Safety
    /// Same as [`product`](Self::product).
    #[inline(always)]
    unsafe fn accumulate(rows: usize, cols: usize, depth: usize, a: In, b: In, c: Out) {
        let mut j = 0;
        while j < cols {
            let width = (2 * Self::LANES).min(cols - j);
            let panel = In {
                ptr: b.ptr.add(j),
                stride: b.stride,
            };
            let c = Out {
                ptr: c.ptr.add(j),
                stride: c.stride,
            };
            if width == 2 * Self::LANES {
                Self::product::<2, false>(rows, depth, a, panel, c, true);
            } else {
                Self::product::<1, false>(rows, depth, a, panel, c, true);
            }
            j += width;
        }
    }
}

macro_rules! impl_product {
    ($vector:ty, $step:literal $(, $features:literal)?) => {
        impl Product for $vector {
            const STEP: usize = $step;

            #[inline(always)]
            unsafe fn product<const NV: usize, const BY_COLUMN: bool>(
                rows: usize,
                depth: usize,
                a: In,
                b: In,
                c: Out,
                add: bool,
            ) {
                $(#[target_feature(enable = $features)])?
                #[inline(never)]
                unsafe fn call<const NV: usize, const BY_COLUMN: bool>(
                    rows: usize,
                    depth: usize,
                    a: In,
                    b: In,
                    c: Out,
                    add: bool,
                ) {
                    for i in (0..rows).step_by($step) {
                        let from = if BY_COLUMN { i } else { i * a.stride };
                        let a = In { ptr: a.ptr.add(from), stride: a.stride };
                        let c = Out { ptr: c.ptr.add(i * c.stride), stride: c.stride };
                        tile::<$vector, $step, NV, BY_COLUMN>(depth, a, b, c, add);
                    }
                }
                debug_assert!(rows.is_multiple_of($step));
                call::<NV, BY_COLUMN>(rows, depth, a, b, c, add);
            }
        }
    };
}

impl_product!(crate::simd::Lanes8, 4);
#[cfg(target_arch = "aarch64")]
impl_product!(crate::simd::Neon8, 4);
#[cfg(target_arch = "x86_64")]
impl_product!(crate::simd::F32x8, 4, "avx2,fma");
#[cfg(target_arch = "x86_64")]
impl_product!(
    crate::simd::F32x16,
    8,
    "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"
);

/// The same pointer with an origin that is hidden from the compiler: it keeps one register for each row,
/// instead of computing rows from each other all the time.
#[cfg_attr(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    expect(
        clippy::pointers_in_nomem_asm_block,
        reason = "the block is empty: nothing is read or written"
    )
)]
#[inline(always)]
fn opaque(mut p: *const f32) -> *const f32 {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: no instruction at all.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) p, options(pure, nomem, nostack, preserves_flags));
    }
    p
}

/// [`Product::product`] for `MR` rows.
///
/// # Safety
/// Same as for [`Product::product`].
#[inline(always)]
unsafe fn tile<V: Vector, const MR: usize, const NV: usize, const BY_COLUMN: bool>(
    depth: usize,
    a: In,
    b: In,
    c: Out,
    add: bool,
) {
    // Counted loops: compilers keep `sum` in registers only if all its indices become constants.
    // Wrapping arithmetic: `add` is checked in builds with debug assertions, which costs registers.
    let mut sum = [[V::splat(0.0); NV]; MR];
    let mut rows = [a.ptr; MR];
    let mut i = 0;
    while i < MR {
        rows[i] = opaque(a.ptr.wrapping_add(i * a.stride));
        if add {
            let mut v = 0;
            while v < NV {
                sum[i][v] = V::load(c.ptr.wrapping_add(i * c.stride + v * V::LANES));
                v += 1;
            }
        }
        i += 1;
    }
    let (mut column, mut right_row) = (a.ptr, b.ptr);
    let mut k = 0;
    while k < depth {
        let mut right = [V::splat(0.0); NV];
        let mut v = 0;
        while v < NV {
            right[v] = V::load(right_row.wrapping_add(v * V::LANES));
            v += 1;
        }
        let mut i = 0;
        while i < MR {
            let at = if BY_COLUMN {
                column.wrapping_add(i)
            } else {
                rows[i].wrapping_add(k)
            };
            let left = V::broadcast(at);
            let mut v = 0;
            while v < NV {
                sum[i][v] = left.fma(right[v], sum[i][v]);
                v += 1;
            }
            i += 1;
        }
        column = column.wrapping_add(a.stride);
        right_row = right_row.wrapping_add(b.stride);
        k += 1;
    }
    let mut i = 0;
    while i < MR {
        let mut v = 0;
        while v < NV {
            sum[i][v].store(c.ptr.wrapping_add(i * c.stride + v * V::LANES));
            v += 1;
        }
        i += 1;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::simd_fn;

    simd_fn! {
        fn exp2_all<V>(x: &mut [f32]) {
            for part in x.chunks_exact_mut(V::LANES) {
                exp2(V::load(part.as_ptr())).store(part.as_mut_ptr());
            }
        }
    }

    simd_fn! {
        fn exp2_below_all<V>(x: &mut [f32], top: f32) {
            for part in x.chunks_exact_mut(V::LANES) {
                exp2_below(V::load(part.as_ptr()), V::splat(top)).store(part.as_mut_ptr());
            }
        }
    }

    /// Another top changes only the exponent, down to where both are 0.
    #[test]
    fn powers_below_a_top_have_the_same_bits_for_every_top() {
        let mut scores: Vec<f32> = (0..4096).map(|i| -230.0 + i as f32 * 0.0613).collect();
        scores.extend([f32::NEG_INFINITY, LEAST_SCORE, LOWEST, -1e30].repeat(4));
        for kernels in KernelSet::available_f32() {
            let dev = Cpu::new(kernels, 1);
            let below = |top: f32| {
                let mut y = scores.clone();
                // SAFETY: the slice holds whole vectors.
                unsafe { exp2_below_all(&dev, &mut y, top) };
                y
            };
            let near = below(22.0);
            for top in [23.0f32, 50.0, 90.0] {
                let shift = (22.0 - top).exp2();
                for ((x, near), far) in scores.iter().zip(&near).zip(below(top)) {
                    let exact = (f64::from(*x) - f64::from(top)).exp2();
                    let error = (f64::from(far) - exact).abs();
                    assert!(error <= 1.2e-7 * exact + 2e-30, "{kernels}: {x} {top}");
                    if far != 0.0 {
                        assert_eq!(far, near * shift, "{kernels}: {x} below {top}");
                    }
                }
            }
            assert_eq!(below(LOWEST)[4096..4100], [0.0, 0.0, 1.0, 0.0], "{kernels}");
            let mut nan = [f32::NAN; 16];
            // SAFETY: as above.
            unsafe { exp2_below_all(&dev, &mut nan, 3.0) };
            assert!(nan.iter().all(|y| y.is_nan()), "{kernels}");
        }
    }

    #[test]
    fn powers_of_two_agree_with_f64() {
        for kernels in KernelSet::available_f32() {
            let mut x: Vec<f32> = (0..4096).map(|i| -150.0 + i as f32 * 0.04).collect();
            x.extend([f32::NEG_INFINITY, f32::NAN, -1e30, -100.0].repeat(4));
            let mut y = x.clone();
            // SAFETY: the slice holds whole vectors.
            unsafe { exp2_all(&Cpu::new(kernels, 1), &mut y) };
            for (x, y) in x.iter().zip(&y) {
                if x.is_nan() {
                    assert!(y.is_nan(), "{kernels}: 2^NaN gives {y}");
                } else if *x <= LEAST_EXPONENT {
                    assert_eq!(*y, 0.0, "{kernels}: 2^{x}");
                } else {
                    let exact = f64::from(*x).exp2();
                    let error = (f64::from(*y) - exact).abs();
                    assert!(
                        error <= 1.2e-7 * exact + 1e-30,
                        "{kernels}: 2^{x} gives {y}"
                    );
                }
            }
        }
    }
}
