//! Rows that a step was given from outside, written down before they are stored and acknowledged.
//!
//! The last line of a step counts: leases that are taken again, and rows that went to another trainer, make
//! another one.

use serde::{Deserialize, Serialize};
use sinew_orchestrator::PipelineError;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::PathBuf;

/// Leases that a step took, with the names of their rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepLeases {
    pub(crate) step: u64,
    pub(crate) leases: Vec<(u64, Vec<String>)>,
    /// Rows that were stored for the step, and went to another trainer before they were trained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) lost: Vec<String>,
}

/// The file of a run with the leases of its steps, one line a step.
#[derive(Debug)]
pub(crate) struct Ledger(PathBuf);

impl Ledger {
    /// Uses the file at `path`, which need not exist.
    pub(crate) fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// The error of the file as one of the run, with its path.
    fn failed(&self, error: &std::io::Error) -> PipelineError {
        PipelineError::system(format!("{}: {error}", self.0.display()))
    }

    /// Returns the leases that `step` took before a restart.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn taken(&self, step: u64) -> Result<Option<StepLeases>, PipelineError> {
        let text = self.text()?;
        Ok(lines(&text).rev().find(|t| t.step == step))
    }

    /// The steps in which each row went to another trainer.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(crate) fn lost(&self) -> Result<BTreeMap<String, BTreeSet<u64>>, PipelineError> {
        let mut lost: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        for taken in lines(&self.text()?) {
            for key in taken.lost {
                lost.entry(key).or_default().insert(taken.step);
            }
        }
        Ok(lost)
    }

    /// All that was written; nothing if nothing was.
    fn text(&self) -> Result<String, PipelineError> {
        match std::fs::read_to_string(&self.0) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
            read => read.map_err(|e| self.failed(&e)),
        }
    }

    /// Writes down what a step was given; it is on the medium when this returns.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn note(&self, taken: &StepLeases) -> Result<(), PipelineError> {
        let mut file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&self.0)
            .map_err(|e| self.failed(&e))?;
        let line = serde_json::to_string(taken).map_err(PipelineError::system)?;
        // A cut line before it must not swallow this one.
        file.write_all(format!("\n{line}\n").as_bytes())
            .map_err(|e| self.failed(&e))?;
        file.sync_all().map_err(|e| self.failed(&e))
    }
}

/// The lines of a file. A line that a crash cut does not count: its rows were not stored.
fn lines(text: &str) -> impl DoubleEndedIterator<Item = StepLeases> {
    text.lines().filter_map(|l| serde_json::from_str(l).ok())
}
