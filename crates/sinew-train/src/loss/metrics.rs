//! Metrics of a loss: sums over rows and micro-batches, and the means computed from them.

use super::correction::CorrectedTerm;
use super::surrogate::sequence_ratio;
use super::{RowInputs, bounded_exp, uses_ratio};
use serde::{Deserialize, Serialize};
use sinew_types::{LossSpec, Surrogate};

/// Sums over tokens. The losses are weighted; in all other sums, each trainable token counts once, whatever
/// its weight. The sums of parts, in any grouping, are equal up to f64 rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MetricSums {
    pub(super) policy_loss: f64,
    pub(super) kl_loss: f64,
    pub(super) entropy_loss: f64,
    value_loss: f64,
    teacher_loss: f64,
    teacher_kl: f64,
    value_clipped: f64,
    pub(super) kl_reference: f64,
    pub(super) kl_tokens: f64,
    pub(super) clipped: f64,
    trained: f64,
    kept: f64,
    masked: f64,
    truncated: f64,
    factor: f64,
    entropy: f64,
    kl_k1: f64,
    kl_k3: f64,
    gap_abs: f64,
    gap_max: f64,
    gap_tokens: f64,
    ratios: f64,
    ratio: f64,
    ratio_range: Extremes,
    entropy_tokens: f64,
}

/// The smallest and the largest of some numbers; infinite without any.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Extremes {
    min: f64,
    max: f64,
}

impl Default for Extremes {
    fn default() -> Self {
        Self {
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
        }
    }
}

impl MetricSums {
    /// Adds the sums of another row or micro-batch.
    pub fn merge(&mut self, other: &Self) {
        let (before, mut other) = (*self, *other);
        for (sum, value) in self.fields().into_iter().zip(other.fields()) {
            *sum += *value;
        }
        // These are no sums.
        self.gap_max = before.gap_max.max(other.gap_max);
        self.ratio_range.min = before.ratio_range.min.min(other.ratio_range.min);
        self.ratio_range.max = before.ratio_range.max.max(other.ratio_range.max);
    }

    fn fields(&mut self) -> [&mut f64; 26] {
        [
            &mut self.policy_loss,
            &mut self.kl_loss,
            &mut self.entropy_loss,
            &mut self.value_loss,
            &mut self.teacher_loss,
            &mut self.teacher_kl,
            &mut self.value_clipped,
            &mut self.kl_reference,
            &mut self.kl_tokens,
            &mut self.clipped,
            &mut self.trained,
            &mut self.kept,
            &mut self.masked,
            &mut self.truncated,
            &mut self.factor,
            &mut self.entropy,
            &mut self.kl_k1,
            &mut self.kl_k3,
            &mut self.gap_abs,
            &mut self.gap_max,
            &mut self.gap_tokens,
            &mut self.ratios,
            &mut self.ratio,
            &mut self.ratio_range.min,
            &mut self.ratio_range.max,
            &mut self.entropy_tokens,
        ]
    }

    /// Returns the bits of every sum.
    pub(crate) fn to_bits(self) -> Vec<u64> {
        let mut own = self;
        own.fields().into_iter().map(|f| f.to_bits()).collect()
    }

    /// Inverse of [`MetricSums::to_bits`]; missing sums stay as if nothing was counted.
    pub(crate) fn from_bits(bits: &[u64]) -> Self {
        let mut sums = Self::default();
        for (field, &bits) in sums.fields().into_iter().zip(bits) {
            *field = f64::from_bits(bits);
        }
        sums
    }

    /// Adds a row's weighted value loss.
    pub(crate) fn add_values(&mut self, loss: f64, clipped_tokens: u64) {
        self.value_loss += loss;
        self.value_clipped += clipped_tokens as f64;
    }

    /// Adds one token's divergence from the teacher, weighted and unweighted.
    pub(crate) fn add_teacher(&mut self, loss: f64, divergence: f64) {
        self.teacher_loss += loss;
        self.teacher_kl += divergence;
    }

    pub(super) fn add_corrections(&mut self, corrected: &[CorrectedTerm]) {
        for c in corrected {
            let masked = c.rejected || (c.bounded && c.factor == 0.0);
            self.trained += 1.0;
            self.masked += f64::from(u8::from(masked));
            self.truncated += f64::from(u8::from(c.bounded && !masked));
            if !c.rejected {
                self.kept += 1.0;
                self.factor += c.factor;
            }
        }
    }

    /// Entropy, and the distance of the trained policy from the one that sampled. Tokens drawn
    /// from `b`: with `g = ℓ_π − ℓ_b`, k1 is `−g` and k3 `e^g − 1 − g` (estimators of KL(b‖π)).
    pub(super) fn add_behaviour_gap(
        &mut self,
        spec: &LossSpec,
        row: &RowInputs<'_>,
        trained: &[usize],
    ) {
        for &t in trained {
            if let Some(entropy) = row.entropies.get(t) {
                self.entropy += f64::from(*entropy);
                self.entropy_tokens += 1.0;
            }
            if spec.surrogate == Surrogate::CrossEntropy {
                continue;
            }
            let gap = f64::from(row.logprobs[t]) - f64::from(row.behaviour[t]);
            self.gap_tokens += 1.0;
            self.kl_k1 -= gap;
            self.kl_k3 += bounded_exp(gap).0 - 1.0 - gap;
            self.gap_abs += gap.abs();
            self.gap_max = self.gap_max.max(gap.abs());
        }
    }

    /// Adds the ratios that the surrogate used: one for each token, or for each sequence (GSPO).
    pub(super) fn add_ratios(
        &mut self,
        surrogate: &Surrogate,
        row: &RowInputs<'_>,
        old: &[f32],
        kept: &[usize],
    ) {
        if !uses_ratio(surrogate) || kept.is_empty() {
            return;
        }
        let mut add = |ratio: f64| {
            self.ratios += 1.0;
            self.ratio += ratio;
            self.ratio_range.min = self.ratio_range.min.min(ratio);
            self.ratio_range.max = self.ratio_range.max.max(ratio);
        };
        if matches!(
            surrogate,
            Surrogate::SequenceClip { .. } | Surrogate::SequenceTokenClip { .. }
        ) {
            add(sequence_ratio(row, old, kept).0);
            return;
        }
        for &t in kept {
            add(bounded_exp(f64::from(row.logprobs[t]) - f64::from(old[t])).0);
        }
    }

    /// Computes the means. A mean is `None` if there was nothing to measure (no ratio under REINFORCE, no
    /// behaviour policy in SFT).
    pub fn finish(&self) -> LossMetrics {
        let per = |sum: f64, count: f64| (count > 0.0).then(|| sum / count);
        LossMetrics {
            policy_loss: self.policy_loss,
            kl_loss: self.kl_loss,
            entropy_loss: self.entropy_loss,
            value_loss: self.value_loss,
            teacher_loss: self.teacher_loss,
            trained_tokens: self.trained as u64,
            kept_tokens: self.kept as u64,
            masked_fraction: per(self.masked, self.trained).unwrap_or(0.0),
            truncated_fraction: per(self.truncated, self.trained).unwrap_or(0.0),
            correction_mean: per(self.factor, self.kept),
            value_clip_fraction: per(self.value_clipped, self.trained).unwrap_or(0.0),
            clip_fraction: per(self.clipped, self.kept).unwrap_or(0.0),
            entropy: per(self.entropy, self.entropy_tokens),
            kl_teacher: (self.teacher_kl != 0.0).then(|| self.teacher_kl / self.trained.max(1.0)),
            kl_reference: per(self.kl_reference, self.kl_tokens),
            kl_behaviour_k1: per(self.kl_k1, self.gap_tokens),
            kl_behaviour_k3: per(self.kl_k3, self.gap_tokens),
            gap_mean_abs: per(self.gap_abs, self.gap_tokens),
            gap_max_abs: (self.gap_tokens > 0.0).then_some(self.gap_max),
            ratio_mean: per(self.ratio, self.ratios),
            ratio_min: (self.ratios > 0.0).then_some(self.ratio_range.min),
            ratio_max: (self.ratios > 0.0).then_some(self.ratio_range.max),
        }
    }
}

/// Metrics of one optimizer step. Log-probabilities and entropies in nats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LossMetrics {
    /// Weighted surrogate loss. The total is the sum of the five losses.
    pub policy_loss: f64,
    /// Weighted KL estimate against the reference model.
    pub kl_loss: f64,
    /// Weighted entropy bonus; negative if the bonus is used.
    pub entropy_loss: f64,
    /// Weighted loss of the critic.
    pub value_loss: f64,
    /// Weighted divergence from the teacher.
    #[serde(default)]
    pub teacher_loss: f64,
    /// Number of tokens with a weight.
    pub trained_tokens: u64,
    /// Number of these tokens that no rejection removed.
    pub kept_tokens: u64,
    /// Share of trained tokens whose surrogate was masked or that were rejected.
    pub masked_fraction: f64,
    /// Share of trained tokens whose correction was truncated.
    pub truncated_fraction: f64,
    /// Mean correction factor of the kept tokens.
    pub correction_mean: Option<f64>,
    /// Share of kept tokens at which the surrogate's clip was active.
    pub clip_fraction: f64,
    /// Share of trained tokens at which the clip of the value loss was active.
    pub value_clip_fraction: f64,
    /// Mean entropy of the policy at trained tokens, in nats; `None` also for a policy that computes none. A
    /// fall towards 0 is an early sign of collapse.
    pub entropy: Option<f64>,
    /// Mean KL estimate against the reference, if rows have its log-probabilities. It uses the estimator of
    /// the loss, or k3 if only the reward has a KL term.
    pub kl_reference: Option<f64>,
    /// Mean distance to the teacher's distribution in nats, if there is a teacher term.
    #[serde(default)]
    pub kl_teacher: Option<f64>,
    /// KL(behaviour‖policy) in nats, estimator k1: the mean of `ℓ_b − ℓ_π`.
    pub kl_behaviour_k1: Option<f64>,
    /// KL(behaviour‖policy) in nats, estimator k3, which is never negative.
    pub kl_behaviour_k3: Option<f64>,
    /// Mean of `|ℓ_π − ℓ_b|`: at unchanged weights, the numerical gap between engine and trainer.
    pub gap_mean_abs: Option<f64>,
    /// Maximum of `|ℓ_π − ℓ_b|`.
    pub gap_max_abs: Option<f64>,
    /// Mean of `exp(ℓ_π − ℓ_old)`, the ratio that the surrogate used.
    pub ratio_mean: Option<f64>,
    /// Minimum of this ratio.
    pub ratio_min: Option<f64>,
    /// Maximum of this ratio.
    pub ratio_max: Option<f64>,
}
