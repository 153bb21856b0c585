//! Weights of 16 bits (bfloat16), for generation where reading the weights is what takes time.

use std::cell::RefCell;

use super::pack::pack_even;
use super::product::{Part, Product, Source};
use super::{PACKED, panel_width};
use crate::buffer::{Buffer, Scratch};
use crate::device::{Device, KernelSet};
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

thread_local! {
    /// The panel that this thread packs, still with 32 bits a value.
    static PANEL: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Weights `[n, k]` for `x · wᵀ`, rounded to the nearest bfloat16 (ties to even): half the bytes of
/// [`PackedWeights`](super::PackedWeights), in the same panels. A word holds two values: of a step's values
/// the first half lies in the low halves of the words and the second half in the high ones, so that a shift
/// and a mask widen them.
///
/// Products multiply and add up in `f32`: they have the bits of the product with the rounded weights as `f32`.
#[derive(Debug, Clone)]
pub struct PackedBf16 {
    n: usize,
    k: usize,
    kernels: KernelSet,
    /// `[panels, k, panel width / 2]` words of two values.
    data: Buffer,
}

impl PackedBf16 {
    /// Rounds and packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Device, w: &[f32], n: usize, k: usize) -> Self {
        let nr = panel_width(dev.kernels(), true);
        let mut packed = Self {
            n,
            k,
            kernels: dev.kernels(),
            data: Buffer::zeros(n.next_multiple_of(nr) * k / 2),
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by row-major `w` of the same shape, without allocating.
    pub fn repack(&mut self, dev: &Device, w: &[f32]) {
        let (n, k, nr) = (self.n, self.k, panel_width(self.kernels, true));
        assert_eq!(w.len(), n * k, "weights [{n}, {k}]");
        self.check(dev);
        let data = Part(self.data.as_mut_ptr());
        dev.pool().parallel_for(n.div_ceil(nr), &|panel| {
            PANEL.with_borrow_mut(|scratch| {
                let wide = scratch.take(nr * k);
                let rows = nr.min(n - panel * nr);
                let from = w[panel * nr * k..].as_ptr();
                // SAFETY: `rows` rows of `k` values lie at `from`, `wide` and the panel of `data` have
                // room for a whole panel, and this panel is this task's alone.
                unsafe {
                    pack_even(dev, from, k, 1, rows, k, nr, wide.as_mut_ptr());
                    let words = data.at(panel * nr * k / 2).cast::<u32>();
                    join(dev, wide.as_ptr(), nr, k, words);
                }
            });
        });
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

    /// Memory it takes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len() * 4
    }

    fn check(&self, dev: &Device) {
        assert_eq!(
            self.kernels,
            dev.kernels(),
            "weights were packed for other kernels"
        );
    }
}

/// The bits of the nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
fn bf16_bits(value: f32) -> u32 {
    const QUIET: u32 = 0x40;
    let bits = value.to_bits();
    // Beyond the largest finite value the carry runs into the exponent, which gives infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() {
        (bits >> 16) | QUIET
    } else {
        rounded
    }
}

simd_fn! {
/// Joins the `nr` values of each of `depth` steps in half as many words.
///
/// # Safety
/// Both are valid for all steps.
fn join<V>(wide: *const f32, nr: usize, depth: usize, words: *mut u32) {
    let half = nr / 2;
    for p in 0..depth {
        for i in 0..half {
            let (low, high) = (*wide.add(p * nr + i), *wide.add(p * nr + half + i));
            *words.add(p * half + i) = bf16_bits(low) | (bf16_bits(high) << 16);
        }
    }
}
}

impl Device {
    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]` rounded to bfloat16, `y` `[m, n]`.
    pub fn matmul_bf16(&self, x: Mat<'_>, w: &PackedBf16, y: MatMut<'_>, accumulate: bool) {
        w.check(self);
        assert_eq!(
            (x.cols(), y.cols()),
            (w.k, w.n),
            "columns of x and y, weights [n, k]"
        );
        PACKED.with_borrow_mut(|scratch| {
            Product {
                dev: self,
                parallel: true,
                a: x,
                b: Source::Half(&w.data),
                c: y,
                accumulate,
            }
            .run(scratch);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::PackedWeights;
    use proptest::prelude::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn rounded(w: &[f32]) -> Vec<f32> {
        let round = |v: &f32| f32::from_bits(bf16_bits(*v) << 16);
        w.iter().map(round).collect()
    }

    fn devices() -> impl Iterator<Item = Device> {
        let sets = KernelSet::available_f32().into_iter();
        sets.flat_map(|set| [1, 3].map(|threads| Device::new(set, threads)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        /// Exactly the `f32` product with the rounded weights, at any size, added or not.
        #[test]
        fn products_are_those_of_the_rounded_weights(
            m in prop_oneof![1usize..20, 190usize..200],
            n in 1usize..100,
            k in prop_oneof![1usize..300, 760usize..800],
            accumulate: bool,
            seed in 0u32..1000,
        ) {
            let (x, w) = (values(m * k, seed), values(n * k, seed + 1));
            for dev in devices() {
                let x = Mat::new(&x, m, k);
                let (mut found, mut expected) = (vec![0.5; m * n], vec![0.5; m * n]);
                let packed = PackedBf16::pack(&dev, &w, n, k);
                dev.matmul_bf16(x, &packed, MatMut::new(&mut found, m, n), accumulate);
                let wide = PackedWeights::pack(&dev, &rounded(&w), n, k);
                dev.matmul_packed(x, &wide, MatMut::new(&mut expected, m, n), accumulate);
                prop_assert_eq!(found, expected, "{}", dev.kernels());
            }
        }
    }

    #[test]
    fn values_round_to_the_nearest_and_ties_to_even() {
        let cases = [
            (1.0, 1.0),
            (-1.004, -1.007_812_5),
            // Halfway between 1 and 1 + 2^-7, then between 1 + 2^-7 and 1 + 2^-6.
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 3.0 / 256.0, 1.015_625),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
            (-0.0, -0.0),
        ];
        for (value, expected) in cases {
            let found = rounded(&[value])[0];
            assert_eq!(found.to_bits(), f32::to_bits(expected), "{value}: {found}");
        }
        // A payload in the low bits alone would round to infinity.
        assert!(rounded(&[f32::from_bits(0x7f80_0001)])[0].is_nan());
    }

    #[test]
    fn repacking_replaces_all_weights_in_half_the_memory() {
        let dev = Device::new(KernelSet::detect_f32(), 2);
        let (n, k) = (70, 101);
        let (old, new, x) = (values(n * k, 1), values(n * k, 2), values(k, 3));
        let mut packed = PackedBf16::pack(&dev, &old, n, k);
        packed.repack(&dev, &new);
        let product = |w: &PackedBf16| {
            let mut y = vec![0.0; n];
            dev.matmul_bf16(Mat::new(&x, 1, k), w, MatMut::new(&mut y, 1, n), false);
            y
        };
        assert_eq!(
            product(&packed),
            product(&PackedBf16::pack(&dev, &new, n, k))
        );
        assert_eq!((packed.n(), packed.k()), (n, k));
        assert_eq!(
            2 * packed.bytes(),
            PackedWeights::pack(&dev, &new, n, k).bytes()
        );
    }
}
