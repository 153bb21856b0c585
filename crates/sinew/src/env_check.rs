//! `sinew env`: tests a Python environment or task folders before they are trained on or served, and tests
//! servers.

use crate::env_args::{key, options, seconds};
use crate::env_serve;
use crate::harbor_check::{self, HarborCheck};
use crate::output;
use crate::runtime;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_bridge::{
    CaseOutcome, CheckReport, ConformanceOptions, Finding, Python, PythonEnvFactory, PythonWorkers,
    SplitTasks, conformance,
};
use sinew_env::{EnvConfig, Split, Taskset};
use sinew_recipe::{Recipe, RunPlan};
use sinew_types::{Task, TaskId};
use std::path::Path;

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    #[command(subcommand)]
    command: EnvCommand,
}

#[derive(Debug, Subcommand)]
enum EnvCommand {
    /// Try an environment: a Python class, that of a recipe, or task folders: gold, null, leaks, speed
    #[command(
        after_help = "Examples: sinew env check my_env.py:MyEnv\n          sinew env check recipes/worlds/search.toml\n          \
                      sinew env check tasks --all --sessions 4"
    )]
    Check(CheckArgs),
    /// Serve an environment: over HTTP for recipes with env.type = "http", or as OpenEnv and MCP
    #[command(
        after_help = "Examples:\n  sinew env serve my_env.py:MyEnv --listen 127.0.0.1:9100\n  \
                      sinew env serve tiny --protocol openenv\n  \
                      sinew env serve recipes/worlds/phone.toml --protocol mcp"
    )]
    Serve(env_serve::ServeArgs),
    /// Try whether a server keeps the protocol of environments
    #[command(after_help = "Example: sinew env test http://127.0.0.1:9100")]
    Test(TestArgs),
}

#[derive(Debug, Args)]
struct TestArgs {
    /// Address of the server
    url: String,
    /// Variable with the server's key
    #[arg(long, value_name = "NAME")]
    key_env: Option<String>,
    /// Fields of the episodes' task as JSON; others are those of the server's example
    #[arg(long, value_name = "JSON")]
    task: Option<String>,
    /// Episodes at once: the group size of the training
    #[arg(long, default_value_t = 8, value_parser = super::at_least_one)]
    group: usize,
    /// Deadline of one request, in seconds
    #[arg(long, default_value_t = 30.0)]
    timeout_s: f64,
    /// One JSON object a case
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// The class, FILE.py:CLASS or MODULE:CLASS; or a recipe, FILE.toml; or a folder with task.toml or with
    /// such folders
    module: String,
    /// Tasks of each policy
    #[arg(long, default_value_t = 8, value_parser = super::at_least_one)]
    tasks: usize,
    /// All tasks of a folder
    #[arg(long, conflicts_with = "tasks")]
    all: bool,
    /// Sandboxes of a folder's tasks; left out: process, if all tasks can run there, else container
    #[arg(long)]
    level: Option<String>,
    /// Seed of the tasks
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Episodes at once: while the speed is measured, or tasks of a folder
    #[arg(long, default_value_t = 1, value_parser = super::at_least_one)]
    sessions: usize,
    /// Deadline of one call, in seconds; where it is longer than a minute, of the imports as well
    #[arg(long, default_value_t = 30.0)]
    timeout_s: f64,
    /// Python interpreter: a path, or a name in PATH
    #[arg(long, default_value = "python3")]
    python: String,
    /// Attributes of the class to set, as JSON
    #[arg(long, value_name = "JSON", default_value = "{}")]
    options: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Carries out a sub-command of `sinew env`.
///
/// # Errors
/// If the class or the server cannot be reached, or a check of it fails: then with status 1.
pub(crate) fn run(args: &EnvArgs) -> Result<(), Failure> {
    let runtime = runtime::with_threads(2)?;
    match &args.command {
        EnvCommand::Check(args) => check(args, &runtime),
        EnvCommand::Serve(args) => env_serve::serve(args, &runtime),
        EnvCommand::Test(args) => runtime.block_on(test(args)),
    }
}

/// Starts the class, and reads some of its tasks.
fn start(keys: &Python, limit: usize, seed: u64) -> Result<(PythonEnvFactory, Vec<Task>), Failure> {
    keys.check().map_err(Failure::input)?;
    let workers = keys.workers(None).map_err(Failure::input)?;
    let factory =
        PythonEnvFactory::new(workers.clone(), 0, &keys.module).map_err(Failure::input)?;
    let tasks = tasks(&keys.module, limit, seed, &workers, &factory)?;
    Ok((factory, tasks))
}

/// Checks the environment of a recipe as a run would make it; of a chain, that of its first stage.
fn check_recipe(
    args: &CheckArgs,
    runtime: &tokio::runtime::Runtime,
) -> Result<CheckReport, Failure> {
    let recipe = Recipe::load(Path::new(&args.module), ENVIRONMENTS).map_err(Failure::input)?;
    let plan = match &recipe {
        Recipe::Run(plan) => plan.as_ref(),
        Recipe::Chain(chain) => match chain.stages.first() {
            Some(stage) => &stage.plan,
            None => return Err(Failure::input("the recipe has no stage")),
        },
    };
    let plan = RunPlan {
        seed: args.seed,
        ..plan.clone()
    };
    let tasks = sinew_assembly::tasks(&plan)?;
    let sinew_assembly::World { taskset, envs, .. } = sinew_assembly::world(&plan, &tasks)?;
    let some = (0..args.tasks.min(taskset.len(Split::Train)))
        .map(|i| taskset.get(Split::Train, i).map_err(Failure::system))
        .collect::<Result<Vec<_>, _>>()?;
    let place = args.module.clone();
    Ok(runtime.block_on(CheckReport::any(envs.as_ref(), &some, place, args.sessions)))
}

/// `sinew env check`: plays some tasks with one worker, and prints what was found.
fn check(args: &CheckArgs, runtime: &tokio::runtime::Runtime) -> Result<(), Failure> {
    let path = Path::new(&args.module);
    if path.is_dir() || path.extension().is_some_and(|ending| ending == "json") {
        let check = HarborCheck {
            folder: &args.module,
            tasks: (!args.all).then_some(args.tasks),
            sessions: args.sessions,
            level: args.level.as_deref(),
            json: args.json,
        };
        return harbor_check::run(&check, runtime);
    }
    if args.all || args.level.is_some() {
        let text = "--all and --level are for folders of tasks; remove them";
        return Err(Failure::input(text));
    }
    if args.module.ends_with(".toml") {
        return finish(args, &check_recipe(args, runtime)?);
    }
    let keys = Python {
        workers: 1,
        sessions_per_worker: args
            .sessions
            .max(Python::new(&args.module).sessions_per_worker),
        timeout_s: args.timeout_s,
        startup_timeout_s: args.timeout_s.max(60.0),
        python: args.python.clone(),
        options: options(&args.options)?,
        ..Python::new(&args.module)
    };
    let (factory, tasks) = start(&keys, args.tasks, args.seed)?;
    let report = runtime.block_on(CheckReport::at_once(&factory, &tasks, args.sessions));
    finish(args, &report)
}

/// Prints a report. Status 1 if training would fail.
fn finish(args: &CheckArgs, report: &CheckReport) -> Result<(), Failure> {
    print(args, report);
    if report.passed() {
        Ok(())
    } else {
        // The report names what failed.
        Err(Failure::Program(1, String::new()))
    }
}

/// `sinew env test`: plays the cases of the protocol against a server; one line a case.
async fn test(args: &TestArgs) -> Result<(), Failure> {
    let wrong = |e: serde_json::Error| Failure::input(format!("--task: {e}"));
    let options = ConformanceOptions {
        url: args.url.clone(),
        key: key(args.key_env.as_ref())?,
        task: sinew_types::json::from_str(args.task.as_deref().unwrap_or("{}")).map_err(wrong)?,
        group: args.group,
        timeout: seconds("--timeout-s", args.timeout_s)?,
    };
    let rows = conformance(&options).await.map_err(Failure::input)?;
    for row in &rows {
        let mark = match row.outcome {
            CaseOutcome::Passed => "ok  ",
            CaseOutcome::Failed => "FAIL",
            CaseOutcome::Skipped => "skip",
        };
        if args.json {
            output::print_json(&json!(row))
        } else {
            output::print(&format!("{mark}  {:16} {}\n", row.case, row.why))
        }
    }
    if rows.iter().all(|r| r.outcome != CaseOutcome::Failed) {
        Ok(())
    } else {
        Err(Failure::Program(1, String::new()))
    }
}

/// Tasks of the class, else one without a prompt.
fn tasks(
    module: &str,
    limit: usize,
    seed: u64,
    workers: &PythonWorkers,
    factory: &PythonEnvFactory,
) -> Result<Vec<Task>, Failure> {
    if !factory.has_tasks() {
        return Ok(vec![Task {
            id: TaskId::new("empty"),
            kind: "python".into(),
            preamble: Vec::new(),
            prompt: String::new(),
            data: json!({}),
            seed,
        }]);
    }
    let all = SplitTasks::of_class(workers, 0, module, seed).map_err(Failure::input)?;
    (0..limit.min(all.len(Split::Train)))
        .map(|i| all.get(Split::Train, i).map_err(Failure::system))
        .collect()
}

/// The report of `sinew env check`: one JSON object, or a line for each tool and each check.
fn print(args: &CheckArgs, report: &CheckReport) {
    if args.json {
        output::print_json(&json!(report));
        return;
    }
    output::print(&format!("{} ({})\n", args.module, report.place));
    for tool in &report.tools {
        output::print(&format!("tool  {}\n", json!(tool)));
    }
    for check in &report.checks {
        let mark = match check.finding {
            Finding::Ok => "ok  ",
            Finding::Warning => "warn",
            Finding::Error => "FAIL",
        };
        output::print(&format!("{mark}  {:12} {}\n", check.name, check.detail));
    }
}
