//! Turns one batch of rows into one or several optimizer updates.
//!
//! ```text
//! rows -> pack -> micro-batch: forward -> loss and derivatives -> backward   for each
//!              -> sum of the gradients over processes -> clip -> AdamW       once per update
//! ```

mod derive;
mod minibatch;
mod ranks;
mod report;

pub use report::{NonFiniteGradient, PhaseSeconds, Progress, StepReport};

use crate::comm::{Comm, CommError, SingleProcess};
use crate::loss::{LossError, LossSpecError, MetricSums, validate_spec};
use crate::optim::{AdamWConfig, OptimError, Outcome, Schedule, Update};
use crate::pack::{MicroBatch, PackError, PackedRow, Packing};
use crate::policy::{OutputChoice, Policy, Scores, waves};
use crate::policy_error::PolicyError;
use derive::derive;
use serde::{Deserialize, Serialize};
use sinew_types::{Clock, Correction, EpisodeId, LossSpec, PolicyVersion, TrainRow};
use std::fmt;
use std::ops::ControlFlow;

/// Settings of a trainer that do not depend on the loss. Files of older checkpoints contain one more
/// (`epochs`, always 1).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainerConfig {
    /// Maximum packed tokens in one forward and backward pass: bounds memory, and does not change the result
    /// except for rounding.
    pub micro_batch_tokens: usize,
    /// Learning rate by update; a step has [`minibatches`](Self::minibatches) of them, trained or not.
    pub schedule: Schedule,
    /// Moments and decay. Default: see [`AdamWConfig`].
    #[serde(default)]
    pub adamw: AdamWConfig,
    /// Gradients are scaled down to this global norm; `None` leaves them. Default in files: none.
    #[serde(default)]
    pub max_grad_norm: Option<f32>,
    /// Optimizer updates per batch, which is divided among them. Default: 1.
    #[serde(default = "one")]
    pub minibatches: u32,
    /// Seed of the episodes' order in minibatches. Default: 0.
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

/// Reasons for which a step failed. Nothing was updated, unless the variant states otherwise.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TrainError {
    /// A refused setting.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// A refused loss.
    #[error(transparent)]
    Spec(#[from] LossSpecError),
    /// Rows that cannot be packed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// The loss of a row could not be computed.
    #[error("row of episode {episode}: {error}")]
    Loss {
        episode: EpisodeId,
        error: LossError,
    },
    /// The model failed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// All weights of the batch are 0.
    #[error("none of the {rows} rows has a token to train on")]
    NothingToTrain { rows: usize },
    /// The loss has a value term, but the policy has no critic.
    #[error(
        "values are asked for but the policy has no critic: add one or remove the value coefficient"
    )]
    NoCritic,
    /// The loss has an entropy term, but the policy computes no entropies.
    #[error("the policy computes no entropies: remove the entropy coefficient")]
    NoEntropies,
    /// Another process failed or ended.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The progress sink cancelled the step, after this many updates.
    #[error("step cancelled after {updates} of its optimizer updates")]
    Cancelled { updates: u32 },
}

/// Callback after each micro-batch. `Break` cancels the step before its next update. A step with several
/// updates can end between two of them ([`TrainError::Cancelled`]); the weights are then not those of a
/// complete step.
pub type ProgressSink = Box<dyn FnMut(&Progress) -> ControlFlow<()> + Send>;

/// Turns batches of rows into updates of a policy. Single-threaded; the policy can use threads
/// inside a call.
pub struct Trainer<P> {
    pub(crate) policy: P,
    pub(crate) config: TrainerConfig,
    /// Applied updates, which is the version of the weights.
    pub(crate) updates: u64,
    /// Index of the next update in the learning-rate schedule.
    pub(crate) place: u64,
    /// Updates that were skipped because of a non-finite gradient, over all steps.
    pub(crate) skipped_updates: u64,
    clock: Clock,
    progress: Option<ProgressSink>,
    comm: Box<dyn Comm>,
    keeps_logprobs: bool,
}

impl<P: fmt::Debug> fmt::Debug for Trainer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trainer")
            .field("policy", &self.policy)
            .field("config", &self.config)
            .field("updates", &self.updates)
            .finish_non_exhaustive()
    }
}

/// A row's log-probabilities under the proximal policy, at its trained tokens; 0 elsewhere.
type Prox = Option<Vec<f32>>;

/// State that is accumulated over the passes of one step.
struct StepState<'a> {
    rows: &'a [TrainRow],
    spec: &'a LossSpec,
    prox: Vec<Prox>,
    /// Log-probabilities of each row when it is first trained; empty if they are not kept.
    logprobs: Vec<Prox>,
    report: StepReport,
    /// Metric sums of the whole step.
    sums: MetricSums,
    /// Metric sums before the first update, when engine and trainer have the same weights.
    first: MetricSums,
}

impl<P: Policy> Trainer<P> {
    /// Creates a trainer at step 0 with a single process. `clock` returns seconds from any fixed origin; only
    /// the report uses it.
    ///
    /// # Errors
    /// If a setting is out of range.
    pub fn new(policy: P, config: TrainerConfig, clock: Clock) -> Result<Self, TrainError> {
        config.validate()?;
        Ok(Self {
            policy,
            config,
            updates: 0,
            place: 0,
            skipped_updates: 0,
            clock,
            progress: None,
            comm: Box::new(SingleProcess),
            keeps_logprobs: false,
        })
    }

    /// Reports each micro-batch to `sink`.
    pub fn on_progress(&mut self, sink: ProgressSink) {
        self.progress = Some(sink);
    }

    /// Makes further reports contain each row's log-probabilities ([`StepReport::logprobs`]).
    pub fn keep_logprobs(&mut self) {
        self.keeps_logprobs = true;
    }

    /// The policy being trained.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// Returns the policy mutably, to publish its weights or to score with it. Its weights must not be
    /// changed.
    pub fn policy_mut(&mut self) -> &mut P {
        &mut self.policy
    }

    /// The settings, as they were given.
    pub fn config(&self) -> &TrainerConfig {
        &self.config
    }

    /// Number of updates applied, which is the version of the weights.
    pub fn version(&self) -> PolicyVersion {
        PolicyVersion(self.updates)
    }

    /// Sets the step of the next batch, from 1. The learning-rate schedule counts all steps, also those
    /// without training, which the trainer does not see. If this is not called, each batch is the next step.
    pub fn begin_step(&mut self, step: u64) {
        self.place = step.saturating_sub(1) * u64::from(self.config.minibatches);
    }

    /// Trains on one batch: as many optimizer updates as there are minibatches.
    ///
    /// For rows without `ℓ_prox`, it is `ℓ_π` before the first update. With one update, it comes from this
    /// step's forward pass; with several updates, an additional forward pass computes it. The weights of all
    /// rows are multiplied by the number of minibatches, which keeps the mean step size independent of their
    /// number: an episode weighs as much as in the whole batch, whichever minibatch it falls into.
    ///
    /// # Errors
    /// Rows, settings or loss that cannot be used, or a failed model, before the first update.
    /// [`TrainError::Cancelled`], or an error of the model or of another process, between two updates of one
    /// step.
    pub fn step(&mut self, rows: &[TrainRow], spec: &LossSpec) -> Result<StepReport, TrainError> {
        validate_spec(spec)?;
        if spec.value.is_some() && !self.policy.has_critic() {
            return Err(TrainError::NoCritic);
        }
        if spec.entropy != 0.0 && !self.policy.has_entropies() {
            return Err(TrainError::NoEntropies);
        }
        let started = (self.clock)();
        let packing = self.pack(rows)?;
        if packing.micro_batches.is_empty() {
            return Err(TrainError::NothingToTrain { rows: rows.len() });
        }
        check_columns(rows, spec)?;
        let mut state = StepState {
            rows,
            spec,
            prox: vec![None; rows.len()],
            logprobs: kept(self.keeps_logprobs, rows),
            report: StepReport::new(&packing),
            sums: MetricSums::default(),
            first: MetricSums::default(),
        };
        state.report.seconds.pack = (self.clock)() - started;
        let updates = self.config.minibatches;
        let wants_prox = !matches!(spec.correction, Correction::None)
            && rows.iter().any(|row| row.prox_logprobs.is_none());
        if updates > 1 && wants_prox {
            self.fill_prox(&packing, &mut state)?;
        }
        if self.config.minibatches == 1 {
            self.update(&packing.micro_batches, 1.0, &mut state)?;
        } else {
            self.minibatch_updates(&mut state)?;
        }
        state
            .report
            .finish(&state.sums, &state.first, self.version());
        state.report.ranks = self.policy.take_usage();
        state.report.router_loss = self.policy.take_router_loss();
        let routed = packing.routed_tokens as f64 / packing.computed_tokens as f64;
        state.report.routed_share = self.policy.replays_routes().then_some(routed);
        state.report.logprobs = state.logprobs;
        Ok(state.report)
    }

    /// Divides the batch among several updates, in an order that follows from seed and step.
    fn minibatch_updates(&mut self, state: &mut StepState<'_>) -> Result<(), TrainError> {
        let seed = self.config.seed ^ self.updates.rotate_left(32);
        let parts = minibatch::split(state.rows, self.config.minibatches as usize, seed);
        let scale = parts.len() as f64;
        for part in parts {
            let rows: Vec<TrainRow> = part.iter().map(|&r| state.rows[r].clone()).collect();
            let mut packing = self.pack(&rows)?;
            for batch in &mut packing.micro_batches {
                batch.rows.iter_mut().for_each(|r| r.row = part[r.row]);
            }
            self.update(&packing.micro_batches, scale, state)?;
        }
        Ok(())
    }

    /// Computes the present log-probabilities for rows that have none.
    fn fill_prox(
        &mut self,
        packing: &Packing,
        state: &mut StepState<'_>,
    ) -> Result<(), TrainError> {
        let started = (self.clock)();
        let batches: Vec<&MicroBatch> = packing.micro_batches.iter().collect();
        let mut done = 0;
        for wave in waves(&batches, self.policy.lanes()) {
            let all = self.policy.forward(&wave, OutputChoice::default())?;
            check_scores(&wave, &all, OutputChoice::default())?;
            for (batch, scores) in wave.iter().zip(&all) {
                state.report.computed_tokens += batch.tokens.len();
                for packed in &batch.rows {
                    let row = &state.rows[packed.row];
                    state.prox[packed.row] =
                        Some(spread(row.tokens.len(), packed, &scores.logprobs));
                }
            }
            done += wave.len();
            self.report_progress(state, done, batches.len(), &wave)?;
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
        self.policy.zero_gradients()?;
        let first = state.report.updates == 0 && state.report.skipped.is_empty();
        let shares = self.hand_out(batches, scale, state)?;
        let own: Vec<&MicroBatch> = shares[0].iter().map(|&b| &batches[b]).collect();
        let mut done = 0;
        for wave in waves(&own, self.policy.lanes()) {
            for sums in self.wave(&wave, scale, state)? {
                state.sums.merge(&sums);
                if first {
                    state.first.merge(&sums);
                }
            }
            done += wave.len();
            self.report_progress(state, done, own.len(), &wave)?;
        }
        let rows = |share: &Vec<usize>| ranks::rows_of(batches, share);
        self.gather(first, state, shares.iter().map(rows).collect())?;
        self.apply(state)
    }

    /// Reports a finished wave with its tokens, and the progress of the update.
    fn report_progress(
        &mut self,
        state: &StepState<'_>,
        micro_batch: usize,
        micro_batches: usize,
        wave: &[&MicroBatch],
    ) -> Result<(), TrainError> {
        let Some(sink) = &mut self.progress else {
            return Ok(());
        };
        let progress = Progress {
            update: state.report.updates + state.report.skipped.len() as u32,
            updates: self.config.minibatches,
            micro_batch,
            micro_batches,
            tokens: wave.iter().map(|batch| batch.tokens.len()).sum(),
        };
        match sink(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(TrainError::Cancelled {
                updates: state.report.updates,
            }),
        }
    }

    /// Applies one update, or counts it as skipped.
    fn apply(&mut self, state: &mut StepState<'_>) -> Result<(), TrainError> {
        let started = (self.clock)();
        let update = Update {
            number: self.updates + 1,
            lr: self.config.schedule.lr(self.place),
            adamw: self.config.adamw,
            max_grad_norm: self.config.max_grad_norm,
        };
        self.place += 1;
        match self.policy.apply(&update)? {
            Outcome::Applied { grad_norm } => {
                self.updates += 1;
                state.report.updates += 1;
                state.report.grad_norm = grad_norm;
                state.report.lr = update.lr;
            }
            Outcome::SkippedNonFinite { tensor } => {
                self.skipped_updates += 1;
                state.report.skipped.push(NonFiniteGradient { tensor });
            }
        }
        state.report.seconds.optimizer += (self.clock)() - started;
        Ok(())
    }

    /// Forward pass, loss and backward pass of one wave. Returns the sums of each micro-batch.
    fn wave(
        &mut self,
        wave: &[&MicroBatch],
        scale: f64,
        state: &mut StepState<'_>,
    ) -> Result<Vec<MetricSums>, TrainError> {
        let started = (self.clock)();
        // Entropy costs little compared with the logits, and it shows a collapse first.
        let want = OutputChoice {
            entropies: self.policy.has_entropies(),
            values: state.spec.value.is_some(),
            backward: true,
        };
        let all = self.policy.forward(wave, want)?;
        check_scores(wave, &all, want)?;
        let forwarded = (self.clock)();
        let (mut grads, mut sums) = (Vec::new(), Vec::new());
        for (batch, scores) in wave.iter().zip(&all) {
            state.keep_logprobs(batch, scores);
            let (own, of_batch) = derive(batch, scores, scale, state)?;
            grads.push(own);
            sums.push(of_batch);
            state.report.computed_tokens += batch.tokens.len();
            state.report.micro_batches += 1;
        }
        let derived = (self.clock)();
        self.policy.backward(wave, &grads)?;
        let seconds = &mut state.report.seconds;
        seconds.forward += forwarded - started;
        seconds.loss += derived - forwarded;
        seconds.backward += (self.clock)() - derived;
        Ok(sums)
    }
}

impl StepState<'_> {
    /// Stores the log-probabilities of rows that were not trained before in this step.
    fn keep_logprobs(&mut self, batch: &MicroBatch, scores: &Scores) {
        for packed in &batch.rows {
            let length = self.rows[packed.row].tokens.len();
            if let Some(kept) = self.logprobs.get_mut(packed.row) {
                kept.get_or_insert_with(|| spread(length, packed, &scores.logprobs));
            }
        }
    }
}

/// Creates the storage for the log-probabilities of each row, if they are kept.
fn kept(keeps: bool, rows: &[TrainRow]) -> Vec<Prox> {
    vec![None; if keeps { rows.len() } else { 0 }]
}

/// Returns a column of the row's length with the values of the trained tokens.
pub(crate) fn spread(len: usize, packed: &PackedRow, items: &[f32]) -> Vec<f32> {
    let mut column = vec![0.0; len];
    for term in &packed.terms {
        column[term.t as usize] = items[term.item as usize];
    }
    column
}

/// Refuses scores if their number differs from the number of items, or from that of micro-batches.
pub(crate) fn check_scores(
    wave: &[&MicroBatch],
    all: &[Scores],
    want: OutputChoice,
) -> Result<(), PolicyError> {
    if all.len() != wave.len() {
        return Err(PolicyError::failed(format!(
            "forward gave scores of {} micro-batches, expected {}",
            all.len(),
            wave.len()
        )));
    }
    for (batch, scores) in wave.iter().zip(all) {
        let n = batch.items.len();
        let expected = |wanted: bool| if wanted { n } else { 0 };
        let (entropies, values) = (expected(want.entropies), expected(want.values));
        let columns = [
            ("log-probabilities", scores.logprobs.len(), n),
            ("entropies", scores.entropies.len(), entropies),
            ("values", scores.values.len(), values),
        ];
        if let Some((what, actual, expected)) = columns.iter().find(|(_, actual, n)| actual != n) {
            return Err(PolicyError::failed(format!(
                "forward gave {actual} {what} for {n} items, expected {expected}"
            )));
        }
    }
    Ok(())
}

/// Refuses rows that lack a column which a term of the loss reads, before any computation.
fn check_columns(rows: &[TrainRow], spec: &LossSpec) -> Result<(), TrainError> {
    for row in rows.iter().filter(|r| r.weights.iter().any(|&w| w != 0.0)) {
        let missing = if spec.kl.is_some() && row.ref_logprobs.is_none() {
            LossError::MissingReference
        } else if spec.value.is_some() && (row.values.is_none() || row.returns.is_none()) {
            LossError::MissingValues
        } else if spec.teacher.is_some() && row.teacher_top.is_none() {
            LossError::MissingTeacher
        } else {
            continue;
        };
        return Err(TrainError::Loss {
            episode: row.episode.clone(),
            error: missing,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
