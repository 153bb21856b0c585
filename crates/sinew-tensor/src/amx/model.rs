//! Plain Rust model of the products: the definition that kernels are compared with bit by bit.

use crate::matrix::Mat;

/// Steps of the contracted index that are added up before they join the old value.
pub const DEPTH: usize = 32;

/// `x` rounded to the nearest bfloat16, ties to even, as an `f32`. Numbers too small for a normal `f32`
/// become 0 of their sign, and NaN stays NaN, as with the instruction `vcvtneps2bf16`.
#[must_use]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return f32::from_bits((bits | 0x0040_0000) & 0xffff_0000);
    }
    if x.abs() < f32::MIN_POSITIVE {
        return flush(x);
    }
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// Flushes numbers that are not normal to 0 of the same sign, as tiles do.
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0f32.copysign(x)
    } else {
        x
    }
}

/// `start + Σ a_p b_p` over rounded operands `(a, b)` of the whole contracted index.
#[must_use]
pub fn sum(start: f32, operands: impl IntoIterator<Item = (f32, f32)>) -> f32 {
    let mut total = start;
    let mut halves = [0.0f32; 2];
    let mut taken = 0;
    let mut close = |halves: &mut [f32; 2]| {
        total = flush(flush(total) + flush(halves[0] + halves[1]));
        *halves = [0.0; 2];
    };
    for (a, b) in operands {
        let half = &mut halves[taken % 2];
        *half = flush(flush(a).mul_add(flush(b), *half));
        taken += 1;
        if taken % DEPTH == 0 {
            close(&mut halves);
        }
    }
    if taken % DEPTH != 0 {
        close(&mut halves);
    }
    total
}

/// `c (+)= a · b` with `a` `[m, k]`, `b` `[k, n]` and dense row-major `c` `[m, n]`.
pub fn product(a: Mat<'_>, b: Mat<'_>, c: &mut [f32], accumulate: bool) {
    let (m, k, n) = (a.rows(), a.cols(), b.cols());
    assert_eq!((b.rows(), c.len()), (k, m * n), "b is [k, n], c is [m, n]");
    let rounded = |x: Mat<'_>| -> Vec<f32> {
        let place = |i: usize, j: usize| i * x.row_stride() + j * x.col_stride();
        (0..x.rows())
            .flat_map(|i| (0..x.cols()).map(move |j| place(i, j)))
            // SAFETY: the view covers its elements.
            .map(|at| round(unsafe { *x.as_ptr().add(at) }))
            .collect()
    };
    let (a, b) = (rounded(a), rounded(b));
    for (at, c) in c.iter_mut().enumerate() {
        let (i, j) = (at / n, at % n);
        let start = if accumulate { *c } else { 0.0 };
        let operands = (0..k).map(|p| (a[i * k + p], b[p * n + j]));
        if k > 0 || !accumulate {
            *c = sum(start, operands);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_goes_to_the_nearest_and_ties_to_even() {
        let unit = 2f32.powi(-7);
        for (x, expected) in [
            (1.0 + unit / 2.0, 1.0),
            (1.0 + unit * 0.5001, 1.0 + unit),
            (1.0 + unit * 1.5, 1.0 + unit * 2.0),
            (-1.0 - unit * 0.7, -1.0 - unit),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (f32::MIN_POSITIVE, f32::MIN_POSITIVE),
            (f32::MIN_POSITIVE * 0.999, 0.0),
        ] {
            assert_eq!(round(x), expected, "{x}");
        }
        assert!(round(f32::NAN).is_nan());
        assert!(round(f32::from_bits(0x7f80_0001)).is_nan());
        assert!(round(-1e-40).is_sign_negative());
    }

    #[test]
    fn sums_of_whole_numbers_are_exact() {
        let operands = |k: usize| (0..k).map(|p| (p as f32, (p % 3) as f32 - 1.0));
        for k in [0, 1, 31, 32, 33, 100] {
            let exact: f32 = operands(k).map(|(a, b)| a * b).sum();
            assert_eq!(sum(5.0, operands(k)), 5.0 + exact, "{k}");
        }
    }
}
