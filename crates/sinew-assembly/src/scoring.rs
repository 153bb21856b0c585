//! Reference and teacher: their files and weights.
//!
//! They are frozen, and score the tokens that the policy sampled. So they must have its vocabulary; whether
//! the tokens mean the same in both is up to the user.

use crate::failure::Failure;
use crate::model::{resolve_env, unresolved};
use crate::run_model::{RunModel, run_model, typed_source};
use crate::start_shape::StartShape;
use sinew_algo::Needs;
use sinew_model::{ModelConfig, ModelFiles, Params, load_config, load_model, resolve_model};
use sinew_pipeline::{FrozenModel, Reference, ScoringModels};
use sinew_recipe::RunPlan;
use sinew_tensor::Cpu;
use sinew_train::ModelPolicy;
use std::fmt::Display;
use std::path::PathBuf;

/// A reference or teacher: of a run, whose folder is named with `run:` or without, or files.
enum Scorer {
    /// The newest checkpoint of a run, with its adapters merged.
    Run(Box<RunModel>),
    /// A folder or a GGUF file, found by its source.
    Files(ModelFiles),
}

/// Finds the model of `key` (`reference.model` or `teacher.model`). The text of a failure contains the key.
fn scorer(key: &str, source: &str) -> Result<Scorer, Failure> {
    if let Some(run) = run_model(&typed_source(source))? {
        return Ok(Scorer::Run(Box::new(run)));
    }
    let files = resolve_model(source, &resolve_env());
    let files = files.map_err(|e| unresolved(&format!("{key} = {source:?}"), e))?;
    Ok(Scorer::Files(files))
}

/// The configuration of a reference or teacher, which must have as many tokens as the policy. Weights are
/// not read.
///
/// # Errors
/// If the model is missing, or has more or fewer tokens than `vocab`.
pub fn check(key: &str, source: &str, vocab: usize) -> Result<ModelConfig, Failure> {
    let config = match scorer(key, source)? {
        Scorer::Run(run) => run.config()?,
        Scorer::Files(files) => {
            load_config(&files).map_err(|e| Failure::input(format!("{key}: {e}")))?
        }
    };
    if config.vocab == vocab {
        return Ok(config);
    }
    Err(other_vocabulary(key, source, config.vocab, vocab))
}

/// Folder with the whole weights of a reference or teacher of any family; `None`: they have to be loaded and
/// written, as a GGUF file or adapters of a run.
///
/// # Errors
/// If the model is missing, or has another number of tokens than `vocab`.
pub(crate) fn folder(key: &str, source: &str, vocab: usize) -> Result<Option<PathBuf>, Failure> {
    let folder = match scorer(key, source)? {
        Scorer::Run(run) => {
            let folder = run.checkpoint()?;
            folder.join("config.json").is_file().then_some(folder)
        }
        Scorer::Files(ModelFiles::Dir(folder)) => Some(folder),
        Scorer::Files(ModelFiles::Gguf(_)) => None,
    };
    let Some(folder) = folder else {
        return Ok(None);
    };
    let found = StartShape::of_folder(&folder)?.vocab;
    if found == vocab {
        return Ok(Some(folder));
    }
    Err(other_vocabulary(key, source, found, vocab))
}

pub(crate) fn other_vocabulary(
    key: &str,
    source: &str,
    found: impl Display,
    vocab: impl Display,
) -> Failure {
    Failure::input(format!(
        "{key} = {source:?}: it has {found} tokens, the policy {vocab}; both must have one tokenizer"
    ))
}

/// Weights of a reference or teacher, in 32 bits.
pub(crate) fn load(key: &str, source: &str, vocab: usize) -> Result<Params, Failure> {
    check(key, source, vocab)?;
    match scorer(key, source)? {
        Scorer::Run(run) => run.params(),
        Scorer::Files(files) => {
            let loaded = load_model(&files).map_err(|e| Failure::input(format!("{key}: {e}")));
            Ok(loaded?.params)
        }
    }
}

/// Loads what `needs` asks for; `initial` are the weights that the run begins with.
///
/// A recipe without `[reference]` uses the first weights as the reference: a copy of them, or with adapters
/// the policy without its adapters, which needs no memory.
///
/// # Errors
/// If a model is missing or damaged, or has another number of tokens than the policy.
pub(crate) fn scoring_models(
    recipe: &RunPlan,
    needs: Needs,
    device: &Cpu,
    initial: &Params,
) -> Result<ScoringModels, Failure> {
    let vocab = initial.config().vocab;
    let context = recipe.rollout.max_context_tokens as usize;
    let model = |params: Params| -> Result<FrozenModel, Failure> {
        let model = ModelPolicy::frozen(params, context, device.clone());
        Ok(Box::new(model.map_err(Failure::system)?))
    };
    let reference = match &recipe.reference {
        _ if !needs.reference() => Reference::None,
        Some(named) => Reference::Model(model(load("reference.model", &named.model, vocab)?)?),
        None if recipe.train.lora.is_some() => Reference::Base,
        None => Reference::Model(model(initial.clone())?),
    };
    let teacher = recipe.teacher.as_ref();
    let teacher = teacher.map(|named| model(load("teacher.model", &named.model, vocab)?));
    let teacher = teacher.transpose()?;
    let tokens = recipe.train.micro_batch_tokens;
    Ok(ScoringModels::new(reference, teacher, tokens))
}

/// Reference and teacher of a recipe: key and source.
pub fn named(recipe: &RunPlan) -> Vec<(&'static str, String)> {
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
