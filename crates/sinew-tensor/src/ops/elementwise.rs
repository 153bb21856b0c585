//! Sums, scalings, biases and the norm of a gradient.

use super::{GRAIN, row_grain};
use crate::buffer::SharedMut;
use crate::device::Device;
use crate::simd::simd_fn;

/// Values whose squares are summed in `f32` before the sum moves on in `f64`.
const NORM_BLOCK: usize = 1024;
/// Columns a task of a column sum takes: 1 KiB of each row.
const COLUMN_STRIP: usize = 256;

/// `y += x`, the residual connection.
pub fn add(dev: &Device, x: &[f32], y: &mut [f32]) {
    axpy(dev, 1.0, x, y);
}

/// `y += a x`.
pub fn axpy(dev: &Device, a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "x and y");
    let y = SharedMut::new(y);
    dev.pool().parallel_ranges(x.len(), GRAIN, &|range| {
        // SAFETY: ranges of tasks are disjoint.
        let y = unsafe { y.range(range.clone()) };
        // SAFETY: equal lengths.
        unsafe { axpy_part(dev, a, &x[range], y) };
    });
}

simd_fn! {
fn axpy_part<V>(a: f32, x: &[f32], y: &mut [f32]) {
    let n = y.len();
    let a = V::splat(a);
    let (x, y) = (x.as_ptr(), y.as_mut_ptr());
    let mut j = 0;
    while j < n {
        let left = n - j;
        V::load_upto(x.add(j), left).fma(a, V::load_upto(y.add(j), left)).store_upto(y.add(j), left);
        j += V::LANES;
    }
}
}

/// `x *= a`.
pub fn scale(dev: &Device, a: f32, x: &mut [f32]) {
    let len = x.len();
    let x = SharedMut::new(x);
    dev.pool().parallel_ranges(len, GRAIN, &|range| {
        // SAFETY: ranges of tasks are disjoint.
        unsafe { x.range(range) }.iter_mut().for_each(|x| *x *= a);
    });
}

/// Adds `bias` `[n]` to each row of `y` `[m, n]`.
pub fn bias_add(dev: &Device, bias: &[f32], y: &mut [f32]) {
    let n = bias.len().max(1);
    assert!(
        y.len().is_multiple_of(n),
        "{} values are no rows of {n}",
        y.len()
    );
    let m = y.len() / n;
    let y = SharedMut::new(y);
    dev.pool().parallel_ranges(m, row_grain(n), &|rows| {
        for i in rows {
            // SAFETY: only this task touches row `i`.
            let y = unsafe { y.range(i * n..(i + 1) * n) };
            // SAFETY: equal lengths.
            unsafe { axpy_part(dev, 1.0, bias, y) };
        }
    });
}

/// Gradient of [`bias_add`]: `dbias[j] += sum over rows of dy[i, j]`, rows in order.
pub fn bias_backward(dev: &Device, dy: &[f32], dbias: &mut [f32]) {
    let n = dbias.len().max(1);
    assert!(
        dy.len().is_multiple_of(n),
        "{} values are no rows of {n}",
        dy.len()
    );
    let dbias = SharedMut::new(dbias);
    dev.pool()
        .parallel_ranges(dbias.len(), COLUMN_STRIP, &|cols| {
            // SAFETY: ranges of tasks are disjoint.
            let dbias = unsafe { dbias.range(cols.clone()) };
            for row in dy.chunks_exact(n) {
                // SAFETY: equal lengths.
                unsafe { axpy_part(dev, 1.0, &row[cols.clone()], dbias) };
            }
        });
}

/// Euclidean norm over all `tensors` together, summed in `f64`.
#[must_use]
pub fn l2_norm(dev: &Device, tensors: &[&[f32]]) -> f64 {
    tensors
        .iter()
        .map(|tensor| sum_of_squares(dev, tensor))
        .sum::<f64>()
        .sqrt()
}

fn sum_of_squares(dev: &Device, x: &[f32]) -> f64 {
    let chunk = GRAIN * 4;
    // One f64 per chunk, as its two halves, since shared slices hold f32.
    let mut parts = vec![0.0f32; 2 * x.len().div_ceil(chunk)];
    let shared = SharedMut::new(&mut parts);
    dev.pool().parallel_ranges(x.len(), chunk, &|range| {
        let part = range.start / chunk;
        let sum: f64 = x[range]
            .chunks(NORM_BLOCK)
            // SAFETY: the kernel stays inside its slice.
            .map(|block| f64::from(unsafe { squares_part(dev, block) }))
            .sum();
        // SAFETY: only this task touches its pair.
        let out = unsafe { shared.range(2 * part..2 * part + 2) };
        let high = sum as f32;
        out.copy_from_slice(&[high, (sum - f64::from(high)) as f32]);
    });
    parts
        .chunks_exact(2)
        .map(|pair| f64::from(pair[0]) + f64::from(pair[1]))
        .sum()
}

simd_fn! {
fn squares_part<V>(x: &[f32]) -> f32 {
    let n = x.len();
    let mut sum = V::splat(0.0);
    let mut j = 0;
    while j < n {
        let v = V::load_upto(x.as_ptr().add(j), n - j);
        sum = v.fma(v, sum);
        j += V::LANES;
    }
    sum.sum()
}
}
