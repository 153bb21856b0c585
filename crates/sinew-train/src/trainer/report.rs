//! Report of a step: counts, times and metrics. The report does not affect the training.

use crate::loss::{LossMetrics, MetricSums};
use crate::pack::Packing;
use crate::policy::RankUsage;
use serde::{Deserialize, Serialize};
use sinew_types::PolicyVersion;

/// Progress of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of finished optimizer updates.
    pub update: u32,
    /// Maximum number of updates in the step; there are fewer if there are not enough rows.
    pub updates: u32,
    /// Number of finished micro-batches of this update.
    pub micro_batch: usize,
    /// Number of micro-batches in this update.
    pub micro_batches: usize,
    /// Number of trie rows in the last micro-batch.
    pub tokens: usize,
}

/// An update that was skipped because of a non-finite gradient.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NonFiniteGradient {
    /// The first tensor with a non-finite gradient.
    pub tensor: String,
}

/// Seconds of each phase, measured by the trainer's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PhaseSeconds {
    /// Sorting and packing rows.
    pub pack: f64,
    /// The extra forward pass for proximal log-probabilities.
    pub prox: f64,
    /// Forward passes.
    pub forward: f64,
    pub loss: f64,
    /// Backward passes.
    pub backward: f64,
    /// Clipping and AdamW.
    pub optimizer: f64,
}

impl PhaseSeconds {
    /// Sum of all phases. With several processes, only those of rank 0 are counted.
    pub fn total(&self) -> f64 {
        self.pack + self.prox + self.forward + self.loss + self.backward + self.optimizer
    }
}

/// The outcome of [`Trainer::step`](crate::Trainer::step).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Version of the weights after the step: the total number of applied updates.
    pub version: PolicyVersion,
    /// Loss of the batch; with several updates, the mean over passes.
    pub loss: f64,
    /// Global norm of the gradients before clipping, at the last applied update.
    pub grad_norm: f64,
    /// Learning rate of the last applied update.
    pub lr: f32,
    /// Number of applied updates.
    pub updates: u32,
    /// Updates that were skipped.
    pub skipped: Vec<NonFiniteGradient>,
    /// Number of rows in the batch.
    pub rows: usize,
    /// Number of rows without a trained token.
    pub untrained_rows: usize,
    /// Number of forward and backward passes.
    pub micro_batches: usize,
    /// Trie rows computed in all passes.
    pub computed_tokens: usize,
    /// Number of tokens in all rows, the work of one pass without prefix sharing.
    pub naive_tokens: usize,
    /// Number of trie rows for all rows, the work of one pass with prefix sharing.
    pub packed_tokens: usize,
    /// Metrics over all updates of the step.
    pub metrics: LossMetrics,
    /// Mean of `|ℓ_behaviour − ℓ_π|` before the first update. If the engine sampled with the same weights, it
    /// is the numerical gap between engine and trainer. `None` without sampled tokens (SFT).
    pub gap_mean_abs: Option<f64>,
    /// Maximum of `|ℓ_behaviour − ℓ_π|` before the first update.
    pub gap_max_abs: Option<f64>,
    /// Seconds by phase.
    pub seconds: PhaseSeconds,
    /// Seconds and memory of the processes behind the policy since the last step; `None` without such
    /// processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RankUsage>,
    /// Share of the trie rows computed by recorded experts, 0 to 1; `None` if the policy replays none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routed_share: Option<f64>,
    /// Mean load-balancing loss of the model's routers over the step's trie rows, which is not a part of
    /// `loss`; `None` if it is not a part of the gradients.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_loss: Option<f64>,
    /// Log-probabilities of each row at its trained tokens when it was first trained, in nats, and 0
    /// elsewhere; `None` for a row that was not trained. Empty unless they are kept
    /// ([`Trainer::keep_logprobs`](crate::Trainer::keep_logprobs)).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<Option<Vec<f32>>>,
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
            ranks: None,
            routed_share: None,
            router_loss: None,
            logprobs: Vec::new(),
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
