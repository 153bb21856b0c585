//! `sinew judge`: judges against labels, and reward servers against their protocol.

use crate::output::{print, print_json};
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_env::Split;
use sinew_judge::{Bench, Calibration, check_server, read_labels, samples_of};
use sinew_recipe::RunPlan;
use std::path::PathBuf;

/// Arguments of `sinew judge`.
#[derive(Debug, Args)]
pub(crate) struct JudgeArgs {
    #[command(subcommand)]
    command: JudgeCommand,
}

/// Sub-commands of `sinew judge`.
#[derive(Debug, Subcommand)]
enum JudgeCommand {
    /// Judge labelled answers, and print how far the judge agrees: kappa, precision, recall, confusion
    #[command(after_help = "Example: sinew judge calibrate recipe.toml --labels labels.jsonl")]
    Calibrate(CalibrateArgs),
    /// Try the reward servers of a recipe: order, concurrency, wrong input, keys
    #[command(after_help = "Example: sinew judge check-server recipe.toml")]
    CheckServer(ServerArgs),
}

/// Arguments of `sinew judge calibrate`.
#[derive(Debug, Args)]
struct CalibrateArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// JSON lines with `prompt`, `output`, `label` and columns of the task
    #[arg(long)]
    labels: PathBuf,
    /// Judge to calibrate; may be left out where there is one
    #[arg(long)]
    judge: Option<String>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Arguments of `sinew judge check-server`.
#[derive(Debug, Args)]
struct ServerArgs {
    /// Recipe file (TOML)
    recipe: PathBuf,
    /// One JSON object a check
    #[arg(long)]
    json: bool,
}

/// Carries out a sub-command.
///
/// # Errors
/// If the recipe or the labels are refused, a key is missing, or a check failed.
pub(crate) fn run(args: &JudgeArgs) -> Result<(), Failure> {
    match &args.command {
        JudgeCommand::Calibrate(args) => calibrate(args),
        JudgeCommand::CheckServer(args) => servers(args),
    }
}

/// A runtime with threads: a reward may block one for a moment.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Runtime::new().map_err(Failure::system)
}

/// Judges the labelled rows and prints the tables. Nothing is kept in a run's folder.
///
/// # Errors
/// If there is no such judge, a row is wrong, or no row gets a verdict.
fn calibrate(args: &CalibrateArgs) -> Result<(), Failure> {
    let recipe = RunPlan::load(&args.recipe, ENVIRONMENTS).map_err(Failure::input)?;
    let names: Vec<&str> = recipe.judges.keys().map(String::as_str).collect();
    let name = match (args.judge.as_deref(), &names[..]) {
        (Some(name), _) => name,
        (None, [one]) => one,
        (None, _) => {
            let names = names.join(", ");
            return Err(Failure::input(format!(
                "--judge: needed where a recipe does not have one judge; there are: {names}"
            )));
        }
    };
    let tasks = sinew_assembly::tasks(&recipe)?.all;
    let judge = sinew_assembly::judge(&recipe, name, tasks.as_ref(), &Bench::default())?;
    let wrong =
        |e: &dyn std::fmt::Display| Failure::input(format!("{}: {e}", args.labels.display()));
    let text = std::fs::read_to_string(&args.labels).map_err(|e| wrong(&e))?;
    let config = judge.config();
    let rows = read_labels(&text, config.mode, &config.rubric).map_err(|e| wrong(&e))?;
    let table = runtime()?.block_on(Calibration::of(&judge, &rows));
    if args.json {
        print_json(&json!(table))
    } else {
        print(&table.text())
    }
    match (table.rows, table.first_cause) {
        (0, Some(cause)) => Err(Failure::outside(format!("no row was judged: {cause}"))),
        _ => Ok(()),
    }
}

/// Tries every reward server of the recipe with its first tasks.
///
/// # Errors
/// If the recipe has no server; exit code 1 without a text if a check failed, which its row shows.
fn servers(args: &ServerArgs) -> Result<(), Failure> {
    let recipe = RunPlan::load(&args.recipe, ENVIRONMENTS).map_err(Failure::input)?;
    let servers = recipe
        .reward
        .iter()
        .flat_map(|r| r.servers())
        .collect::<Vec<_>>();
    if servers.is_empty() {
        let why = "reward: no term is a server such as \"http://127.0.0.1:8000/score\"";
        return Err(Failure::input(why));
    }
    let tasks = sinew_assembly::tasks(&recipe)?.all;
    let count = tasks.len(Split::Train).min(4);
    let first = (0..count).map(|i| tasks.get(Split::Train, i).map_err(Failure::input));
    let samples = samples_of(&first.collect::<Result<Vec<_>, _>>()?);
    let (runtime, mut passed) = (runtime()?, true);
    for server in &servers {
        let config = sinew_assembly::server_config(server)?;
        let findings = runtime.block_on(check_server(&config, &samples));
        for finding in findings.map_err(|e| Failure::input(format!("reward: {e}")))? {
            passed &= finding.ok;
            let mark = if finding.ok { "ok  " } else { "FAIL" };
            if args.json {
                print_json(&json!(finding))
            } else {
                print(&format!(
                    "{mark}  {:12} {}\n",
                    finding.check, finding.detail
                ))
            }
        }
    }
    if passed {
        Ok(())
    } else {
        Err(Failure::Program(1, String::new()))
    }
}
