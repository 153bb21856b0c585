//! The files that record a run: `metrics.jsonl` and `evals.jsonl`, as a reader of its events.

use crate::metrics_file::{MetricsFile, Record, RecordsDamage};
use crate::state::{EarlierSessions, SavedState};
use sinew_orchestrator::{Bus, EvalRecord, PipelineError, Recorder, RunEvent, StepRecord};
use std::path::Path;
use std::sync::Arc;

/// Writes a line for each step and each measurement.
#[derive(Debug)]
pub(crate) struct RunFiles {
    metrics: MetricsFile,
    evals: MetricsFile,
}

/// Records of earlier sessions, read from the files.
#[derive(Clone, Debug)]
pub(crate) struct SavedRecords {
    pub(crate) steps: Arc<Vec<StepRecord>>,
    pub(crate) evals: Arc<Vec<EvalRecord>>,
}

/// A file of records with those of the store that it lacks.
fn records<T: Record>(
    path: &Path,
    known: &[T],
    keep: impl Fn(&T) -> bool,
    bus: &Bus,
) -> Result<(MetricsFile, Vec<T>), PipelineError> {
    let opened = MetricsFile::open(path, known, keep);
    let (file, kept, damage) =
        opened.map_err(|e| PipelineError::system(format!("{}: {e}", path.display())))?;
    let RecordsDamage {
        unreadable,
        rebuilt,
    } = damage;
    if unreadable > 0 {
        bus.emit(RunEvent::Warning(format!(
            "{}: {unreadable} lines could not be read; {rebuilt} records were written again from the store",
            path.display()
        )))?;
    }
    Ok((file, kept))
}

impl RunFiles {
    /// Opens the files of a run folder, as far as its checkpoint goes: what came later is done again.
    pub(crate) fn open(
        run_dir: &Path,
        saved: &SavedState,
        earlier: &EarlierSessions,
        bus: &Bus,
    ) -> Result<(Self, SavedRecords), PipelineError> {
        let done = saved.step;
        let path = run_dir.join("metrics.jsonl");
        let (metrics, steps) = records(&path, &earlier.records, |r| r.step <= done, bus)?;
        if (steps.len() as u64) < done {
            let missing = done - steps.len() as u64;
            bus.emit(RunEvent::Warning(format!(
                "the records of {missing} steps are gone: counts at the end leave them out"
            )))?;
        }
        let keep = |r: &EvalRecord| match r.when.as_str() {
            "before" => done > 0,
            "during" => r.step <= done,
            _ => false,
        };
        let path = run_dir.join("evals.jsonl");
        let (evals, measured) = records(&path, &earlier.evals, keep, bus)?;
        let written = SavedRecords {
            steps: Arc::new(steps),
            evals: Arc::new(measured),
        };
        Ok((Self { metrics, evals }, written))
    }
}

impl Recorder for RunFiles {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        match event {
            RunEvent::Step(record) => self.metrics.append(record.as_ref()),
            RunEvent::Measured {
                record,
                again: false,
                ..
            } => self.evals.append(record.as_ref()),
            _ => Ok(()),
        }
    }
}
