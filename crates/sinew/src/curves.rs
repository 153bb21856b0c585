//! `sinew plot`: the learning curves of several runs in one picture.
//!
//! A curve is the success of training episodes, averaged over a window of steps, from a run's
//! `metrics.jsonl`; or the results of held-out episodes, from `evals.jsonl`, over all stages of a chain. Runs
//! that still train can be drawn.

use crate::output;
use clap::ValueEnum;
use serde_json::Value;
use sinew_assembly::Failure;
use sinew_orchestrator::{EvalRecord, StepRecord};
use sinew_runs::write_atomic;
use sinew_view::plot::{Curve, plot};
use sinew_view::{WINDOW, lines, smoothed};
use std::path::{Path, PathBuf};

/// The measure of held-out episodes that is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum HeldOut {
    /// Share of solved episodes
    Success,
    /// Mean reward
    Reward,
}

/// Writes `out`, an SVG with one curve for each run, named by its folder.
///
/// # Errors
/// If a folder has no records of what is drawn, or `out` cannot be written; an existing file is replaced
/// whole.
pub(crate) fn run(runs: &[PathBuf], held_out: Option<HeldOut>, out: &Path) -> Result<(), Failure> {
    let mut curves = Vec::new();
    for dir in runs {
        let points = match held_out {
            None => smoothed(&records::<StepRecord>(dir, "metrics.jsonl")?),
            Some(what) => measured(dir, what)?,
        };
        let name = dir.file_name().unwrap_or(dir.as_os_str());
        curves.push(Curve {
            name: name.to_string_lossy().into_owned(),
            points,
        });
    }
    let (title, y) = match held_out {
        None => (
            format!("Success of training episodes, mean of {WINDOW} steps"),
            "success",
        ),
        Some(HeldOut::Success) => ("Success of held-out episodes".into(), "success"),
        Some(HeldOut::Reward) => ("Reward of held-out episodes".into(), "reward"),
    };
    let svg = plot(&title, "step", y, &curves).map_err(Failure::system)?;
    write_atomic(out, svg.as_bytes())
        .map_err(|e| Failure::system(format!("{}: {e}", out.display())))?;
    output::print(&format!("{}\n", out.display()));
    Ok(())
}

/// Lines of a file of a run.
fn records<T: serde::de::DeserializeOwned>(dir: &Path, file: &str) -> Result<Vec<T>, Failure> {
    let path = dir.join(file);
    if !path.is_file() {
        return Err(Failure::input(format!(
            "{}: no such file\n  hint: give the folders of runs, as in `sinew train --run-dir`",
            path.display()
        )));
    }
    lines(&path).map_err(Failure::system)
}

/// Held-out measurements of a run, or of the stages of a chain that have ended, one after the other.
fn measured(dir: &Path, what: HeldOut) -> Result<Vec<(f64, f64)>, Failure> {
    let mut stages = vec![(dir.to_owned(), 0)];
    if let Ok(text) = std::fs::read_to_string(dir.join("chain.json")) {
        let chain: Value = serde_json::from_str(&text).map_err(Failure::system)?;
        let mut before = 0;
        stages.clear();
        for stage in chain["ended"].as_array().into_iter().flatten() {
            let name = stage["name"].as_str().unwrap_or_default();
            stages.push((dir.join(name), before));
            before += stage["steps"].as_u64().unwrap_or_default();
        }
    }
    let mut points = Vec::new();
    for (folder, before) in stages {
        for record in records::<EvalRecord>(&folder, "evals.jsonl")? {
            let value = match what {
                HeldOut::Success => record.stats.success,
                HeldOut::Reward => record.stats.reward,
            };
            points.push(((before + record.step) as f64, value));
        }
    }
    Ok(points)
}
