//! `sinew runs`: the runs and collections below a folder.
//!
//! A run is a folder with `recipe.toml`. Folders below it are not searched, except the stages of chains.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_assembly::ENVIRONMENTS;
use sinew_assembly::Failure;
use sinew_orchestrator::Process;
use sinew_store::StoreReader;
use std::path::{Path, PathBuf};

/// Arguments of `sinew runs`.
#[derive(Debug, Args)]
pub(crate) struct RunsArgs {
    /// Folder that holds the runs' folders
    #[arg(default_value = "runs")]
    folder: PathBuf,
    /// One JSON object a run
    #[arg(long)]
    json: bool,
}

/// Lists the runs. A run that cannot be read is a line with the reason.
///
/// # Errors
/// If the folder cannot be read, or holds no run and no chain.
pub(crate) fn run(args: &RunsArgs) -> Result<(), Failure> {
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
    let store = StoreReader::open(&sinew_runs::store_path(folder));
    match (store.and_then(|store| store.stats()), as_json) {
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
        (Err(e), true) => output::print_json(&json!({ "run_dir": folder, "why": e.to_string() })),
        (Err(e), false) => output::print(&format!("{shown}  unreadable: {e}\n")),
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
