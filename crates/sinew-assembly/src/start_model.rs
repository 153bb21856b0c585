//! The model that a run begins with, as its trainer gets it: weights in this process, a folder for the
//! processes of another one, or the name of weights at a service.

use crate::failure::Failure;
use crate::model::{check_context, loaded_params, model_files};
use crate::tinker::{self, ServiceStart};
use serde_json::Value;
use sinew_model::{ModelConfig, ModelFiles, Params, SaveDtype, load_config, save_pretrained};
use sinew_recipe::{RunPlan, TrainerPlan};
use sinew_render::Renderer;
use std::path::{Path, PathBuf};

/// Folder in that of a run with the first weights, where they have no other one.
const FOLDER: &str = "start-model";

/// Weights that training begins with.
pub(crate) enum StartWeights {
    /// Weights in this process, in f32.
    Params(Params),
    /// A folder in the Hugging Face layout, and the settings of the PyTorch trainer that reads it.
    Folder(PathBuf, Box<TrainerPlan>),
    /// Weights that a Tinker service has.
    Service(ServiceStart),
}

/// Shape of a model, as far as every trainer and engine needs it.
#[derive(Clone, Debug)]
pub(crate) struct StartShape {
    /// Number of tokens.
    pub(crate) vocab: usize,
    /// Maximum number of positions.
    pub(crate) context: usize,
    /// Width of the hidden states.
    pub(crate) hidden: usize,
    /// Family, layers and width in words.
    pub(crate) words: String,
    /// The shape for an engine of this process, or the reason why it has none.
    config: Result<ModelConfig, String>,
}

impl StartShape {
    pub(crate) fn of(config: ModelConfig) -> Self {
        Self {
            vocab: config.vocab,
            context: config.max_context,
            hidden: config.d_model,
            words: format!(
                "model {:?}, {} layers of {}",
                config.family, config.layers, config.d_model
            ),
            config: Ok(config),
        }
    }

    /// Reads `config.json` of any family. A model of several parts has those of its text in `text_config`.
    pub(crate) fn of_folder(folder: &Path) -> Result<Self, Failure> {
        let why = match load_config(&ModelFiles::Dir(folder.to_owned())) {
            Ok(config) => return Ok(Self::of(config)),
            Err(e) => e.to_string(),
        };
        let path = folder.join("config.json");
        let failed = |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", path.display()));
        let bytes = std::fs::read(&path).map_err(|e| failed(&e))?;
        let whole: Value = serde_json::from_slice(&bytes).map_err(|e| failed(&e))?;
        let text = whole.get("text_config").unwrap_or(&whole);
        let size = |key: &str| {
            let value = text[key].as_u64().filter(|&n| n > 0);
            value.ok_or_else(|| failed(&format!("{key} is missing")))
        };
        let (vocab, hidden) = (size("vocab_size")?, size("hidden_size")?);
        let layers = size("num_hidden_layers")?;
        let family = whole["model_type"].as_str().unwrap_or("of no known type");
        Ok(Self {
            vocab: vocab as usize,
            // Models without a table of positions have no limit of their own.
            context: size("max_position_embeddings").map_or(usize::MAX, |n| n as usize),
            hidden: hidden as usize,
            words: format!("model {family}, {layers} layers of {hidden}"),
            config: Err(why),
        })
    }

    /// The shape for an engine of this process.
    ///
    /// # Errors
    /// If such an engine does not know the family.
    pub(crate) fn config(&self) -> Result<&ModelConfig, Failure> {
        self.config.as_ref().map_err(|why| {
            Failure::input(format!(
                "engine.type = \"embedded\": {why}\n  hint: engine.type = \"vllm\" or \"sglang\" runs this model"
            ))
        })
    }
}

/// The first weights of a plan's model and its shape: for PyTorch as a folder, which a model from scratch or
/// in GGUF gets in `run`, by name for a Tinker service, and in this process otherwise.
///
/// # Errors
/// If the model cannot be found or read, has fewer positions than the plan asks for, or the folder cannot be
/// written.
pub(crate) fn start_model(
    plan: &RunPlan,
    renderer: &dyn Renderer,
    run: &Path,
) -> Result<(StartWeights, StartShape), Failure> {
    let context = plan.rollout.max_context_tokens;
    if plan.tinker().is_some() {
        let start = tinker::start(plan)?;
        let shape = tinker::shape(plan)?;
        check_context(context, shape.context)?;
        return Ok((StartWeights::Service(start), shape));
    }
    let Some(trainer) = plan.torch() else {
        let params = loaded_params(plan, renderer)?;
        let shape = StartShape::of(params.config().clone());
        check_context(context, shape.context)?;
        return Ok((StartWeights::Params(params), shape));
    };
    let folder = match model_files(&plan.model)? {
        Some(ModelFiles::Dir(folder)) => folder,
        _ => written(run.join(FOLDER), || loaded_params(plan, renderer))?,
    };
    let shape = StartShape::of_folder(&folder)?;
    check_context(context, shape.context)?;
    Ok((
        StartWeights::Folder(folder, Box::new(trainer.clone())),
        shape,
    ))
}

/// Writes weights into a folder, unless it is there: it appears complete or not at all.
///
/// # Errors
/// If the weights cannot be had or written.
pub(crate) fn written(
    folder: PathBuf,
    params: impl FnOnce() -> Result<Params, Failure>,
) -> Result<PathBuf, Failure> {
    if !folder.join("config.json").is_file() {
        let saved = save_pretrained(&folder, &params()?, SaveDtype::F32, &[]);
        saved.map_err(Failure::system)?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shape_of_any_family_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("config.json"), text).unwrap();
        write(
            r#"{ "model_type": "new_one", "text_config":
                { "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 2, "max_position_embeddings": 64 } }"#,
        );
        let shape = StartShape::of_folder(dir.path()).unwrap();
        assert_eq!((shape.vocab, shape.hidden, shape.context), (100, 8, 64));
        assert_eq!(shape.words, "model new_one, 2 layers of 8");
        let refused = shape.config().unwrap_err();
        assert!(
            refused.text().contains("engine.type = \"vllm\""),
            "{refused:?}"
        );
        write(r#"{ "model_type": "new_one", "hidden_size": 8 }"#);
        let refused = StartShape::of_folder(dir.path()).unwrap_err();
        assert!(
            refused.text().contains("vocab_size is missing"),
            "{refused:?}"
        );
    }
}
