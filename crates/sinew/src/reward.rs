//! `sinew reward`: scores that come after their episodes.

use crate::output;
use clap::{Args, Subcommand};
use serde_json::json;
use sinew_assembly::{Failure, import_rewards};
use sinew_store::{IMPORT_SOURCE, ImportReport};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Arguments of `sinew reward`.
#[derive(Debug, Args)]
pub(crate) struct RewardArgs {
    #[command(subcommand)]
    command: RewardCommand,
}

/// Use of the scores.
#[derive(Debug, Subcommand)]
enum RewardCommand {
    /// Add scores from a file of JSON lines {"episode" or "external_id", "name", "value"}
    Import(ImportArgs),
}

/// Arguments of `sinew reward import`.
#[derive(Debug, Args)]
struct ImportArgs {
    /// File of JSON lines; optional fields: "reason", "at" (seconds since 1970), "source"
    file: PathBuf,
    /// Folder of the run
    #[arg(long = "run")]
    run_dir: PathBuf,
    /// Source of rows that name none
    #[arg(long, default_value = IMPORT_SOURCE)]
    source: String,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Runs a sub-command.
///
/// # Errors
/// If rows are bad, with their lines; the others are stored.
pub(crate) fn run(args: &RewardArgs) -> Result<(), Failure> {
    let RewardCommand::Import(args) = &args.command;
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_us = now.map_or(0, |d| d.as_micros() as u64);
    let report = import_rewards(&args.run_dir, &args.file, &args.source, now_us)?;
    if args.json {
        output::print_json(&json!(report));
    } else {
        output::print(&summary(&report));
    }
    if report.refused == 0 {
        return Ok(());
    }
    let bad = report.bad.iter();
    let lines: Vec<String> = bad
        .map(|b| format!("\n  line {}: {}", b.line, b.why))
        .collect();
    Err(Failure::input(format!(
        "{}: {} of {} rows were not taken:{}",
        args.file.display(),
        report.refused,
        report.rows,
        lines.concat()
    )))
}

/// The report in a line.
fn summary(report: &ImportReport) -> String {
    let how = if report.queued {
        "left for the run, which takes them at its next step"
    } else {
        "stored"
    };
    format!(
        "{} new scores {how}, {} known already\n",
        report.new, report.known
    )
}
