//! Sums over the steps of a run, earlier sessions included.

use sinew_orchestrator::{
    EvalRecord, SampleCounts, StepRecord, TokenSummary, Totals, VerdictInput,
};

/// Sums so far.
pub(super) struct Sums {
    pub(super) samples: SampleCounts,
    pub(super) tokens: TokenSummary,
    pub(super) totals: Totals,
    /// Sums over all steps and measurements, for the verdict.
    pub(super) course: VerdictInput,
}

impl Sums {
    /// Sums over what earlier sessions recorded.
    pub(super) fn new(samples: SampleCounts, steps: &[StepRecord], evals: &[EvalRecord]) -> Self {
        Self {
            samples,
            tokens: TokenSummary::of(steps),
            totals: Totals::of(steps),
            course: VerdictInput::of(steps, evals),
        }
    }

    /// Adds a step.
    pub(super) fn add(&mut self, record: &StepRecord) {
        self.tokens.add(record);
        self.totals.add(record);
        self.course.step(record);
    }

    /// Counts the samples of an update.
    pub(super) fn count(&mut self, trained: usize, dropped: usize) {
        self.samples.trained += trained;
        self.samples.dropped += dropped;
    }
}
