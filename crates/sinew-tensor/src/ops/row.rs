//! Passes over a row of logits in chunks: maxima, and sums of exponentials. The engine's sampler is
//! built on them.
//!
//! Elementwise loops over one chunk at a time, compiled once per instruction set; sums and maxima
//! fold a chunk in halves, which is elementwise too. No fused multiply-add and a fixed order of
//! additions, so that every CPU has the same bits, and draws the same tokens from the same logits.

#[cfg(target_arch = "x86_64")]
use crate::cpu::KernelSet;

/// Values of one chunk.
pub const CHUNK: usize = 256;

/// Defines a function that is compiled once per instruction set, and takes the best that the CPU has.
macro_rules! per_set {
    ($(#[$meta:meta])* pub fn $name:ident($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        pub fn $name($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                body($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            if KernelSet::Avx512.is_available() {
                // SAFETY: the CPU has the instructions.
                return unsafe { avx512($($arg),*) };
            }
            #[cfg(target_arch = "x86_64")]
            if KernelSet::Avx2.is_available() {
                // SAFETY: the CPU has the instructions.
                return unsafe { avx2($($arg),*) };
            }
            body($($arg),*)
        }
    };
}

/// A chunk of a row; a short one, copied to `spare`, is filled up with -infinity, which is neutral for maxima
/// and sums of exponentials.
#[inline(always)]
fn whole<'a>(chunk: &'a [f32], spare: &'a mut [f32; CHUNK]) -> &'a [f32; CHUNK] {
    if let Ok(chunk) = chunk.try_into() {
        return chunk;
    }
    spare.fill(f32::NEG_INFINITY);
    spare[..chunk.len()].copy_from_slice(chunk);
    spare
}

/// Combines all values of a chunk, the upper half with the lower half again and again.
#[inline(always)]
fn fold(chunk: &[f32; CHUNK], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let (low, high) = chunk.split_at(CHUNK / 2);
    let mut values = [0.0; CHUNK / 2];
    for ((to, &a), &b) in values.iter_mut().zip(low).zip(high) {
        *to = combine(a, b);
    }
    let mut width = CHUNK / 4;
    while width > 0 {
        let (low, high) = values.split_at_mut(width);
        for (a, &b) in low.iter_mut().zip(&*high) {
            *a = combine(*a, b);
        }
        width /= 2;
    }
    values[0]
}

#[inline(always)]
fn add(a: f32, b: f32) -> f32 {
    a + b
}

/// The larger one of two values, in the form that becomes one instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

per_set! {
/// Writes the maximum of each chunk of `row` to `out`; returns whether a NaN is among the values.
pub fn chunk_maxima(row: &[f32], out: &mut [f32]) -> bool {
    let (mut nan, mut spare) = (0u32, [0.0; CHUNK]);
    for (chunk, out) in row.chunks(CHUNK).zip(out) {
        let chunk = whole(chunk, &mut spare);
        for x in chunk {
            nan |= u32::from(x.is_nan());
        }
        *out = fold(chunk, larger);
    }
    nan != 0
}
}

per_set! {
/// Writes `sum(exp((row - max) * scale))` of each chunk of `row` to `out`; no value is above `max`.
pub fn chunk_exp_sums(row: &[f32], max: f32, scale: f32, out: &mut [f32]) {
    let mut spare = [0.0; CHUNK];
    let mut powers = [0.0; CHUNK];
    for (chunk, out) in row.chunks(CHUNK).zip(out) {
        let chunk = whole(chunk, &mut spare);
        for (power, &x) in powers.iter_mut().zip(chunk) {
            *power = exp_nonpositive((x - max) * scale);
        }
        *out = fold(&powers, add);
    }
}
}

/// `exp(x)` for `x <= 0`: relative error below 2e-7; 0 below -87, where f32 would become
/// subnormal. Argument reduction and polynomial of Cephes `expf` (Moshier).
#[inline(always)]
pub fn exp_nonpositive(x: f32) -> f32 {
    const LOWEST: f32 = -87.0;
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    /// Adding 1.5 * 2^23 rounds to an integer, kept in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let keep = u32::from(x >= LOWEST).wrapping_neg();
    let x = if x > LOWEST { x } else { LOWEST };
    let rounded = x * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5e-1;
    let y = p * (r * r) + r + 1.0;
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()) << 23;
    f32::from_bits(y.to_bits().wrapping_add(exponent) & keep)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_accurate_over_its_range() {
        for i in 0..=870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp_nonpositive(x)) - exact).abs() / exact;
            assert!(relative < 2e-7, "exp({x}) is off by {relative}");
        }
        assert_eq!(exp_nonpositive(0.0), 1.0);
        assert_eq!(exp_nonpositive(-87.5), 0.0);
        assert_eq!(exp_nonpositive(f32::NEG_INFINITY), 0.0);
    }

    /// Bits of sums that any CPU must give: tokens depend on them.
    #[test]
    fn sums_have_the_same_bits_everywhere() {
        let row: Vec<f32> = (0..700)
            .map(|i| ((i * 37 % 101) as f32).sqrt() - 10.0)
            .collect();
        let (mut sums, mut expected) = ([0.0; 3], Vec::new());
        chunk_exp_sums(&row, 0.0, 0.7, &mut sums);
        for chunk in row.chunks(CHUNK) {
            let mut powers: Vec<f32> = chunk.iter().map(|x| exp_nonpositive(x * 0.7)).collect();
            powers.resize(CHUNK, 0.0);
            let mut width = CHUNK / 2;
            while width > 0 {
                for i in 0..width {
                    powers[i] += powers[i + width];
                }
                width /= 2;
            }
            expected.push(powers[0]);
        }
        assert_eq!(sums[..], expected[..]);
        let mut maxima = [0.0; 3];
        assert!(!chunk_maxima(&row, &mut maxima));
        let plain = row
            .chunks(CHUNK)
            .map(|c| c.iter().copied().fold(f32::MIN, f32::max));
        assert!(plain.eq(maxima));
    }
}
