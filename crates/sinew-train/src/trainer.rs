//! One batch of rows to one (or several) optimizer updates.

mod minibatch;
mod report;

pub use report::{NonFiniteGradient, PhaseSeconds, Progress, StepReport};

use crate::loss::{
    LossError, LossSpecError, MetricSums, RowInputs, RowLoss, row_loss, validate_spec,
};
use crate::optim::{AdamW, AdamWConfig, OptimError, Schedule, Update};
use crate::pack::{MicroBatch, PackError, PackedRow, Packing, pack};
use crate::policy::{Policy, PolicyError, Scores};
use serde::{Deserialize, Serialize};
use sinew_tensor::Device;
use sinew_types::{Correction, EpisodeId, LossSpec, PolicyVersion, TrainRow};
use std::fmt;
use std::ops::ControlFlow;

/// Settings of a trainer that do not depend on the loss.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerConfig {
    /// Most packed tokens in one forward and backward pass: what bounds memory.
    pub micro_batch_tokens: usize,
    pub schedule: Schedule,
    #[serde(default)]
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this global norm; `None` leaves them.
    #[serde(default)]
    pub max_grad_norm: Option<f32>,
    /// Passes over each batch.
    #[serde(default = "one")]
    pub epochs: u32,
    /// Optimizer updates per pass; the batch is divided among them.
    #[serde(default = "one")]
    pub minibatches: u32,
    /// Of the order of minibatches.
    #[serde(default)]
    pub seed: u64,
}

fn one() -> u32 {
    1
}

impl TrainerConfig {
    /// One update per batch at a constant learning rate, gradients clipped to norm 1.
    pub fn new(micro_batch_tokens: usize, lr: f32) -> Self {
        Self {
            micro_batch_tokens,
            schedule: Schedule::constant(lr),
            adamw: AdamWConfig::default(),
            max_grad_norm: Some(1.0),
            epochs: 1,
            minibatches: 1,
            seed: 0,
        }
    }

    /// Checks every number.
    pub fn validate(&self) -> Result<(), OptimError> {
        self.schedule.validate()?;
        self.adamw.validate()?;
        let limits = [
            ("micro_batch_tokens", self.micro_batch_tokens as f64, 1.0),
            ("epochs", f64::from(self.epochs), 1.0),
            ("minibatches", f64::from(self.minibatches), 1.0),
            (
                "max_grad_norm",
                self.max_grad_norm.map_or(1.0, f64::from),
                f64::MIN_POSITIVE,
            ),
        ];
        match limits
            .iter()
            .find(|(_, value, least)| !(value >= least && value.is_finite()))
        {
            None => Ok(()),
            Some(&(field, value, _)) => Err(OptimError {
                field,
                value,
                allowed: "a finite number above 0",
            }),
        }
    }
}

/// Why a step failed. Unless said otherwise nothing was updated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TrainError {
    #[error(transparent)]
    Optim(#[from] OptimError),
    #[error(transparent)]
    Spec(#[from] LossSpecError),
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error("row of episode {episode}: {error}")]
    Loss {
        episode: EpisodeId,
        error: LossError,
    },
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error("none of the {rows} rows has a token to train on")]
    NothingToTrain { rows: usize },
    #[error(
        "the loss has a value term but this trainer has no critic: remove the value coefficient"
    )]
    NoCritic,
    #[error("step cancelled after {updates} of its optimizer updates")]
    Cancelled { updates: u32 },
}

/// Called after each micro-batch; `Break` ends the step before its next update.
pub type ProgressSink = Box<dyn FnMut(&Progress) -> ControlFlow<()> + Send>;

/// Seconds from any fixed origin; the trainer itself reads no clock.
pub type Clock = Box<dyn Fn() -> f64 + Send>;

/// Turns batches of rows into updates of a policy.
pub struct Trainer<P> {
    pub(crate) policy: P,
    pub(crate) config: TrainerConfig,
    pub(crate) optimizer: AdamW,
    pub(crate) skipped_updates: u64,
    clock: Clock,
    progress: Option<ProgressSink>,
}

impl<P: fmt::Debug> fmt::Debug for Trainer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("policy", &self.policy)
            .field("config", &self.config)
            .field("step", &self.optimizer.step())
            .finish_non_exhaustive()
    }
}

/// A row's log-probabilities under the proximal policy, at its trained tokens; 0 elsewhere.
type Prox = Option<Vec<f32>>;

/// What the passes of one step accumulate.
struct StepState<'a> {
    rows: &'a [TrainRow],
    spec: &'a LossSpec,
    prox: Vec<Prox>,
    report: StepReport,
    /// Over the whole step.
    sums: MetricSums,
    /// Before the first update: engine and trainer at the same weights.
    first: MetricSums,
}

impl<P: Policy> Trainer<P> {
    /// A trainer at step 0. `clock` gives seconds from any fixed origin, for the report only.
    pub fn new(
        policy: P,
        config: TrainerConfig,
        device: Device,
        clock: Clock,
    ) -> Result<Self, TrainError> {
        config.validate()?;
        Ok(Self {
            policy,
            config,
            optimizer: AdamW::new(config.adamw, device),
            skipped_updates: 0,
            clock,
            progress: None,
        })
    }

    /// Reports each micro-batch to `sink`.
    pub fn on_progress(&mut self, sink: ProgressSink) {
        self.progress = Some(sink);
    }

    /// The policy being trained.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// The policy, to publish its weights or score with it. Not to change its weights.
    pub fn policy_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    /// The policy, when training is over.
    pub fn into_policy(self) -> P {
        self.policy
    }

    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Number of updates applied, which is the version of the weights.
    pub fn version(&self) -> PolicyVersion {
        PolicyVersion(self.optimizer.step())
    }

    /// Updates that a non-finite gradient prevented, over the trainer's life.
    pub fn skipped_updates(&self) -> u64 {
        self.skipped_updates
    }

    /// Trains on one batch: `epochs × minibatches` optimizer updates.
    ///
    /// `ℓ_prox` of rows that do not bring it is `ℓ_π` before the first update: with one update it
    /// is this step's own forward pass, with several one more forward pass is made. Each
    /// minibatch's weights are scaled so that they add up to the batch's, which keeps the step
    /// size independent of the number of minibatches.
    pub fn step(&mut self, rows: &[TrainRow], spec: &LossSpec) -> Result<StepReport, TrainError> {
        validate_spec(spec)?;
        if spec.value.is_some() {
            return Err(TrainError::NoCritic);
        }
        let started = (self.clock)();
        let packing = pack(rows, self.config.micro_batch_tokens)?;
        if packing.micro_batches.is_empty() {
            return Err(TrainError::NothingToTrain { rows: rows.len() });
        }
        check_reference(rows, spec)?;
        let mut state = StepState {
            rows,
            spec,
            prox: vec![None; rows.len()],
            report: StepReport::new(&packing),
            sums: MetricSums::default(),
            first: MetricSums::default(),
        };
        state.report.seconds.pack = (self.clock)() - started;
        let updates = self.config.epochs * self.config.minibatches;
        let wants_prox = !matches!(spec.correction, Correction::None)
            && rows.iter().any(|row| row.prox_logprobs.is_none());
        if updates > 1 && wants_prox {
            self.fill_prox(&packing, &mut state)?;
        }
        if self.config.minibatches == 1 {
            for _ in 0..self.config.epochs {
                self.update(&packing.micro_batches, 1.0, &mut state)?;
            }
        } else {
            self.minibatch_updates(&mut state)?;
        }
        state
            .report
            .finish(&state.sums, &state.first, self.version());
        Ok(state.report)
    }

    fn minibatch_updates(&mut self, state: &mut StepState<'_>) -> Result<(), TrainError> {
        let parts = minibatch::split(state.rows, self.config.minibatches as usize);
        let total = minibatch::total_weight(state.rows, 0..state.rows.len());
        let mut packed = Vec::with_capacity(parts.len());
        for part in parts {
            let own: f64 = minibatch::total_weight(state.rows, part.iter().copied());
            if own == 0.0 {
                continue;
            }
            let rows: Vec<TrainRow> = part.iter().map(|&r| state.rows[r].clone()).collect();
            let mut packing = pack(&rows, self.config.micro_batch_tokens)?;
            for batch in &mut packing.micro_batches {
                batch.rows.iter_mut().for_each(|r| r.row = part[r.row]);
            }
            packed.push((packing, total / own));
        }
        for epoch in 0..self.config.epochs {
            let seed = self.config.seed ^ self.optimizer.step().rotate_left(32);
            for at in minibatch::order(packed.len(), seed ^ u64::from(epoch)) {
                let (packing, scale) = &packed[at];
                self.update(&packing.micro_batches, *scale, state)?;
            }
        }
        Ok(())
    }

    /// Log-probabilities of the weights as they are now, for rows that do not bring them.
    fn fill_prox(
        &mut self,
        packing: &Packing,
        state: &mut StepState<'_>,
    ) -> Result<(), TrainError> {
        let started = (self.clock)();
        for batch in &packing.micro_batches {
            let scores = self.policy.forward(batch, false, false)?;
            state.report.computed_tokens += batch.tokens.len();
            for packed in &batch.rows {
                let row = &state.rows[packed.row];
                state.prox[packed.row] = Some(spread(row.tokens.len(), packed, &scores.logprobs));
            }
        }
        state.report.seconds.prox = (self.clock)() - started;
        Ok(())
    }

    /// Accumulates the gradient over `batches` and applies one update.
    fn update(
        &mut self,
        batches: &[MicroBatch],
        scale: f64,
        state: &mut StepState<'_>,
    ) -> Result<(), TrainError> {
        self.policy.zero_gradients();
        let first = state.report.updates == 0 && state.report.skipped.is_empty();
        for (index, batch) in batches.iter().enumerate() {
            let sums = self.micro_batch(batch, scale, state)?;
            state.sums.merge(&sums);
            if first {
                state.first.merge(&sums);
            }
            let progress = Progress {
                update: state.report.updates + state.report.skipped.len() as u32,
                updates: self.config.epochs * self.config.minibatches,
                micro_batch: index + 1,
                micro_batches: batches.len(),
                tokens: batch.tokens.len(),
            };
            if let Some(sink) = &mut self.progress
                && sink(&progress).is_break()
            {
                return Err(TrainError::Cancelled {
                    updates: state.report.updates,
                });
            }
        }
        self.apply(state)
    }

    fn apply(&mut self, state: &mut StepState<'_>) -> Result<(), TrainError> {
        let started = (self.clock)();
        let lr = self.config.schedule.lr(self.optimizer.step());
        let clip = self.config.max_grad_norm;
        let update = {
            let mut tensors = self.policy.tensors();
            self.optimizer.update(&mut tensors, lr, clip)
        };
        match update {
            Update::Applied { grad_norm, lr } => {
                self.policy.weights_changed()?;
                state.report.updates += 1;
                state.report.grad_norm = grad_norm;
                state.report.lr = lr;
            }
            Update::SkippedNonFinite { tensor } => {
                self.skipped_updates += 1;
                state.report.skipped.push(NonFiniteGradient { tensor });
            }
        }
        state.report.seconds.optimizer += (self.clock)() - started;
        Ok(())
    }

    fn micro_batch(
        &mut self,
        batch: &MicroBatch,
        scale: f64,
        state: &mut StepState<'_>,
    ) -> Result<MetricSums, TrainError> {
        let started = (self.clock)();
        // Entropy costs little beside the logits and its course is the first thing to look at.
        let scores = self.policy.forward(batch, true, true)?;
        check_scores(batch, &scores)?;
        let forwarded = (self.clock)();
        let mut d_logprob = vec![0.0f32; batch.items.len()];
        let mut d_entropy = vec![0.0f32; batch.items.len()];
        let mut sums = MetricSums::default();
        for packed in &batch.rows {
            let row = &state.rows[packed.row];
            let loss = packed_row_loss(row, packed, &scores, scale, state)?;
            state.report.loss += loss.loss;
            sums.merge(&loss.sums);
            for (i, term) in packed.terms.iter().enumerate() {
                d_logprob[term.item as usize] += loss.d_logprob[i];
                d_entropy[term.item as usize] += loss.d_entropy[i];
            }
        }
        let derived = (self.clock)();
        if state.spec.entropy == 0.0 {
            d_entropy.clear();
        }
        self.policy.backward(batch, &d_logprob, &d_entropy)?;
        let seconds = &mut state.report.seconds;
        seconds.forward += forwarded - started;
        seconds.loss += derived - forwarded;
        seconds.backward += (self.clock)() - derived;
        state.report.computed_tokens += batch.tokens.len();
        state.report.micro_batches += 1;
        Ok(sums)
    }
}

/// The loss of one row's trained tokens, gathered from its columns and the micro-batch's items.
fn packed_row_loss(
    row: &TrainRow,
    packed: &PackedRow,
    scores: &Scores,
    scale: f64,
    state: &StepState<'_>,
) -> Result<RowLoss, TrainError> {
    let gather = |column: &[f32]| -> Vec<f32> {
        packed
            .terms
            .iter()
            .map(|term| column[term.t as usize])
            .collect()
    };
    let items = |column: &[f32]| -> Vec<f32> {
        packed
            .terms
            .iter()
            .map(|term| column[term.item as usize])
            .collect()
    };
    let mut weights = gather(&row.weights);
    weights
        .iter_mut()
        .for_each(|w| *w = (f64::from(*w) * scale) as f32);
    let logprobs = items(&scores.logprobs);
    let given = row
        .prox_logprobs
        .as_ref()
        .or(state.prox[packed.row].as_ref());
    let prox = given.map_or_else(|| logprobs.clone(), |column| gather(column));
    let reference = row.ref_logprobs.as_deref().map(gather);
    let inputs = RowInputs {
        weights: &weights,
        advantages: &gather(&row.advantages),
        behaviour: &gather(&row.behaviour_logprobs),
        prox: Some(&prox),
        reference: reference.as_deref(),
        logprobs: &logprobs,
        entropies: &items(&scores.entropies),
    };
    row_loss(state.spec, &inputs).map_err(|error| TrainError::Loss {
        episode: row.episode.clone(),
        error,
    })
}

/// A column of the row's length with the trained tokens' values.
pub(crate) fn spread(len: usize, packed: &PackedRow, items: &[f32]) -> Vec<f32> {
    let mut column = vec![0.0; len];
    for term in &packed.terms {
        column[term.t as usize] = items[term.item as usize];
    }
    column
}

fn check_scores(batch: &MicroBatch, scores: &Scores) -> Result<(), PolicyError> {
    let n = batch.items.len();
    if scores.logprobs.len() == n && scores.entropies.len() == n {
        return Ok(());
    }
    Err(PolicyError(format!(
        "forward gave {} log-probabilities and {} entropies for {n} items",
        scores.logprobs.len(),
        scores.entropies.len()
    )))
}

/// A KL term needs the reference of every trained row before anything is computed.
fn check_reference(rows: &[TrainRow], spec: &LossSpec) -> Result<(), TrainError> {
    let trained = |row: &&TrainRow| row.weights.iter().any(|&w| w != 0.0);
    let lacks = |row: &&TrainRow| row.ref_logprobs.is_none();
    match rows.iter().filter(trained).find(lacks) {
        Some(row) if spec.kl.is_some() => Err(TrainError::Loss {
            episode: row.episode.clone(),
            error: LossError::MissingReference,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;
