//! `sinew runs`: the runs below a folder.
//!
//! A run is a folder with `recipe.toml`. Folders below it are not searched, but for the stages of chains.

use crate::output;
use clap::Args;
use serde_json::json;
use sinew_view::RunSummary;
use sinew_wire::Failure;
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

/// Lists what is there. A run that cannot be read is a line that says why.
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
        } else if sinew_chain::holds_chain(&path) {
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

/// Prints one run: `running`, `ended`, `interrupted`, `failed` or `killed`, how far it is, and how it goes
/// on.
fn one(folder: &Path, as_json: bool) {
    let shown = folder.display();
    let read = sinew_project::summary(folder);
    let (state, why) = match sinew_project::end_of(folder) {
        _ if sinew_project::in_use(folder) => ("running".to_owned(), None),
        Some(end) => end,
        // A run of a version that said nothing of its end.
        None if read.as_ref().is_ok_and(RunSummary::is_measured) => ("ended".to_owned(), None),
        None => ("killed".to_owned(), None),
    };
    match (read, as_json) {
        (Ok(run), true) => {
            let line = json!({ "run_dir": folder, "state": state, "why": why, "run": run });
            output::print_json(&line);
        }
        (Ok(run), false) => {
            let more = why.map_or_else(String::new, |why| reason(&state, &why));
            output::print(&format!("{shown}  {state}  {}\n{more}", run.line()));
        }
        (Err(e), true) => output::print_json(&json!({ "run_dir": folder, "why": e.to_string() })),
        (Err(e), false) => output::print(&format!("{shown}  unreadable: {e}\n")),
    }
}

/// Maximum number of lines about the end of a run.
const REASON_LINES: usize = 4;

/// Why a run failed, or the command that goes on with one that was stopped, below its line.
fn reason(state: &str, why: &str) -> String {
    // The first line of the others says what the state says.
    let known = usize::from(state != "failed");
    let lines = why.lines().skip(known).take(REASON_LINES);
    lines.map(|line| format!("    {}\n", line.trim())).collect()
}
