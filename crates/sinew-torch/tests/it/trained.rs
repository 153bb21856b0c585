//! Updates by a trainer, and the distances between two runs of it.

use crate::bench::{Bench, Tensors, device, weights, wide_params};
use sinew_model::Keep;
use sinew_torch::TorchPolicy;
use sinew_train::checkpoint::{CheckpointError, CheckpointStore, Draft, LoadedCheckpoint};
use sinew_train::optim::{AdamWConfig, Outcome, Update};
use sinew_train::pack::MicroBatch;
use sinew_train::{
    ModelPolicy, OutputChoice, Policy, PolicyError, ScoreGrads, Scores, StepReport, Trainer,
    TrainerConfig, score_rows, score_values,
};
use sinew_types::{LossSpec, PolicyVersion, TensorSource, TrainRow};
use std::sync::Arc;

/// Seed of the model that is trained.
pub(crate) const SEED: u64 = 11;
/// Learning rate of the updates that are compared. Three of them move a weight by at most 0.03; the largest
/// weights are about 1.
const RATE: f32 = 1e-2;
/// Learning rate that changes no weight.
const NO_RATE: f32 = 1e-30;
/// Largest distance of log-probabilities, in nats, and of values.
const MAX_SCORES: f64 = 1e-5;
/// Largest distance of weights, as a share of the largest weight.
const MAX_WEIGHTS: f64 = 1e-6;

/// The embedded policy with the weights of `bench.wide_model(SEED)`.
pub(crate) fn embedded() -> ModelPolicy {
    ModelPolicy::full(wide_params(SEED), 256, Keep::All, device()).unwrap()
}

/// A policy that is lent to a trainer, which owns its policy.
struct Lent<'a>(&'a mut dyn Policy);

impl Policy for Lent<'_> {
    fn lanes(&self) -> usize {
        self.0.lanes()
    }

    fn forward(
        &mut self,
        wave: &[&MicroBatch],
        want: OutputChoice,
    ) -> Result<Vec<Scores>, PolicyError> {
        self.0.forward(wave, want)
    }

    fn backward(&mut self, wave: &[&MicroBatch], grads: &[ScoreGrads]) -> Result<(), PolicyError> {
        self.0.backward(wave, grads)
    }

    fn has_critic(&self) -> bool {
        self.0.has_critic()
    }

    fn zero_gradients(&mut self) -> Result<(), PolicyError> {
        self.0.zero_gradients()
    }

    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError> {
        self.0.apply(update)
    }

    fn save(&mut self, draft: &mut Draft<'_>) -> Result<Vec<String>, CheckpointError> {
        self.0.save(draft)
    }

    fn load(
        &mut self,
        loaded: &LoadedCheckpoint,
        weights: &[String],
        updates: u64,
    ) -> Result<(), CheckpointError> {
        self.0.load(loaded, weights, updates)
    }

    fn weights(&mut self, version: PolicyVersion) -> Result<Arc<dyn TensorSource>, PolicyError> {
        self.0.weights(version)
    }
}

/// A torch policy that goes back to its first weights, which takes less time than to open it again.
pub(crate) struct Fresh {
    policy: TorchPolicy,
    pub(crate) first: LoadedCheckpoint,
    files: Vec<String>,
}

impl Fresh {
    /// Saves the weights that `policy` has now in the folder `name` of the bench.
    pub(crate) fn of(bench: &Bench, name: &str, mut policy: TorchPolicy) -> Self {
        let store = CheckpointStore::open(bench.dir.path().join(name), 2).unwrap();
        let mut draft = store.begin(0).unwrap();
        let files = policy.save(&mut draft).unwrap();
        draft.commit().unwrap();
        Self {
            policy,
            first: store.load().unwrap().unwrap(),
            files,
        }
    }

    /// The policy with its first weights and without moments.
    pub(crate) fn policy(&mut self) -> &mut TorchPolicy {
        self.policy.load(&self.first, &self.files, 0).unwrap();
        &mut self.policy
    }
}

/// The settings of comparable updates.
///
/// An update divides each gradient by its own size: with Adam's usual epsilon of 1e-8, a gradient that is
/// only rounding moves its weight as far as any other, and in any direction. So epsilon is 1/100 of the
/// norm after clipping here, while the root mean square of the 20,544 gradients is 1/143 of that norm.
/// Gradients of this size move their weights by two fifths of the learning rate, and those at rounding
/// level (1e-7 of the norm) by 1e-5 of it, which is a tenth of the bound on weights.
///
/// `norm` is that of the first gradients. They are clipped to half of it.
pub(crate) fn settings(norm: f64, micro_batch_tokens: usize) -> TrainerConfig {
    TrainerConfig {
        adamw: AdamWConfig {
            epsilon: (0.005 * norm) as f32,
            weight_decay: 0.1,
            ..AdamWConfig::default()
        },
        max_grad_norm: Some((0.5 * norm) as f32),
        ..TrainerConfig::new(micro_batch_tokens, RATE)
    }
}

/// A batch with its loss, and the way in which it is trained.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) rows: &'a [TrainRow],
    pub(crate) spec: &'a LossSpec,
    pub(crate) settings: TrainerConfig,
    /// Steps on the same batch.
    pub(crate) steps: usize,
}

impl<'a> Job<'a> {
    /// Three comparable updates on a batch. `policy` computes the norm of the first gradients; it cannot be
    /// used for another job, since its moments change.
    pub(crate) fn comparable(
        rows: &'a [TrainRow],
        spec: &'a LossSpec,
        micro_batch_tokens: usize,
        policy: &mut dyn Policy,
    ) -> Self {
        let first = Self {
            rows,
            spec,
            settings: TrainerConfig::new(micro_batch_tokens, NO_RATE),
            steps: 1,
        };
        let norm = first.reports(policy)[0].grad_norm;
        assert!(norm > 0.0, "the batch trains nothing");
        Self {
            settings: settings(norm, micro_batch_tokens),
            steps: 3,
            ..first
        }
    }

    /// The same with micro-batches of another size.
    pub(crate) fn packed(self, micro_batch_tokens: usize) -> Self {
        let settings = TrainerConfig {
            micro_batch_tokens,
            ..self.settings
        };
        Self { settings, ..self }
    }

    /// Trains the batch. Returns the report of each step, with log-probabilities before their updates.
    pub(crate) fn reports(&self, policy: &mut dyn Policy) -> Vec<StepReport> {
        let mut trainer = Trainer::new(Lent(policy), self.settings, Box::new(|| 0.0)).unwrap();
        trainer.keep_logprobs();
        let step = |_| trainer.step(self.rows, self.spec).unwrap();
        (0..self.steps).map(step).collect()
    }

    /// Trains the batch, and looks at the policy afterwards.
    pub(crate) fn train(&self, policy: &mut dyn Policy) -> Trained {
        let reports = self.reports(policy);
        let tokens = self.settings.micro_batch_tokens;
        let mut after = score_rows(policy, self.rows, tokens).unwrap();
        if policy.has_critic() {
            after.extend(score_values(policy, self.rows, tokens).unwrap());
        }
        Trained {
            reports,
            after,
            weights: weights(policy),
        }
    }

    /// The sum of the magnitudes of the loss's policy terms at a ratio of 1. The loss itself may be a small
    /// difference of large terms of both signs, so its rounding is relative to this sum.
    fn magnitude(&self) -> f64 {
        let of = |row: &TrainRow| -> f64 {
            let pairs = row.weights.iter().zip(&row.advantages);
            pairs.map(|(w, a)| f64::from(w * a).abs()).sum()
        };
        self.rows.iter().map(of).sum()
    }
}

/// A policy after a job.
pub(crate) struct Trained {
    pub(crate) reports: Vec<StepReport>,
    /// Log-probabilities of all rows after the last update, then their values if there is a critic.
    after: Vec<Vec<f32>>,
    pub(crate) weights: Tensors,
}

/// Distances of two runs of a job, the largest ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gaps {
    /// Log-probabilities before each update and after the last one, in nats, and values after it.
    pub(crate) scores: f64,
    /// Losses, relative.
    pub(crate) losses: f64,
    /// Norms of gradients, relative.
    pub(crate) gradients: f64,
    /// Weights after all updates, as a share of the largest weight.
    pub(crate) weights: f64,
}

impl Trained {
    pub(crate) fn gaps(&self, expected: &Self, job: &Job<'_>) -> Gaps {
        let mut gaps = Gaps {
            scores: 0.0,
            losses: 0.0,
            gradients: 0.0,
            weights: weight_gap(&self.weights, &expected.weights),
        };
        assert_eq!(self.reports.len(), expected.reports.len());
        for (found, expected) in self.reports.iter().zip(&expected.reports) {
            assert_eq!(found.updates, expected.updates);
            assert!(found.skipped.is_empty() && expected.skipped.is_empty());
            let size = job.magnitude().max(expected.loss.abs());
            let loss = (found.loss - expected.loss).abs() / size;
            let norm = (found.grad_norm / expected.grad_norm - 1.0).abs();
            assert!(loss.is_finite() && norm.is_finite(), "{loss} {norm}");
            gaps.losses = gaps.losses.max(loss);
            gaps.gradients = gaps.gradients.max(norm);
            gaps.scores = gaps.scores.max(gap(&kept(found), &kept(expected)));
        }
        assert_eq!(self.after.len(), expected.after.len());
        for (found, expected) in self.after.iter().zip(&expected.after) {
            gaps.scores = gaps.scores.max(gap(found, expected));
        }
        gaps
    }
}

impl Gaps {
    /// Checks all distances. `relative` is the bound on losses and norms of gradients.
    pub(crate) fn check(&self, what: &str, relative: f64) {
        assert!(self.scores <= MAX_SCORES, "{what}: {self:?}");
        assert!(self.losses <= relative, "{what}: {self:?}");
        assert!(self.gradients <= relative, "{what}: {self:?}");
        assert!(self.weights <= MAX_WEIGHTS, "{what}: {self:?}");
    }
}

/// The log-probabilities of all rows that a step trained.
fn kept(report: &StepReport) -> Vec<f32> {
    let columns = report.logprobs.iter().flatten();
    columns.flatten().copied().collect()
}

/// The largest distance of two columns.
pub(crate) fn gap(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let apart = |(a, b): (&f32, &f32)| {
        let apart = f64::from((a - b).abs());
        assert!(apart.is_finite(), "{a} and {b}");
        apart
    };
    found.iter().zip(expected).map(apart).fold(0.0, f64::max)
}

/// The largest distance of two models' weights, as a share of the largest weight.
pub(crate) fn weight_gap(found: &Tensors, expected: &Tensors) -> f64 {
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected));
    let mut widest = 0.0f64;
    let mut largest = 0.0f64;
    for (name, (shape, values)) in expected {
        let (found_shape, found) = &found[name];
        assert_eq!(found_shape, shape, "{name}");
        widest = widest.max(gap(found, values));
        let magnitudes = values.iter().map(|value| f64::from(value.abs()));
        largest = magnitudes.fold(largest, f64::max);
    }
    widest / largest
}

/// Prints the head of a table of distances.
pub(crate) fn print_head(first: &str) {
    print_cells(
        first,
        ["log-probs", "gradients", "weights"].map(str::to_owned),
    );
}

/// Prints a line of a table of distances.
pub(crate) fn print_gaps(name: &str, gaps: &Gaps) {
    let cells = [gaps.scores, gaps.gradients, gaps.weights];
    print_cells(name, cells.map(|gap| format!("{gap:.1e}")));
}

#[expect(clippy::print_stdout, reason = "a table for whoever runs the test")]
fn print_cells(name: &str, [logprobs, gradients, weights]: [String; 3]) {
    println!("{name:<32} {logprobs:>10} {gradients:>10} {weights:>10}");
}
