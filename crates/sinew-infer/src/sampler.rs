//! The CPU sampler: draws tokens from rows of logits.
//!
//! Order of the truncations: bias, temperature, `min_p` (against the largest probability), `top_k`, then
//! `top_p` over the rest, renormalized. The reported log-probability is that of the policy that a trainer
//! computes: full softmax at the request's temperature (greedy: 1), no bias, nothing truncated.

use crate::constraint::Constraint;
use crate::draw::{Draw, Drawn, map_indices};
use crate::rng;
use crate::softmax::{self, BadLogits, Candidate, Maxima};
use sinew_grammar::Mask;
use sinew_tensor::Cpu;
use sinew_tensor::logprob::SoftmaxRow;
use sinew_types::{EngineError, SamplingParams, TokenId, TokenLogprob};
use std::sync::{Mutex, PoisonError};

/// Draws tokens for one sequence from consecutive rows of logits.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<'a> {
    /// Index of the row after the known tokens, in [`Batch::logit_rows`](crate::Batch::logit_rows).
    /// Samplers can share a row.
    pub row: usize,
    /// Draft tokens, which follow the known ones in the batch: a row of logits follows for each.
    pub draft: &'a [TokenId],
    /// Temperature, truncation, bias and seed.
    pub params: &'a SamplingParams,
    /// Number of known tokens: the position of the first token drawn.
    pub position: usize,
    /// Constraint of the output format. It stands after the known tokens, and advances with each
    /// token drawn.
    pub constraint: Option<&'a Mutex<Constraint>>,
}

/// The result of each sampler, from `[rows, vocab]` logits, in parallel on the threads of `cpu`: a draw
/// depends only on its own sequence. A `cpu` gives log-probabilities the bits of training.
pub(crate) fn sample(
    logits: &[f32],
    vocab: usize,
    samplers: &[Sampler<'_>],
    cpu: Option<&Cpu>,
) -> Vec<Drawn> {
    map_indices(samplers.len(), cpu, |i| {
        let sampler = &samplers[i];
        let rows = sampler.row * vocab..(sampler.row + sampler.draft.len() + 1) * vocab;
        draw_along(&logits[rows], vocab, sampler, cpu)
    })
}

/// Draws the token after the known ones, and continues as long as the draw is the draft token: the
/// tokens are those of drawing one in each pass.
fn draw_along(logits: &[f32], vocab: usize, sampler: &Sampler<'_>, cpu: Option<&Cpu>) -> Drawn {
    let params = sampler.params;
    let mut draws = Vec::with_capacity(1);
    // No invariant spans a panic while it is locked.
    let constraint = sampler.constraint;
    let mut constraint = constraint.map(|c| c.lock().unwrap_or_else(PoisonError::into_inner));
    for (i, row) in logits.chunks_exact(vocab).enumerate() {
        let position = sampler.position + i;
        let draw = match &mut constraint {
            Some(constraint) => draw_constrained(row, params, position, constraint, cpu)?,
            None => {
                let drawn = draw(row, params, position);
                let mut draw = drawn.map_err(|e| EngineError::Failed(e.to_string()))?;
                if let Some(cpu) = cpu {
                    as_trained(&mut draw, cpu, row, params, None);
                }
                draw
            }
        };
        let goes_on = sampler.draft.get(i) == Some(&draw.id);
        draws.push(draw);
        if !goes_on || constraint.as_ref().is_some_and(|c| c.ended()) {
            break;
        }
    }
    Ok(draws)
}

/// Draws the token that follows `position` tokens from those that the constraint allows.
fn draw_constrained(
    logits: &[f32],
    params: &SamplingParams,
    position: usize,
    constraint: &mut Constraint,
    cpu: Option<&Cpu>,
) -> Result<Draw, EngineError> {
    if let Some(draw) = constraint.without_choice(params)? {
        return Ok(draw);
    }
    let mask = constraint.mask()?;
    let drawn = draw_masked(logits, params, position, &mask);
    let (mut draw, log_mass) = drawn.map_err(|e| EngineError::Failed(e.to_string()))?;
    if let Some(cpu) = cpu {
        as_trained(&mut draw, cpu, logits, params, Some(&mask));
    }
    draw.choice = Some(constraint.accept(draw.id, &mask, log_mass)?);
    Ok(draw)
}

/// Draws the token that follows `position` tokens. The same logits, parameters and position give
/// the same token.
///
/// # Errors
/// If the logits are not finite.
pub(crate) fn draw(
    logits: &[f32],
    params: &SamplingParams,
    position: usize,
) -> Result<Draw, BadLogits> {
    let maxima = softmax::maxima(logits)?;
    let mut sums = Vec::new();
    let temperature = params.policy_temperature();
    let scale = 1.0 / temperature;
    let sum = softmax::exp_sums(logits, maxima.max, scale, &mut sums);
    let divided = |logit: f32| f64::from(logit) / f64::from(temperature);
    let log_sum = divided(maxima.max) + sum.ln();
    let u = rng::uniform(params.seed, position as u64);
    let id = if params.logit_bias.is_empty() {
        choose(logits, &maxima, sum, sums, params, u)
    } else {
        let biased = biased(logits, params);
        let maxima = softmax::maxima(&biased)?;
        let sum = softmax::exp_sums(&biased, maxima.max, scale, &mut sums);
        choose(&biased, &maxima, sum, sums, params, u)
    };
    let logprob = |logit: f32| (divided(logit) - log_sum) as f32;
    let count = usize::from(params.top_logprobs);
    let top = softmax::largest(logits, &maxima, count, f32::NEG_INFINITY);
    Ok(Draw {
        id,
        logprob: logprob(logits[id as usize]),
        top: top
            .into_iter()
            .map(|(logit, id)| TokenLogprob {
                id,
                logprob: logprob(logit),
            })
            .collect(),
        choice: None,
    })
}

/// Draws like [`draw`], but from the tokens that `mask` allows, as if there were no others. Also returns the
/// logarithm of the probability that all of them have together in the full softmax at the same temperature.
pub(crate) fn draw_masked(
    logits: &[f32],
    params: &SamplingParams,
    position: usize,
    mask: &Mask,
) -> Result<(Draw, f32), BadLogits> {
    let (kept, ids) = compact(logits, mask);
    let mut own = params.clone();
    own.logit_bias
        .retain_mut(|(id, _)| match ids.binary_search(id) {
            Ok(at) => {
                *id = at as TokenId;
                true
            }
            Err(_) => false,
        });
    let mut draw = draw(&kept, &own, position)?;
    draw.id = ids[draw.id as usize];
    for top in &mut draw.top {
        top.id = ids[top.id as usize];
    }
    let log_mass = log_sum(&kept, params)? - log_sum(logits, params)?;
    Ok((draw, log_mass.min(0.0) as f32))
}

/// Replaces the log-probabilities of a draw by those that training computes from the same logits, bit for
/// bit; `mask` as for [`draw_masked`].
pub(crate) fn as_trained(
    draw: &mut Draw,
    device: &Cpu,
    logits: &[f32],
    params: &SamplingParams,
    mask: Option<&Mask>,
) {
    let words = mask.map(Mask::words);
    let softmax = SoftmaxRow::new(device, logits, params.policy_temperature(), words);
    draw.logprob = softmax.logprob(logits[draw.id as usize]);
    for top in &mut draw.top {
        top.logprob = softmax.logprob(logits[top.id as usize]);
    }
}

/// The allowed logits, and their tokens in ascending order.
fn compact(logits: &[f32], mask: &Mask) -> (Vec<f32>, Vec<TokenId>) {
    let allowed = mask.allowed() as usize;
    let (mut kept, mut ids) = (Vec::with_capacity(allowed), Vec::with_capacity(allowed));
    for ((&word, chunk), first) in mask
        .words()
        .iter()
        .zip(logits.chunks(32))
        .zip((0u32..).step_by(32))
    {
        if word == u32::MAX && chunk.len() == 32 {
            kept.extend_from_slice(chunk);
            ids.extend(first..first + 32);
            continue;
        }
        let mut left = word;
        while left != 0 {
            let bit = left.trailing_zeros();
            left &= left - 1;
            if let Some(&logit) = chunk.get(bit as usize) {
                kept.push(logit);
                ids.push(first + bit);
            }
        }
    }
    (kept, ids)
}

/// Logarithm of the sum of exponentials at the policy's temperature.
fn log_sum(logits: &[f32], params: &SamplingParams) -> Result<f64, BadLogits> {
    let temperature = params.policy_temperature();
    let max = softmax::maxima(logits)?.max;
    let sum = softmax::exp_sums(logits, max, 1.0 / temperature, &mut Vec::new());
    Ok(f64::from(max) / f64::from(temperature) + sum.ln())
}

/// The logits with the request's bias added.
fn biased(logits: &[f32], params: &SamplingParams) -> Vec<f32> {
    let mut out = logits.to_vec();
    for &(id, bias) in &params.logit_bias {
        out[id as usize] += bias;
    }
    out
}

/// The token of the uniform number `u`. `total` and `chunks` are the sums of exponentials at the
/// temperature: whole and per chunk.
fn choose(
    logits: &[f32],
    maxima: &Maxima,
    total: f64,
    chunks: Vec<f32>,
    params: &SamplingParams,
    u: f64,
) -> TokenId {
    if params.temperature == 0.0 {
        return softmax::argmax(logits, maxima);
    }
    let scale = 1.0 / params.temperature;
    if params.top_k == 0 && params.top_p == 1.0 && params.min_p == 0.0 {
        return choose_from_all(logits, maxima.max, scale, &chunks, u * total);
    }
    let (kept, mass) = truncate(logits, maxima, total, params);
    choose_from(&kept, maxima.max, scale, u * mass)
}

/// Inverse of the cumulative distribution: first the chunk, then the token in it.
fn choose_from_all(
    logits: &[f32],
    max: f32,
    scale: f32,
    chunks: &[f32],
    mut target: f64,
) -> TokenId {
    let mut chunk = 0;
    for (c, &mass) in chunks.iter().enumerate() {
        if mass > 0.0 {
            chunk = c;
            if target < f64::from(mass) {
                break;
            }
            target -= f64::from(mass);
        }
    }
    let start = chunk * softmax::CHUNK;
    let end = logits.len().min(start + softmax::CHUNK);
    let ids = start as TokenId..;
    let entries = logits[start..end].iter().copied().zip(ids);
    pick(entries, max, scale, target)
}

fn choose_from(kept: &[Candidate], max: f32, scale: f32, target: f64) -> TokenId {
    pick(kept.iter().copied(), max, scale, target)
}

/// The token at which the cumulative mass passes `target`. Rounding can leave a rest at the end: it
/// belongs to the last token that has any mass.
fn pick(
    entries: impl Iterator<Item = Candidate>,
    max: f32,
    scale: f32,
    mut target: f64,
) -> TokenId {
    let mut last = 0;
    for (logit, id) in entries {
        let mass = f64::from(softmax::exp_nonpositive((logit - max) * scale));
        if mass > 0.0 {
            last = id;
            if target < mass {
                break;
            }
            target -= mass;
        }
    }
    last
}

/// The tokens that `min_p`, `top_k` and `top_p` keep, best first, and their mass in units
/// of the largest probability. `total` is the mass of all.
fn truncate(
    logits: &[f32],
    maxima: &Maxima,
    total: f64,
    params: &SamplingParams,
) -> (Vec<Candidate>, f64) {
    let scale = 1.0 / params.temperature;
    let mass_of = |kept: &[Candidate]| -> f64 {
        let mass = |&(x, _): &Candidate| softmax::exp_nonpositive((x - maxima.max) * scale);
        kept.iter().map(|c| f64::from(mass(c))).sum()
    };
    let cut = maxima.max + params.temperature * params.min_p.ln();
    let (mut kept, total) = if params.top_k > 0 {
        let kept = softmax::largest(logits, maxima, params.top_k as usize, cut);
        let mass = mass_of(&kept);
        (kept, mass)
    } else if params.min_p > 0.0 {
        let kept = softmax::at_least(logits, maxima, cut);
        let mass = mass_of(&kept);
        (kept, mass)
    } else {
        let limit = f64::from(params.top_p) * total;
        (
            likely(logits, maxima, params.temperature, limit, mass_of),
            total,
        )
    };
    kept.sort_unstable_by(softmax::by_logit);
    let limit = f64::from(params.top_p) * total;
    let mut mass = 0.0;
    let mut count = 0;
    while count < kept.len() && (count == 0 || mass < limit) {
        mass += mass_of(&kept[count..=count]);
        count += 1;
    }
    kept.truncate(count);
    (kept, mass)
}

/// Enough of the most likely tokens to hold the mass `limit`, found by lowering a cut, so that a
/// peaked distribution does not pay for sorting the vocabulary.
fn likely(
    logits: &[f32],
    maxima: &Maxima,
    temperature: f32,
    limit: f64,
    mass_of: impl Fn(&[Candidate]) -> f64,
) -> Vec<Candidate> {
    let mut depth = 4.0;
    // Probabilities below e^-64 of the largest one are not worth a cut.
    while depth <= 64.0 {
        let kept = softmax::at_least(logits, maxima, maxima.max - depth * temperature);
        if mass_of(&kept) >= limit {
            return kept;
        }
        depth *= 2.0;
    }
    softmax::at_least(logits, maxima, f32::NEG_INFINITY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(edit: impl FnOnce(&mut SamplingParams)) -> SamplingParams {
        let mut p = SamplingParams::default();
        edit(&mut p);
        p
    }

    fn ids(logits: &[f32], p: &SamplingParams, draws: usize) -> Vec<TokenId> {
        (0..draws).map(|i| draw(logits, p, i).unwrap().id).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let p = params(|p| p.temperature = 0.0);
        assert_eq!(draw(&[0.0, 3.0, 3.0, 1.0], &p, 0).unwrap().id, 1);
    }

    #[test]
    fn frequencies_follow_the_softmax_at_any_temperature() {
        let logits: Vec<f32> = (0..600)
            .map(|i| (i % 3) as f32 - (i / 300) as f32)
            .collect();
        for temperature in [0.5f32, 1.0, 2.0] {
            let p = params(|p| p.temperature = temperature);
            let weight = |i: usize| f64::from(logits[i] / temperature).exp();
            let total: f64 = (0..600).map(weight).sum();
            let n = 30_000;
            let mut classes = [0f64; 6];
            for id in ids(&logits, &p, n) {
                classes[(id / 300 * 3 + id % 3) as usize] += 1.0;
            }
            for (class, &seen) in classes.iter().enumerate() {
                let share = 100.0 * weight(class / 3 * 300 + class % 3) / total;
                let sd = (n as f64 * share * (1.0 - share)).sqrt();
                let off = (seen - n as f64 * share).abs();
                assert!(
                    off < 5.0 * sd,
                    "T {temperature} class {class}: {off} of {sd}"
                );
            }
        }
    }

    #[test]
    fn logprob_is_at_the_temperature_and_ignores_bias_and_truncation() {
        let logits = [1.0f32, 2.0, 0.5, -1.0];
        // Greedy sampling reports the model itself.
        for (temperature, divisor) in [(0.3f32, 0.3f32), (1.0, 1.0), (1.7, 1.7), (0.0, 1.0)] {
            let sum: f32 = logits.iter().map(|x| (x / divisor).exp()).sum();
            let p = params(|p| {
                p.temperature = temperature;
                p.top_k = 1;
                p.logit_bias = vec![(2, 50.0)];
                p.top_logprobs = 2;
            });
            let d = draw(&logits, &p, 0).unwrap();
            assert_eq!(d.id, 2);
            let expected = |logit: f32| logit / divisor - sum.ln();
            assert!((d.logprob - expected(0.5)).abs() < 2e-6, "{temperature}");
            let top: Vec<_> = d.top.iter().map(|t| t.id).collect();
            assert_eq!(top, [1, 0]);
            let off = (d.top[0].logprob - expected(2.0)).abs();
            assert!(off < 2e-6, "{temperature}");
        }
    }

    #[test]
    fn strong_negative_bias_bans_a_token() {
        let p = params(|p| p.logit_bias = vec![(1, -200.0)]);
        assert!(ids(&[0.0, 9.0, 0.0], &p, 500).iter().all(|&id| id != 1));
    }

    #[test]
    fn truncations_keep_what_they_say() {
        // Probabilities 0.5, 0.25, 0.125, 0.125.
        let logits = [0.5f32, 0.25, 0.125, 0.125].map(f32::ln);
        let kept = |edit: fn(&mut SamplingParams)| {
            let p = params(edit);
            let mut seen = ids(&logits, &p, 2000);
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(kept(|_| ()), [0, 1, 2, 3]);
        assert_eq!(kept(|p| p.top_k = 3), [0, 1, 2]);
        assert_eq!(kept(|p| p.top_p = 0.7), [0, 1]);
        assert_eq!(kept(|p| p.top_p = 1e-6), [0]);
        assert_eq!(kept(|p| p.min_p = 0.4), [0, 1]);
        // 0.5 of the 0.75 that top_k leaves is 2/3: above 0.6.
        assert_eq!(
            kept(|p| {
                p.top_k = 2;
                p.top_p = 0.6;
            }),
            [0]
        );
    }

    #[test]
    fn nan_is_an_error_and_not_a_token() {
        assert_eq!(draw(&[0.0, f32::NAN], &params(|_| ()), 0), Err(BadLogits));
    }

    proptest! {
        /// The test sorts everything in f64, as in the definition.
        #[test]
        fn kept_set_matches_the_definition(
            logits in prop::collection::vec(-8f32..8.0, 1..700),
            temperature in 0.2f32..3.0,
            top_k in 0u32..40,
            top_p in prop_oneof![Just(1.0f32), 0.05f32..0.99],
            min_p in prop_oneof![Just(0.0f32), 0.001f32..0.5],
        ) {
            let p = params(|p| {
                p.temperature = temperature;
                p.top_k = top_k;
                p.top_p = top_p;
                p.min_p = min_p;
            });
            let m = softmax::maxima(&logits).unwrap();
            let mut sums = Vec::new();
            let total = softmax::exp_sums(&logits, m.max, 1.0 / temperature, &mut sums);
            let (kept, mass) = truncate(&logits, &m, total, &p);

            let weight = |x: f32| f64::from((x - m.max) / temperature).exp();
            let mut all: Vec<Candidate> = logits.iter().copied().zip(0..).collect();
            all.sort_by(softmax::by_logit);
            // A logit this close to the cut, which is an f32, may be on either side of it.
            let cut = f64::from(min_p);
            prop_assume!(logits.iter().all(|&x| (weight(x) / cut - 1.0).abs() > 1e-5));
            all.retain(|&(x, _)| weight(x) >= cut);
            if top_k > 0 {
                all.truncate(top_k as usize);
            }
            let total: f64 = all.iter().map(|&(x, _)| weight(x)).sum();
            let limit = f64::from(top_p) * total;
            let cumulative = |n: usize| all[..n].iter().map(|&(x, _)| weight(x)).sum::<f64>();
            let n = kept.len();
            prop_assert_eq!(&kept[..], &all[..n]);
            prop_assert!(cumulative(n) >= limit * (1.0 - 1e-5));
            prop_assert!(n == 1 || cumulative(n - 1) < limit * (1.0 + 1e-5));
            prop_assert!((mass / cumulative(n) - 1.0).abs() < 1e-5);
        }
    }
}
