//! The report of a step.

use crate::loss::{LossMetrics, MetricSums};
use crate::pack::Packing;
use serde::{Deserialize, Serialize};
use sinew_types::PolicyVersion;

/// Where a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Optimizer updates done, of at most how many (fewer if there are not enough rows).
    pub update: u32,
    pub updates: u32,
    /// Micro-batches done of this update.
    pub micro_batch: usize,
    pub micro_batches: usize,
    /// Trie rows of the one just done.
    pub tokens: usize,
}

/// An update that did not take place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonFiniteGradient {
    /// First tensor with a gradient that is not finite.
    pub tensor: String,
}

/// Seconds by the trainer's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    pub pack: f64,
    /// The extra forward pass for proximal log-probabilities.
    pub prox: f64,
    pub forward: f64,
    pub loss: f64,
    pub backward: f64,
    pub optimizer: f64,
}

impl PhaseSeconds {
    pub fn total(&self) -> f64 {
        self.pack + self.prox + self.forward + self.loss + self.backward + self.optimizer
    }
}

/// The outcome of [`Trainer::step`](crate::Trainer::step).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Version of the weights now: the number of updates applied since the beginning.
    pub version: PolicyVersion,
    /// Loss of the batch; with several updates, the mean over passes.
    pub loss: f64,
    /// Norm before clipping and learning rate of the last update applied.
    pub grad_norm: f64,
    pub lr: f32,
    pub updates: u32,
    /// Updates that did not take place.
    pub skipped: Vec<NonFiniteGradient>,
    pub rows: usize,
    pub untrained_rows: usize,
    /// Forward and backward passes.
    pub micro_batches: usize,
    /// Trie rows computed in all passes.
    pub computed_tokens: usize,
    /// What one pass without prefix sharing computes, and what it computes with it.
    pub naive_tokens: usize,
    pub packed_tokens: usize,
    /// Over all updates of the step.
    pub metrics: LossMetrics,
    /// `|ℓ_behaviour − ℓ_π|` before the first update: if the engine had these very weights, the
    /// numerical gap between engine and trainer. `None` without sampled tokens (SFT).
    pub gap_mean_abs: Option<f64>,
    pub gap_max_abs: Option<f64>,
    pub seconds: PhaseSeconds,
}

impl StepReport {
    pub(super) fn new(packing: &Packing) -> Self {
        let rows: usize = packing.micro_batches.iter().map(|m| m.rows.len()).sum();
        Self {
            version: PolicyVersion(0),
            loss: 0.0,
            grad_norm: 0.0,
            lr: 0.0,
            updates: 0,
            skipped: Vec::new(),
            rows: rows + packing.untrained_rows,
            untrained_rows: packing.untrained_rows,
            micro_batches: 0,
            computed_tokens: 0,
            naive_tokens: packing.naive_tokens,
            packed_tokens: packing.computed_tokens,
            metrics: LossMetrics::default(),
            gap_mean_abs: None,
            gap_max_abs: None,
            seconds: PhaseSeconds::default(),
        }
    }

    pub(super) fn finish(&mut self, sums: &MetricSums, first: &MetricSums, version: PolicyVersion) {
        self.version = version;
        // Every pass is a mean like the batch's.
        let passes = f64::from(self.updates + self.skipped.len() as u32).max(1.0);
        self.loss /= passes;
        self.metrics = sums.finish();
        let parts = &mut self.metrics;
        for part in [
            &mut parts.policy_loss,
            &mut parts.kl_loss,
            &mut parts.entropy_loss,
            &mut parts.value_loss,
            &mut parts.teacher_loss,
        ] {
            *part /= passes;
        }
        let first = first.finish();
        self.gap_mean_abs = first.gap_mean_abs;
        self.gap_max_abs = first.gap_max_abs;
    }
}
