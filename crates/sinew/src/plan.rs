//! From a recipe to what the training loop takes: the one place where the two meet.

use crate::failure::Failure;
use crate::recipe::{DataSection, LoraSection, Recipe, TrainSection};
use sinew_model::{LoraConfig, Projection};
use sinew_pipeline::{Dataset, DatasetConfig, LearnerConfig, PolicyConfig};
use sinew_render::Renderer;
use sinew_train::TrainerConfig;
use sinew_train::optim::{AdamWConfig, Decay, Schedule};
use std::path::Path;

/// A value head starts from nothing, so that by default it learns this much faster.
const CRITIC_LR_FACTOR: f32 = 10.0;

/// Adapters of `train.lora`.
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

fn schedule(t: &TrainSection) -> Schedule {
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

/// The policy that a recipe trains.
pub(crate) fn policy(recipe: &Recipe) -> Result<PolicyConfig, Failure> {
    let t = &recipe.train;
    let lora = t.lora.as_ref().map(lora_config).transpose()?;
    let asked = recipe.critic.as_ref().and_then(|c| c.learning_rate);
    let critic = asked.map_or(CRITIC_LR_FACTOR, |lr| lr / t.learning_rate);
    Ok(PolicyConfig {
        seed: recipe.seed,
        max_context_tokens: recipe.rollout.max_context_tokens as usize,
        lora: lora.map(|config| (config, recipe.model_source())),
        critic: recipe.needs().values.then_some(critic),
        trainer: TrainerConfig {
            schedule: schedule(t),
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
        },
    })
}

/// The trainer of a recipe's run.
pub(crate) fn learner(recipe: &Recipe, run_dir: &Path) -> Result<LearnerConfig, Failure> {
    let t = &recipe.train;
    Ok(LearnerConfig {
        policy: policy(recipe)?,
        micro_batch_tokens: t.micro_batch_tokens,
        data_parallel: t.data_parallel,
        worker: toml::to_string(recipe).map_err(Failure::system)?,
        run_dir: run_dir.into(),
        keep_checkpoints: t.keep_checkpoints,
        config_hash: recipe.hash().map_err(Failure::system)?,
    })
}

/// The recipe's data; `None` where it samples its own, or leases it from a pool.
pub(crate) fn dataset(
    recipe: &Recipe,
    renderer: &dyn Renderer,
) -> Result<Option<Dataset>, Failure> {
    let config = match &recipe.data {
        None | Some(DataSection::Pool { .. }) => return Ok(None),
        Some(DataSection::Demonstrations { path }) => {
            DatasetConfig::Demonstrations { path: path.clone() }
        }
        Some(DataSection::Pairs { path }) => DatasetConfig::Pairs { path: path.clone() },
        Some(DataSection::Episodes { path, purpose }) => DatasetConfig::Episodes {
            path: path.clone(),
            purpose: purpose.clone(),
        },
    };
    let context = recipe.rollout.max_context_tokens as usize;
    Ok(Some(Dataset::load(&config, renderer, context)?))
}
