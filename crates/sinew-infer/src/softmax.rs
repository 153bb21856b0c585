//! Reductions over one row of logits: maxima, sums of exponentials, the largest entries. The passes
//! themselves are kernels of `sinew-tensor`, with the same bits on every CPU.

use sinew_tensor::ops::{chunk_exp_sums, chunk_maxima};
use sinew_types::TokenId;
use std::cmp::Ordering;

pub(crate) use sinew_tensor::ops::{CHUNK, exp_nonpositive};

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
    let nan = chunk_maxima(row, &mut chunks);
    let max = chunks.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if nan || !max.is_finite() {
        return Err(BadLogits);
    }
    Ok(Maxima { max, chunks })
}

/// Sums `exp((row - max) * scale)`. Returns the sum of the whole row, and writes the sum of each chunk to
/// `chunks`. `scale` is 1/temperature.
pub(crate) fn exp_sums(row: &[f32], max: f32, scale: f32, chunks: &mut Vec<f32>) -> f64 {
    chunks.clear();
    chunks.resize(row.len().div_ceil(CHUNK), 0.0);
    chunk_exp_sums(row, max, scale, chunks);
    chunks.iter().map(|&s| f64::from(s)).sum()
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

/// Returns the `count` largest logits of at least `cut`, best first. Only chunks that may contain one are
/// sorted.
pub(crate) fn largest(row: &[f32], maxima: &Maxima, count: usize, cut: f32) -> Vec<Candidate> {
    if count == 0 {
        return Vec::new();
    }
    let mut bound = cut;
    if count <= maxima.chunks.len() {
        // At least `count` chunks have a maximum of at least the count-th largest maximum, so the count
        // largest logits are not below it.
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
