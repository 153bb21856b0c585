//! Vectors of NEON: two registers of four lanes, so that panels, blocks and sums have the layout and the
//! order of [`Lanes8`](super::Lanes8), and the bits too.
#![expect(
    unsafe_op_in_unsafe_fn,
    reason = "each body is one or few intrinsics under the contract of `Vector`"
)]

use std::arch::aarch64::*;

use super::{HIGH_HALF, Vector, larger};

/// 8 lanes: 0 to 3, then 4 to 7.
#[derive(Clone, Copy)]
pub(crate) struct Neon8(float32x4_t, float32x4_t);

impl Neon8 {
    /// Both registers by an instruction with one operand.
    #[inline(always)]
    fn map(self, f: impl Fn(float32x4_t) -> float32x4_t) -> Self {
        Self(f(self.0), f(self.1))
    }

    /// Both registers by an instruction with two operands.
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self(f(self.0, b.0), f(self.1, b.1))
    }

    /// 16 bytes in the first four lanes, and again in the others.
    #[inline(always)]
    unsafe fn of_bytes(bytes: uint8x16_t) -> Self {
        let lanes = vreinterpretq_f32_u8(bytes);
        Self(lanes, lanes)
    }

    /// The bytes in the first four lanes.
    #[inline(always)]
    unsafe fn bytes(self) -> uint8x16_t {
        vreinterpretq_u8_f32(self.0)
    }
}

/// `2^n` for integral lanes in -126..=127.
#[inline(always)]
unsafe fn power(n: int32x4_t) -> float32x4_t {
    vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127))))
}

impl Vector for Neon8 {
    const LANES: usize = 8;

    methods! {
        fn splat(x: f32) -> Self = Self(vdupq_n_f32(x), vdupq_n_f32(x));
        fn broadcast(p: *const f32) -> Self = Self(vld1q_dup_f32(p), vld1q_dup_f32(p));
        fn load(p: *const f32) -> Self = Self(vld1q_f32(p), vld1q_f32(p.add(4)));
        fn add(self, b: Self) -> Self = self.zip(b, |a, b| vaddq_f32(a, b));
        fn sub(self, b: Self) -> Self = self.zip(b, |a, b| vsubq_f32(a, b));
        fn mul(self, b: Self) -> Self = self.zip(b, |a, b| vmulq_f32(a, b));
        fn div(self, b: Self) -> Self = self.zip(b, |a, b| vdivq_f32(a, b));
        // `vmaxq` answers NaN when either operand is one; only that of `self` is to be kept.
        fn max(self, b: Self) -> Self = self.zip(b, |a, b| vbslq_f32(vcgtq_f32(b, a), b, a));
        fn min(self, b: Self) -> Self = self.zip(b, |a, b| vbslq_f32(vcltq_f32(b, a), b, a));
        fn sqrt(self) -> Self = self.map(|a| vsqrtq_f32(a));
        fn fma(self, b: Self, c: Self) -> Self =
            Self(vfmaq_f32(c.0, self.0, b.0), vfmaq_f32(c.1, self.1, b.1));
        fn round(self) -> Self = self.map(|a| vrndnq_f32(a));
        fn table(table: &[u8; 16]) -> Self = Self::of_bytes(vld1q_u8(table.as_ptr()));
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        vst1q_f32(p, self.0);
        vst1q_f32(p.add(4), self.1);
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut lanes = [0.0; 8];
        std::ptr::copy_nonoverlapping(p, lanes.as_mut_ptr(), n);
        Self::load(lanes.as_ptr())
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        let mut lanes = [0.0; 8];
        self.store(lanes.as_mut_ptr());
        std::ptr::copy_nonoverlapping(lanes.as_ptr(), p, n);
    }
    #[inline(always)]
    unsafe fn select(self, bits: u32, other: Self) -> Self {
        const LANE: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
        let own = vdupq_n_u32(bits);
        let low = vtstq_u32(own, vld1q_u32(LANE.as_ptr()));
        let high = vtstq_u32(own, vld1q_u32(LANE.as_ptr().add(4)));
        Self(
            vbslq_f32(low, self.0, other.0),
            vbslq_f32(high, self.1, other.1),
        )
    }
    #[inline(always)]
    unsafe fn scale2(self, n: Self) -> Self {
        // The scaling has two factors: a single one could be subnormal or infinite where the result is
        // neither.
        self.zip(n, |a, n| {
            let n = vcvtq_s32_f32(n);
            let half = vshrq_n_s32::<1>(n);
            vmulq_f32(vmulq_f32(a, power(half)), power(vsubq_s32(n, half)))
        })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let quad = vaddq_f32(self.0, self.1);
        let pair = vadd_f32(vget_low_f32(quad), vget_high_f32(quad));
        vget_lane_f32::<0>(pair) + vget_lane_f32::<1>(pair)
    }
    #[inline(always)]
    unsafe fn max_lane(self) -> f32 {
        let lanes: [f32; 8] = std::mem::transmute(self);
        lanes.into_iter().fold(f32::NEG_INFINITY, larger)
    }
    #[inline(always)]
    unsafe fn high_bytes(block: *const u8, table: Self) -> [Self; 2] {
        let (table, index) = (table.bytes(), vld1q_u8(block.add(32)));
        let low = vqtbl1q_u8(table, vandq_u8(index, vdupq_n_u8(15)));
        let high = vqtbl1q_u8(table, vshrq_n_u8::<4>(index));
        [Self::of_bytes(low), Self::of_bytes(high)]
    }
    #[inline(always)]
    unsafe fn join(block: *const u8, high: [Self; 2]) -> [Self; 4] {
        let (first, last) = (vld1q_u8(block), vld1q_u8(block.add(16)));
        let (a, b) = (high[0].bytes(), high[1].bytes());
        [
            Self::of_bytes(vzip1q_u8(first, a)),
            Self::of_bytes(vzip2q_u8(first, a)),
            Self::of_bytes(vzip1q_u8(last, b)),
            Self::of_bytes(vzip2q_u8(last, b)),
        ]
    }
    #[inline(always)]
    unsafe fn half(self, j: usize) -> Self {
        debug_assert!(j == 0, "words of one vector of values");
        let words = vreinterpretq_u32_f32(self.0);
        let high = vandq_u32(words, vdupq_n_u32(HIGH_HALF));
        Self(
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(words)),
            vreinterpretq_f32_u32(high),
        )
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, rows: usize, dst: *mut f32, ldd: usize) {
        let mut t = [Self::splat(0.0); 8];
        for (r, row) in t.iter_mut().enumerate() {
            if r < rows {
                *row = Self::load(src.add(r * ld));
            }
        }
        let low = [
            transpose4([t[0].0, t[1].0, t[2].0, t[3].0]),
            transpose4([t[4].0, t[5].0, t[6].0, t[7].0]),
        ];
        let high = [
            transpose4([t[0].1, t[1].1, t[2].1, t[3].1]),
            transpose4([t[4].1, t[5].1, t[6].1, t[7].1]),
        ];
        for c in 0..4 {
            Self(low[0][c], low[1][c]).store_upto(dst.add(c * ldd), rows);
            Self(high[0][c], high[1][c]).store_upto(dst.add((4 + c) * ldd), rows);
        }
    }
}

/// 4x4 transpose: pairs of rows, then pairs of pairs.
#[inline(always)]
unsafe fn transpose4(r: [float32x4_t; 4]) -> [float32x4_t; 4] {
    let pair = |a, b| {
        (
            vreinterpretq_f64_f32(vtrn1q_f32(a, b)),
            vreinterpretq_f64_f32(vtrn2q_f32(a, b)),
        )
    };
    let (a, b) = (pair(r[0], r[1]), pair(r[2], r[3]));
    [
        vreinterpretq_f32_f64(vtrn1q_f64(a.0, b.0)),
        vreinterpretq_f32_f64(vtrn1q_f64(a.1, b.1)),
        vreinterpretq_f32_f64(vtrn2q_f64(a.0, b.0)),
        vreinterpretq_f32_f64(vtrn2q_f64(a.1, b.1)),
    ]
}
