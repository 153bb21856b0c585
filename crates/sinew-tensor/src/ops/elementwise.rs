//! Sums, scalings, biases and the sum of squares of a gradient.

use super::{GRAIN, row_grain};
use crate::buffer::SharedMut;
use crate::cpu::Cpu;
use crate::simd::simd_fn;

/// Values whose squares one task adds up. A constant, so that the sum does not depend on the number
/// of threads.
const NORM_BLOCK: usize = 1 << 16;
/// Partial sums of squares of a task: a multiple of every vector width.
const NORM_LANES: usize = 16;
/// Columns of a task of a column sum: 1 KiB of each row.
const COLUMN_STRIP: usize = 256;

/// `y += x`, the residual connection. Equal lengths.
pub fn add(dev: &Cpu, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "x and y");
    let y = SharedMut::new(y);
    dev.pool().parallel_ranges(x.len(), GRAIN, &|range| {
        // SAFETY: ranges of tasks are disjoint.
        let y = unsafe { y.range(range.clone()) };
        // SAFETY: equal lengths.
        unsafe { add_part(dev, &x[range], y) };
    });
}

simd_fn! {
/// `y += x` for one range.
fn add_part<V>(x: &[f32], y: &mut [f32]) {
    let n = y.len();
    let (x, y) = (x.as_ptr(), y.as_mut_ptr());
    let mut j = 0;
    while j < n {
        let left = n - j;
        V::load_upto(x.add(j), left).add(V::load_upto(y.add(j), left)).store_upto(y.add(j), left);
        j += V::LANES;
    }
}
}

/// `x *= a`, in place.
pub fn scale(dev: &Cpu, a: f32, x: &mut [f32]) {
    let len = x.len();
    let x = SharedMut::new(x);
    dev.pool().parallel_ranges(len, GRAIN, &|range| {
        // SAFETY: ranges of tasks are disjoint.
        unsafe { x.range(range) }.iter_mut().for_each(|x| *x *= a);
    });
}

/// Adds `bias` `[n]` to each row of `y` `[m, n]`.
///
/// # Panics
/// If `y` does not have whole rows of `n`.
pub fn bias_add(dev: &Cpu, bias: &[f32], y: &mut [f32]) {
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
            unsafe { add_part(dev, bias, y) };
        }
    });
}

/// Gradient of [`bias_add`]: `dbias[j] += sum over rows of dy[i, j]`, rows in order.
pub fn bias_backward(dev: &Cpu, dy: &[f32], dbias: &mut [f32]) {
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
                unsafe { add_part(dev, &row[cols.clone()], dbias) };
            }
        });
}

/// Sum of the squares of `x` in `f64`, which no finite `f32` overflows: over blocks of a fixed size, so that
/// the result does not depend on the number of threads, and in each over `NORM_LANES` partial sums, so that
/// it does not depend on the width of vectors.
#[must_use]
pub fn sum_of_squares(dev: &Cpu, x: &[f32]) -> f64 {
    let mut sums = vec![0.0; x.len().div_ceil(NORM_BLOCK)];
    let shared = SharedMut::new(&mut sums);
    dev.pool().parallel_ranges(x.len(), NORM_BLOCK, &|range| {
        let block = range.start / NORM_BLOCK;
        // SAFETY: only this task touches its block's sum.
        let sum = unsafe { shared.range(block..block + 1) };
        // SAFETY: the kernel stays inside its slice.
        sum[0] = unsafe { squares_part(dev, &x[range]) };
    });
    sums.iter().sum()
}

simd_fn! {
/// Loops over `NORM_LANES` that the compiler turns into vectors.
fn squares_part<V>(x: &[f32]) -> f64 {
    let mut sums = [0.0f64; NORM_LANES];
    let whole = x.len() / NORM_LANES * NORM_LANES;
    for at in (0..whole).step_by(NORM_LANES) {
        for (i, sum) in sums.iter_mut().enumerate() {
            let v = f64::from(*x.as_ptr().add(at + i));
            *sum += v * v;
        }
    }
    let rest: f64 = x[whole..].iter().map(|&v| f64::from(v).powi(2)).sum();
    sums.iter().sum::<f64>() + rest
}
}
