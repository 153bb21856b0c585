//! Matrix products.

use crate::buffer::{Buffer, Scratch};
use crate::device::Device;
use crate::matrix::{Mat, MatMut};

/// Weights `[n, k]` packed for `x · wᵀ`.
#[derive(Debug, Clone)]
pub struct PackedWeights {
    n: usize,
    k: usize,
    data: Buffer,
}

impl PackedWeights {
    /// Packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Device, w: &[f32], n: usize, k: usize) -> Self {
        let mut packed = Self {
            n,
            k,
            data: Buffer::zeros(n * k),
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by `w` of the same shape, without allocating.
    pub fn repack(&mut self, _dev: &Device, w: &[f32]) {
        assert_eq!(w.len(), self.n * self.k, "weights [{}, {}]", self.n, self.k);
        self.data.copy_from_slice(w);
    }

    /// Output features.
    #[must_use]
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    #[must_use]
    pub fn k(&self) -> usize {
        self.k
    }
}

impl Device {
    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`.
    pub fn matmul_packed(&self, x: Mat<'_>, w: &PackedWeights, y: MatMut<'_>, accumulate: bool) {
        let w = Mat::new(&w.data, w.n, w.k);
        self.matmul_nt(x, w, y, accumulate);
    }

    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`.
    pub fn matmul_nt(&self, x: Mat<'_>, w: Mat<'_>, y: MatMut<'_>, accumulate: bool) {
        self.gemm(x, w.t(), y, accumulate);
    }

    /// `dx (+)= dy · w` with `dy` `[m, n]`, `w` `[n, k]`, `dx` `[m, k]`.
    pub fn matmul_nn(&self, dy: Mat<'_>, w: Mat<'_>, dx: MatMut<'_>, accumulate: bool) {
        self.gemm(dy, w, dx, accumulate);
    }

    /// `dw (+)= dyᵀ · x` with `dy` `[m, n]`, `x` `[m, k]`, `dw` `[n, k]`.
    pub fn matmul_tn(&self, dy: Mat<'_>, x: Mat<'_>, dw: MatMut<'_>, accumulate: bool) {
        self.gemm(dy.t(), x, dw, accumulate);
    }

    /// `c (+)= a · b` with `a` `[m, k]`, `b` `[k, n]`, `c` `[m, n]`, on all threads of the device.
    pub fn gemm(&self, a: Mat<'_>, b: Mat<'_>, c: MatMut<'_>, accumulate: bool) {
        gemm_serial(self, a, b, c, accumulate, &mut Scratch::new());
    }
}

/// `c (+)= a · b` on the calling thread alone, for use inside the tasks of a parallel loop.
pub fn gemm_serial(
    _dev: &Device,
    a: Mat<'_>,
    b: Mat<'_>,
    c: MatMut<'_>,
    accumulate: bool,
    _scratch: &mut Scratch,
) {
    assert_eq!(
        (a.rows(), b.cols(), a.cols()),
        (c.rows(), c.cols(), b.rows())
    );
    for i in 0..c.rows() {
        for j in 0..c.cols() {
            // SAFETY: indices are within the shapes checked above.
            unsafe {
                let out = c.as_ptr().add(i * c.row_stride() + j);
                let mut sum = if accumulate { *out } else { 0.0 };
                for p in 0..a.cols() {
                    let x = *a.as_ptr().add(i * a.row_stride() + p * a.col_stride());
                    sum += x * *b.as_ptr().add(p * b.row_stride() + j * b.col_stride());
                }
                *out = sum;
            }
        }
    }
}
