//! Sizes of a recipe's models, of every family that PyTorch trains, for counting memory and disk.

use crate::failure::Failure;
use crate::model::{model_config, resolve_env, unresolved};
use crate::run_model::{RunModel, run_model, typed_source};
use crate::scoring::other_vocabulary;
use sinew_model::{ModelFiles, ModelShape, check_model, resolve_model};
use sinew_recipe::{ModelSection, RunPlan};

/// Sizes of the policy. Its files are downloaded if they are on the hub; weights are not read, only their
/// headers.
///
/// # Errors
/// If the model cannot be found or its configuration cannot be read, or its weights are quantized, so that
/// they cannot be trained.
pub fn model_shape(recipe: &RunPlan) -> Result<ModelShape, Failure> {
    match &recipe.model {
        ModelSection::Scratch { .. } => Ok(ModelShape::from(&model_config(recipe)?)),
        ModelSection::Pretrained { source, .. } => of_source("model", source),
    }
}

/// Sizes of a reference or teacher, which must have as many tokens as the policy.
///
/// # Errors
/// If the model is missing, or has more or fewer tokens than `vocab`.
pub fn scoring_shape(key: &str, source: &str, vocab: u64) -> Result<ModelShape, Failure> {
    let shape = of_source(key, &typed_source(source))?;
    if shape.vocab == vocab {
        return Ok(shape);
    }
    Err(other_vocabulary(key, source, shape.vocab, vocab))
}

/// Sizes of the model of a source.
fn of_source(key: &str, source: &str) -> Result<ModelShape, Failure> {
    if let Some(run) = run_model(source)? {
        return of_run(key, &run);
    }
    let files = resolve_model(source, &resolve_env()).map_err(|e| unresolved(key, e))?;
    of_files(key, &files)
}

/// Sizes of a run's model: of its newest checkpoint, or of the model that it begins with.
fn of_run(key: &str, run: &RunModel) -> Result<ModelShape, Failure> {
    let latest = run.latest();
    match latest.filter(|folder| folder.join("config.json").is_file()) {
        Some(folder) => of_files(key, &ModelFiles::Dir(folder)),
        None => model_shape(&run.recipe),
    }
}

fn of_files(key: &str, files: &ModelFiles) -> Result<ModelShape, Failure> {
    let failed = |e: sinew_model::LoadError| Failure::input(format!("{key}: {e}"));
    let shape = match files {
        ModelFiles::Gguf(_) => ModelShape::from(&check_model(files).map_err(failed)?),
        ModelFiles::Dir(folder) => ModelShape::read(folder).map_err(failed)?,
    };
    if shape.quantized {
        return Err(Failure::input(format!(
            "{key}: config.json has a quantization_config: PyTorch trains weights in f32, bf16 or f16, so write a \
             dequantized copy of it first"
        )));
    }
    Ok(shape)
}
