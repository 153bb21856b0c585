//! Weights rounded to 16 bits (bfloat16), for generation, where reading the weights takes most of
//! the time.

use std::cell::RefCell;

use super::Sizes;
use super::block::BLOCK;
use super::pack::pack_even;
use super::product::Source;
use super::split::{Split, encode};
use super::tile::Tile;
use crate::buffer::Scratch;
use crate::cpu::{Cpu, KernelSet};
use crate::matrix::{Mat, MatMut};
use crate::simd::simd_fn;

thread_local! {
    /// The panel that this thread packs, still with 32 bits a value.
    static PANEL: RefCell<Scratch> = RefCell::new(Scratch::new());
}

/// Weights `[n, k]` for `x · wᵀ`, rounded to the nearest bfloat16 (ties to even) and stored in 12 bits each,
/// without loss: three eighths of the bytes of [`PackedWeights`](super::PackedWeights).
///
/// Products multiply and add up in `f32`: they have the bits of the product with the rounded weights as
/// `f32`.
#[derive(Debug, Clone)]
pub struct PackedBf16 {
    n: usize,
    k: usize,
    kernels: KernelSet,
    data: Split,
}

impl PackedBf16 {
    /// Rounds and packs row-major `w` `[n, k]`.
    #[must_use]
    pub fn pack(dev: &Cpu, w: &[f32], n: usize, k: usize) -> Self {
        let mut packed = Self {
            n,
            k,
            kernels: dev.kernels(),
            data: Split::new(n, k, Sizes::of(dev.kernels()).split_cols),
        };
        packed.repack(dev, w);
        packed
    }

    /// Replaces the weights by row-major `w` of the same shape.
    pub fn repack(&mut self, dev: &Cpu, w: &[f32]) {
        let (n, k, nr) = (self.n, self.k, Sizes::of(self.kernels).split_cols);
        assert_eq!(w.len(), n * k, "weights [{n}, {k}]");
        self.check(dev);
        self.data.fill(dev, &|panel, to, side| {
            PANEL.with_borrow_mut(|scratch| {
                let room = nr * k.next_multiple_of(BLOCK);
                let wide = scratch.take(room + room / 2).as_mut_ptr();
                let words = wide.wrapping_add(room).cast::<u32>();
                let rows = nr.min(n - panel * nr);
                let from = w[panel * nr * k..].as_ptr();
                // SAFETY: `rows` rows of `k` values lie at `from`, `wide` and `words` have space for a whole
                // panel of whole blocks, and so has `to`.
                unsafe {
                    pack_even(dev, from, k, 1, rows, k, nr, wide);
                    round(dev, wide, rows, k, words);
                    encode(dev, words, k, to, side);
                }
            });
        });
    }

    /// Memory it takes, all of which a product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    fn check(&self, dev: &Cpu) {
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
    // The carry runs into the exponent beyond the largest finite value, which gives infinity.
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() {
        (bits >> 16) | QUIET
    } else {
        rounded
    }
}

simd_fn! {
/// Rounds the values of each of `depth` steps and puts two in a word, those of the first half of the columns
/// in the low halves. Columns from `rows` on, whose results are not needed, become as the first one.
///
/// # Safety
/// Both are valid for all steps of a panel.
fn round<V: Tile>(wide: *mut f32, rows: usize, depth: usize, words: *mut u32) {
    let half = V::SPLIT_NR / 2;
    for p in 0..depth {
        let from = wide.add(2 * p * half);
        for column in rows..2 * half {
            *from.add(column) = *from;
        }
        for i in 0..half {
            let (low, high) = (*from.add(i), *from.add(half + i));
            *words.add(p * half + i) = bf16_bits(low) | (bf16_bits(high) << 16);
        }
    }
}
}

impl Cpu {
    /// `y (+)= x · wᵀ` with `x` `[m, k]`, `w` `[n, k]` rounded to bfloat16, `y` `[m, n]`.
    pub fn matmul_bf16(&self, x: Mat<'_>, w: &PackedBf16, y: MatMut<'_>, accumulate: bool) {
        w.check(self);
        assert_eq!(
            (x.cols(), y.cols()),
            (w.k, w.n),
            "columns of x and y, weights [n, k]"
        );
        self.multiply(x, Source::Split(&w.data), y, accumulate);
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

    fn devices() -> impl Iterator<Item = Cpu> {
        let sets = KernelSet::available_f32().into_iter();
        sets.flat_map(|set| [1, 3].map(|threads| Cpu::new(set, threads)))
    }

    /// Weights of which some or all blocks have high bytes that no table of 16 holds.
    fn weights(kind: usize, len: usize, seed: u32) -> Vec<f32> {
        let mut w = values(len, seed);
        let odd = [
            0.0,
            -0.0,
            f32::from_bits(1),
            1e-40,
            3e38,
            -1e-30,
            f32::INFINITY,
            f32::NAN,
        ];
        for (i, v) in w.iter_mut().enumerate() {
            let bits = (i as u32).wrapping_add(seed).wrapping_mul(2_654_435_761);
            match kind {
                0 => *v *= 0.05,
                1 if bits.is_multiple_of(97) => *v = odd[(bits >> 8) as usize % odd.len()],
                2 => *v = f32::from_bits(bits),
                3 => *v = 0.75,
                4 => *v = 0.0,
                _ => {}
            }
        }
        w
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        /// Exactly the `f32` product with the rounded weights, at any size and of any weights, added or not.
        #[test]
        fn products_are_those_of_the_rounded_weights(
            m in prop_oneof![1usize..36, 190usize..200],
            n in 1usize..200,
            k in prop_oneof![1usize..300, 760usize..800],
            kind in 0usize..6,
            accumulate: bool,
            seed in 0u32..1000,
        ) {
            let (x, w) = (values(m * k, seed), weights(kind, n * k, seed + 1));
            for dev in devices() {
                let x = Mat::new(&x, m, k);
                let (mut found, mut expected) = (vec![0.5; m * n], vec![0.5; m * n]);
                let packed = PackedBf16::pack(&dev, &w, n, k);
                dev.matmul_bf16(x, &packed, MatMut::new(&mut found, m, n), accumulate);
                let wide = PackedWeights::pack(&dev, &rounded(&w), n, k);
                dev.matmul_packed(x, &wide, MatMut::new(&mut expected, m, n), accumulate);
                // The instructions choose which of several NaNs results.
                let bits = |y: Vec<f32>| -> Vec<u32> {
                    y.into_iter().map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() }).collect()
                };
                prop_assert_eq!(bits(found), bits(expected), "{}", dev.kernels());
            }
        }
    }

    #[test]
    fn weights_of_like_sizes_take_twelve_bits_and_any_others_at_most_twenty() {
        for dev in devices() {
            let (n, k) = (192, 576);
            let bits = |kind: usize| {
                let packed = PackedBf16::pack(&dev, &weights(kind, n * k, 5), n, k);
                packed.bytes() as f64 * 8.0 / (n * k) as f64
            };
            // Tables and the ends of lists, a share that is larger in narrow panels.
            assert!((12.0..12.2).contains(&bits(3)), "{}", bits(3));
            assert!((12.0..12.9).contains(&bits(0)), "{}", bits(0));
            assert!((19.0..23.0).contains(&bits(2)), "{}", bits(2));
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
        // A payload in only the low bits would round to infinity.
        assert!(rounded(&[f32::from_bits(0x7f80_0001)])[0].is_nan());
    }

    #[test]
    fn repacking_replaces_all_weights() {
        let dev = Cpu::new(KernelSet::detect_f32(), 2);
        let (n, k) = (70, 101);
        let x = values(k, 3);
        let product = |w: &PackedBf16| {
            let mut y = vec![0.0; n];
            dev.matmul_bf16(Mat::new(&x, 1, k), w, MatMut::new(&mut y, 1, n), false);
            y
        };
        let mut packed = PackedBf16::pack(&dev, &weights(0, n * k, 1), n, k);
        // More blocks with their own high bytes, then fewer.
        for (kind, seed) in [(5, 2), (4, 3), (0, 4)] {
            let new = weights(kind, n * k, seed);
            packed.repack(&dev, &new);
            let fresh = PackedBf16::pack(&dev, &new, n, k);
            assert_eq!(product(&packed), product(&fresh));
            assert_eq!(packed.bytes(), fresh.bytes());
        }
    }
}
