//! The trainer with its checkpoints, behind the loop's port.

use crate::ports::Learner;
use crate::scoring_models::ScoringModels;
use crate::trainer_error::{of_policy, of_trainer, system};
use serde_json::Value;
use sinew_algo::{Algorithm, Column, Columns, Prepared};
use sinew_orchestrator::{PipelineError, Rows, StepRecord};
use sinew_train::checkpoint::{CheckpointError, CheckpointStore};
use sinew_train::{
    Commit, Policy, PolicyError, Progress, TrainError, Trainer, score_rows, score_values,
};
use sinew_types::{
    Fence, LossSpec, PolicyVersion, TensorSource, TokenKind, Trace, TrainRow, VersionSpan,
};
use std::fmt;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::watch;

/// Settings of a learner that are not of its policy.
#[derive(Clone, Debug)]
pub struct LearnerConfig {
    /// Most packed tokens in one forward and backward pass.
    pub micro_batch_tokens: usize,
    /// Checkpoints are in its folder `checkpoints`.
    pub run_dir: PathBuf,
    /// Older ones are removed.
    pub keep_checkpoints: usize,
    /// Hash of what was trained with: a checkpoint of another one is compared before it is restored.
    pub config_hash: String,
    /// Fence of this process, without which no checkpoint is named.
    pub fence: Fence,
}

/// Is given what a step trained: its number, its rows, and their log-probabilities by the trainer
/// ([`sinew_train::StepReport::logprobs`]).
pub type RowSink = Box<dyn FnMut(u64, &[TrainRow], &[Option<Vec<f32>>]) + Send>;

/// Trains and remembers.
pub struct PolicyLearner<P> {
    trainer: Trainer<P>,
    scorers: ScoringModels,
    checkpoints: CheckpointStore,
    micro_batch_tokens: usize,
    run_dir: PathBuf,
    cancel: Option<watch::Receiver<bool>>,
    /// Some updates of a step were done and others not: the weights are those of no step.
    partial: bool,
    config_hash: String,
    /// Tokenizer files, which make a checkpoint a whole model.
    files: Vec<(String, Vec<u8>)>,
    row_sink: Option<RowSink>,
}

impl<P: fmt::Debug> fmt::Debug for PolicyLearner<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyLearner")
            .field("trainer", &self.trainer)
            .field("run_dir", &self.run_dir)
            .finish_non_exhaustive()
    }
}

/// Called between two passes over the rows of a step: an error once the run is asked to stop.
fn go_on(cancel: Option<&watch::Receiver<bool>>) -> Result<(), PipelineError> {
    match cancel {
        Some(cancel) if *cancel.borrow() => Err(PipelineError::Interrupted),
        _ => Ok(()),
    }
}

impl<P: Policy + Send> PolicyLearner<P> {
    /// A learner around a trainer at step 0; each checkpoint stores `files` with its weights.
    ///
    /// # Errors
    /// If the folder of checkpoints cannot be made.
    pub fn new(
        config: LearnerConfig,
        trainer: Trainer<P>,
        scorers: ScoringModels,
        files: Vec<(String, Vec<u8>)>,
    ) -> Result<Self, PipelineError> {
        let folder = config.run_dir.join("checkpoints");
        let checkpoints = CheckpointStore::open(folder, config.keep_checkpoints).map_err(system)?;
        Ok(Self {
            trainer,
            scorers,
            checkpoints: checkpoints.fenced(config.fence),
            micro_batch_tokens: config.micro_batch_tokens,
            run_dir: config.run_dir,
            cancel: None,
            partial: false,
            config_hash: config.config_hash,
            files,
            row_sink: None,
        })
    }

    /// Passes the rows of each step to `sink` after the step was trained.
    pub fn record_rows(&mut self, sink: RowSink) {
        self.trainer.keep_logprobs();
        self.row_sink = Some(sink);
    }

    /// Reports each micro-batch to `tell`, and stops between two of them once `cancel` is true.
    pub fn follow(
        &mut self,
        cancel: watch::Receiver<bool>,
        tell: impl Fn(&Progress) + Send + 'static,
    ) {
        self.cancel = Some(cancel.clone());
        self.trainer.on_progress(Box::new(move |progress| {
            tell(progress);
            if *cancel.borrow() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        }));
    }

    /// Goes back to the last good checkpoint, and gives the state that was saved with it; `None` if there
    /// is none yet. `changed` is asked about the state of a run with another configuration.
    ///
    /// # Errors
    /// Fails if the checkpoint cannot be read, or if `changed` refuses it.
    pub fn restore(
        &mut self,
        changed: impl FnOnce(&Value) -> Result<(), PipelineError>,
    ) -> Result<Option<Value>, PipelineError> {
        let damaged = |e| {
            let folder = self.run_dir.join("checkpoints");
            system(format!(
                "{e}\n  hint: without {} the run trains from its beginning, from the episodes that it has stored",
                folder.display()
            ))
        };
        let Some(loaded) = self.checkpoints.load().map_err(damaged)? else {
            return Ok(None);
        };
        for skipped in &loaded.skipped {
            tracing::error!(checkpoint = %skipped.name, reason = %skipped.reason, "checkpoint passed over");
        }
        let state = self.trainer.restore(&loaded).map_err(|e| match e {
            CheckpointError::Policy(e) => of_policy(e),
            e => system(e),
        })?;
        if state.commit.config_hash != self.config_hash {
            changed(&state.commit.cursor)?;
        }
        // A process can have died before it named the checkpoint, and this run may have no step left to save.
        self.checkpoints.commit(&loaded).map_err(system)?;
        Ok(Some(state.commit.cursor))
    }
}

impl<P: Policy + Send> Learner for PolicyLearner<P> {
    fn is_whole(&self) -> bool {
        !self.partial
    }

    fn version(&self) -> PolicyVersion {
        self.trainer.version()
    }

    fn weights(&mut self) -> Result<Arc<dyn TensorSource>, PipelineError> {
        let version = self.trainer.version();
        let weights = self.trainer.policy_mut().weights(version);
        weights.map_err(of_policy)
    }

    fn columns(
        &mut self,
        algorithm: &Algorithm,
        batch: &Prepared<'_>,
        mut columns: Columns,
    ) -> Result<Columns, PipelineError> {
        let needs = algorithm.needs();
        if !needs.columns() {
            return Ok(columns);
        }
        let draft = batch.draft(&columns).map_err(PipelineError::system)?;
        let policy = self.trainer.policy_mut();
        if needs.values {
            let values = score_values(policy, &draft.value_rows(), self.micro_batch_tokens);
            let filled = draft.fill_values(&mut columns, values.map_err(of_trainer)?);
            filled.map_err(PipelineError::system)?;
        }
        let stop = || go_on(self.cancel.as_ref());
        let mut fill = |column, scores: Vec<Vec<f32>>| {
            let filled = draft.fill(&mut columns, column, &scores);
            filled.map_err(system)
        };
        stop()?;
        if needs.prox_logprobs {
            let scored = score_rows(policy, draft.rows(), self.micro_batch_tokens);
            fill(Column::ProxLogprobs, scored.map_err(of_trainer)?)?;
        }
        stop()?;
        if needs.ref_logprobs {
            let scored = self.scorers.reference(policy, draft.rows())?;
            fill(Column::RefLogprobs, scored)?;
        }
        stop()?;
        if needs.teacher_logprobs {
            fill(Column::TeacherLogprobs, self.scorers.teacher(draft.rows())?)?;
        }
        if needs.teacher_top > 0 {
            let k = needs.teacher_top as usize;
            let tops = self.scorers.teacher_top(draft.rows(), k)?;
            draft
                .fill_top(&mut columns, &tops)
                .map_err(PipelineError::system)?;
        }
        Ok(columns)
    }

    fn score_data(
        &mut self,
        algorithm: &Algorithm,
        groups: &mut [Vec<Trace>],
        known: &Columns,
    ) -> Result<(), PipelineError> {
        let draft = algorithm.prepare(groups).and_then(|b| b.draft(known));
        let draft = draft.map_err(PipelineError::system)?;
        let version = self.version();
        let scored = score_rows(
            self.trainer.policy_mut(),
            draft.rows(),
            self.micro_batch_tokens,
        );
        let mut columns = Columns::new();
        draft
            .fill(
                &mut columns,
                Column::ProxLogprobs,
                &scored.map_err(of_trainer)?,
            )
            .map_err(PipelineError::system)?;
        for trace in groups.iter_mut().flatten() {
            let own = columns.remove(&trace.episode).unwrap_or_default();
            let Some(by_node) = own.prox_logprobs else {
                continue;
            };
            for (node, logprobs) in trace.nodes.iter_mut().zip(by_node) {
                if node.kind == TokenKind::Sampled {
                    node.versions = VersionSpan::whole(logprobs.len(), version);
                    node.logprobs = logprobs;
                    // The new log-probabilities are at temperature 1 here.
                    if !algorithm.composition().tempered() {
                        node.temperature = 1.0;
                    }
                }
            }
        }
        Ok(())
    }

    fn update(
        &mut self,
        batch: &mut Rows,
        spec: &LossSpec,
        record: &mut StepRecord,
    ) -> Result<(), PipelineError> {
        if spec.kl.is_some() && batch.rows.iter().any(|r| r.ref_logprobs.is_none()) {
            let policy = self.trainer.policy_mut();
            let scored = self.scorers.reference(policy, &batch.rows)?;
            for (row, column) in batch.rows.iter_mut().zip(scored) {
                row.ref_logprobs = Some(column);
            }
        }
        go_on(self.cancel.as_ref())?;
        self.trainer.begin_step(record.step);
        let report = match self.trainer.step(&batch.rows, spec) {
            Err(TrainError::Cancelled { updates }) => {
                self.partial = updates > 0;
                return Err(PipelineError::Interrupted);
            }
            done => done.map_err(of_trainer)?,
        };
        if let Some(skipped) = report.skipped.first() {
            tracing::error!(tensor = %skipped.tensor, "gradient is not finite, update skipped");
        }
        record.trained_tokens = batch.report.trained_tokens;
        record.computed_tokens = report.packed_tokens;
        record.unshared_tokens = report.naive_tokens;
        record.loss = report.loss;
        record.grad_norm = report.grad_norm;
        record.learning_rate = f64::from(report.lr);
        record.skipped_updates = report.skipped.len();
        record.updates_applied = report.updates;
        record.logprob_gap_max = report.gap_max_abs.unwrap_or(0.0);
        record.routing_replayed_share = report.routed_share;
        record.router_aux_loss = report.router_loss;
        record.metrics = serde_json::to_value(&report.metrics).map_err(system)?;
        record.preference = batch.report.preference;
        record.train_phases = serde_json::to_value(report.seconds).map_err(system)?;
        let ranks = report.ranks.map(serde_json::to_value);
        record.trainer_ranks = ranks.transpose().map_err(system)?;
        if let Some(sink) = &mut self.row_sink {
            sink(record.step, &batch.rows, &report.logprobs);
        }
        Ok(())
    }

    fn save(&mut self, step: u64, state: Value) -> Result<(), PipelineError> {
        let commit = Commit {
            // All of them are in the store.
            trained_batches: vec![format!("s{step:05}")],
            config_hash: self.config_hash.clone(),
            cursor: state,
        };
        let saved = self
            .trainer
            .save(&self.checkpoints, step, &commit, self.files.clone());
        let dir = self.run_dir.display();
        saved.map(|_| ()).map_err(|e| match e {
            CheckpointError::Policy(e @ PolicyError::Lost(_)) => of_policy(e),
            e => PipelineError::system(format!(
                "checkpoint of step {step}: {e}\n  hint: when that is put right, go on with `sinew train {dir}/recipe.toml --run-dir {dir} --resume`"
            )),
        })
    }
}
