//! The command line: the only place where concrete parts meet.

mod admission;
mod attack;
mod bench;
mod check;
mod container;
mod cross;
mod curriculum;
mod curves;
mod data;
mod egress;
mod episodes;
mod eval;
mod export;
mod failure;
mod gc;
mod harness;
mod health;
mod judges;
mod learner;
mod ledger;
mod log;
mod math;
mod microvm;
mod output;
mod outside;
mod parallel;
mod pool;
mod recipe;
mod record;
mod report;
mod run_dir;
mod runs;
mod sandbox;
mod sandbox_bench;
mod schedule;
mod serve;
mod serve_sandbox;
mod show;
mod show_run;
mod signals;
mod summary;
mod train;
mod view;
mod visible;
mod wire;

use clap::{Args, Parser, Subcommand};
use failure::Failure;
use recipe::Recipe;
use run_dir::{Resume, RunDir};
use std::path::PathBuf;
use std::process::ExitCode;

/// Agentic reinforcement learning: episodes, training signal, optimizer step, new weights.
#[derive(Debug, Parser)]
#[command(name = "sinew", version, arg_required_else_help = true)]
#[command(
    after_help = "Example: sinew train recipes/quickstart.toml --run-dir runs/quickstart\n\
Exit codes: 0 done; 1 the system failed, or a run collapsed, learned nothing or lost data (it says which);\n\
            2 wrong input; 130 interrupted (resume with --resume)"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a recipe: evaluate, train, evaluate again
    #[command(after_help = "Example: sinew train recipes/tiny.toml --run-dir runs/tiny --json")]
    Train(RunArgs),
    /// Run a recipe's held-out tasks once, and train nothing
    #[command(
        after_help = "Example: sinew eval recipes/quickstart.toml --model model --run-dir runs/trained-eval"
    )]
    Eval(eval::EvalArgs),
    /// Refuse now what would fail later: recipe, model, template, sandbox, disk
    #[command(after_help = "Example: sinew check recipes/quickstart.toml")]
    Check(CheckArgs),
    /// Print an episode with each token's kind, or what became of all tokens of a run
    #[command(
        after_help = "Examples: sinew show eval-after-40-0000 --run-dir runs/quickstart --tokens\n          sinew show runs/quickstart"
    )]
    Show(ShowArgs),
    /// List runs: how far they are, and what they gained
    #[command(after_help = "Example: sinew runs runs")]
    Runs(runs::RunsArgs),
    /// List the episodes of a run
    #[command(
        after_help = "Example: sinew episodes --run-dir runs/quickstart --purpose train --limit 10"
    )]
    Episodes(EpisodesArgs),
    /// Draw the learning curves of runs into one SVG
    #[command(after_help = "Example: sinew plot runs/seed-0 runs/seed-1 --out learning.svg")]
    Plot {
        /// Folders of runs
        #[arg(required = true)]
        runs: Vec<PathBuf>,
        /// File to write
        #[arg(long)]
        out: PathBuf,
    },
    /// Write a run's weights as one model folder, adapters merged
    #[command(after_help = "Example: sinew export runs/lora model --dtype bf16")]
    Export(export::ExportArgs),
    /// Free the room of trained episodes that no resume will ask for
    #[command(after_help = "Example: sinew gc runs/quickstart")]
    Gc(gc::GcArgs),
    /// Serve a model to agents, and capture what they do with it
    #[command(after_help = "Example: sinew serve --engine fake --listen 127.0.0.1:8080")]
    Serve(Box<serve::ServeArgs>),
    /// Look into the data pool of a running `sinew serve --pool`, and release what it holds back
    #[command(
        after_help = "Example: sinew pool status --url http://127.0.0.1:8080 --token-file token"
    )]
    Pool(pool::PoolArgs),
    /// A process of `train.data_parallel`, started by `train`
    #[command(name = parallel::COMMAND, hide = true)]
    TrainWorker,
    /// Run code in a sandbox, or say what this host enforces
    #[command(after_help = "Example: sinew sandbox run --code 'print(6 * 7)'")]
    Sandbox(SandboxArgs),
    /// Measure this build against the machine's limits and against other systems
    #[command(after_help = "Example: sinew bench compute --only floors,decode --json")]
    Bench {
        #[command(subcommand)]
        command: sinew_bench::BenchCommand,
    },
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// Folder for everything the run produces; default: runs/NAME, of `eval` runs/NAME-eval
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Go on with the run in --run-dir
    #[arg(long)]
    resume: bool,
    /// With --resume: a key of the recipe that may differ from what the run was trained with, such as train.learning_rate; several times
    #[arg(long, value_name = "KEY", requires = "resume")]
    allow_change: Vec<String>,
    /// Go on, and end with 0, though trained episodes are gone from the run's store
    #[arg(long)]
    accept_loss: bool,
    /// JSON lines on standard output, the last one with the result
    #[arg(long)]
    json: bool,
    /// Another seed than the recipe's
    #[arg(long)]
    seed: Option<u64>,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// One JSON object a check
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Episode id with --run-dir, else the folder of a run
    #[arg(value_name = "EPISODE|RUN")]
    pub(crate) what: String,
    /// Folder of the episode's run
    #[arg(long)]
    pub(crate) run_dir: Option<PathBuf>,
    /// One line for each token of the episode
    #[arg(long, requires = "run_dir")]
    pub(crate) tokens: bool,
    /// The whole trace, or the counts of the run, as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EpisodesArgs {
    /// Folder of the run
    #[arg(long)]
    pub(crate) run_dir: PathBuf,
    /// train, eval-before, eval-after, ...
    #[arg(long)]
    pub(crate) purpose: Option<String>,
    /// Training step
    #[arg(long)]
    pub(crate) step: Option<u64>,
    /// Most episodes to list
    #[arg(long, default_value_t = 50, value_parser = at_least_one)]
    pub(crate) limit: usize,
    /// One JSON object an episode
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
struct SandboxArgs {
    #[command(subcommand)]
    command: sandbox::SandboxCommand,
}

/// A count that lists something.
fn at_least_one(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|e| format!("{e}"))?;
    if count == 0 {
        return Err("allowed: 1 or more".into());
    }
    Ok(count)
}

fn main() -> ExitCode {
    let child = sinew_sandbox::spawner_main_if_requested()
        .or_else(sinew_wasm::worker_main_if_requested)
        .or_else(sinew_microvm::jail_main_if_requested);
    if let Some(code) = child {
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_writer(log::writer)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("SINEW_LOG")
                .unwrap_or_else(|_| "error".into()),
        )
        .init();
    let result = match cli.command {
        Command::Train(args) => run_train(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Check(args) => check::check(&args.recipe, args.json),
        Command::Show(args) => episodes::show(&args),
        Command::Runs(args) => runs::run(&args),
        Command::Episodes(args) => episodes::list(&args),
        Command::Plot { runs, out } => curves::run(&runs, &out),
        Command::Export(args) => export::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::TrainWorker => parallel::work(),
        Command::Sandbox(args) => sandbox::run(&args.command),
        Command::Serve(args) => serve::run(&args),
        Command::Pool(args) => pool::run(&args),
        Command::Bench { command } => bench::run(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprint_failure(&failure);
            ExitCode::from(failure.code())
        }
    }
}

fn eprint_failure(failure: &Failure) {
    use std::io::Write;
    // It may quote what servers and programs said.
    let text = visible::visible(failure.text());
    let _ = writeln!(std::io::stderr(), "sinew: {text}");
}

fn run_train(args: &RunArgs) -> Result<(), Failure> {
    args.run(&args.recipe()?, "train", train::train)
}

/// What a command does with a recipe.
type Job = fn(&Recipe, &RunDir, &train::TrainOptions) -> Result<train::Ended, Failure>;

impl RunArgs {
    /// The recipe, with the seed that was asked for.
    pub(crate) fn recipe(&self) -> Result<Recipe, Failure> {
        let mut recipe = Recipe::load(&self.recipe).map_err(Failure::input)?;
        recipe.seed = self.seed.unwrap_or(recipe.seed);
        Ok(recipe)
    }

    /// Does `job` in the run's folder, after all that can be refused was.
    pub(crate) fn run(
        &self,
        recipe: &Recipe,
        command: &'static str,
        job: Job,
    ) -> Result<(), Failure> {
        let default = || PathBuf::from("runs").join(&recipe.name);
        let path = self.run_dir.clone().unwrap_or_else(default);
        if !self.resume {
            check::before_training(&path, recipe)?;
        }
        let resume = self.resume.then(|| Resume {
            allow_change: self.allow_change.clone(),
        });
        let dir = RunDir::open(&path, recipe, resume.as_ref()).map_err(Failure::input)?;
        let options = train::TrainOptions {
            command,
            resume,
            json: self.json,
            accept_loss: self.accept_loss,
        };
        let ended = job(recipe, &dir, &options)?;
        if self.json {
            output::print_json(&ended.last);
        }
        ended.trouble.map_or(Ok(()), Err)
    }
}
