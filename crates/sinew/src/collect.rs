//! `sinew collect`: collects episodes of a recipe, without training.
//!
//! The last line with `--json`:
//!
//! | field | content |
//! |---|---|
//! | `collected` | episodes that ended, of how many; scored, unscored and failed ones; means of reward and success |
//! | `now` | episodes that ended in this session |
//! | `stored` | what the store has, attempts that failed included |
//! | `wall_s` | wall time of this session, in seconds |

use crate::{RunArgs, check, output, train};
use clap::Args;
use sinew_assembly::collection::CollectionEnd;
use sinew_assembly::{CollectOptions, Failure};
use sinew_orchestrator::{CollectProgress, FAILING, Process, RunEvent};
use sinew_recipe::{Recipe, RunPlan};
use sinew_runs::{COLLECTION, RunDir};
use sinew_view::collected;
use std::path::PathBuf;

/// Arguments of `sinew collect`.
#[derive(Debug, Args)]
pub(crate) struct CollectArgs {
    /// Recipe file (TOML)
    pub(crate) recipe: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Number of episodes, those of earlier sessions included; with --resume it may be raised
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    episodes: u64,
    /// Sample with these servers and their weights: URL[,URL...]; each may begin with vllm+, sglang+ or
    /// openai+
    #[arg(long, value_name = "URL")]
    engine: Option<String>,
    #[command(flatten)]
    feed: crate::queue::FeedArgs,
    /// Leave the rewards of the recipe to `sinew queue score`: episodes end without one
    #[arg(long)]
    score_apart: bool,
}

/// `sinew collect RECIPE`. Its folder has the name of the recipe with `-collect` behind it.
///
/// # Errors
/// If the recipe is refused, or the collection fails.
pub(crate) fn run(args: &CollectArgs) -> Result<(), Failure> {
    args.run.end(gathered(args))
}

fn gathered(args: &CollectArgs) -> Result<train::CommandEnd, Failure> {
    if let Some(address) = args.run.serve.control() {
        return Err(Failure::input(format!(
            "--control {address}: it has no effect here, since a collection runs its episodes in this process; \
             leave it out"
        )));
    }
    let mut recipe = match args.run.recipe(&args.recipe)? {
        Recipe::Run(recipe) => *recipe,
        Recipe::Chain(_) => {
            return Err(Failure::input(
                "the recipe is a chain: its stages make the weights that sample\n  hint: give the recipe of one run, with \
                 model = \"run:DIR\" and the chain's folder for its last weights",
            ));
        }
    };
    // A recipe that is trained from a queue fills it.
    let own = sinew_assembly::data_queue(&recipe)?;
    let own_typed = crate::queue::typed_of(&recipe.data);
    if own.is_some() {
        recipe.data = None;
    }
    let mut how = CollectOptions {
        episodes: args.episodes,
        engine: args.engine.clone(),
        queue: None,
    };
    sinew_assembly::check_collect(&recipe, &how)?;
    // A folder of `train` is not taken for one of these, nor the other way round.
    if !recipe.name.ends_with(COLLECTION) {
        recipe.name += COLLECTION;
    }
    let (path, mut options) = args.run.options(&recipe, "collect")?;
    options.typed += &format!(" --episodes {}", args.episodes);
    if let Some(engine) = &args.engine {
        options.typed += &format!(" --engine {engine}");
    }
    options.typed += &args.feed.typed(&own_typed);
    if args.score_apart {
        options.typed += " --score-apart";
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    how.queue = args.feed.plan(own, &name, args.score_apart)?;
    if args.score_apart && how.queue.is_none() {
        return Err(Failure::input(
            "--score-apart: rows of a queue are scored apart: add --queue, or [data] type = \"queue\" to the recipe",
        ));
    }
    let job = |recipe: &RunPlan, dir: &RunDir, options: &train::TrainOptions| {
        gather(recipe, dir, options, &how)
    };
    crate::execute(&path, &recipe, check::before_sampling, job, &options)
}

/// Runs the collection and shows what came of it.
fn gather(
    recipe: &RunPlan,
    dir: &RunDir,
    options: &train::TrainOptions,
    how: &CollectOptions,
) -> Result<train::CommandEnd, Failure> {
    let trouble = |progress: &CollectProgress| {
        let (failed, all) = (progress.failed, progress.episodes);
        (failed as f64 >= FAILING * all as f64 && failed > 0).then(|| {
            format!(
                "{failed} of {all} episodes failed\n  hint: `sinew episodes {} --failed` lists them, `sinew show` says why",
                dir.path().display()
            )
        })
    };
    let CollectionEnd {
        progress,
        now,
        store,
        wall_s,
    } = train::in_session(recipe, dir, options, 0, |session| {
        let bus = session.bus.clone();
        let collection = sinew_assembly::collection(recipe, how, session)?;
        dir.write_recipe(recipe).map_err(Failure::input)?;
        let done = sinew_assembly::collection::collect(collection);
        if let Ok(done) = &done {
            let (process, why) = (Process::Ended, trouble(&done.progress));
            let told = bus.emit(RunEvent::Ended { process, why });
            told.map_err(Failure::system)?;
        }
        Ok(done)
    })?;
    if !options.json {
        output::print(&collected(&progress, dir.path(), wall_s));
    }
    let trouble = trouble(&progress).map(Failure::system);
    let last = serde_json::json!({
        "collected": progress, "now": now, "stored": store, "wall_s": wall_s,
    });
    Ok(train::CommandEnd { last, trouble })
}
