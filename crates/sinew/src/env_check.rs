//! `sinew env check`: a Python environment, tried before it is trained on.

use crate::failure::Failure;
use crate::output;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_bridge::{CheckReport, Finding, Python, PythonEnvFactory, PythonTasks, PythonWorkers};
use sinew_env::{EnvConfig, Split, Taskset};
use sinew_types::{Task, TaskId};

#[derive(Debug, Args)]
pub(crate) struct EnvArgs {
    #[command(subcommand)]
    command: EnvCommand,
}

#[derive(Debug, Subcommand)]
enum EnvCommand {
    /// Try a Python environment: schema of its tools, gold, null and random policies, leaks, speed
    #[command(after_help = "Example: sinew env check my_env.py:MyEnv")]
    Check(CheckArgs),
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// The class: FILE.py:CLASS or MODULE:CLASS
    module: String,
    /// Tasks of each policy
    #[arg(long, default_value_t = 8, value_parser = super::at_least_one)]
    tasks: usize,
    /// Seed of the tasks
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Deadline of one call, in seconds
    #[arg(long, default_value_t = 30.0)]
    timeout_s: f64,
    /// Python interpreter: a path, or a name in PATH
    #[arg(long, default_value = "python3")]
    python: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &EnvArgs) -> Result<(), Failure> {
    let EnvCommand::Check(args) = &args.command;
    let keys = Python {
        workers: 1,
        timeout_s: args.timeout_s,
        python: args.python.clone(),
        ..Python::new(&args.module)
    };
    keys.check().map_err(Failure::input)?;
    let workers = keys.workers(None).map_err(Failure::input)?;
    let factory =
        PythonEnvFactory::new(workers.clone(), 0, &args.module).map_err(Failure::input)?;
    let tasks = tasks(args, &workers, &factory)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::system)?;
    let report = runtime.block_on(CheckReport::of(&factory, &tasks));
    print(args, &report);
    match report.passed() {
        true => Ok(()),
        // The report names what failed.
        false => Err(Failure::Program(1, String::new())),
    }
}

/// Tasks of the class, else one without a prompt.
fn tasks(
    args: &CheckArgs,
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
            seed: args.seed,
        }]);
    }
    let all = PythonTasks::read(workers, 0, &args.module, args.seed).map_err(Failure::input)?;
    (0..args.tasks.min(all.len(Split::Train)))
        .map(|i| all.get(Split::Train, i).map_err(Failure::system))
        .collect()
}

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
