//! The trainer with its checkpoints, behind what the main loop needs of it.

use crate::failure::Failure;
use crate::judges::Judges;
use crate::parallel::ProcessPeers;
use crate::recipe::{LoraSection, Recipe};
use crate::record::StepRecord;
use crate::run_dir::{Resume, RunDir};
use crate::wire::{Rows, SavedState, clock};
use sinew_algo::{Algorithm, Column, Columns};
use sinew_model::{Keep, Lora, LoraConfig, Params, Projection, ValueHead, merge_lora};
use sinew_tensor::Device;
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::{AdamWConfig, Decay, Schedule};
use sinew_train::{
    Commit, ModelPolicy, Progress, TrainError, Trainer, TrainerConfig, score_rows, score_values,
};
use sinew_types::{LossSpec, PolicyVersion, TokenKind, Trace};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;

/// A value head starts from nothing, so that by default it learns this much faster.
const CRITIC_LR_FACTOR: f32 = 10.0;

/// Trains and remembers.
pub(crate) struct Learner {
    trainer: Trainer<ModelPolicy>,
    judges: Judges,
    checkpoints: CheckpointStore,
    device: Device,
    max_rows: usize,
    run_dir: PathBuf,
    cancel: Option<watch::Receiver<bool>>,
    /// Some updates of a step were done and others not: the weights are those of no step.
    partial: bool,
    config_hash: String,
    /// Tokenizer files, which make a checkpoint a whole model.
    files: Vec<(String, Vec<u8>)>,
}

fn system(e: impl std::fmt::Display) -> Failure {
    let text = e.to_string();
    let diverged = ["is NaN", "is inf", "is -inf"]
        .iter()
        .any(|n| text.contains(n));
    let (what, hint) = match diverged {
        true => (
            "the model has diverged: ",
            "\n  hint: start again with a lower train.learning_rate or train.lora.alpha",
        ),
        false => ("", ""),
    };
    Failure::system(format!("trainer: {what}{text}{hint}"))
}

/// Between two passes over the rows of a step: an error once the run is asked to stop.
fn go_on(cancel: Option<&watch::Receiver<bool>>, run_dir: &Path) -> Result<(), Failure> {
    match cancel {
        Some(cancel) if *cancel.borrow() => Err(Failure::interrupt("train", run_dir)),
        _ => Ok(()),
    }
}

pub(crate) fn lora_config(section: &LoraSection) -> Result<LoraConfig, Failure> {
    let named: Result<Vec<_>, _> = section
        .targets
        .iter()
        .map(|t| Projection::parse(t))
        .collect();
    let targets = named.map_err(|e| Failure::input(format!("train.lora.targets: {e}")))?;
    let config = LoraConfig {
        rank: section.rank,
        alpha: section.alpha,
        targets: if targets.is_empty() {
            Projection::ALL.to_vec()
        } else {
            targets
        },
    };
    config
        .validate()
        .map_err(|e| Failure::input(format!("train.lora: {e}")))?;
    Ok(config)
}

fn schedule(recipe: &Recipe) -> Schedule {
    let t = &recipe.train;
    let updates = t.steps * t.minibatches as u64;
    let warmup = t.warmup_steps * t.minibatches as u64;
    let (total_steps, final_fraction) = (updates.max(warmup + 1), 0.0);
    Schedule {
        peak_lr: t.learning_rate,
        warmup_steps: warmup,
        decay: match t.schedule.as_str() {
            "linear" => Decay::Linear {
                total_steps,
                final_fraction,
            },
            "cosine" => Decay::Cosine {
                total_steps,
                final_fraction,
            },
            _ => Decay::Constant,
        },
    }
}

fn trainer_config(recipe: &Recipe) -> TrainerConfig {
    let t = &recipe.train;
    TrainerConfig {
        schedule: schedule(recipe),
        adamw: AdamWConfig {
            beta1: t.beta1,
            beta2: t.beta2,
            weight_decay: t.weight_decay,
            ..AdamWConfig::default()
        },
        max_grad_norm: Some(t.max_grad_norm),
        minibatches: t.minibatches as u32,
        seed: recipe.seed,
        ..TrainerConfig::new(t.micro_batch_tokens, t.learning_rate)
    }
}

/// The policy that a recipe trains, with a critic if the algorithm reads one.
fn policy(
    recipe: &Recipe,
    critic: bool,
    device: &Device,
    params: Params,
) -> Result<ModelPolicy, Failure> {
    let t = &recipe.train;
    let context = recipe.rollout.max_context_tokens as usize;
    let (dev, d_model) = (device.clone(), params.config().d_model);
    let policy = match &t.lora {
        None => ModelPolicy::full(params, context, Keep::All, dev),
        Some(section) => {
            let config = lora_config(section)?;
            let lora = Lora::random(&config, params.config(), recipe.seed).map_err(system)?;
            let source = recipe.model_source();
            ModelPolicy::adapters(params, lora, &source, context, Keep::All, dev)
        }
    };
    let policy = policy.map_err(system)?;
    if !critic {
        return Ok(policy);
    }
    let asked = recipe.critic.as_ref().and_then(|c| c.learning_rate);
    let scale = asked.map_or(CRITIC_LR_FACTOR, |lr| lr / t.learning_rate);
    let head = ValueHead::random(d_model, recipe.seed);
    Ok(policy.with_critic(head, scale))
}

/// What a worker of `train.data_parallel` computes with.
pub(crate) fn worker(
    recipe: &Recipe,
    device: &Device,
    params: Params,
) -> Result<Trainer<ModelPolicy>, Failure> {
    let policy = policy(recipe, recipe.needs().values, device, params)?;
    let config = trainer_config(recipe);
    Trainer::new(policy, config, device.clone(), clock()).map_err(system)
}

impl Learner {
    /// A trainer at step 0; `files` go beside the weights of each checkpoint.
    pub(crate) fn new(
        recipe: &Recipe,
        dir: &RunDir,
        device: &Device,
        params: Params,
        algorithm: &Algorithm,
        files: Vec<(String, Vec<u8>)>,
    ) -> Result<Self, Failure> {
        let needs = algorithm.needs();
        let judges = Judges::new(recipe, needs, device, &params)?;
        let processes = recipe.train.data_parallel;
        let share = (device.threads() / processes).max(1);
        let own = Device::new(device.kernels(), share);
        let device = if processes > 1 { &own } else { device };
        let policy = policy(recipe, needs.values, device, params)?;
        let config = trainer_config(recipe);
        let mut trainer = Trainer::new(policy, config, device.clone(), clock()).map_err(system)?;
        if processes > 1 {
            let peers = ProcessPeers::start(recipe, device, trainer.policy_mut())?;
            trainer.with_peers(Box::new(peers));
        }
        Ok(Self {
            trainer,
            judges,
            checkpoints: CheckpointStore::open(dir.checkpoints(), recipe.train.keep_checkpoints)
                .map_err(system)?,
            device: device.clone(),
            max_rows: recipe.train.micro_batch_tokens,
            run_dir: dir.path().into(),
            cancel: None,
            partial: false,
            config_hash: recipe.hash().map_err(system)?,
            files,
        })
    }

    /// Reports each micro-batch to `tell`, and stops between two of them once `cancel` is true.
    pub(crate) fn follow(
        &mut self,
        cancel: watch::Receiver<bool>,
        tell: impl Fn(&Progress) + Send + 'static,
    ) {
        self.cancel = Some(cancel.clone());
        self.trainer.on_progress(Box::new(move |progress| {
            tell(progress);
            match *cancel.borrow() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        }));
    }

    /// Whether the weights can be saved as those of a step.
    pub(crate) fn is_whole(&self) -> bool {
        !self.partial
    }

    /// Version of the weights.
    pub(crate) fn version(&self) -> PolicyVersion {
        self.trainer.version()
    }

    /// The weights as engines use them; those of a full model are the trainer's own, not a copy.
    pub(crate) fn weights(&self) -> Result<Arc<Params>, Failure> {
        let policy = self.trainer.policy();
        let Some(lora) = policy.lora() else {
            return Ok(policy.shared_params());
        };
        let mut weights = policy.params().clone();
        merge_lora(&self.device, policy.params(), lora, &mut weights).map_err(system)?;
        Ok(Arc::new(weights))
    }

    /// What the algorithm reads beside the traces: values, and the opinions of other models, added to what is
    /// known.
    pub(crate) fn columns(
        &mut self,
        algorithm: &Algorithm,
        groups: &[Vec<Trace>],
        mut columns: Columns,
    ) -> Result<Columns, Failure> {
        let needs = algorithm.needs();
        if !needs.columns() {
            return Ok(columns);
        }
        let draft = algorithm
            .draft_with(groups, &columns)
            .map_err(Failure::system)?;
        let policy = self.trainer.policy_mut();
        if needs.values {
            let values = score_values(policy, &draft.value_rows(), self.max_rows);
            let filled = draft.fill_values(&mut columns, values.map_err(system)?);
            filled.map_err(Failure::system)?;
        }
        let stop = || go_on(self.cancel.as_ref(), &self.run_dir);
        let mut fill = |column, scores: Vec<Vec<f32>>| {
            let filled = draft.fill(&mut columns, column, &scores);
            filled.map_err(system)
        };
        stop()?;
        if needs.prox_logprobs {
            let scored = score_rows(policy, draft.rows(), self.max_rows);
            fill(Column::ProxLogprobs, scored.map_err(system)?)?;
        }
        stop()?;
        if needs.ref_logprobs {
            let scored = self.judges.reference(policy, draft.rows())?;
            fill(Column::RefLogprobs, scored)?;
        }
        stop()?;
        if needs.teacher_logprobs {
            fill(Column::TeacherLogprobs, self.judges.teacher(draft.rows())?)?;
        }
        if needs.teacher_top > 0 {
            let k = needs.teacher_top as usize;
            let tops = self.judges.teacher_top(draft.rows(), k)?;
            draft
                .fill_top(&mut columns, &tops)
                .map_err(Failure::system)?;
        }
        Ok(columns)
    }

    /// Gives the trained tokens of data the log-probabilities of the weights as they are; `known` has the masks.
    pub(crate) fn score_data(
        &mut self,
        algorithm: &Algorithm,
        groups: &mut [Vec<Trace>],
        known: &Columns,
    ) -> Result<(), Failure> {
        let draft = algorithm.draft_with(groups, known);
        let draft = draft.map_err(Failure::system)?;
        let version = self.version();
        let scored = score_rows(self.trainer.policy_mut(), draft.rows(), self.max_rows);
        let mut columns = Columns::new();
        draft
            .fill(&mut columns, Column::ProxLogprobs, &scored.map_err(system)?)
            .map_err(Failure::system)?;
        for trace in groups.iter_mut().flatten() {
            let own = columns.remove(&trace.episode).unwrap_or_default();
            let Some(by_node) = own.prox_logprobs else {
                continue;
            };
            for (node, logprobs) in trace.nodes.iter_mut().zip(by_node) {
                if node.kind == TokenKind::Sampled {
                    node.versions = sinew_pool::whole(logprobs.len(), version);
                    node.logprobs = logprobs;
                    // What the new log-probabilities are at.
                    if !algorithm.composition().tempered() {
                        node.temperature = 1.0;
                    }
                }
            }
        }
        Ok(())
    }

    /// One batch; fills in what the step's record says of training.
    pub(crate) fn step(
        &mut self,
        batch: &mut Rows,
        spec: &LossSpec,
        record: &mut StepRecord,
    ) -> Result<(), Failure> {
        if spec.kl.is_some() && batch.rows.iter().any(|r| r.ref_logprobs.is_none()) {
            let policy = self.trainer.policy_mut();
            let scored = self.judges.reference(policy, &batch.rows)?;
            for (row, column) in batch.rows.iter_mut().zip(scored) {
                row.ref_logprobs = Some(column);
            }
        }
        go_on(self.cancel.as_ref(), &self.run_dir)?;
        let report = match self.trainer.step(&batch.rows, spec) {
            Err(TrainError::Cancelled { updates }) => {
                self.partial = updates > 0;
                return Err(Failure::interrupt("train", &self.run_dir));
            }
            done => done.map_err(system)?,
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
        record.metrics = serde_json::to_value(&report.metrics).map_err(system)?;
        record.preference = batch.report.preference;
        record.train_phases = serde_json::to_value(report.seconds).map_err(system)?;
        Ok(())
    }

    /// Commits weights, optimizer and `state` together.
    pub(crate) fn save(&mut self, state: &SavedState) -> Result<(), Failure> {
        let commit = Commit {
            trained_batches: state
                .ledger
                .steps
                .iter()
                .map(|s| format!("s{:05}", s.step))
                .collect(),
            config_hash: self.config_hash.clone(),
            cursor: serde_json::to_value(state).map_err(system)?,
        };
        let saved = self
            .trainer
            .save(&self.checkpoints, state.step, &commit, self.files.clone());
        let dir = self.run_dir.display();
        saved.map(|_| ()).map_err(|e| {
            Failure::system(format!(
                "checkpoint of step {}: {e}\n  hint: when that is put right, go on with `sinew train {dir}/recipe.toml --run-dir {dir} --resume`",
                state.step
            ))
        })
    }

    /// Goes back to the last good checkpoint; `None` if there is none yet.
    ///
    /// # Errors
    /// If it was trained with another recipe, but for what `resume` allows.
    pub(crate) fn restore(
        &mut self,
        recipe: &Recipe,
        dir: &RunDir,
        resume: &Resume,
    ) -> Result<Option<SavedState>, Failure> {
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
        let state = self.trainer.restore(&loaded).map_err(system)?;
        let unreadable =
            |e: &dyn std::fmt::Display| system(format!("{}: {e}", loaded.path.display()));
        let saved: SavedState =
            serde_json::from_value(state.commit.cursor).map_err(|e| unreadable(&e))?;
        if state.commit.config_hash != self.config_hash && !saved.recipe.is_empty() {
            let old = Recipe::saved(&saved.recipe).map_err(|e| unreadable(&e))?;
            dir.check_changes(&old, recipe, resume)
                .map_err(Failure::input)?;
        }
        Ok(Some(saved))
    }
}
