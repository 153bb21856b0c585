//! Operands in the order in which tiles read them, rounded to bfloat16 on the way.
//!
//! Both operands are cut into strips of 16 (rows of `a`, columns of `b`; here *lanes*) by 32 steps of the
//! contracted index. A word holds the values of two steps. A tile of `a` is `[lane, pair of steps]`, a tile
//! of `b` `[pair of steps, lane]`: packing one is packing the other, transposed.

use std::arch::x86_64::*;

use super::model::DEPTH;
use super::tile::SIDE;
use crate::simd::{F32x16, Vector};

/// Words of a tile.
pub(super) const TILE_WORDS: usize = SIDE * DEPTH / 2;

/// A strip of an operand: the value of lane `i` at step `p` lies at `src + i * lane_stride + p *
/// step_stride`. One of both strides is 1.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strip {
    pub(super) src: *const f32,
    pub(super) lane_stride: usize,
    pub(super) step_stride: usize,
    /// Lanes that exist, at most [`SIDE`]; the others become 0.
    pub(super) lanes: usize,
    pub(super) steps: usize,
}

/// Orientation of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// `[lane, pair]`
    Left,
    /// `[pair, lane]`
    Right,
}

/// 16 values rounded to 16 bits each.
trait Round {
    /// # Safety
    /// The CPU has the instructions of the implementation.
    unsafe fn halves(v: __m512) -> __m256i;
}

/// Rounds by integer arithmetic, on every CPU with AVX-512.
struct Integer;

impl Round for Integer {
    #[inline(always)]
    unsafe fn halves(v: __m512) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff));
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);
            let rounded = _mm512_add_epi32(bits, bias);
            // NaN stays, quiet; what is not a normal number becomes 0 of its sign.
            let nan = _mm512_cmpgt_epi32_mask(size, _mm512_set1_epi32(0x7f80_0000));
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let rounded = _mm512_mask_mov_epi32(rounded, nan, quiet);
            let tiny = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x0080_0000));
            let sign = _mm512_andnot_si512(_mm512_set1_epi32(0x7fff_ffff), bits);
            let rounded = _mm512_mask_mov_epi32(rounded, tiny, sign);
            _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded))
        }
    }
}

/// Rounds by the dedicated instruction.
struct Native;

impl Round for Native {
    #[inline(always)]
    unsafe fn halves(v: __m512) -> __m256i {
        // SAFETY: the caller's promise; both types are 256 bits of anything.
        unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v)) }
    }
}

/// Packs the tiles of a strip at `dst`, `tile_stride` words from one to the next. Steps that the last tile
/// lacks become 0.
///
/// # Safety
/// The CPU has AVX-512 F, BW, DQ and VL; the strip is readable and the tiles writable.
pub(super) unsafe fn pack(x: &Strip, side: Side, dst: *mut u32, tile_stride: usize) {
    assert!(
        x.lane_stride == 1 || x.step_stride == 1,
        "strides {} and {}: one has to be 1",
        x.lane_stride,
        x.step_stride
    );
    // SAFETY: the caller's promises.
    unsafe {
        if is_x86_feature_detected!("avx512bf16") {
            pack_native(x, side, dst, tile_stride);
        } else {
            pack_integer(x, side, dst, tile_stride);
        }
    }
}

/// # Safety
/// Same as for [`pack`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn pack_integer(x: &Strip, side: Side, dst: *mut u32, tile_stride: usize) {
    // SAFETY: the caller's promises.
    unsafe { pack_with::<Integer>(x, side, dst, tile_stride) }
}

/// # Safety
/// Same as for [`pack`], and the CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack_native(x: &Strip, side: Side, dst: *mut u32, tile_stride: usize) {
    // SAFETY: the caller's promises.
    unsafe { pack_with::<Native>(x, side, dst, tile_stride) }
}

/// The first `left` of 16 values at `p`, the others 0.
#[inline(always)]
unsafe fn load(p: *const f32, left: usize) -> __m512 {
    let mask = if left >= SIDE { !0 } else { (1 << left) - 1 };
    // SAFETY: the caller promises as many values; masked lanes are not read.
    unsafe { _mm512_maskz_loadu_ps(mask, p) }
}

#[inline(always)]
unsafe fn pack_with<R: Round>(x: &Strip, side: Side, dst: *mut u32, tile_stride: usize) {
    let by_lane = x.step_stride == 1;
    let straight = by_lane == (side == Side::Left);
    let mut turned = [0u32; TILE_WORDS];
    for tile in 0..x.steps.div_ceil(DEPTH) {
        let to = dst.wrapping_add(tile * tile_stride);
        let rows = if straight { to } else { turned.as_mut_ptr() };
        // SAFETY: the strip is readable, `rows` holds a tile; 16 lanes of 32 bits are a row of either.
        unsafe {
            if by_lane {
                lanes::<R>(x, tile * DEPTH, rows);
            } else {
                pairs::<R>(x, tile * DEPTH, rows);
            }
            if !straight {
                // Moves bits, whatever they mean.
                F32x16::transpose(turned.as_ptr().cast(), SIDE, SIDE, to.cast(), SIDE);
            }
        }
    }
}

/// Writes `[lane, pair]` from steps that lie side by side.
#[inline(always)]
unsafe fn lanes<R: Round>(x: &Strip, first: usize, rows: *mut u32) {
    let left = (x.steps - first).min(DEPTH);
    for lane in 0..SIDE {
        // SAFETY: lanes that exist have `left` values there; the row has 16 words.
        unsafe {
            let row = if lane < x.lanes {
                let from = x.src.add(lane * x.lane_stride + first);
                let low = R::halves(load(from, left));
                let high = R::halves(load(from.wrapping_add(SIDE), left.saturating_sub(SIDE)));
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
            } else {
                _mm512_setzero_si512()
            };
            _mm512_storeu_epi32(rows.add(lane * SIDE).cast(), row);
        }
    }
}

/// Writes `[pair, lane]` from lanes that lie side by side.
#[inline(always)]
unsafe fn pairs<R: Round>(x: &Strip, first: usize, rows: *mut u32) {
    for pair in 0..SIDE {
        let step = first + 2 * pair;
        // SAFETY: steps that exist have `lanes` values there; the row has 16 words.
        unsafe {
            let half = |step: usize| {
                let lanes = if step < x.steps { x.lanes } else { 0 };
                R::halves(load(x.src.wrapping_add(step * x.step_stride), lanes))
            };
            let (even, odd) = (half(step), half(step + 1));
            let even = _mm512_cvtepu16_epi32(even);
            let odd = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(odd));
            _mm512_storeu_epi32(rows.add(pair * SIDE).cast(), _mm512_or_si512(even, odd));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::model;
    use super::*;
    use crate::cpu::KernelSet;

    /// Every strip shape against the rounding of the model, in both directions.
    fn check(pack: unsafe fn(&Strip, Side, *mut u32, usize), values: &[f32]) {
        for (lanes, steps, by_lane) in [
            (16, 64, true),
            (16, 64, false),
            (1, 1, true),
            (5, 33, true),
            (5, 33, false),
            (11, 47, false),
            (16, 31, true),
        ] {
            let (lane_stride, step_stride) = if by_lane {
                (steps + 3, 1)
            } else {
                (1, lanes + 2)
            };
            let strip = Strip {
                src: values.as_ptr(),
                lane_stride,
                step_stride,
                lanes,
                steps,
            };
            let tiles = steps.div_ceil(DEPTH);
            for side in [Side::Left, Side::Right] {
                let mut words = vec![7u32; tiles * TILE_WORDS];
                // SAFETY: strides keep the strip inside `values`; the tiles have their space.
                unsafe { pack(&strip, side, words.as_mut_ptr(), TILE_WORDS) };
                for lane in 0..SIDE {
                    for step in 0..tiles * DEPTH {
                        let pair = step % DEPTH / 2;
                        let at = match side {
                            Side::Left => lane * SIDE + pair,
                            Side::Right => pair * SIDE + lane,
                        };
                        let word = words[step / DEPTH * TILE_WORDS + at];
                        let found = if step % 2 == 0 {
                            word << 16
                        } else {
                            word & 0xffff_0000
                        };
                        let inside = lane < lanes && step < steps;
                        let value = values[lane * lane_stride * usize::from(inside)
                            + step * step_stride * usize::from(inside)];
                        let expected = if inside { model::round(value) } else { 0.0 };
                        assert_eq!(
                            found,
                            expected.to_bits(),
                            "{strip:?} {side:?} {lane} {step}"
                        );
                    }
                }
            }
        }
    }

    fn values() -> Vec<f32> {
        let special = [
            0.0,
            -0.0,
            f32::MIN_POSITIVE,
            -f32::MIN_POSITIVE / 3.0,
            f32::MAX,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::from_bits(0x7f80_0001),
            f32::from_bits(0x007f_ffff),
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
        ];
        let mut state = 1u32;
        (0..4096)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match i % 5 {
                    0 => special[i / 5 % special.len()],
                    // Any bits, except for NaN, whose payload has no meaning.
                    _ => match f32::from_bits(state) {
                        x if x.is_nan() => 1.5,
                        x => x,
                    },
                }
            })
            .collect()
    }

    #[test]
    fn strips_are_rounded_and_put_in_place() {
        if KernelSet::Avx512.is_available() {
            check(pack_integer, &values());
        }
        if KernelSet::Avx512.is_available() && is_x86_feature_detected!("avx512bf16") {
            check(pack_native, &values());
        }
    }
}
