//! The model that a run begins with, as its trainer gets it: weights in this process, a folder for the
//! processes of another one, or the name of weights at a service.

use crate::failure::Failure;
use crate::model::{check_context, loaded_params, model_folder};
use crate::start_shape::StartShape;
use crate::tinker::{self, ServiceStart};
use sinew_model::{Params, SaveDtype, save_pretrained};
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
    let folder = match model_folder(&plan.model)? {
        Some(folder) => folder,
        None => written(run.join(FOLDER), || loaded_params(plan, renderer))?,
    };
    let shape = StartShape::of_folder(&folder)?;
    check_context(context, shape.context)?;
    Ok((
        StartWeights::Folder(folder, Box::new(trainer.clone())),
        shape,
    ))
}

/// Writes weights into a folder, unless it is there: it appears complete or not at all.
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
