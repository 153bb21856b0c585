//! Computes gradients per token from a loss specification and one row's signals.
//!
//! It is a pure function of numbers, without a model, a batch or an algorithm. The loss of a row with
//! trainable tokens `t` (those with `weights[t] != 0`) is
//!
//! `loss = Σ_t weights[t] · ( c_t·L_t + kl·K_t − entropy·H_t )`
//!
//! with the surrogate `L_t`, the correction factor `c_t` (a constant: no gradient flows through
//! it), the KL estimate `K_t` against the reference and the entropy `H_t`, and the derivatives of
//! that sum with respect to every `ℓ_π[t]` and `H_t`.
//!
//! Invariants: positions with weight 0 are never read, so their values (NaN included) cannot leak; a rejected
//! token leaves all terms, not only the surrogate; weights keep the denominator they came with, whatever is
//! rejected (AReaL's `N_orig`); arithmetic is f64.

mod correction;
mod metrics;
mod surrogate;
mod teacher;
mod validate;
mod value;

pub use metrics::{LossMetrics, MetricSums};
pub use teacher::teacher_divergence;
pub use validate::{LossSpecError, validate_spec};
pub use value::{ValueLoss, value_loss};

use correction::corrections;
use sinew_types::{Correction, KlEstimator, LossSpec, Surrogate};

/// Log-ratios are bounded by ±20 before `exp`, as verl and OpenRLHF do: beyond it the ratio is
/// constant (no gradient), and nothing overflows f32.
pub const LOG_RATIO_BOUND: f64 = 20.0;

/// Reasons for which a row's loss cannot be computed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum LossError {
    /// A column's length differs from that of the weights.
    #[error("loss input {field} has {actual} entries, expected {expected}")]
    Length {
        field: &'static str,
        actual: usize,
        expected: usize,
    },
    /// A KL term without log-probabilities of the reference model.
    #[error(
        "the loss has a KL term but the row has no ref_logprobs: compute them with a reference \
         model, they are never taken as zero"
    )]
    MissingReference,
    /// A correction without log-probabilities of the proximal policy.
    #[error(
        "the loss is corrected for the gap to the sampling policy but the row has no old \
         log-probabilities: give prox_logprobs or let the trainer take its first forward pass"
    )]
    MissingOld,
    /// A value term without values or returns.
    #[error(
        "the loss has a value term but the row lacks values or returns: score it with the critic \
         before advantages are computed"
    )]
    MissingValues,
    /// A teacher term without the teacher's tokens.
    #[error(
        "the loss compares with a teacher's distribution but the row has none: score it with the \
         teacher before it is trained"
    )]
    MissingTeacher,
    /// A lower bound of the ratio above the upper one.
    #[error(
        "clip bounds at {index} are {low} and {high}: the lower one must not be above the upper one"
    )]
    ClipOrder { index: usize, low: f32, high: f32 },
    /// A value at a trained token is not finite.
    #[error("{field}[{index}] is {value}: expected a finite number where the weight is not 0")]
    NotFinite {
        field: &'static str,
        index: usize,
        value: f32,
    },
}

/// One row's columns, all of the same length. Entry `t` belongs to one predicted token;
/// log-probabilities are natural logarithms, at the temperature that the token was sampled with.
#[derive(Clone, Copy, Debug)]
pub struct RowInputs<'a> {
    /// Weight of the token in the loss; 0 excludes it. The algorithm's aggregation (such as a mean over
    /// tokens) is part of the weight.
    pub weights: &'a [f32],
    /// Advantage of the token; above 0 makes it more likely.
    pub advantages: &'a [f32],
    /// `ℓ_b`: log-probabilities of the engine that sampled.
    pub behaviour: &'a [f32],
    /// `ℓ_prox`: log-probabilities of the proximal policy. Required, and then also used as `ℓ_old`, with
    /// every correction but [`Correction::None`]. With that, `ℓ_old = ℓ_b` and this is not read.
    pub prox: Option<&'a [f32]>,
    /// `ℓ_ref`: log-probabilities of the reference model. Required if the loss has a KL term.
    pub reference: Option<&'a [f32]>,
    /// `ℓ_π`: log-probabilities of the weights being trained.
    pub logprobs: &'a [f32],
    /// Entropy of the predicted distribution in nats; only read for the entropy term and for
    /// metrics. Empty if the policy computes none, which an entropy term does not allow.
    pub entropies: &'a [f32],
    /// Bounds of the ratio by token, in place of the surrogate's; `None`: the surrogate's for all tokens.
    /// Only surrogates with a clip read them.
    pub clip: Option<ClipBounds<'a>>,
    /// Tokens whose ratios the ratio of a sequence is the mean of; `None`: all tokens with a weight. Only
    /// surrogates of a sequence's ratio read it.
    pub in_ratio: Option<&'a [bool]>,
}

/// Lowest and highest ratio that the clip leaves as it is, by token.
#[derive(Clone, Copy, Debug)]
pub struct ClipBounds<'a> {
    /// Lower bounds.
    pub low: &'a [f32],
    /// Upper bounds, none below its lower bound.
    pub high: &'a [f32],
}

/// Loss of one row and its derivatives, in the row's own indexing (0 where the weight is 0).
#[derive(Clone, Debug, PartialEq)]
pub struct RowLoss {
    /// Weighted total of policy, KL and entropy terms.
    pub loss: f64,
    /// Derivative with respect to each `ℓ_π[t]`.
    pub d_logprob: Vec<f32>,
    /// Derivative with respect to each entropy.
    pub d_entropy: Vec<f32>,
    /// The row's part of the metrics.
    pub sums: MetricSums,
}

/// Surrogate of one token: its value, its derivative with respect to the log-ratio's numerator `ℓ_π`, and
/// whether its clip was active.
#[derive(Clone, Copy, Debug, Default)]
struct Term {
    value: f64,
    d_logprob: f64,
    clipped: bool,
}

/// Returns `exp` of a bounded log-ratio, and the derivative of the bound (1 inside, 0 outside).
fn bounded_exp(log_ratio: f64) -> (f64, f64) {
    let inside = log_ratio.abs() <= LOG_RATIO_BOUND;
    let bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND);
    (bounded.exp(), if inside { 1.0 } else { 0.0 })
}

/// Estimate of KL(π‖ref) at one token and its derivative by `ℓ_π`, from `d = ℓ_π − ℓ_ref` (Schulman 2020).
/// The derivative is that of the estimator's value.
fn kl_term(estimator: KlEstimator, d: f64) -> (f64, f64) {
    match estimator {
        KlEstimator::K1 => (d, 1.0),
        KlEstimator::K2 => (0.5 * d * d, d),
        KlEstimator::K3 => {
            let (inverse, slope) = bounded_exp(-d);
            (inverse - 1.0 + d, 1.0 - inverse * slope)
        }
    }
}

/// Computes one row's loss, its derivatives and its share of the metrics.
///
/// Sequence-level terms (GSPO's ratio, sequence rejection) see exactly the tokens given here: a row
/// must never be split over calls.
///
/// # Errors
/// If a column is missing, of another length, or not finite at a trained token.
pub fn row_loss(spec: &LossSpec, row: &RowInputs<'_>) -> Result<RowLoss, LossError> {
    check(spec, row)?;
    let n = row.weights.len();
    let trained: Vec<usize> = (0..n).filter(|&t| row.weights[t] != 0.0).collect();
    let old = match (&spec.correction, row.prox) {
        (Correction::None, _) => row.behaviour,
        (_, Some(prox)) => prox,
        (_, None) => return Err(LossError::MissingOld),
    };
    let corrected = corrections(&spec.correction, row, old, &trained);
    let kept: Vec<usize> = trained
        .iter()
        .copied()
        .zip(&corrected)
        .filter(|(_, c)| !c.rejected)
        .map(|(t, _)| t)
        .collect();
    let factors: Vec<f64> = corrected
        .iter()
        .filter(|c| !c.rejected)
        .map(|c| c.factor)
        .collect();

    let mut out = RowLoss {
        loss: 0.0,
        d_logprob: vec![0.0; n],
        d_entropy: vec![0.0; n],
        sums: MetricSums::default(),
    };
    out.sums.add_corrections(&corrected);
    out.sums.add_behaviour_gap(spec, row, &trained);
    let terms = surrogate::terms(&spec.surrogate, row, old, &kept, &factors);
    out.sums.add_ratios(&spec.surrogate, row, old, &kept);
    for (&t, term) in kept.iter().zip(&terms) {
        out.loss += term.value;
        out.sums.policy_loss += term.value;
        out.sums.clipped += f64::from(u8::from(term.clipped));
        let regularized = regularize(spec, row, t, &mut out);
        out.d_logprob[t] = (term.d_logprob + regularized) as f32;
    }
    Ok(out)
}

/// Adds the KL and entropy terms of token `t`; returns the former's derivative by `ℓ_π`.
fn regularize(spec: &LossSpec, row: &RowInputs<'_>, t: usize, out: &mut RowLoss) -> f64 {
    let weight = f64::from(row.weights[t]);
    if spec.entropy != 0.0 {
        let scale = weight * f64::from(spec.entropy);
        let value = scale * f64::from(row.entropies[t]);
        out.loss -= value;
        out.sums.entropy_loss -= value;
        out.d_entropy[t] = -scale as f32;
    }
    let Some(reference) = row.reference else {
        return 0.0;
    };
    let d = f64::from(row.logprobs[t]) - f64::from(reference[t]);
    // A reference that only the reward reads is a distance all the same.
    let estimator = spec.kl.map_or(KlEstimator::K3, |kl| kl.estimator);
    let (value, slope) = kl_term(estimator, d);
    out.sums.kl_reference += value;
    out.sums.kl_tokens += 1.0;
    let Some(kl) = spec.kl else {
        return 0.0;
    };
    let scale = weight * f64::from(kl.coefficient);
    out.loss += scale * value;
    out.sums.kl_loss += scale * value;
    scale * slope
}

/// Refuses columns that are missing, of another length, or not finite where the weight is not 0.
fn check(spec: &LossSpec, row: &RowInputs<'_>) -> Result<(), LossError> {
    if spec.kl.is_some() && row.reference.is_none() {
        return Err(LossError::MissingReference);
    }
    let expected = row.weights.len();
    let has_entropies = spec.entropy != 0.0 || !row.entropies.is_empty();
    let columns = [
        ("advantages", Some(row.advantages)),
        ("behaviour_logprobs", Some(row.behaviour)),
        ("prox_logprobs", row.prox),
        ("ref_logprobs", row.reference),
        ("logprobs", Some(row.logprobs)),
        ("entropies", has_entropies.then_some(row.entropies)),
        ("clip_low", row.clip.map(|clip| clip.low)),
        ("clip_high", row.clip.map(|clip| clip.high)),
    ];
    for (field, column) in columns {
        let Some(column) = column else { continue };
        if column.len() != expected {
            return Err(LossError::Length {
                field,
                actual: column.len(),
                expected,
            });
        }
        let bad = |&(t, v): &(usize, &f32)| row.weights[t] != 0.0 && !v.is_finite();
        if let Some((index, &value)) = column.iter().enumerate().find(bad) {
            return Err(LossError::NotFinite {
                field,
                index,
                value,
            });
        }
    }
    if let Some(in_ratio) = row.in_ratio
        && in_ratio.len() != expected
    {
        return Err(LossError::Length {
            field: "in_ratio",
            actual: in_ratio.len(),
            expected,
        });
    }
    let Some(clip) = row.clip else { return Ok(()) };
    let crossed = |&t: &usize| row.weights[t] != 0.0 && clip.low[t] > clip.high[t];
    match (0..expected).find(crossed) {
        None => Ok(()),
        Some(index) => Err(LossError::ClipOrder {
            index,
            low: clip.low[index],
            high: clip.high[index],
        }),
    }
}

/// Whether the surrogate compares the policy with an older one, so that the `ratio_*` metrics are measured.
pub fn uses_ratio(surrogate: &Surrogate) -> bool {
    !matches!(surrogate, Surrogate::Reinforce | Surrogate::CrossEntropy)
}

#[cfg(test)]
mod tests;
