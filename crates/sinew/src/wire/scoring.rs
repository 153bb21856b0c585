//! Reference and teacher: their files and weights.
//!
//! They are frozen, and score the tokens that the policy sampled. So they must have its vocabulary; whether
//! the tokens mean the same in both is up to the user.

use super::model::{resolve_env, unresolved};
use crate::failure::Failure;
use sinew_algo::Needs;
use sinew_model::{ModelConfig, ModelFiles, Params, load_config, load_model, resolve_model};
use sinew_pipeline::{ReferenceWeights, ScoringModels};
use sinew_recipe::RunPlan;
use sinew_tensor::Cpu;
use std::path::Path;

/// Files of a reference or teacher: of a model, or the last checkpoint of a run's folder.
fn files(key: &str, source: &str) -> Result<ModelFiles, Failure> {
    let run = Path::new(source).join("checkpoints");
    let folder = match std::fs::read_to_string(run.join("LATEST")) {
        Err(_) => {
            return resolve_model(source, &resolve_env())
                .map_err(|e| unresolved(&format!("{key} = {source:?}"), e));
        }
        Ok(name) => run.join(name.trim()),
    };
    if !folder.join("model.safetensors").is_file() {
        return Err(Failure::input(format!(
            "{key} = {source:?}: {} holds no whole model; a run with adapters alone cannot be one",
            folder.display()
        )));
    }
    Ok(ModelFiles::Dir(folder))
}

/// The configuration of a reference or teacher, which must have as many tokens as the policy. Weights are
/// not read.
pub(crate) fn check(key: &str, source: &str, vocab: usize) -> Result<ModelConfig, Failure> {
    let files = files(key, source)?;
    let config = load_config(&files).map_err(|e| Failure::input(format!("{key}: {e}")))?;
    if config.vocab == vocab {
        return Ok(config);
    }
    Err(Failure::input(format!(
        "{key} = {source:?}: it has {} tokens, the policy {vocab}; both must have one tokenizer",
        config.vocab
    )))
}

/// Weights of a reference or teacher, in 32 bits.
fn load(key: &str, source: &str, vocab: usize) -> Result<Params, Failure> {
    check(key, source, vocab)?;
    let loaded = load_model(&files(key, source)?);
    Ok(loaded
        .map_err(|e| Failure::input(format!("{key}: {e}")))?
        .params)
}

/// Loads what `needs` asks for; `initial` are the weights that the run begins with.
///
/// Without `[reference]` the first weights are the reference: a copy of them, or with adapters the policy
/// without its adapters, which needs no memory.
pub(crate) fn scoring_models(
    recipe: &RunPlan,
    needs: Needs,
    device: &Cpu,
    initial: &Params,
) -> Result<ScoringModels, Failure> {
    let vocab = initial.config().vocab;
    let model = |params: Params| ReferenceWeights::Model(Box::new(params));
    let reference = match &recipe.reference {
        _ if !needs.reference() => ReferenceWeights::None,
        Some(named) => model(load("reference.model", &named.model, vocab)?),
        None if recipe.train.lora.is_some() => ReferenceWeights::Base,
        None => model(initial.clone()),
    };
    let teacher = recipe.teacher.as_ref();
    let teacher = teacher.map(|named| load("teacher.model", &named.model, vocab));
    Ok(ScoringModels::new(
        reference,
        teacher.transpose()?,
        device,
        recipe.rollout.max_context_tokens as usize,
        recipe.train.micro_batch_tokens,
    )?)
}

/// Reference and teacher of a recipe: key and source.
pub(crate) fn named(recipe: &RunPlan) -> Vec<(&'static str, String)> {
    let mut named = Vec::new();
    named.extend(
        recipe
            .reference
            .iter()
            .map(|r| ("reference.model", r.model.clone())),
    );
    named.extend(
        recipe
            .teacher
            .iter()
            .map(|t| ("teacher.model", t.model.clone())),
    );
    named
}
