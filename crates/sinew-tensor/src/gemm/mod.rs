//! Matrix products: one blocked algorithm over the register tiles of each kernel set.
//!
//! The method is that of Goto & van de Geijn 2008 (doi 10.1145/1356052.1356053) and Van Zee & van de Geijn
//! 2015 (BLIS, doi 10.1145/2764454): operands are packed into panels that the tiles read in order; blocks of
//! `a` stay in the second-level cache while panels of `b` stream past.
//!
//! # Numerics
//! Every element of the result is one chain of fused multiply-adds in ascending order of the contracted
//! index, started from 0 or, when accumulating, from the old value. So it does not depend on threads,
//! blocking, packing or the other rows and columns of the call: a row has the same bits in any batch. AVX2
//! has the bits of AVX-512, NEON those of portable kernels on aarch64. (Portable kernels round products if
//! the target has no fused instruction.) AMX rounds operands and sums in steps of 32, see [`crate::amx`]; its
//! rows have the same bits in any batch, too.

mod bf16;
mod block;
mod pack;
mod product;
mod split;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use crate::amx::product as amx;
use crate::buffer::{Buffer, Part, Scratch};
use crate::cpu::{Cpu, KernelSet};
use crate::matrix::{Mat, MatMut};
use crate::simd::Lanes8;
pub use bf16::PackedBf16;
use pack::pack_even;
use product::{Product, Source};
use tile::Tile;
#[cfg(target_arch = "x86_64")]
pub(crate) use tile::{each, unroll};

/// Values a packing task has at least.
const PACK_GRAIN: usize = 32 << 10;

thread_local! {
    /// Packed operands of the product that this thread runs.
    static PACKED: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Weights `[n, k]` packed for `x · wᵀ`: panels of as many rows as a tile has columns, transposed, the last
/// padded with zeros. Fit for the kernel set of the device that packed them; AMX packs them rounded to
/// bfloat16.
#[derive(Debug, Clone)]
pub struct PackedWeights {
    n: usize,
    k: usize,
    kernels: KernelSet,
    data: Buffer,
}

impl PackedWeights {
    /// Packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Cpu, w: &[f32], n: usize, k: usize) -> Self {
        let len = match dev.kernels() {
            KernelSet::Amx => amx::packed_len(n, k),
            other => n.next_multiple_of(Sizes::of(other).cols) * k,
        };
        let data = Buffer::zeros(len);
        let mut packed = Self {
            n,
            k,
            kernels: dev.kernels(),
            data,
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by row-major `w` of the same shape, without allocating.
    pub fn repack(&mut self, dev: &Cpu, w: &[f32]) {
        let (n, k) = (self.n, self.k);
        assert_eq!(w.len(), n * k, "weights [{n}, {k}]");
        self.check(dev);
        let b = Mat::new(w, n, k).t();
        if self.kernels == KernelSet::Amx {
            return amx::pack_weights(Some(dev.pool()), b, &mut self.data);
        }
        // SAFETY: `data` has space for all panels of `[n, k]`.
        unsafe { pack_b(dev, b, 0..n, 0..k, self.data.as_mut_ptr()) };
    }

    /// Memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() * 4
    }

    fn check(&self, dev: &Cpu) {
        assert_eq!(
            self.kernels,
            dev.kernels(),
            "weights were packed for other kernels"
        );
    }
}

impl Cpu {
    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]`, `y` `[m, n]`.
    pub fn matmul_packed(&self, x: Mat<'_>, w: &PackedWeights, y: MatMut<'_>, accumulate: bool) {
        w.check(self);
        assert_eq!(
            (x.cols(), y.cols()),
            (w.k, w.n),
            "columns of x and y, weights [n, k]"
        );
        self.multiply(x, Source::Packed(&w.data), y, accumulate);
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
        assert_eq!((b.rows(), b.cols()), (a.cols(), c.cols()), "b is [k, n]");
        self.multiply(a, Source::Plain(b), c, accumulate);
    }

    /// `c (+)= a · b` on AMX tiles, if the device has them and `b` is not of 12 bits a value.
    fn multiply(&self, a: Mat<'_>, b: Source<'_>, c: MatMut<'_>, accumulate: bool) {
        let on_tiles = match b {
            _ if self.kernels() != KernelSet::Amx => None,
            Source::Plain(b) => Some(amx::Right::Plain(b)),
            Source::Packed(data) => Some(amx::Right::Packed(data)),
            Source::Split(_) => None,
        };
        PACKED.with_borrow_mut(|scratch| match on_tiles {
            Some(b) => amx::Product {
                pool: Some(self.pool()),
                a,
                b,
                c,
                accumulate,
            }
            .run(scratch),
            None => Product {
                dev: self,
                a,
                b,
                c,
                accumulate,
            }
            .run(scratch),
        });
    }
}

/// Rows and columns of the tiles of a kernel set, as in [`Tile`].
struct Sizes {
    rows: usize,
    cols: usize,
    split_rows: usize,
    split_cols: usize,
    group: usize,
}

impl Sizes {
    fn of(kernels: KernelSet) -> Self {
        fn of<T: Tile>() -> Sizes {
            Sizes {
                rows: T::MR,
                cols: T::NR,
                split_rows: T::SPLIT_MR,
                split_cols: T::SPLIT_NR,
                group: T::GROUP,
            }
        }
        match kernels {
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx512 | KernelSet::Amx => of::<crate::simd::F32x16>(),
            #[cfg(target_arch = "x86_64")]
            KernelSet::Avx2 => of::<crate::simd::F32x8>(),
            #[cfg(target_arch = "aarch64")]
            KernelSet::Neon => of::<crate::simd::Neon8>(),
            _ => of::<Lanes8>(),
        }
    }
}

/// Packs `cols` and `steps` of `b` `[k, n]` into panels at `dst`.
///
/// # Safety
/// `dst` must have space for `cols.len()` rounded up to whole panels times `steps.len()` values.
unsafe fn pack_b(dev: &Cpu, b: Mat<'_>, cols: Range<usize>, steps: Range<usize>, dst: *mut f32) {
    let nr = Sizes::of(dev.kernels()).cols;
    let (rs, cs) = (b.row_stride(), b.col_stride());
    let depth = steps.len();
    let from = Part(
        b.as_ptr()
            .wrapping_add(cols.start * cs + steps.start * rs)
            .cast_mut(),
    );
    let dst = Part(dst);
    let panels = cols.len().div_ceil(nr);
    let tasks = (cols.len() * depth / PACK_GRAIN).clamp(1, panels.max(1));
    let body = |task: usize| {
        let (first, last) = (task * panels / tasks, (task + 1) * panels / tasks);
        let rows = (last * nr).min(cols.len()) - first * nr;
        // SAFETY: `b` covers the block, the caller promises the space, panels of tasks are disjoint.
        unsafe {
            pack_even(
                dev,
                from.at(first * nr * cs),
                cs,
                rs,
                rows,
                depth,
                nr,
                dst.at(first * nr * depth),
            )
        };
    };
    dev.pool().parallel_for(tasks, &body);
}
