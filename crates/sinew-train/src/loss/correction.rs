//! Corrections for the gap between the policy that sampled and the policy whose ratio the loss
//! uses.
//!
//! Engine and trainer can differ in kernels or precision, and asynchronous samples come from older weights. A
//! correction multiplies the surrogate of each trained token by a constant, where `w = exp(ℓ_prox − ℓ_b)`:
//!
//! | [`Correction`] | factor |
//! |---|---|
//! | `None` | 1; the surrogate's own ratio spans the gap |
//! | `Truncate` | `clamp(w, low, high)` |
//! | `Mask` (IcePop) | `w` inside `[low, high]`, else 0 |
//! | `SequenceMask` | the product of the sequence's `w`, 0 above `high` |
//! | `Reject` | `w`; the token leaves the loss altogether if a metric exceeds its bound |

use super::{RowInputs, bounded_exp};
use sinew_types::{Correction, RejectionLevel, RejectionMetric};

/// The result of a correction for one trainable token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CorrectedTerm {
    /// Constant factor on the surrogate.
    pub(super) factor: f64,
    /// Whether the token is removed from the loss.
    pub(super) rejected: bool,
    /// Whether the factor was truncated, or set to 0 by a mask.
    pub(super) bounded: bool,
}

/// Returns one correction for each of the `trained` tokens, from `w = exp(ℓ_prox − ℓ_b)`.
pub(super) fn corrections(
    correction: &Correction,
    row: &RowInputs<'_>,
    prox: &[f32],
    trained: &[usize],
) -> Vec<CorrectedTerm> {
    let gap = |t: usize| f64::from(prox[t]) - f64::from(row.behaviour[t]);
    let plain = |factor: f64| CorrectedTerm {
        factor,
        rejected: false,
        bounded: false,
    };
    match *correction {
        Correction::None => trained.iter().map(|_| plain(1.0)).collect(),
        Correction::Truncate { low, high } => trained
            .iter()
            .map(|&t| {
                let w = bounded_exp(gap(t)).0;
                let factor = w.clamp(f64::from(low), f64::from(high));
                CorrectedTerm {
                    bounded: factor != w,
                    ..plain(factor)
                }
            })
            .collect(),
        Correction::Mask { low, high } => trained
            .iter()
            .map(|&t| {
                let w = bounded_exp(gap(t)).0;
                let inside = (f64::from(low)..=f64::from(high)).contains(&w);
                CorrectedTerm {
                    bounded: !inside,
                    ..plain(if inside { w } else { 0.0 })
                }
            })
            .collect(),
        Correction::SequenceMask { high } => {
            let w = bounded_exp(trained.iter().map(|&t| gap(t)).sum()).0;
            let inside = w <= f64::from(high);
            let masked = CorrectedTerm {
                bounded: !inside,
                ..plain(if inside { w } else { 0.0 })
            };
            vec![masked; trained.len()]
        }
        Correction::Reject {
            metric,
            level,
            upper,
        } => {
            let gaps: Vec<f64> = trained.iter().map(|&t| gap(t)).collect();
            let rejected = rejections(metric, level, f64::from(upper), &gaps);
            gaps.iter()
                .zip(rejected)
                .map(|(&g, rejected)| CorrectedTerm {
                    rejected,
                    ..plain(bounded_exp(g).0)
                })
                .collect()
        }
    }
}

/// Whether each token exceeds the bound. The metric of a sequence is the mean of its tokens' metrics; its
/// ratio is the geometric mean.
fn rejections(
    metric: RejectionMetric,
    level: RejectionLevel,
    upper: f64,
    gaps: &[f64],
) -> Vec<bool> {
    match level {
        RejectionLevel::Token => gaps.iter().map(|&g| of_token(metric, g) > upper).collect(),
        RejectionLevel::Sequence => {
            let n = gaps.len().max(1) as f64;
            let value = match metric {
                RejectionMetric::Ratio => bounded_exp(gaps.iter().sum::<f64>() / n).0,
                _ => gaps.iter().map(|&g| of_token(metric, g)).sum::<f64>() / n,
            };
            vec![value > upper; gaps.len()]
        }
    }
}

/// Metrics of one token from `g = ℓ_prox − ℓ_b`. The tokens were drawn from `b`, so the
/// estimators are those of KL(b‖prox) with `log r = g` (Schulman 2020): `−g`, `g²/2`, `e^g − 1 − g`.
fn of_token(metric: RejectionMetric, g: f64) -> f64 {
    match metric {
        RejectionMetric::Ratio => bounded_exp(g).0,
        RejectionMetric::KlK1 => -g,
        RejectionMetric::KlK2 => 0.5 * g * g,
        RejectionMetric::KlK3 => bounded_exp(g).0 - 1.0 - g,
    }
}
