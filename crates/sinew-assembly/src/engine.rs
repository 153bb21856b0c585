//! The engine that generates tokens: in this process, twice for cross-policy sampling, servers, or a Tinker
//! service.
//!
//! An engine of this process copies the weights of the learner, since generation packs them for its own
//! kernels. Servers get them over a folder before the first token.

use crate::device::precision;
use crate::failure::Failure;
use crate::first_weights::FirstWeights;
use crate::model::model_folder;
use crate::start_shape::StartShape;
use crate::{clock, servers, tinker};
use sinew_grammar::Grammars;
use sinew_infer::{EmbeddedEngine, EngineConfig, ModelForward, SchedulerConfig, TokenBytes};
use sinew_model::{InferModel, ModelConfig};
use sinew_pipeline::{CrossPolicy, CrossPolicyConfig};
use sinew_recipe::{EnginePlan, EngineType, RolloutPlan, RunPlan, TrainMode};
use sinew_render::Renderer;
use sinew_tensor::{Cpu, KernelSet};
use sinew_types::{Engine, Format, PolicyVersion, TensorSource, WeightsId};
use std::sync::Arc;

/// Compiles formats into masks. The recipe's own format is compiled now.
pub(crate) fn grammars(
    format: Option<&Format>,
    renderer: &Arc<dyn Renderer>,
    columns: usize,
) -> Result<Arc<dyn Grammars>, Failure> {
    let grammars = sinew_pipeline::grammars(renderer, columns)?;
    if let Some(format) = format {
        let compiled = grammars.start(&Arc::new(format.clone()));
        compiled.map_err(|e| Failure::input(format!("rollout.format: {e}")))?;
    }
    Ok(grammars)
}

/// Bytes of each token, by which engines find stop strings.
pub(crate) fn token_bytes(renderer: &dyn Renderer) -> TokenBytes {
    let ids = 0..renderer.vocab_size() as u32;
    TokenBytes::new(ids.map(|id| renderer.token_bytes(id).unwrap_or_default()))
}

/// A model for an engine of this process.
pub(crate) struct EngineModel<'a> {
    pub(crate) config: &'a ModelConfig,
    pub(crate) version: PolicyVersion,
    pub(crate) weights: &'a dyn TensorSource,
}

/// An engine in this process.
///
/// Its queue holds at least as many requests as episodes may be in flight, so that admission and not the
/// queue refuses.
pub(crate) fn embedded(
    section: &EnginePlan,
    rollout: &RolloutPlan,
    device: &Cpu,
    model: &EngineModel<'_>,
    renderer: &dyn Renderer,
    grammars: &Arc<dyn Grammars>,
) -> Result<EmbeddedEngine, Failure> {
    let failed = |e: &dyn std::fmt::Display| Failure::system(format!("engine: {e}"));
    let precision = precision(section, device.kernels());
    let version = model.version;
    let model = InferModel::with_precision(
        device,
        model.config,
        model.weights,
        rollout.max_context_tokens as usize,
        precision,
    )
    .map_err(|e| failed(&e))?;
    let forward =
        ModelForward::new(device.clone(), model, section.kv_tokens).map_err(|e| failed(&e))?;
    let bytes = token_bytes(renderer);
    let config = EngineConfig {
        scheduler: SchedulerConfig {
            max_num_seqs: section.max_num_seqs,
            max_batched_tokens: section.max_batched_tokens,
            speculative_tokens: section.speculative_tokens,
            ..SchedulerConfig::default()
        },
        max_waiting: rollout.max_in_flight.max(4096),
        version,
    };
    let grammars = Arc::clone(grammars);
    EmbeddedEngine::with_formats(forward, config, Some(bytes), Some(grammars), clock())
        .map_err(|e| failed(&e))
}

/// Device of the engine. In synchronous mode they are those of the trainer, which is idle meanwhile. If both
/// work at once, the engine has as many threads as the trainer: the system gives each a part while both work,
/// and all cores to one while the other is idle. Results do not depend on it.
///
/// PyTorch computes in f32, so that AMX tiles, which round to bfloat16, would sample from another policy.
pub(crate) fn threads(recipe: &RunPlan, device: &Cpu) -> Cpu {
    let kernels = match device.kernels() {
        KernelSet::Amx if recipe.torch().is_some() => KernelSet::detect_f32(),
        kernels => kernels,
    };
    match recipe.train.mode {
        TrainMode::Sync if kernels == device.kernels() => device.clone(),
        _ => Cpu::new(kernels, device.threads()),
    }
}

/// The engine that episodes use, and the switch between two policies if there is one.
pub(crate) type Engines = (Arc<dyn Engine>, Option<Arc<CrossPolicy>>);

/// The engine that episodes use: one, or two for cross-policy sampling, which begin with the same weights.
///
/// # Errors
/// If KV cache and weights do not fit, or a server does not answer or cannot load the weights.
pub(crate) fn engines(
    recipe: &RunPlan,
    device: &Cpu,
    renderer: &Arc<dyn Renderer>,
    grammars: &Arc<dyn Grammars>,
    shape: &StartShape,
    weights: &FirstWeights,
) -> Result<Engines, Failure> {
    if recipe.engine.kind == EngineType::Openai {
        // The servers have their own weights, and are measured with them.
        return Ok((servers::sampling_engine(&recipe.engine, renderer)?, None));
    }
    if recipe.engine.kind == EngineType::Tinker {
        let first = WeightsId::new(weights.version, weights.lineage);
        let tensors = Arc::clone(&weights.tensors);
        let engine = tinker::engine(recipe, shape.vocab, first, tensors)?;
        return Ok((engine, None));
    }
    if recipe.engine.kind != EngineType::Embedded {
        let base = model_folder(&recipe.model)?;
        let engine = servers::training_engine(recipe, renderer, base, weights.clone())?;
        return Ok((engine, None));
    }
    let model = EngineModel {
        config: shape.config()?,
        version: weights.version,
        weights: &*weights.tensors,
    };
    let one = || {
        embedded(
            &recipe.engine,
            &recipe.rollout,
            device,
            &model,
            renderer.as_ref(),
            grammars,
        )
    };
    let current: Arc<dyn Engine> = Arc::new(one()?);
    let Some(section) = recipe.rollout.cross_policy else {
        return Ok((current, None));
    };
    let old: Arc<dyn Engine> = Arc::new(one()?);
    let config = CrossPolicyConfig {
        share: section.share,
        every: section.every,
    };
    let both = CrossPolicy::new(current, old, config, weights.version);
    let both = Arc::new(both);
    Ok((both.clone(), Some(both)))
}
