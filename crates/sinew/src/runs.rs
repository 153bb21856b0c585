//! `sinew runs`: the runs and collections below a folder, and copies of their stores.
//!
//! A run is a folder with `recipe.toml`. Folders below it are not searched, except the stages of chains.

use crate::output;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::{Failure, StorePlace};
use sinew_orchestrator::Process;
use sinew_store::{CopyPhase, CopyProgress};
use std::path::{Path, PathBuf};

/// Arguments of `sinew runs`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct RunsArgs {
    #[command(subcommand)]
    command: Option<RunsCommand>,
    /// Folder that holds the runs' folders
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// One JSON object a run
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum RunsCommand {
    /// Copy the store of a run between its folder and a database; what is there already is not copied again
    #[command(
        after_help = "Examples: sinew runs copy runs/quickstart postgres://me@db.example/sinew\n          sinew runs copy postgres://me@db.example/sinew#quickstart copies/quickstart"
    )]
    Copy(CopyArgs),
}

/// Arguments of `sinew runs copy`.
#[derive(Debug, Args)]
struct CopyArgs {
    /// Folder of a run or a store, or postgres://USER@HOST/DATABASE#NAME; the password is in PGPASSWORD
    from: String,
    /// Likewise; without #NAME a store in a database is named like the folder
    to: String,
    /// File whose first line is the address of the database, in the place of the one that is typed
    #[arg(long)]
    url_file: Option<PathBuf>,
    /// Place of the traces of the store in the database: s3://BUCKET/PREFIX or file:///FOLDER
    #[arg(long)]
    payloads: Option<String>,
    /// JSON lines on standard output: progress, then the result
    #[arg(long)]
    json: bool,
}

/// Copies a store.
///
/// # Errors
/// If a place cannot be opened, the target holds other data, or the stores differ in the end.
fn copy(args: &CopyArgs) -> Result<(), Failure> {
    let place = |typed: &str| {
        let is_database = sinew_types::is_database(typed);
        StorePlace {
            place: typed.to_owned(),
            url_file: args.url_file.clone().filter(|_| is_database),
            payloads: args.payloads.clone().filter(|_| is_database),
        }
    };
    let (from, to) = (place(&args.from), place(&args.to));
    let mut last = None;
    let mut tell = |progress: CopyProgress| {
        if args.json {
            output::print_json(&json!({ "progress": progress }));
        } else if last != Some(progress.phase) {
            let total = progress.total;
            output::say_error(&match progress.phase {
                CopyPhase::Episodes => format!("copying {total} episodes\n"),
                CopyPhase::Scores => "copying scores\n".to_owned(),
                CopyPhase::Updates => format!("copying {total} updates\n"),
                CopyPhase::Check => "comparing both stores\n".to_owned(),
            });
        }
        last = Some(progress.phase);
    };
    let report = sinew_assembly::copy_store(&from, &to, &mut tell)?;
    if args.json {
        output::print_json(&json!({ "copy": report }));
    } else {
        output::print(&format!(
            "equal: {} episodes ({} new), {} removed ones, {} scores, {} updates, owner {}\nchecksum {}\n",
            report.episodes,
            report.copied,
            report.removed,
            report.scores,
            report.updates,
            report.fence,
            report.checksum,
        ));
    }
    Ok(())
}

/// Lists the runs. A run that cannot be read is a line with the reason.
///
/// # Errors
/// If the folder cannot be read, or holds no run and no chain.
pub(crate) fn run(args: &RunsArgs) -> Result<(), Failure> {
    if let Some(RunsCommand::Copy(args)) = &args.command {
        return copy(args);
    }
    let unreadable = |e: std::io::Error| {
        Failure::input(format!(
            "{}: {e}\n  hint: give the folder that holds the folders of runs",
            args.folder.display()
        ))
    };
    let mut folders = Vec::new();
    for entry in args.folder.read_dir().map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.join("recipe.toml").is_file() {
            folders.push(path);
        } else if sinew_runs::chain::holds_chain(&path) {
            let stages = path.read_dir().map_err(unreadable)?.flatten();
            folders.extend(
                stages
                    .map(|s| s.path())
                    .filter(|s| s.join("recipe.toml").is_file()),
            );
        }
    }
    folders.sort();
    if folders.is_empty() {
        return Err(Failure::input(format!(
            "{} holds no run\n  hint: `sinew train RECIPE` makes one in runs/NAME",
            args.folder.display()
        )));
    }
    for folder in &folders {
        one(folder, args.json);
    }
    Ok(())
}

/// Prints one run, or one collection: how far it is, and how it continues.
fn one(folder: &Path, as_json: bool) {
    let shown = folder.display();
    match sinew_assembly::recipe_of(folder) {
        Ok(recipe) if sinew_runs::is_collection(folder, &recipe) => {
            return collection(folder, &recipe.name, as_json);
        }
        // The code below reports the fault.
        _ => {}
    }
    let (process, why) = sinew_runs::process_of(folder);
    let state = process.name();
    match (sinew_runs::summary(folder, ENVIRONMENTS), as_json) {
        (Ok(run), true) => {
            let verdict = run.verdict(process, why.as_deref());
            let line = json!({
                "run_dir": folder, "state": state, "why": why, "verdict": verdict, "run": run,
            });
            output::print_json(&line);
        }
        (Ok(run), false) => {
            let verdict = run.verdict(process, why.as_deref());
            let more = why.map_or_else(String::new, |why| reason(process, &why));
            output::print(&format!(
                "{shown}  {state}  {}\n    {}\n{more}",
                run.line(),
                verdict.line()
            ));
        }
        (Err(e), true) => output::print_json(&json!({ "run_dir": folder, "why": e.to_string() })),
        (Err(e), false) => output::print(&format!("{shown}  unreadable: {e}\n")),
    }
}

/// Prints one collection, by the counts of its store.
fn collection(folder: &Path, name: &str, as_json: bool) {
    let shown = folder.display();
    let (process, why) = sinew_runs::process_of(folder);
    let state = process.name();
    let store = sinew_assembly::run_reader(folder);
    let stats = store.and_then(|store| store.stats().map_err(Failure::system));
    match (stats, as_json) {
        (Ok(stored), true) => output::print_json(&json!({
            "run_dir": folder, "state": state, "why": why, "collection": { "name": name, "stored": stored },
        })),
        (Ok(s), false) => output::print(&format!(
            "{shown}  {state}  {name}: {} episodes stored, {} successes, {} failed, {} removed, {:.1} MiB\n{}",
            s.episodes,
            s.successes,
            s.failed,
            s.collected,
            s.bytes as f64 / f64::from(1 << 20),
            why.map_or_else(String::new, |why| reason(process, &why)),
        )),
        (Err(e), true) => output::print_json(&json!({ "run_dir": folder, "why": e.text() })),
        (Err(e), false) => output::print(&format!("{shown}  unreadable: {}\n", e.text())),
    }
}

/// Maximum number of lines about the end of a run.
const REASON_LINES: usize = 4;

/// The reason of a failure, or the command that resumes a stopped run, below its line. The verdict names the
/// reason if an ended run did not reach its goal.
fn reason(process: Process, why: &str) -> String {
    let known = match process {
        Process::Failed => 0,
        Process::Running | Process::Ended => return String::new(),
        // The first line repeats the state.
        Process::Interrupted | Process::Killed => 1,
    };
    let lines = why.lines().skip(known).take(REASON_LINES);
    lines.map(|line| format!("    {}\n", line.trim())).collect()
}
