//! Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split form: dimension `j` of
//! a head turns with dimension `j + head_dim / 2`.
//!
//! The angle `a = position · frequency[j]` gives
//! `(x_j, x_{j+h}) -> (x_j cos a - x_{j+h} sin a, x_{j+h} cos a + x_j sin a)`, where `h = head_dim / 2`. This
//! is the layout of the Hugging Face weights.

use super::row_grain;
use crate::buffer::Buffer;
use crate::cpu::Cpu;
use crate::matrix::MatMut;
use crate::simd::simd_fn;

/// Cosines and sines for positions `0..positions`, `4 · positions · head_dim` bytes.
#[derive(Debug, Clone)]
pub struct RopeTable {
    /// Half of the head dimension: number of frequencies.
    half: usize,
    positions: usize,
    /// `[positions, half]` each.
    cos: Buffer,
    sin: Buffer,
}

impl RopeTable {
    /// A table with the given angle per position of each dimension pair.
    ///
    /// The angle is rounded to `f32` before its sine is taken, as Transformers does.
    #[must_use]
    pub fn from_inv_freq(inv_freq: &[f32], positions: usize) -> Self {
        let half = inv_freq.len();
        let (mut cos, mut sin) = (
            Buffer::zeros(positions * half),
            Buffer::zeros(positions * half),
        );
        for p in 0..positions {
            for (j, &freq) in inv_freq.iter().enumerate() {
                let (s, c) = f64::from(p as f32 * freq).sin_cos();
                cos[p * half + j] = c as f32;
                sin[p * half + j] = s as f32;
            }
        }
        Self {
            half,
            positions,
            cos,
            sin,
        }
    }

    /// Memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.cos) + size_of_val(&*self.sin)
    }

    /// Dimension of the heads it turns.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        2 * self.half
    }

    /// Number of positions it covers.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Cosines and sines of `position`, `[head_dim / 2]` each; panics beyond [`Self::positions`].
    #[must_use]
    pub fn row(&self, position: u32) -> (&[f32], &[f32]) {
        let p = position as usize;
        assert!(
            p < self.positions,
            "position {p} is beyond the {} of the table",
            self.positions
        );
        let range = p * self.half..(p + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Turns each head of `x` `[m, heads * head_dim]` in place to its row's position `[m]`.
pub fn rope(dev: &Cpu, x: MatMut<'_>, positions: &[u32], table: &RopeTable) {
    rotate(dev, x, positions, table, 1.0);
}

/// Gradient of [`rope`], in place on `dx`: the turn back.
pub fn rope_backward(dev: &Cpu, dx: MatMut<'_>, positions: &[u32], table: &RopeTable) {
    rotate(dev, dx, positions, table, -1.0);
}

/// Turns all heads of all rows, by the angle (`sign` 1) or back (-1).
fn rotate(dev: &Cpu, x: MatMut<'_>, positions: &[u32], table: &RopeTable, sign: f32) {
    let dim = table.head_dim();
    assert!(
        x.cols().is_multiple_of(dim.max(1)),
        "{} columns are no multiple of head dimension {dim}",
        x.cols()
    );
    assert_eq!(positions.len(), x.rows(), "positions for each row");
    let heads = x.cols().checked_div(dim).unwrap_or(0);
    dev.pool()
        .parallel_ranges(x.rows(), row_grain(x.cols()), &|rows| {
            for i in rows {
                let (cos, sin) = table.row(positions[i]);
                // SAFETY: row `i` is in bounds and belongs to this task.
                unsafe {
                    rotate_row(
                        dev,
                        x.as_ptr().add(i * x.row_stride()),
                        heads,
                        cos,
                        sin,
                        sign,
                    )
                };
            }
        });
}

simd_fn! {
/// Turns all heads of one row.
fn rotate_row<V>(x: *mut f32, heads: usize, cos: &[f32], sin: &[f32], sign: f32) {
    let half = cos.len();
    let sign = V::splat(sign);
    let mut j = 0;
    while j < half {
        let left = half - j;
        let c = V::load_upto(cos.as_ptr().add(j), left);
        let s = V::load_upto(sin.as_ptr().add(j), left).mul(sign);
        for h in 0..heads {
            let low = x.add(h * 2 * half + j);
            let high = low.add(half);
            let (a, b) = (V::load_upto(low, left), V::load_upto(high, left));
            a.mul(c).sub(b.mul(s)).store_upto(low, left);
            b.mul(c).add(a.mul(s)).store_upto(high, left);
        }
        j += V::LANES;
    }
}
}
