//! The trainer with its checkpoints, behind what the main loop needs of it.

use crate::failure::Failure;
use crate::recipe::{LoraSection, Recipe};
use crate::record::StepRecord;
use crate::run_dir::RunDir;
use crate::wire::{Rows, SavedState, clock};
use sinew_model::{Keep, Lora, LoraConfig, Params, Projection, merge_lora};
use sinew_tensor::Device;
use sinew_train::checkpoint::CheckpointStore;
use sinew_train::optim::{AdamWConfig, Decay, Schedule};
use sinew_train::{Commit, ModelPolicy, RefModel, Trainer, TrainerConfig};
use sinew_types::{LossSpec, PolicyVersion};
use std::sync::Arc;

/// Trains and remembers.
pub(crate) struct Learner {
    trainer: Trainer<ModelPolicy>,
    reference: Option<RefModel<ModelPolicy>>,
    checkpoints: CheckpointStore,
    device: Device,
}

fn system(e: impl std::fmt::Display) -> Failure {
    Failure::system(format!("trainer: {e}"))
}

fn lora_config(section: &LoraSection) -> Result<LoraConfig, Failure> {
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

impl Learner {
    /// A trainer at step 0.
    pub(crate) fn new(
        recipe: &Recipe,
        dir: &RunDir,
        device: &Device,
        params: Params,
    ) -> Result<Self, Failure> {
        let t = &recipe.train;
        let context = recipe.rollout.max_context_tokens as usize;
        let reference = if recipe.needs_reference() {
            let frozen = ModelPolicy::frozen(params.clone(), context, device.clone());
            Some(RefModel::new(frozen.map_err(system)?, t.max_rows))
        } else {
            None
        };
        let source = recipe.model_source();
        let dev = device.clone();
        let policy = match &t.lora {
            None => ModelPolicy::full(params, context, Keep::All, dev),
            Some(section) => {
                let config = lora_config(section)?;
                let lora = Lora::random(&config, params.config(), recipe.seed).map_err(system)?;
                ModelPolicy::adapters(params, lora, &source, context, Keep::All, dev)
            }
        }
        .map_err(system)?;
        let config = TrainerConfig {
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
            ..TrainerConfig::new(t.max_rows, t.learning_rate)
        };
        Ok(Self {
            trainer: Trainer::new(policy, config, device.clone(), clock()).map_err(system)?,
            reference,
            checkpoints: CheckpointStore::open(dir.checkpoints(), t.keep_checkpoints)
                .map_err(system)?,
            device: device.clone(),
        })
    }

    /// Version of the weights.
    pub(crate) fn version(&self) -> PolicyVersion {
        self.trainer.version()
    }

    /// A copy of the weights as engines use them.
    pub(crate) fn weights(&self) -> Result<Arc<Params>, Failure> {
        let policy = self.trainer.policy();
        let mut weights = policy.params().clone();
        if let Some(lora) = policy.lora() {
            merge_lora(&self.device, policy.params(), lora, &mut weights).map_err(system)?;
        }
        Ok(Arc::new(weights))
    }

    /// One batch; fills in what the step's record says of training.
    pub(crate) fn step(
        &mut self,
        batch: &mut Rows,
        spec: &LossSpec,
        record: &mut StepRecord,
    ) -> Result<(), Failure> {
        if let Some(reference) = &mut self.reference {
            reference.fill(&mut batch.rows).map_err(system)?;
        }
        let report = self.trainer.step(&batch.rows, spec).map_err(system)?;
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
        record.logprob_gap_max = report.gap_max_abs.unwrap_or(0.0);
        record.metrics = serde_json::to_value(&report.metrics).map_err(system)?;
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
            config_hash: String::new(),
            cursor: serde_json::to_value(state).map_err(system)?,
        };
        self.trainer
            .save(&self.checkpoints, &commit, Vec::new())
            .map_err(system)?;
        Ok(())
    }

    /// Goes back to the last good checkpoint; `None` if there is none yet.
    pub(crate) fn restore(&mut self) -> Result<Option<SavedState>, Failure> {
        let Some(loaded) = self.checkpoints.load().map_err(system)? else {
            return Ok(None);
        };
        for skipped in &loaded.skipped {
            tracing::error!(checkpoint = %skipped.name, reason = %skipped.reason, "checkpoint passed over");
        }
        let state = self.trainer.restore(&loaded).map_err(system)?;
        serde_json::from_value(state.commit.cursor)
            .map(Some)
            .map_err(|e| system(format!("{}: {e}", loaded.path.display())))
    }
}
