//! Vectors of `f32` for kernels that are written once and compiled per instruction set.
//!
//! A kernel is a [`simd_fn!`](crate::simd::simd_fn) with a type parameter [`Vector`]; the macro makes
//! one copy per kernel set, each compiled with the instructions of the set. Methods of `Vector` are
//! `unsafe` since they must run only inside such a copy.
//!
//! Kernels must not hide vector arithmetic behind closures or functions that are not
//! `#[inline(always)]`: those would be compiled without the instructions.

/// A SIMD register of `f32` lanes.
///
/// # Safety
/// Every method may be called only where the CPU runs the kernel set of the type (which
/// [`simd_fn!`] ensures), and pointers must be valid for the lanes read or written. No alignment
/// is needed.
pub(crate) trait Vector: Copy {
    /// Number of lanes.
    const LANES: usize;

    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self;
    /// All lanes the value at `p`.
    unsafe fn broadcast(p: *const f32) -> Self;
    /// Reads `LANES` values.
    unsafe fn load(p: *const f32) -> Self;
    /// Writes `LANES` values.
    unsafe fn store(self, p: *mut f32);
    /// Reads the first `n <= LANES` values; other lanes are 0.
    unsafe fn load_part(p: *const f32, n: usize) -> Self;
    /// Writes the first `n <= LANES` lanes.
    unsafe fn store_part(self, p: *mut f32, n: usize);
    unsafe fn add(self, b: Self) -> Self;
    unsafe fn sub(self, b: Self) -> Self;
    unsafe fn mul(self, b: Self) -> Self;
    unsafe fn div(self, b: Self) -> Self;
    /// The larger value per lane. NaN in `self` is kept; the result for NaN in `b` is not promised.
    unsafe fn max(self, b: Self) -> Self;
    /// The smaller value per lane; NaN in `self` is kept.
    unsafe fn min(self, b: Self) -> Self;
    unsafe fn sqrt(self) -> Self;
    /// Lane `i` of `self` where bit `i` of `bits` is set, else that of `other`.
    unsafe fn select(self, bits: u32, other: Self) -> Self;
    /// `self * b + c`, rounded once where the CPU can.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Nearest integer, ties to even; valid for magnitudes below 2^22.
    unsafe fn round(self) -> Self;
    /// `self * 2^n` for integral `n` in -252..=252.
    unsafe fn scale2(self, n: Self) -> Self;
    /// Sum of the lanes in a fixed order.
    unsafe fn sum(self) -> f32;
    /// Largest lane.
    unsafe fn max_lane(self) -> f32;
    /// [`Vector::load_part`] of as many of `left > 0` values as there are lanes.
    #[inline(always)]
    unsafe fn load_upto(p: *const f32, left: usize) -> Self {
        // SAFETY: by the contract of the trait.
        unsafe {
            if left >= Self::LANES {
                Self::load(p)
            } else {
                Self::load_part(p, left)
            }
        }
    }
    /// [`Vector::store_part`] of as many of `left > 0` values as there are lanes.
    #[inline(always)]
    unsafe fn store_upto(self, p: *mut f32, left: usize) {
        // SAFETY: by the contract of the trait.
        unsafe {
            if left >= Self::LANES {
                self.store(p)
            } else {
                self.store_part(p, left)
            }
        }
    }
    /// Asks for the cache line of `p`, which need not be valid memory, up to L2.
    #[inline(always)]
    unsafe fn prefetch_l2(p: *const f32) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults; SSE is part of the base instruction set.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T1>(p.cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a prefetch never faults, and changes nothing.
        unsafe {
            std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) p, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = p;
    }
    /// Asks for the cache line of `p`, which need not be valid memory.
    #[inline(always)]
    unsafe fn prefetch(p: *const f32) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults; SSE is part of the base instruction set.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(p.cast());
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: a prefetch never faults, and changes nothing.
        unsafe {
            std::arch::asm!("prfm pldl1keep, [{0}]", in(reg) p, options(readonly, nostack, preserves_flags));
        }
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let _ = p;
    }
    /// A table of bytes for [`Vector::high_bytes`].
    unsafe fn table(table: &[u8; 16]) -> Self;
    /// Looks up the high bytes of a block of values of 12 bits (`gemm::split`) in its panel's table.
    unsafe fn high_bytes(block: *const u8, table: Self) -> [Self; 2];
    /// Puts the low bytes of a block and its high bytes together: the words of four steps.
    unsafe fn join(block: *const u8, high: [Self; 2]) -> [Self; 4];
    /// The values in the low (`j` 0) or high halves (1) of words, as `f32`. Both halves, one after the other,
    /// if a step has only one vector of values ([`Lanes8`] and NEON).
    unsafe fn half(self, j: usize) -> Self;
    /// Writes the transpose of `rows <= LANES` rows of `LANES` values: value `p` of row `r` goes to
    /// `dst[p * ldd + r]`. Writes exactly `rows` values in each of the `LANES` destination rows.
    unsafe fn transpose(src: *const f32, ld: usize, rows: usize, dst: *mut f32, ldd: usize);
}

/// Methods of [`Vector`] that are one expression: `fn name(arguments) -> result = expression;`.
macro_rules! methods {
    ($(fn $name:ident($($arg:tt)*) -> $ret:ty = $value:expr;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name($($arg)*) -> $ret {
                $value
            }
        )*
    };
}

/// Bits of a word that hold its second value of 16 bits.
const HIGH_HALF: u32 = 0xffff_0000;

/// Portable lanes; compilers turn the loops into the vectors of the base instruction set.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
pub(crate) struct Lanes8([f32; 8]);

macro_rules! lanes {
    (|$i:ident| $value:expr) => {{
        let mut out = [0.0f32; 8];
        let mut $i = 0;
        while $i < 8 {
            out[$i] = $value;
            $i += 1;
        }
        Lanes8(out)
    }};
}

/// The larger value; `a` where either is NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// One rounding where the target has the instruction; elsewhere two roundings, since the library call
/// would cost a hundred cycles.
#[inline(always)]
pub(crate) fn fma1(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

impl Lanes8 {
    /// A byte of the first four lanes.
    #[inline(always)]
    fn byte(self, at: usize) -> u8 {
        self.0[at / 4].to_bits().to_le_bytes()[at % 4]
    }

    /// The bytes in the first four lanes.
    #[inline(always)]
    fn of_bytes(bytes: &[u8; 16]) -> Self {
        lanes!(|i| {
            let at = i % 4 * 4;
            f32::from_bits(u32::from_le_bytes([
                bytes[at],
                bytes[at + 1],
                bytes[at + 2],
                bytes[at + 3],
            ]))
        })
    }
}

impl Vector for Lanes8 {
    const LANES: usize = 8;

    methods! {
        fn splat(x: f32) -> Self = Self([x; 8]);
        fn add(self, b: Self) -> Self = lanes!(|i| self.0[i] + b.0[i]);
        fn sub(self, b: Self) -> Self = lanes!(|i| self.0[i] - b.0[i]);
        fn mul(self, b: Self) -> Self = lanes!(|i| self.0[i] * b.0[i]);
        fn div(self, b: Self) -> Self = lanes!(|i| self.0[i] / b.0[i]);
        fn max(self, b: Self) -> Self = lanes!(|i| larger(self.0[i], b.0[i]));
        fn min(self, b: Self) -> Self =
            lanes!(|i| if b.0[i] < self.0[i] { b.0[i] } else { self.0[i] });
        fn sqrt(self) -> Self = lanes!(|i| self.0[i].sqrt());
        fn select(self, bits: u32, other: Self) -> Self =
            lanes!(|i| if bits >> i & 1 == 1 { self.0[i] } else { other.0[i] });
        fn fma(self, b: Self, c: Self) -> Self = lanes!(|i| fma1(self.0[i], b.0[i], c.0[i]));
        fn max_lane(self) -> f32 = self.0.into_iter().fold(f32::NEG_INFINITY, larger);
        fn table(table: &[u8; 16]) -> Self = Self::of_bytes(table);
    }

    #[inline(always)]
    unsafe fn broadcast(p: *const f32) -> Self {
        // SAFETY: valid for a read by the contract of the trait.
        Self([unsafe { p.read_unaligned() }; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: valid for 8 reads by the contract of the trait.
        unsafe { Self(p.cast::<[f32; 8]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: valid for 8 writes by the contract of the trait.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut out = [0.0; 8];
        // SAFETY: `p` is valid for `n <= 8` reads by the contract of the trait.
        unsafe { std::ptr::copy_nonoverlapping(p, out.as_mut_ptr(), n) };
        Self(out)
    }
    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        // SAFETY: `p` is valid for `n <= 8` writes by the contract of the trait.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), p, n) };
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        // Adding 1.5 * 2^23 leaves no bits for the fraction, and rounds ties to even.
        const MAGIC: f32 = 12_582_912.0;
        lanes!(|i| (self.0[i] + MAGIC) - MAGIC)
    }
    #[inline(always)]
    unsafe fn scale2(self, n: Self) -> Self {
        lanes!(|i| {
            let n = n.0[i] as i32;
            let half = n >> 1;
            let low = f32::from_bits(((half + 127) as u32) << 23);
            let high = f32::from_bits(((n - half + 127) as u32) << 23);
            self.0[i] * low * high
        })
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let a = self.0;
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    unsafe fn high_bytes(block: *const u8, table: Self) -> [Self; 2] {
        [0, 4].map(|shift| {
            let mut high = [0; 16];
            for (i, byte) in high.iter_mut().enumerate() {
                // SAFETY: a block has 48 bytes by the contract of the trait.
                let index = unsafe { *block.add(32 + i) } >> shift & 15;
                *byte = table.byte(index.into());
            }
            Self::of_bytes(&high)
        })
    }
    #[inline(always)]
    unsafe fn join(block: *const u8, high: [Self; 2]) -> [Self; 4] {
        let mut steps = [Self([0.0; 8]); 4];
        for (s, step) in steps.iter_mut().enumerate() {
            for i in 0..4 {
                let value = |h: usize| {
                    let at = s % 2 * 8 + 2 * i + h;
                    // SAFETY: a block has 48 bytes by the contract of the trait.
                    let low = unsafe { *block.add(s / 2 * 16 + at) };
                    let high = high[s / 2].byte(at);
                    u32::from(low) | u32::from(high) << 8
                };
                step.0[i] = f32::from_bits(value(0) | value(1) << 16);
            }
        }
        steps
    }
    #[inline(always)]
    unsafe fn half(self, j: usize) -> Self {
        debug_assert!(j == 0, "words of one vector of values");
        lanes!(|i| {
            let word = self.0[i % 4].to_bits();
            f32::from_bits(if i < 4 { word << 16 } else { word & HIGH_HALF })
        })
    }
    #[inline(always)]
    unsafe fn transpose(src: *const f32, ld: usize, rows: usize, dst: *mut f32, ldd: usize) {
        for p in 0..8 {
            for r in 0..rows {
                // SAFETY: inside the block that the contract of the trait names.
                unsafe { *dst.add(p * ldd + r) = *src.add(r * ld + p) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{F32x8, F32x16};

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub(crate) use neon::Neon8;

#[cfg(target_arch = "aarch64")]
mod neon;

/// `e^x` per lane. Relative error at most 2 units in the last place for results that are normal
/// numbers (tested), absolute 1e-45 below; 0 under -104, infinity above 88.73, NaN stays.
///
/// Cody-Waite reduction `x = n ln 2 + r`, then the minimax polynomial of Cephes `expf` on `r`.
///
/// # Safety
/// See [`Vector`].
#[inline(always)]
pub(crate) unsafe fn exp<V: Vector>(x: V) -> V {
    // SAFETY: the caller runs inside a copy for the kernel set of `V`.
    unsafe {
        let x = x.max(V::splat(-104.0)).min(V::splat(89.0));
        let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts; the first has 10 bits, so that n times it is exact.
        let r = n.fma(V::splat(-355.0 / 512.0), x);
        let r = n.fma(V::splat(2.121_944_4e-4), r);
        let mut p = V::splat(1.987_569_1e-4);
        for c in [
            1.398_199_9e-3,
            8.333_452e-3,
            4.166_579_6e-2,
            1.666_666_5e-1,
            0.5,
        ] {
            p = p.fma(r, V::splat(c));
        }
        p.fma(r.mul(r), r).add(V::splat(1.0)).scale2(n)
    }
}

/// `1 / (1 + e^-x)` per lane.
///
/// # Safety
/// See [`Vector`].
#[inline(always)]
pub(crate) unsafe fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: the caller runs inside a copy for the kernel set of `V`.
    unsafe {
        let one = V::splat(1.0);
        one.div(one.add(exp(V::splat(0.0).sub(x))))
    }
}

/// Defines a function that exists once per kernel set:
/// `simd_fn! { pub(crate) fn name<V>(a: A, ...) -> R { body } }` makes
/// `unsafe fn name(dev: &Cpu, a: A, ...) -> R`, whose body may use the [`Vector`] type `V`.
/// The whole body is an unsafe context; the function is as safe as its pointers.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$V:ident $(: $bound:path)?>($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis unsafe fn $name(dev: &$crate::cpu::Cpu, $($arg: $ty),*) $(-> $ret)? {
            use $crate::simd::Vector;
            #[inline(always)]
            unsafe fn body<$V: Vector $(+ $bound)?>($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: by the contract of the outer function.
                unsafe { $body }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features of the vector are those of this function.
                unsafe { body::<$crate::simd::F32x16>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the features of the vector are those of this function.
                unsafe { body::<$crate::simd::F32x8>($($arg),*) }
            }
            // SAFETY: a device exists only when the CPU runs its kernel set.
            unsafe {
                match dev.kernels() {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::KernelSet::Avx512 | $crate::cpu::KernelSet::Amx => avx512($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::KernelSet::Avx2 => avx2($($arg),*),
                    // NEON is part of the base instruction set.
                    #[cfg(target_arch = "aarch64")]
                    $crate::cpu::KernelSet::Neon => body::<$crate::simd::Neon8>($($arg),*),
                    _ => body::<$crate::simd::Lanes8>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use simd_fn;

#[cfg(test)]
mod tests {
    use super::{exp, sigmoid};
    use crate::cpu::{Cpu, KernelSet};

    simd_fn! {
    fn exp_all<V>(x: &[f32], y: &mut [f32]) {
        let mut j = 0;
        while j < x.len() {
            let v = exp(V::load_upto(x.as_ptr().add(j), x.len() - j));
            v.store_upto(y.as_mut_ptr().add(j), x.len() - j);
            j += V::LANES;
        }
    }
    }

    simd_fn! {
    fn probe<V>(x: &[f32; 16], out: &mut Vec<f32>) {
        let v = V::load(x.as_ptr());
        out.extend([v.sum(), v.max_lane()]);
        let mut lanes = [0.0f32; 16];
        for (i, v) in [v.round(), v.sqrt(), v.max(V::splat(2.0)), v.min(V::splat(2.0)), sigmoid(v)]
            .into_iter()
            .enumerate()
        {
            v.store(lanes.as_mut_ptr());
            out.push(lanes[i + 1]);
        }
        v.store_part(lanes.as_mut_ptr(), 3);
        V::load_part(lanes.as_ptr(), 5).store(lanes.as_mut_ptr());
        out.extend(&lanes[..8]);
    }
    }

    simd_fn! {
    fn transpose_block<V>(rows: usize, src: &[f32], dst: &mut [f32]) -> usize {
        V::transpose(src.as_ptr(), 20, rows, dst.as_mut_ptr(), 19);
        V::LANES
    }
    }

    fn devices() -> impl Iterator<Item = Cpu> {
        KernelSet::available_f32()
            .into_iter()
            .map(|set| Cpu::new(set, 1))
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x: Vec<f32> = (0..400_000)
            .map(|i| -87.3 + i as f32 * (176.0 / 400_000.0))
            .collect();
        x.extend((0..20_000).map(|i| (i as f32 - 10_000.0) * 1e-5));
        for dev in devices() {
            let mut y = vec![0.0; x.len()];
            // SAFETY: equal lengths.
            unsafe { exp_all(&dev, &x, &mut y) };
            for (&x, &y) in x.iter().zip(&y) {
                let want = f64::from(x).exp();
                let unit = 2f64.powf(want.log2().floor() - 23.0);
                assert!(
                    (f64::from(y) - want).abs() <= 2.0 * unit,
                    "{} exp({x}) is {y}",
                    dev.kernels()
                );
            }
        }
    }

    #[test]
    fn exp_has_the_right_ends() {
        let x = [
            f32::NEG_INFINITY,
            -1000.0,
            -104.5,
            0.0,
            88.73,
            1000.0,
            f32::INFINITY,
            f32::NAN,
            -95.0,
        ];
        for dev in devices() {
            let mut y = [7.0; 9];
            // SAFETY: equal lengths.
            unsafe { exp_all(&dev, &x, &mut y) };
            assert_eq!(
                y[..7],
                [
                    0.0,
                    0.0,
                    0.0,
                    1.0,
                    f32::INFINITY,
                    f32::INFINITY,
                    f32::INFINITY
                ]
            );
            assert!(y[7].is_nan());
            assert!(
                (f64::from(y[8]) - (-95f64).exp()).abs() < 2e-45,
                "subnormal {}",
                y[8]
            );
        }
    }

    #[test]
    fn sets_agree_lane_by_lane() {
        let mut x = [0.0f32; 16];
        for (i, x) in x.iter_mut().enumerate().take(8) {
            *x = i as f32 + 0.5;
        }
        let results: Vec<Vec<f32>> = devices()
            .map(|dev| {
                let mut out = Vec::new();
                // SAFETY: 16 values cover every vector.
                unsafe { probe(&dev, &x, &mut out) };
                out
            })
            .collect();
        // Sum, largest, round(1.5), sqrt(2.5), max(3.5, 2), min(4.5, 2), sigmoid(5.5).
        let want = [
            32.0,
            7.5,
            2.0,
            2.5f32.sqrt(),
            3.5,
            2.0,
            1.0 / (1.0 + (-5.5f32).exp()),
        ];
        for result in &results {
            assert!(
                result.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6),
                "{result:?}"
            );
            // Lanes 0..3 came from the partial store, 3 and 4 from before, the rest is cleared.
            assert_eq!(result[7..10], [0.5, 1.5, 2.5]);
            assert_eq!(result[12..], [0.0; 3]);
        }
    }

    #[test]
    fn transposes_write_their_rows_alone() {
        let src: Vec<f32> = (0..20 * 16).map(|i| i as f32).collect();
        for dev in devices() {
            for rows in 1..=16 {
                let mut dst = vec![-1.0; 19 * 16];
                let lanes = match dev.kernels() {
                    KernelSet::Avx512 | KernelSet::Amx => 16,
                    _ => 8,
                };
                if rows > lanes {
                    continue;
                }
                // SAFETY: source and destination cover 16 rows.
                let width = unsafe { transpose_block(&dev, rows, &src, &mut dst) };
                assert_eq!(width, lanes);
                for (i, &value) in dst.iter().enumerate() {
                    let (p, r) = (i / 19, i % 19);
                    let want = if p < lanes && r < rows {
                        src[r * 20 + p]
                    } else {
                        -1.0
                    };
                    assert_eq!(value, want, "{} {rows} rows at {p}, {r}", dev.kernels());
                }
            }
        }
    }
}
