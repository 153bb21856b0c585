//! `sinew eval`: measures held-out tasks of a recipe, or benchmarks, and compares measurements.
//!
//! | call | file | what it does |
//! |---|---|---|
//! | `sinew eval RECIPE` | this one | the measurement of `sinew train` without the training |
//! | `sinew eval --bench NAME --model MODEL` | `bench`, `plan`, `target` | benchmarks: intervals, pass@k, reports |
//! | `sinew eval --compare A B` | `compare` | the paired test of two measurements |

mod bench;
mod compare;
mod plan;
mod target;

use crate::adapter_args::AdapterArg;
use crate::{RunArgs, train};
use clap::Args;
use sinew_assembly::Failure;
use sinew_recipe::{ChainPlan, ModelSection, RUN, Recipe, RunPlan, TemplateOptions};
use sinew_runs::{EVALUATION, RunDir};
use std::path::{Path, PathBuf};

/// Arguments of `sinew eval`.
#[derive(Debug, Args)]
pub(crate) struct EvalArgs {
    /// Recipe file (TOML) whose held-out tasks are measured
    #[arg(
        required_unless_present_any = ["bench", "benches", "compare"],
        conflicts_with_all = ["bench", "benches", "compare"]
    )]
    pub(crate) recipe: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    track: crate::track::TrackArgs,
    /// The measured model: a source as in a recipe, or the folder of a run or of `sinew export`; left out,
    /// that of the recipe. A URL of an OpenAI-compatible server is allowed with --bench
    #[arg(long)]
    model: Option<String>,
    /// Measure the model with this LoRA adapter (a folder in PEFT's layout); traces record the name
    #[arg(long, value_name = "NAME=DIR")]
    adapter: Option<AdapterArg>,
    #[command(flatten)]
    bench: bench::BenchArgs,
}

/// `sinew eval`. The folder of a recipe's measurement has the name of the recipe with `-eval` behind it.
///
/// # Errors
/// If the recipe or a benchmark is refused, or the measurement fails.
pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    if args.bench.benches {
        return bench::list(args.run.json);
    }
    args.run.end(match (&args.recipe, &args.bench.compare[..]) {
        (Some(recipe), _) => measured(args, recipe),
        (None, [first, second]) => compare::compared(first, second, args.run.json),
        (None, _) => bench::measured(args),
    })
}

/// Measures the model of the recipe, or the one of `--model`.
fn measured(args: &EvalArgs, file: &Path) -> Result<train::CommandEnd, Failure> {
    let mut recipe = match args.run.recipe(file)? {
        Recipe::Run(recipe) => *recipe,
        // Its held-out tasks are those of the whole chain, unless a stage sets others.
        Recipe::Chain(chain) => last(&chain, args.model.as_deref())?,
    };
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
    if !recipe.name.ends_with(EVALUATION) {
        recipe.name += EVALUATION;
    }
    let adapter = args.adapter.clone();
    let job = |recipe: &RunPlan, dir: &RunDir, options: &train::TrainOptions| {
        let mut options = options.clone();
        if let Some(adapter) = &adapter {
            options.typed += &format!(" --adapter {adapter}");
        }
        options.adapter = adapter;
        train::evaluate(recipe, dir, &options)
    };
    args.run.run(&recipe, &args.track, "eval", job)
}

/// The last stage of a chain as a separate recipe, which begins with a model that was trained already.
///
/// # Errors
/// If there is no `--model`: a chain has no weights before its first stage ends.
fn last(chain: &ChainPlan, model: Option<&str>) -> Result<RunPlan, Failure> {
    if model.is_none() {
        return Err(Failure::input(
            "--model is missing: the model of a chain is made by its stages\n  hint: --model with the chain's folder, \
             runs/NAME",
        ));
    }
    let mut plan = chain.to_measure();
    plan.name.clone_from(&chain.name);
    Ok(plan)
}

/// The section of `--model`. Its tokenizer and template replace those of the recipe, too; the model of a run
/// must have been trained with the environment's alphabet, if it has one.
///
/// # Errors
/// If the environment has a separate alphabet and the model is not of a run.
fn other_model(recipe: &RunPlan, source: &str) -> Result<ModelSection, Failure> {
    let source = sinew_assembly::typed_source(source);
    if recipe.env.needs().alphabet.is_some() && !source.starts_with(RUN) {
        return Err(Failure::input(format!(
            "--model = {source:?}: env.type = \"{}\" has an alphabet of its own, which only models from scratch have",
            recipe.env.name()
        )));
    }
    // Variables of the template belong to the recipe's model, unless the other one is a run with its own.
    let template = if source.starts_with(RUN) {
        TemplateOptions::default()
    } else {
        recipe.model.template().clone()
    };
    Ok(ModelSection::Pretrained { source, template })
}
