//! The policy terms: value and derivative of `weight·c·L_t`, token by token.
//!
//! The formulas use `r = exp(ℓ_π − ℓ_old)`, bounded by ±20 in the exponent, and the advantage `A`:
//!
//! | surrogate | `L_t` | source |
//! |---|---|---|
//! | `Reinforce` | `−A ℓ_π` | Williams 1992 |
//! | `Importance` | `−rA` | importance sampling |
//! | `Clip` | `max(−rA, −clip(r, 1−low, 1+high) A)`, for `A < 0` at most `−dual A` | PPO, Schulman et al. 2017; dual clip, Ye et al. 2020 |
//! | `SequenceClip` | the clip of `s = exp(mean(ℓ_π − ℓ_old))` | GSPO, Zheng et al. 2025 |
//! | `SequenceTokenClip` | the clip of `s_t = sg(s)·exp(ℓ_π − sg(ℓ_π))`, `sg` for no gradient | GSPO-token, Zheng et al. 2025 |
//! | `Cispo` | `−sg(clamp(r, 1−low, 1+high)) A ℓ_π` | CISPO, MiniMax 2025 |
//! | `Soft` | `−(4/τ) σ(τ (r − 1)) A`, `τ` by the sign of `A` | SAPO, Qwen 2025 |
//! | `TrustRegion` | `−rA + penalty (ℓ_π − ℓ_old)²`; the penalty alone past `limit` | prime-rl |
//! | `Dro` | `−A ℓ_π + ½ beta (ℓ_π − ℓ_old)²` | DRO, Richemond et al. 2024; Kimi Team 2025 |
//! | `CrossEntropy` | `−A ℓ_π` | SFT with `A = 1` |
//!
//! Bounds by token ([`ClipBounds`](super::ClipBounds)) replace `1−low` and `1+high`.

use super::{RowInputs, Term, bounded_exp};
use sinew_types::Surrogate;

/// Weighted and corrected terms of the `kept` tokens, in their order.
///
/// `factors[i]` is the correction of `kept[i]`; both it and `ℓ_old` are constants.
pub(super) fn terms(
    surrogate: &Surrogate,
    row: &RowInputs<'_>,
    old: &[f32],
    kept: &[usize],
    factors: &[f64],
) -> Vec<Term> {
    let plain = |t: usize| {
        let logprob = f64::from(row.logprobs[t]);
        let advantage = f64::from(row.advantages[t]);
        let log_ratio = logprob - f64::from(old[t]);
        let clip = |low, high| bounds(row, t, low, high);
        token_term(surrogate, logprob, log_ratio, advantage, clip)
    };
    let scaled = |term: Term, t: usize, factor: f64| {
        let scale = f64::from(row.weights[t]) * factor;
        Term {
            value: scale * term.value,
            d_logprob: scale * term.d_logprob,
            clipped: term.clipped,
        }
    };
    let each = kept.iter().zip(factors);
    let (low, high, through_mean) = match *surrogate {
        Surrogate::SequenceClip { low, high } => (low, high, true),
        Surrogate::SequenceTokenClip { low, high } => (low, high, false),
        _ => return each.map(|(&t, &f)| scaled(plain(t), t, f)).collect(),
    };
    let (ratio, slope) = sequence_ratio(row, old, kept);
    let mut out: Vec<Term> = each
        .map(|(&t, &factor)| {
            let limits = bounds(row, t, low, high);
            let term = clip(ratio, slope, f64::from(row.advantages[t]), limits);
            scaled(term, t, factor)
        })
        .collect();
    if through_mean {
        spread_over_mean(row, kept, &mut out);
    }
    out
}

/// GSPO differentiates through the mean: `dℓ_j = Σ_t weight_t·c_t·dL_t/ds · s / n` for each of the `n` tokens
/// that the mean is of, and nothing for others.
fn spread_over_mean(row: &RowInputs<'_>, kept: &[usize], terms: &mut [Term]) {
    let total = terms.iter().map(|t| t.d_logprob).sum::<f64>();
    let n = kept.iter().filter(|&&t| is_in_ratio(row, t)).count();
    let share = total / n.max(1) as f64;
    for (term, &t) in terms.iter_mut().zip(kept) {
        term.d_logprob = if is_in_ratio(row, t) { share } else { 0.0 };
    }
}

/// Lowest and highest ratio of token `t` that a clip leaves as it is.
fn bounds(row: &RowInputs<'_>, t: usize, low: f32, high: f32) -> (f64, f64) {
    match row.clip {
        Some(clip) => (f64::from(clip.low[t]), f64::from(clip.high[t])),
        None => (1.0 - f64::from(low), 1.0 + f64::from(high)),
    }
}

/// Returns `L_t` and `dL_t/dℓ_π` of the surrogates that depend on one token only. `limits` gives the bounds
/// of the ratio from the surrogate's distances.
fn token_term(
    surrogate: &Surrogate,
    logprob: f64,
    log_ratio: f64,
    advantage: f64,
    limits: impl Fn(f32, f32) -> (f64, f64),
) -> Term {
    let (ratio, slope) = bounded_exp(log_ratio);
    let smooth = |value: f64, d_logprob: f64| Term {
        value,
        d_logprob,
        clipped: false,
    };
    match *surrogate {
        Surrogate::Reinforce | Surrogate::CrossEntropy => smooth(-advantage * logprob, -advantage),
        Surrogate::Importance => smooth(-ratio * advantage, -ratio * slope * advantage),
        Surrogate::Clip { low, high, dual } => {
            let term = clip(ratio, slope, advantage, limits(low, high));
            match dual.map(f64::from) {
                Some(dual) if advantage < 0.0 && term.value > -dual * advantage => Term {
                    value: -dual * advantage,
                    d_logprob: 0.0,
                    clipped: true,
                },
                _ => term,
            }
        }
        Surrogate::Cispo { low, high } => {
            let (low, high) = limits(low, high);
            let bounded = ratio.clamp(low, high);
            Term {
                clipped: bounded != ratio,
                ..smooth(-bounded * advantage * logprob, -bounded * advantage)
            }
        }
        Surrogate::Soft { tau_pos, tau_neg } => {
            let tau = f64::from(if advantage > 0.0 { tau_pos } else { tau_neg });
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            let through_gate = -4.0 * gate * (1.0 - gate) * ratio * slope * advantage;
            smooth(-4.0 / tau * gate * advantage, through_gate)
        }
        Surrogate::TrustRegion { limit, penalty } => {
            let moved = logprob.exp() - (logprob - log_ratio).exp();
            let left = is_outside(moved, f64::from(limit), advantage);
            let kept = if left { 0.0 } else { advantage };
            let penalty = f64::from(penalty);
            Term {
                value: -kept * ratio + penalty * log_ratio * log_ratio,
                d_logprob: -kept * ratio * slope + 2.0 * penalty * log_ratio,
                clipped: left,
            }
        }
        Surrogate::Dro { beta } => {
            let beta = f64::from(beta);
            let penalty = 0.5 * beta * log_ratio * log_ratio;
            smooth(
                -advantage * logprob + penalty,
                -advantage + beta * log_ratio,
            )
        }
        Surrogate::SequenceClip { .. } | Surrogate::SequenceTokenClip { .. } => {
            unreachable!("handled per sequence")
        }
    }
}

/// Whether a probability moved by more than `limit` into the advantage's own direction.
fn is_outside(moved: f64, limit: f64, advantage: f64) -> bool {
    if advantage > 0.0 {
        moved > limit
    } else {
        moved < -limit
    }
}

/// `max(−rA, −clip(r, low, high)A)` and its derivative by the log-ratio.
fn clip(ratio: f64, slope: f64, advantage: f64, (low, high): (f64, f64)) -> Term {
    let plain = -ratio * advantage;
    let bounded = -ratio.clamp(low, high) * advantage;
    if bounded > plain {
        Term {
            value: bounded,
            d_logprob: 0.0,
            clipped: true,
        }
    } else {
        Term {
            value: plain,
            d_logprob: plain * slope,
            clipped: false,
        }
    }
}

/// Whether a sequence's ratio is the mean of token `t` and others.
fn is_in_ratio(row: &RowInputs<'_>, t: usize) -> bool {
    row.in_ratio.is_none_or(|marks| marks[t])
}

/// Geometric mean of the ratios of the kept tokens that are marked for it, and the derivative of its bound; 1
/// if none is.
pub(super) fn sequence_ratio(row: &RowInputs<'_>, old: &[f32], kept: &[usize]) -> (f64, f64) {
    let marked = kept.iter().filter(|&&t| is_in_ratio(row, t));
    let gaps = marked.map(|&t| f64::from(row.logprobs[t]) - f64::from(old[t]));
    let (total, n) = gaps.fold((0.0, 0usize), |(sum, n), gap| (sum + gap, n + 1));
    bounded_exp(total / n.max(1) as f64)
}
