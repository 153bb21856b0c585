//! Optimizer settings, learning-rate schedules, and AdamW for weights in host memory.
//!
//! Settings are plain data, so that a policy on another device can apply the same [`Update`] with its own
//! kernels.

mod adamw;

pub use adamw::{AdamW, HostTensor};

use serde::{Deserialize, Serialize};

/// AdamW (Loshchilov & Hutter 2019). Weight decay is decoupled and scaled by the learning rate:
///
/// ```text
/// m = β1 m + (1 − β1) g        v = β2 v + (1 − β2) g²
/// w = w − lr (m / (1 − β1ⁿ) / (√(v / (1 − β2ⁿ)) + ε) + decay · w)
/// ```
///
/// with update number `n` from 1. Norms and biases have no decay.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Decay of the first moment, in [0, 1). Default: 0.9.
    pub beta1: f32,
    /// Decay of the second moment, in [0, 1). Default: 0.95.
    pub beta2: f32,
    /// Added to the root of the second moment, above 0. Default: 1e-8.
    pub epsilon: f32,
    /// Factor of the decay, at least 0. Default: 0.
    pub weight_decay: f32,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.0,
        }
    }
}

/// Learning rate as a function of the number of earlier updates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Learning rate after warm-up, above 0.
    pub peak_lr: f32,
    /// Updates over which it rises linearly; update 0 already has `peak_lr / warmup_steps`.
    /// Default: 0.
    #[serde(default)]
    pub warmup_steps: u64,
    /// The course after warm-up. Default: constant.
    #[serde(default)]
    pub decay: Decay,
}

/// The course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type", deny_unknown_fields)]
pub enum Decay {
    /// The peak, without end.
    #[default]
    Constant,
    /// Straight from the peak to `final_fraction` of it at `total_steps`, which stays.
    Linear {
        total_steps: u64,
        final_fraction: f32,
    },
    /// Half a cosine from the peak to `final_fraction` of it at `total_steps`, which stays.
    Cosine {
        total_steps: u64,
        final_fraction: f32,
    },
}

/// A refused setting: its name, its value, and the allowed range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("optimizer {field} is {value}, allowed: {allowed}")]
pub struct OptimError {
    /// Name of the setting.
    pub field: &'static str,
    /// The value that was given.
    pub value: f64,
    /// The allowed range, for users.
    pub allowed: &'static str,
}

fn require(
    field: &'static str,
    value: f64,
    allowed: &'static str,
    holds: bool,
) -> Result<(), OptimError> {
    if holds && value.is_finite() {
        Ok(())
    } else {
        Err(OptimError {
            field,
            value,
            allowed,
        })
    }
}

impl AdamWConfig {
    /// Refuses numbers outside their ranges.
    pub fn validate(&self) -> Result<(), OptimError> {
        for (field, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            let holds = (0.0..1.0).contains(&beta);
            require(field, f64::from(beta), "at least 0 and below 1", holds)?;
        }
        let (epsilon, decay) = (self.epsilon, self.weight_decay);
        require("epsilon", f64::from(epsilon), "above 0", epsilon > 0.0)?;
        require("weight_decay", f64::from(decay), "at least 0", decay >= 0.0)
    }
}

impl Schedule {
    /// A learning rate that never changes.
    pub fn constant(peak_lr: f32) -> Self {
        Self {
            peak_lr,
            warmup_steps: 0,
            decay: Decay::Constant,
        }
    }

    /// Refuses numbers outside their ranges, and a decay that ends before the warm-up.
    pub fn validate(&self) -> Result<(), OptimError> {
        let peak = self.peak_lr;
        require("peak_lr", f64::from(peak), "above 0", peak > 0.0)?;
        let (Decay::Linear {
            total_steps,
            final_fraction,
        }
        | Decay::Cosine {
            total_steps,
            final_fraction,
        }) = self.decay
        else {
            return Ok(());
        };
        let holds = total_steps > self.warmup_steps;
        require(
            "total_steps",
            total_steps as f64,
            "above warmup_steps",
            holds,
        )?;
        let holds = (0.0..=1.0).contains(&final_fraction);
        require(
            "final_fraction",
            f64::from(final_fraction),
            "from 0 to 1",
            holds,
        )
    }

    /// Learning rate of the update number `step` (the first is 0).
    pub fn lr(&self, step: u64) -> f32 {
        let peak = f64::from(self.peak_lr);
        if step < self.warmup_steps {
            return (peak * (step + 1) as f64 / self.warmup_steps as f64) as f32;
        }
        let (total, floor, cosine) = match self.decay {
            Decay::Constant => return self.peak_lr,
            Decay::Linear {
                total_steps,
                final_fraction,
            } => (total_steps, final_fraction, false),
            Decay::Cosine {
                total_steps,
                final_fraction,
            } => (total_steps, final_fraction, true),
        };
        let span = total.saturating_sub(self.warmup_steps).max(1) as f64;
        let progress = ((step - self.warmup_steps) as f64 / span).min(1.0);
        let left = if cosine {
            0.5 * (1.0 + (std::f64::consts::PI * progress).cos())
        } else {
            1.0 - progress
        };
        (peak * (f64::from(floor) + (1.0 - f64::from(floor)) * left)) as f32
    }
}

/// Request for one optimizer update of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Update {
    /// Updates applied with this one, from 1: the exponent of the bias correction.
    pub number: u64,
    /// Learning rate of this update.
    pub lr: f32,
    /// Moments and decay.
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this global norm (over all tensors); `None` leaves them.
    pub max_grad_norm: Option<f32>,
}

/// The result of an update.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The weights changed. `grad_norm` is the global norm before clipping.
    Applied { grad_norm: f64 },
    /// A gradient was not finite: weights and optimizer state are as before. `tensor` is the first
    /// such one.
    SkippedNonFinite { tensor: String },
}

#[cfg(test)]
mod tests;
