//! `sinew plot`: the learning curves of several runs in one picture.

use crate::failure::Failure;
use crate::output;
use crate::run_dir::write_atomic;
use crate::show_run::lines;
use sinew_pipeline::StepRecord;
use sinew_plot::{Curve, plot};
use std::path::{Path, PathBuf};

/// Steps that a point of a curve averages: a step has too few tasks to be read alone.
const WINDOW: usize = 4;

/// Writes `out`, an SVG with one curve for each run.
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
        let records: Vec<StepRecord> = lines(&path)?;
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

fn smoothed(records: &[StepRecord]) -> Vec<(f64, f64)> {
    (0..records.len())
        .map(|i| {
            let window = &records[i.saturating_sub(WINDOW - 1)..=i];
            let sum: f64 = window.iter().map(|r| r.rollout.success).sum();
            (records[i].step as f64, sum / window.len() as f64)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_means_of_the_last_steps() {
        let record = |step: u64, success: f64| {
            let mut r = StepRecord {
                step,
                ..StepRecord::default()
            };
            r.rollout.success = success;
            r
        };
        let points = smoothed(&[record(1, 0.0), record(2, 1.0), record(3, 0.5)]);
        assert_eq!(points, [(1.0, 0.0), (2.0, 0.5), (3.0, 0.5)]);
    }
}
