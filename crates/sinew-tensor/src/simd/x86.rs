//! Vectors of AVX2 (8 lanes) and AVX-512 (16 lanes).
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "each body is one or few intrinsics under the contract of `Vector`"
)]

use std::arch::x86_64::*;

use super::{HIGH_HALF, Vector};

/// 16 lanes, AVX-512.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F32x16(__m512);

/// 8 lanes, AVX2 and FMA.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F32x8(__m256);

#[inline(always)]
fn mask16(n: usize) -> __mmask16 {
    debug_assert!(n <= 16);
    ((1u32 << n) - 1) as u16
}

impl Vector for F32x16 {
    const LANES: usize = 16;

    methods! {
        fn splat(x: f32) -> Self = Self(_mm512_set1_ps(x));
        fn broadcast(p: *const f32) -> Self = Self(_mm512_broadcastss_ps(_mm_load_ss(p)));
        // Same instruction as `_mm512_loadu_ps`, without the overlap check that builds with debug
        // assertions put into that one: it halves the speed of kernels. Stores below likewise.
        fn load(p: *const f32) -> Self = Self(_mm512_maskz_loadu_ps(!0, p));
        fn load_part(p: *const f32, n: usize) -> Self = Self(_mm512_maskz_loadu_ps(mask16(n), p));
        fn add(self, b: Self) -> Self = Self(_mm512_add_ps(self.0, b.0));
        fn sub(self, b: Self) -> Self = Self(_mm512_sub_ps(self.0, b.0));
        fn mul(self, b: Self) -> Self = Self(_mm512_mul_ps(self.0, b.0));
        fn div(self, b: Self) -> Self = Self(_mm512_div_ps(self.0, b.0));
        // `max` and `min` of x86 answer their second operand when one is NaN.
        fn max(self, b: Self) -> Self = Self(_mm512_max_ps(b.0, self.0));
        fn min(self, b: Self) -> Self = Self(_mm512_min_ps(b.0, self.0));
        fn sqrt(self) -> Self = Self(_mm512_sqrt_ps(self.0));
        fn fma(self, b: Self, c: Self) -> Self = Self(_mm512_fmadd_ps(self.0, b.0, c.0));
        fn round(self) -> Self = Self(_mm512_roundscale_ps::<8>(self.0));
        fn scale2(self, n: Self) -> Self = Self(_mm512_scalef_ps(self.0, n.0));
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        _mm512_mask_storeu_ps(p, !0, self.0);
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        _mm512_mask_storeu_ps(p, mask16(n), self.0);
    }
    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        Self(_mm512_mask_mov_ps(other.0, bits as __mmask16, self.0))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let low = _mm512_castps512_ps256(self.0);
        let high = _mm512_extractf32x8_ps::<1>(self.0);
        F32x8(_mm256_add_ps(low, high)).sum()
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let low = _mm512_castps512_ps256(self.0);
        let high = _mm512_extractf32x8_ps::<1>(self.0);
        F32x8(_mm256_max_ps(low, high)).max_lane()
    }
    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> Self {
        let table = _mm512_broadcast_i32x4(_mm_lddqu_si128(table.as_ptr().cast()));
        Self(_mm512_castsi512_ps(table))
    }
    #[inline(always)]
    unsafe fn high_bytes(block: *const u8, table: Self) -> [Self; 2] {
        let table = _mm512_castps_si512(table.0);
        let mask = _mm512_set1_epi8(15);
        let index = _mm512_maskz_loadu_epi32(!0, block.add(128).cast());
        let low = _mm512_shuffle_epi8(table, _mm512_and_si512(index, mask));
        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(index), mask);
        let high = _mm512_shuffle_epi8(table, high);
        [
            Self(_mm512_castsi512_ps(low)),
            Self(_mm512_castsi512_ps(high)),
        ]
    }
    #[inline(always)]
    unsafe fn join(block: *const u8, high: [Self; 2]) -> [Self; 4] {
        let (first, last) = (
            _mm512_maskz_loadu_epi32(!0, block.add(0).cast()),
            _mm512_maskz_loadu_epi32(!0, block.add(64).cast()),
        );
        let (a, b) = (
            _mm512_castps_si512(high[0].0),
            _mm512_castps_si512(high[1].0),
        );
        [
            Self(_mm512_castsi512_ps(_mm512_unpacklo_epi8(first, a))),
            Self(_mm512_castsi512_ps(_mm512_unpackhi_epi8(first, a))),
            Self(_mm512_castsi512_ps(_mm512_unpacklo_epi8(last, b))),
            Self(_mm512_castsi512_ps(_mm512_unpackhi_epi8(last, b))),
        ]
    }
    #[inline(always)]
    unsafe fn half(self, j: usize) -> Self {
        let words = _mm512_castps_si512(self.0);
        let halves = if j == 0 {
            _mm512_slli_epi32::<16>(words)
        } else {
            _mm512_and_si512(words, _mm512_set1_epi32(HIGH_HALF.cast_signed()))
        };
        Self(_mm512_castsi512_ps(halves))
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, rows: usize, dst: *mut f32, ldd: usize) {
        let zero = _mm512_setzero_ps();
        let mut t = [zero; 16];
        for (r, row) in t.iter_mut().enumerate() {
            if r < rows {
                *row = Self::load(src.add(r * ld)).0;
            }
        }
        let t = transpose16(t);
        let mask = mask16(rows);
        for (p, col) in t.iter().enumerate() {
            _mm512_mask_storeu_ps(dst.add(p * ldd), mask, *col);
        }
    }
}

/// 16x16 transpose in four rounds: pairs and quads inside 128-bit lanes, then the lanes themselves.
#[inline(always)]
unsafe fn transpose16(r: [__m512; 16]) -> [__m512; 16] {
    let mut a = r;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    // b[4g + c] holds, in lane l, column 4l + c of rows 4g..4g + 4.
    let mut b = a;
    for g in 0..4 {
        b[4 * g] = _mm512_shuffle_ps::<0x44>(a[4 * g], a[4 * g + 2]);
        b[4 * g + 1] = _mm512_shuffle_ps::<0xee>(a[4 * g], a[4 * g + 2]);
        b[4 * g + 2] = _mm512_shuffle_ps::<0x44>(a[4 * g + 1], a[4 * g + 3]);
        b[4 * g + 3] = _mm512_shuffle_ps::<0xee>(a[4 * g + 1], a[4 * g + 3]);
    }
    let mut out = b;
    for c in 0..4 {
        let x = _mm512_shuffle_f32x4::<0x88>(b[c], b[4 + c]);
        let y = _mm512_shuffle_f32x4::<0xdd>(b[c], b[4 + c]);
        let z = _mm512_shuffle_f32x4::<0x88>(b[8 + c], b[12 + c]);
        let w = _mm512_shuffle_f32x4::<0xdd>(b[8 + c], b[12 + c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(x, z);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(y, w);
        out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(x, z);
        out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(y, w);
    }
    out
}

/// Lane masks for `maskload`: eight set words, then eight clear ones.
static MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline(always)]
unsafe fn mask8(n: usize) -> __m256i {
    debug_assert!(n <= 8);
    _mm256_loadu_si256(MASKS.as_ptr().add(8 - n).cast())
}

impl Vector for F32x8 {
    const LANES: usize = 8;

    methods! {
        fn splat(x: f32) -> Self = Self(_mm256_set1_ps(x));
        fn broadcast(p: *const f32) -> Self = Self(_mm256_broadcastss_ps(_mm_load_ss(p)));
        // See the note at 16 lanes.
        fn load(p: *const f32) -> Self = Self(_mm256_castsi256_ps(_mm256_lddqu_si256(p.cast())));
        fn load_part(p: *const f32, n: usize) -> Self = Self(_mm256_maskload_ps(p, mask8(n)));
        fn add(self, b: Self) -> Self = Self(_mm256_add_ps(self.0, b.0));
        fn sub(self, b: Self) -> Self = Self(_mm256_sub_ps(self.0, b.0));
        fn mul(self, b: Self) -> Self = Self(_mm256_mul_ps(self.0, b.0));
        fn div(self, b: Self) -> Self = Self(_mm256_div_ps(self.0, b.0));
        fn max(self, b: Self) -> Self = Self(_mm256_max_ps(b.0, self.0));
        fn min(self, b: Self) -> Self = Self(_mm256_min_ps(b.0, self.0));
        fn sqrt(self) -> Self = Self(_mm256_sqrt_ps(self.0));
        fn fma(self, b: Self, c: Self) -> Self = Self(_mm256_fmadd_ps(self.0, b.0, c.0));
        fn round(self) -> Self = Self(_mm256_round_ps::<8>(self.0));
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        _mm256_maskstore_ps(p, _mm256_set1_epi32(-1), self.0);
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        _mm256_maskstore_ps(p, mask8(n), self.0);
    }
    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let own = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lane);
        let set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(own, lane));
        Self(_mm256_blendv_ps(other.0, self.0, set))
    }
    #[inline(always)]
    unsafe fn scale2(self, n: Self) -> Self {
        let n = _mm256_cvtps_epi32(n.0);
        let half = _mm256_srai_epi32::<1>(n);
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
        Self(_mm256_mul_ps(
            _mm256_mul_ps(self.0, _mm256_castsi256_ps(low)),
            _mm256_castsi256_ps(high),
        ))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let quad = _mm_add_ps(
            _mm256_castps256_ps128(self.0),
            _mm256_extractf128_ps::<1>(self.0),
        );
        let pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
        _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let quad = _mm_max_ps(
            _mm256_castps256_ps128(self.0),
            _mm256_extractf128_ps::<1>(self.0),
        );
        let pair = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
        _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)))
    }
    #[inline(always)]
    unsafe fn table(table: &[u8; 16]) -> Self {
        let table = _mm256_broadcastsi128_si256(_mm_lddqu_si128(table.as_ptr().cast()));
        Self(_mm256_castsi256_ps(table))
    }
    #[inline(always)]
    unsafe fn high_bytes(block: *const u8, table: Self) -> [Self; 2] {
        let table = _mm256_castps_si256(table.0);
        let mask = _mm256_set1_epi8(15);
        let index = _mm256_lddqu_si256(block.add(64).cast());
        let low = _mm256_shuffle_epi8(table, _mm256_and_si256(index, mask));
        let high = _mm256_and_si256(_mm256_srli_epi16::<4>(index), mask);
        let high = _mm256_shuffle_epi8(table, high);
        [
            Self(_mm256_castsi256_ps(low)),
            Self(_mm256_castsi256_ps(high)),
        ]
    }
    #[inline(always)]
    unsafe fn join(block: *const u8, high: [Self; 2]) -> [Self; 4] {
        let (first, last) = (
            _mm256_lddqu_si256(block.add(0).cast()),
            _mm256_lddqu_si256(block.add(32).cast()),
        );
        let (a, b) = (
            _mm256_castps_si256(high[0].0),
            _mm256_castps_si256(high[1].0),
        );
        [
            Self(_mm256_castsi256_ps(_mm256_unpacklo_epi8(first, a))),
            Self(_mm256_castsi256_ps(_mm256_unpackhi_epi8(first, a))),
            Self(_mm256_castsi256_ps(_mm256_unpacklo_epi8(last, b))),
            Self(_mm256_castsi256_ps(_mm256_unpackhi_epi8(last, b))),
        ]
    }
    #[inline(always)]
    unsafe fn half(self, j: usize) -> Self {
        let words = _mm256_castps_si256(self.0);
        let halves = if j == 0 {
            _mm256_slli_epi32::<16>(words)
        } else {
            _mm256_and_si256(words, _mm256_set1_epi32(HIGH_HALF.cast_signed()))
        };
        Self(_mm256_castsi256_ps(halves))
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, rows: usize, dst: *mut f32, ldd: usize) {
        let mut t = [_mm256_setzero_ps(); 8];
        for (r, row) in t.iter_mut().enumerate() {
            if r < rows {
                *row = Self::load(src.add(r * ld)).0;
            }
        }
        let mut a = t;
        for i in 0..4 {
            a[2 * i] = _mm256_unpacklo_ps(t[2 * i], t[2 * i + 1]);
            a[2 * i + 1] = _mm256_unpackhi_ps(t[2 * i], t[2 * i + 1]);
        }
        let mut b = a;
        for g in 0..2 {
            b[4 * g] = _mm256_shuffle_ps::<0x44>(a[4 * g], a[4 * g + 2]);
            b[4 * g + 1] = _mm256_shuffle_ps::<0xee>(a[4 * g], a[4 * g + 2]);
            b[4 * g + 2] = _mm256_shuffle_ps::<0x44>(a[4 * g + 1], a[4 * g + 3]);
            b[4 * g + 3] = _mm256_shuffle_ps::<0xee>(a[4 * g + 1], a[4 * g + 3]);
        }
        let mask = mask8(rows);
        for c in 0..4 {
            let low = _mm256_permute2f128_ps::<0x20>(b[c], b[4 + c]);
            let high = _mm256_permute2f128_ps::<0x31>(b[c], b[4 + c]);
            if rows == 8 {
                _mm256_storeu_ps(dst.add(c * ldd), low);
                _mm256_storeu_ps(dst.add((4 + c) * ldd), high);
            } else {
                _mm256_maskstore_ps(dst.add(c * ldd), mask, low);
                _mm256_maskstore_ps(dst.add((4 + c) * ldd), mask, high);
            }
        }
    }
}
