//! `sinew eval`: a recipe's held-out tasks, once.
//!
//! It is the measurement of `sinew train` without the training, for a model that was trained elsewhere or
//! exported from a run.

use crate::failure::Failure;
use crate::{RunArgs, train};
use clap::Args;
use sinew_recipe::{ModelSection, RunPlan};
use std::path::Path;

/// Arguments of `sinew eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Another model than the recipe's: a source as in a recipe, or a folder of `sinew export`
    #[arg(long)]
    model: Option<String>,
}

/// `sinew eval RECIPE`. Its folder has the name of the recipe with `-eval` behind it.
pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    args.run.end(measured(args))
}

/// Measures the model of the recipe, or the one of `--model`.
fn measured(args: &EvalArgs) -> Result<train::Finished, Failure> {
    let mut recipe = args.run.recipe()?;
    if recipe.harness.live().is_some() {
        return Err(Failure::input(
            "harness.type = \"live\": agents bring their own tasks, so there are no held-out ones to measure\n  \
             hint: harness.type = \"service\" asks a service for each task of the recipe",
        ));
    }
    if let Some(source) = &args.model {
        recipe.model = other_model(&recipe, source)?;
    }
    // A folder of `train` is not taken for one of these, nor the other way round.
    if !recipe.name.ends_with("-eval") {
        recipe.name += "-eval";
    }
    args.run.run(&recipe, "eval", train::evaluate)
}

/// The section of `--model`. Its tokenizer and template replace those of the recipe, too.
fn other_model(recipe: &RunPlan, source: &str) -> Result<ModelSection, Failure> {
    if recipe.env.needs().alphabet.is_some() {
        return Err(Failure::input(format!(
            "--model = {source:?}: env.type = \"{}\" has an alphabet of its own, which only models from scratch have",
            recipe.env.name()
        )));
    }
    if Path::new(source).join("recipe.toml").is_file() {
        return Err(Failure::input(format!(
            "--model = {source:?} is the folder of a run\n  hint: `sinew export {source} model` writes its weights as a folder that --model takes"
        )));
    }
    Ok(ModelSection::Pretrained {
        source: source.into(),
    })
}
