//! Memory that a run will hold, estimated before any of it is taken.
//!
//! The estimate is an upper bound, made only of the shapes. Sandboxes are not counted: they have their own
//! limits.

use sinew_assembly::Failure;
use sinew_model::{Activations, Keep, ModelConfig, ParamLayout, Precision, Projection};
use sinew_recipe::{EngineType, LoraSection, RunPlan};
use sinew_tensor::KernelSet;

/// Maximum bytes of logits that a pass with gradients keeps.
const KEPT_LOGITS: u128 = 640 << 20;

/// Memory of a run at its peak, in bytes, part by part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Estimate {
    /// Weights, gradients and the optimizer's two moments; reference and teacher.
    pub(super) weights: u128,
    /// Activations and logits that a pass of `train.micro_batch_tokens` keeps for its gradient.
    pub(super) activations: u128,
    /// The embedded engine's own copy of the weights.
    pub(super) engine: u128,
    /// Bytes of the KV cache.
    pub(super) keys: u128,
}

impl Estimate {
    /// All parts together.
    pub(super) fn total(&self) -> u128 {
        self.weights + self.activations + self.engine + self.keys
    }
}

/// Numbers in the weights of a model.
fn f32s(config: &ModelConfig) -> u128 {
    ParamLayout::new(config).total() as u128
}

/// Numbers of adapters on all projections of the layers, of which `train.lora.targets` may choose some, and
/// on the output matrix if it is named.
fn adapters(config: &ModelConfig, lora: &LoraSection) -> u128 {
    let c = config;
    let sides =
        2 * (c.d_model + c.q_dim()) + 2 * (c.d_model + c.kv_dim()) + 3 * (c.d_model + c.d_ff);
    let has_head = lora.targets.iter().any(|t| t == Projection::Head.name());
    let head = if has_head { c.d_model + c.vocab } else { 0 };
    lora.rank as u128 * (c.layers as u128 * sides as u128 + head as u128)
}

/// An upper bound of what this process holds for `recipe`: rows that a step does not fill are counted as
/// filled. Where PyTorch trains, it holds the engine only.
/// `others` are the models in addition to the policy.
pub(super) fn estimate(
    recipe: &RunPlan,
    config: &ModelConfig,
    others: &[ModelConfig],
    kernels: KernelSet,
) -> Estimate {
    if recipe.torch().is_some() {
        return engine_part(recipe, config, kernels);
    }
    let own = 4 * f32s(config);
    let trained = match &recipe.train.lora {
        Some(lora) => 4 * adapters(config, lora),
        None => own,
    };
    let rows = recipe.train.micro_batch_tokens as u128;
    let pass = rows * Activations::bytes_per_row(config, Keep::All) as u128
        + (4 * rows * config.vocab as u128).min(KEPT_LOGITS);
    // Each further process has its weights and its gradient.
    let processes = recipe.train.data_parallel as u128;
    let workers = processes.saturating_sub(1) * (own + trained + pass);
    let base = if recipe.train.lora.is_some() { own } else { 0 };
    let scoring: u128 = others.iter().map(|c| 4 * f32s(c)).sum();
    Estimate {
        weights: base + 4 * trained + scoring + workers,
        activations: pass,
        ..engine_part(recipe, config, kernels)
    }
}

/// The part of the embedded engine; nothing for servers.
fn engine_part(recipe: &RunPlan, config: &ModelConfig, kernels: KernelSet) -> Estimate {
    let mut estimate = Estimate::default();
    if recipe.engine.kind == EngineType::Embedded {
        let row = 2 * config.layers * config.kv_heads * config.head_dim * 4;
        estimate.keys = recipe.engine.kv_tokens as u128 * row as u128;
        estimate.engine = engine(recipe, config, kernels);
        // Another policy in the same process: its weights.
        if recipe.rollout.cross_policy.is_some() {
            estimate.engine *= 2;
            estimate.keys *= 2;
        }
    }
    estimate
}

/// The engine's own copy of the weights. Embeddings stay `f32`; matrices, the output's among them, are
/// packed.
fn engine(recipe: &RunPlan, config: &ModelConfig, kernels: KernelSet) -> u128 {
    let embedding = config.vocab as u128 * config.d_model as u128;
    let tied = if config.tied_embeddings { 0 } else { embedding };
    let matrices = f32s(config) - tied;
    let bits = match (sinew_assembly::precision(&recipe.engine, kernels), kernels) {
        (Precision::Bf16, _) => 12,
        (Precision::Int8, _) => 9,
        (Precision::F32, KernelSet::Amx) => 16,
        (Precision::F32, _) => 32,
    };
    4 * embedding + matrices * bits / 8
}

/// Bytes of this process where PyTorch trains: an embedded engine and its KV cache. Gradients and moments are
/// in the ranks.
pub(super) fn own(recipe: &RunPlan) -> Result<u64, Failure> {
    if recipe.engine.kind != EngineType::Embedded {
        return Ok(0);
    }
    let config = sinew_assembly::model_config(recipe)?;
    let kernels = sinew_assembly::device()?.kernels();
    let bytes = estimate(recipe, &config, &[], kernels).total();
    Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
}

/// The memory of a run whose model is at a Tinker service: of reference and teacher, where they are here.
fn scorers(recipe: &RunPlan) -> Result<String, Failure> {
    let vocab = sinew_assembly::service_model(recipe)?.1;
    let mut need = 0;
    for (key, source) in sinew_assembly::scoring_sources(recipe) {
        if !sinew_assembly::is_at_service(&source)? {
            need += 4 * f32s(&sinew_assembly::check_scoring(key, &source, vocab)?);
        }
    }
    let looked = sinew_telemetry::Memory::look();
    let installed = looked.map_err(Failure::system)?.installed;
    let mib = |bytes: u128| bytes.div_ceil(1 << 20);
    if need <= u128::from(installed) {
        let need = mib(need);
        return Ok(format!(
            "the Tinker service has the model; reference and teacher here {need} MiB"
        ));
    }
    Err(Failure::input(format!(
        "reference and teacher need {} MiB, this machine has {} MiB\n  hint: name models of the Tinker service, \
         \"tinker:NAME\"",
        mib(need),
        mib(u128::from(installed))
    )))
}

/// The memory that a run needs, in words; refused where the machine has less installed.
pub(crate) fn memory(recipe: &RunPlan) -> Result<String, Failure> {
    if recipe.tinker().is_some() {
        return scorers(recipe);
    }
    let config = sinew_assembly::model_config(recipe)?;
    let mut beside = Vec::new();
    for (key, source) in sinew_assembly::scoring_sources(recipe) {
        beside.push(sinew_assembly::check_scoring(key, &source, config.vocab)?);
    }
    let from_the_start = recipe.needs().reference() && recipe.reference.is_none();
    if from_the_start && recipe.train.lora.is_none() {
        beside.push(config.clone());
    }
    let kernels = sinew_assembly::device()?.kernels();
    let need = estimate(recipe, &config, &beside, kernels);
    let looked = sinew_telemetry::Memory::look();
    let installed = looked.map_err(Failure::system)?.installed;
    let mib = |bytes: u128| bytes.div_ceil(1 << 20);
    if need.total() > u128::from(installed) {
        return Err(Failure::input(format!(
            "weights and optimizer need {} MiB, activations of train.micro_batch_tokens = {} need {} MiB, engine.kv_tokens = {} \
             {} MiB and the engine's weights {} MiB, this machine has {} MiB\n  hint: lower engine.kv_tokens or \
             train.micro_batch_tokens, take a smaller model, or set train.lora",
            mib(need.weights),
            recipe.train.micro_batch_tokens,
            mib(need.activations),
            recipe.engine.kv_tokens,
            mib(need.keys),
            mib(need.engine),
            mib(u128::from(installed))
        )));
    }
    Ok(format!(
        "{} MiB at most: weights and optimizer {}, activations {}, keys and values {}, the engine's weights {}",
        mib(need.total()),
        mib(need.weights),
        mib(need.activations),
        mib(need.keys),
        mib(need.engine)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_model::{Family, RopeScaling};

    /// The quickstart with SmolLM2-135M held 5.2 to 6.8 GB at its peak, by what the first steps sampled.
    #[test]
    fn the_quickstart_is_estimated_as_it_was_measured() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recipes/quickstart.toml");
        let recipe =
            RunPlan::load(std::path::Path::new(root), sinew_assembly::ENVIRONMENTS).unwrap();
        let config = ModelConfig {
            family: Family::Llama,
            vocab: 49152,
            d_model: 576,
            layers: 30,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            d_ff: 1536,
            rope_theta: 1e5,
            rope_scaling: RopeScaling::None,
            rms_eps: 1e-5,
            tied_embeddings: true,
            qkv_bias: false,
            qk_norm: false,
            max_context: 8192,
            bos_id: None,
            eos_ids: Vec::new(),
        };
        let mib = |bytes: u128| bytes >> 20;
        let amx = estimate(&recipe, &config, &[], KernelSet::Amx);
        // Weights, their gradient and two moments: four times 513 MiB.
        assert_eq!((mib(amx.weights), mib(amx.keys)), (2052, 1440));
        let plain = estimate(&recipe, &config, &[], KernelSet::Avx512);
        for need in [&amx, &plain] {
            let gb = need.total() as f64 / 1e9;
            assert!((5.2..=6.8).contains(&gb), "{gb}");
        }
        assert!(plain.engine > amx.engine);
        // PyTorch's ranks hold weights, gradients and moments: the engine is left here.
        let mut torch = recipe.clone();
        torch.trainer = Some(sinew_recipe::TrainerPlan {
            kind: sinew_recipe::TrainerType::Torch,
            ..Default::default()
        });
        let left = estimate(&torch, &config, &[], KernelSet::Amx);
        let engine_only = Estimate {
            weights: 0,
            activations: 0,
            ..amx.clone()
        };
        assert_eq!(left, engine_only);
        let judged = estimate(
            &recipe,
            &config,
            std::slice::from_ref(&config),
            KernelSet::Amx,
        );
        assert_eq!(mib(judged.total() - amx.total()), 513);
    }
}
