//! Passes over one row of logits: maxima, sums of exponentials, the largest entries.
//!
//! Elementwise loops over one chunk at a time, compiled once per instruction set and chosen at
//! run time; sums and maxima fold a chunk in halves, which is elementwise too. No fused
//! multiply-add and a fixed order of additions, so that every CPU draws the same tokens from
//! the same logits.

use sinew_types::TokenId;
use std::cmp::Ordering;

/// Logits of one chunk: the unit in which maxima and sums are kept.
pub(crate) const CHUNK: usize = 256;

/// A logit and its token.
pub(crate) type Candidate = (f32, TokenId);

/// The logits hold a NaN, an infinity, or nothing that can be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("logits are not finite: the weights have diverged or are damaged")]
pub(crate) struct BadLogits;

/// The maxima of a row.
#[derive(Debug)]
pub(crate) struct Maxima {
    /// The largest logit; finite.
    pub(crate) max: f32,
    /// The largest of each [`CHUNK`] logits.
    pub(crate) chunks: Vec<f32>,
}

/// Finds the maxima of `row`, and refuses NaN, +infinity and rows of -infinity.
pub(crate) fn maxima(row: &[f32]) -> Result<Maxima, BadLogits> {
    let mut chunks = vec![f32::NEG_INFINITY; row.len().div_ceil(CHUNK)];
    let nan = pulp::Arch::new().dispatch(ChunkMaxima {
        row,
        out: &mut chunks,
    });
    let max = chunks.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if nan || !max.is_finite() {
        return Err(BadLogits);
    }
    Ok(Maxima { max, chunks })
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

/// The larger one, in the form that becomes one instruction.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Writes the maximum of each chunk; says whether a NaN is among the values.
///
/// A struct, since a closure would be compiled without the instruction set.
struct ChunkMaxima<'a> {
    row: &'a [f32],
    out: &'a mut [f32],
}

impl pulp::WithSimd for ChunkMaxima<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) -> bool {
        let (mut nan, mut spare) = (0u32, [0.0; CHUNK]);
        for (chunk, out) in self.row.chunks(CHUNK).zip(self.out) {
            let chunk = whole(chunk, &mut spare);
            for x in chunk {
                nan |= u32::from(x.is_nan());
            }
            *out = fold(chunk, larger);
        }
        nan != 0
    }
}

/// `exp(x)` for `x <= 0`: relative error below 2e-7; 0 below -87, where f32 would become
/// subnormal. Argument reduction and polynomial of Cephes `expf` (Moshier).
#[inline(always)]
pub(crate) fn exp_nonpositive(x: f32) -> f32 {
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

/// `sum(exp((row - max) * scale))`, whole and for each chunk. `scale` is 1/temperature.
pub(crate) fn exp_sums(row: &[f32], max: f32, scale: f32, chunks: &mut Vec<f32>) -> f64 {
    chunks.clear();
    chunks.resize(row.len().div_ceil(CHUNK), 0.0);
    pulp::Arch::new().dispatch(ChunkExpSums {
        row,
        max,
        scale,
        out: chunks,
    });
    chunks.iter().map(|&s| f64::from(s)).sum()
}

/// Writes `sum(exp((row - max) * scale))` of each chunk.
struct ChunkExpSums<'a> {
    row: &'a [f32],
    max: f32,
    scale: f32,
    out: &'a mut [f32],
}

impl pulp::WithSimd for ChunkExpSums<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        let (mut spare, max, scale) = ([0.0; CHUNK], self.max, self.scale);
        let mut powers = [0.0; CHUNK];
        for (chunk, out) in self.row.chunks(CHUNK).zip(self.out) {
            let chunk = whole(chunk, &mut spare);
            for (power, &x) in powers.iter_mut().zip(chunk) {
                *power = exp_nonpositive((x - max) * scale);
            }
            *out = fold(&powers, add);
        }
    }
}

/// The token of the largest logit; the smallest id of equals.
pub(crate) fn argmax(row: &[f32], maxima: &Maxima) -> TokenId {
    let chunk = maxima.chunks.iter().position(|&m| m == maxima.max);
    let start = chunk.unwrap_or(0) * CHUNK;
    let offset = row[start..].iter().position(|&x| x == maxima.max);
    (start + offset.unwrap_or(0)) as TokenId
}

/// Larger logits first, of equals the smaller id.
pub(crate) fn by_logit(a: &Candidate, b: &Candidate) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Every logit of at least `cut`, in the order of ids.
pub(crate) fn at_least(row: &[f32], maxima: &Maxima, cut: f32) -> Vec<Candidate> {
    let mut out = Vec::new();
    for (c, chunk) in row.chunks(CHUNK).enumerate() {
        if maxima.chunks[c] >= cut {
            let ids = (c * CHUNK) as TokenId..;
            let kept = chunk.iter().copied().zip(ids).filter(|&(x, _)| x >= cut);
            out.extend(kept);
        }
    }
    out
}

/// The `count` largest logits that are at least `cut`, best first.
pub(crate) fn largest(row: &[f32], maxima: &Maxima, count: usize, cut: f32) -> Vec<Candidate> {
    if count == 0 {
        return Vec::new();
    }
    let mut bound = cut;
    if count <= maxima.chunks.len() {
        // As many chunks have a maximum of at least the count-th largest maximum, so
        // the count largest logits are not below it.
        let mut tops = maxima.chunks.clone();
        let (_, nth, _) = tops.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
        bound = bound.max(*nth);
    }
    let mut out = at_least(row, maxima, bound);
    if out.len() > count {
        out.select_nth_unstable_by(count - 1, by_logit);
        out.truncate(count);
    }
    out.sort_unstable_by(by_logit);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn rows_that_cannot_be_sampled_are_refused() {
        for bad in [f32::NAN, f32::INFINITY] {
            for at in [0, 255, 300] {
                let mut row = vec![1.0; 301];
                row[at] = bad;
                assert_eq!(maxima(&row).map(|_| ()), Err(BadLogits));
            }
        }
        assert_eq!(maxima(&[f32::NEG_INFINITY; 5]).map(|_| ()), Err(BadLogits));
        assert!(maxima(&[f32::NEG_INFINITY, 0.0]).is_ok());
    }

    proptest! {
        #[test]
        fn passes_agree_with_plain_loops(
            row in prop::collection::vec(-30f32..30.0, 1..1500),
            count in 0usize..20,
            scale in 0.1f32..4.0,
        ) {
            let m = maxima(&row).unwrap();
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(m.max, max);
            let best = row.iter().position(|&x| x == max).unwrap();
            prop_assert_eq!(argmax(&row, &m) as usize, best);

            let sum = exp_sums(&row, max, scale, &mut Vec::new());
            let exact: f64 = row.iter().map(|&x| f64::from((x - max) * scale).exp()).sum();
            prop_assert!((sum / exact - 1.0).abs() < 1e-6, "{} {}", sum, exact);

            let mut sorted: Vec<Candidate> = row.iter().copied().zip(0..).collect();
            sorted.sort_by(by_logit);
            sorted.truncate(count);
            prop_assert_eq!(largest(&row, &m, count, f32::NEG_INFINITY), sorted);
        }
    }
}
