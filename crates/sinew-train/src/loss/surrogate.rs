//! The policy terms: value and derivative of `weight·c·L_t`, token by token.
//!
//! The formulas use `r = exp(ℓ_π − ℓ_old)`, bounded by ±20 in the exponent, and the advantage `A`:
//!
//! | surrogate | `L_t` | source |
//! |---|---|---|
//! | `Reinforce` | `−A ℓ_π` | Williams 1992 |
//! | `Clip` | `max(−rA, −clip(r, 1−low, 1+high) A)`, for `A < 0` at most `−dual A` | PPO, Schulman et al. 2017; dual clip, Ye et al. 2020 |
//! | `SequenceClip` | the clip of `s = exp(mean(ℓ_π − ℓ_old))` | GSPO, Zheng et al. 2025 |
//! | `Cispo` | `−sg(clamp(r, 1−low, 1+high)) A ℓ_π`, `sg` for no gradient | CISPO, MiniMax 2025 |
//! | `Soft` | `−(4/τ) σ(τ (r − 1)) A`, `τ` by the sign of `A` | SAPO, Qwen 2025 |
//! | `TrustRegion` | `−rA + penalty (ℓ_π − ℓ_old)²`; the penalty alone past `limit` | prime-rl |
//! | `CrossEntropy` | `−A ℓ_π` | SFT with `A = 1` |

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
    if let Surrogate::SequenceClip { low, high } = *surrogate {
        return sequence_clip(row, old, kept, factors, f64::from(low), f64::from(high));
    }
    kept.iter()
        .zip(factors)
        .map(|(&t, &factor)| {
            let logprob = f64::from(row.logprobs[t]);
            let advantage = f64::from(row.advantages[t]);
            let term = token_term(surrogate, logprob, logprob - f64::from(old[t]), advantage);
            let scale = f64::from(row.weights[t]) * factor;
            Term {
                value: scale * term.value,
                d_logprob: scale * term.d_logprob,
                clipped: term.clipped,
            }
        })
        .collect()
}

/// Returns `L_t` and `dL_t/dℓ_π` of the surrogates that depend on one token only.
fn token_term(surrogate: &Surrogate, logprob: f64, log_ratio: f64, advantage: f64) -> Term {
    let (ratio, slope) = bounded_exp(log_ratio);
    match *surrogate {
        Surrogate::Reinforce | Surrogate::CrossEntropy => Term {
            value: -advantage * logprob,
            d_logprob: -advantage,
            clipped: false,
        },
        Surrogate::Clip { low, high, dual } => {
            let mut term = clip(ratio, slope, advantage, f64::from(low), f64::from(high));
            if let Some(dual) = dual.map(f64::from)
                && advantage < 0.0
                && term.value > -dual * advantage
            {
                term = Term {
                    value: -dual * advantage,
                    d_logprob: 0.0,
                    clipped: true,
                };
            }
            term
        }
        Surrogate::Cispo { low, high } => {
            let bounded = ratio.clamp(1.0 - f64::from(low), 1.0 + f64::from(high));
            Term {
                value: -bounded * advantage * logprob,
                d_logprob: -bounded * advantage,
                clipped: bounded != ratio,
            }
        }
        Surrogate::Soft { tau_pos, tau_neg } => {
            let tau = f64::from(if advantage > 0.0 { tau_pos } else { tau_neg });
            let gate = 1.0 / (1.0 + (-tau * (ratio - 1.0)).exp());
            Term {
                value: -4.0 / tau * gate * advantage,
                d_logprob: -4.0 * gate * (1.0 - gate) * ratio * slope * advantage,
                clipped: false,
            }
        }
        Surrogate::TrustRegion { limit, penalty } => {
            let moved = logprob.exp() - (logprob - log_ratio).exp();
            let limit = f64::from(limit);
            let left = if advantage > 0.0 {
                moved > limit
            } else {
                moved < -limit
            };
            let kept = if left { 0.0 } else { advantage };
            let penalty = f64::from(penalty);
            Term {
                value: -kept * ratio + penalty * log_ratio * log_ratio,
                d_logprob: -kept * ratio * slope + 2.0 * penalty * log_ratio,
                clipped: left,
            }
        }
        Surrogate::SequenceClip { .. } => unreachable!("handled per sequence"),
    }
}

/// `max(−rA, −clip(r, 1−low, 1+high)A)` and its derivative by the log-ratio.
fn clip(ratio: f64, slope: f64, advantage: f64, low: f64, high: f64) -> Term {
    let plain = -ratio * advantage;
    let bounded = -ratio.clamp(1.0 - low, 1.0 + high) * advantage;
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

/// GSPO (Zheng et al. 2025): the clip of `s = exp(mean_t(ℓ_π − ℓ_old))` over the kept tokens,
/// differentiated through the mean: `dℓ_j = Σ_t weight_t·c_t·dL_t/ds · s / n` for every kept `j`.
fn sequence_clip(
    row: &RowInputs<'_>,
    old: &[f32],
    kept: &[usize],
    factors: &[f64],
    low: f64,
    high: f64,
) -> Vec<Term> {
    let (ratio, slope) = sequence_ratio(row, old, kept);
    let mut out: Vec<Term> = kept
        .iter()
        .zip(factors)
        .map(|(&t, &factor)| {
            let term = clip(ratio, slope, f64::from(row.advantages[t]), low, high);
            let scale = f64::from(row.weights[t]) * factor;
            Term {
                value: scale * term.value,
                d_logprob: scale * term.d_logprob,
                clipped: term.clipped,
            }
        })
        .collect();
    let through_mean = out.iter().map(|t| t.d_logprob).sum::<f64>() / out.len().max(1) as f64;
    out.iter_mut().for_each(|t| t.d_logprob = through_mean);
    out
}

/// Geometric mean of the tokens' ratios, and the derivative of its bound.
pub(super) fn sequence_ratio(row: &RowInputs<'_>, old: &[f32], kept: &[usize]) -> (f64, f64) {
    let total: f64 = kept
        .iter()
        .map(|&t| f64::from(row.logprobs[t]) - f64::from(old[t]))
        .sum();
    bounded_exp(total / kept.len().max(1) as f64)
}
