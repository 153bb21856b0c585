//! `sinew eval`: a recipe's held-out tasks, once.

use crate::failure::Failure;
use crate::recipe::{ModelSection, Recipe};
use crate::run_dir::RunDir;
use crate::train::{self, TrainOptions};
use crate::{check, output};
use clap::Args;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// Another model than the recipe's: a source as in a recipe, or a folder of `sinew export`
    #[arg(long)]
    model: Option<String>,
    /// Folder for the episodes; default: runs/NAME-eval
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Go on with the evaluation in --run-dir
    #[arg(long)]
    resume: bool,
    /// JSON on standard output
    #[arg(long)]
    json: bool,
    /// Another seed than the recipe's
    #[arg(long)]
    seed: Option<u64>,
}

/// `sinew eval RECIPE`.
pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    let mut recipe = Recipe::load(&args.recipe).map_err(Failure::input)?;
    if let Some(source) = &args.model {
        recipe.model = other_model(&recipe, source)?;
    }
    if let Some(seed) = args.seed {
        recipe.seed = seed;
    }
    // A folder of `train` is not taken for one of these, nor the other way round.
    if !recipe.name.ends_with("-eval") {
        recipe.name += "-eval";
    }
    let default = || PathBuf::from("runs").join(&recipe.name);
    let path = args.run_dir.clone().unwrap_or_else(default);
    if !args.resume {
        check::before_training(&path, &recipe)?;
    }
    let dir = RunDir::open(&path, &recipe, args.resume).map_err(Failure::input)?;
    let options = TrainOptions {
        command: "eval",
        resume: args.resume,
        json: args.json,
    };
    let last = train::evaluate(&recipe, &dir, &options)?;
    if args.json {
        output::print_json(&last);
    }
    Ok(())
}

fn other_model(recipe: &Recipe, source: &str) -> Result<ModelSection, Failure> {
    if matches!(recipe.model, ModelSection::Scratch { .. }) {
        return Err(Failure::input(format!(
            "--model = {source:?}: the recipe's model is one from scratch, with an alphabet of its own; allowed with model.type = \"pretrained\""
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
