//! `sinew plot`: the learning curves of several runs in one picture.
//!
//! A curve is the success of training episodes, averaged over a window of steps, from a run's
//! `metrics.jsonl`. Runs that still train can be drawn.

use crate::output;
use sinew_pipeline::StepRecord;
use sinew_plot::{Curve, plot};
use sinew_project::write_atomic;
use sinew_view::{WINDOW, lines, smoothed};
use sinew_wire::Failure;
use std::path::{Path, PathBuf};

/// Writes `out`, an SVG with one curve for each run, named by its folder.
///
/// # Errors
/// If a folder has no `metrics.jsonl`, or `out` cannot be written; an existing file is replaced whole.
pub(crate) fn run(runs: &[PathBuf], out: &Path) -> Result<(), Failure> {
    let mut curves = Vec::new();
    for dir in runs {
        let path = dir.join("metrics.jsonl");
        if !path.is_file() {
            return Err(Failure::input(format!(
                "{}: no such file\n  hint: give the folders of runs, as in `sinew train --run-dir`",
                path.display()
            )));
        }
        let records: Vec<StepRecord> = lines(&path).map_err(Failure::system)?;
        let name = dir.file_name().unwrap_or(dir.as_os_str());
        curves.push(Curve {
            name: name.to_string_lossy().into_owned(),
            points: smoothed(&records),
        });
    }
    let title = format!("Success of training episodes, mean of {WINDOW} steps");
    let svg = plot(&title, "step", "success", &curves).map_err(Failure::system)?;
    write_atomic(out, svg.as_bytes())
        .map_err(|e| Failure::system(format!("{}: {e}", out.display())))?;
    output::print(&format!("{}\n", out.display()));
    Ok(())
}
