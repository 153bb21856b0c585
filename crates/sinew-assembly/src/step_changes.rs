//! Steps of a run that are done again from its commits, and the differences to the recorded ones.

use serde_json::Value;
use sinew_orchestrator::{PipelineError, Recorder, RunEvent, StepRecord};
use std::sync::{Arc, Mutex, PoisonError};

/// Keys of a record that a repetition reproduces bit for bit: rows and tokens of the update, and the
/// measurements of the trainer. Times, rates and counts of concurrent work differ between sessions.
const REPEATED: [&str; 14] = [
    "rows",
    "tokens",
    "dropped",
    "trained_tokens",
    "computed_tokens",
    "unshared_tokens",
    "loss",
    "grad_norm",
    "learning_rate",
    "updates_applied",
    "skipped_updates",
    "metrics",
    "preference",
    "logprob_gap_max",
];

/// A value of a step that is not as recorded.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct StepChange {
    /// Number of the step.
    pub step: u64,
    /// Path in the record, such as `metrics.clip_fraction`.
    pub field: String,
    /// Recorded value.
    pub was: Value,
    /// Value of the repeated step.
    pub is: Value,
}

/// Lists the differences between two records of one step.
///
/// # Errors
/// If a record cannot be written as JSON.
pub fn step_changes(was: &StepRecord, is: &StepRecord) -> Result<Vec<StepChange>, PipelineError> {
    let step = was.step;
    let record = |r: &StepRecord| serde_json::to_value(r).map_err(PipelineError::system);
    let (was, is) = (record(was)?, record(is)?);
    let mut changes = Vec::new();
    for key in REPEATED {
        differ(step, key.to_owned(), &was[key], &is[key], &mut changes);
    }
    Ok(changes)
}

/// Adds the leaves in which two values differ.
fn differ(step: u64, field: String, was: &Value, is: &Value, changes: &mut Vec<StepChange>) {
    if was == is {
        return;
    }
    if let (Value::Object(a), Value::Object(b)) = (was, is) {
        let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
        for key in keys {
            let field = format!("{field}.{key}");
            differ(step, field, &was[key], &is[key], changes);
        }
        return;
    }
    changes.push(StepChange {
        step,
        field,
        was: was.clone(),
        is: is.clone(),
    });
}

/// Recorder of a session's steps, which ends the session as if it was interrupted after one of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct StopAfter {
    /// Number of the last step.
    step: u64,
    records: Arc<Mutex<Vec<StepRecord>>>,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl StopAfter {
    /// Ends the session after step `step`.
    pub(crate) fn new(step: u64) -> Self {
        Self {
            step,
            ..Self::default()
        }
    }

    /// Warnings of the session.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let warnings = self.warnings.lock();
        warnings.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the records so far.
    pub(crate) fn records(&self) -> Vec<StepRecord> {
        let records = self.records.lock();
        records.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Recorder for StopAfter {
    fn record(&mut self, event: &RunEvent) -> Result<(), PipelineError> {
        let record = match event {
            RunEvent::Step(record) => record,
            RunEvent::Warning(text) => {
                let warnings = self.warnings.lock();
                let mut warnings = warnings.unwrap_or_else(PoisonError::into_inner);
                warnings.push(text.clone());
                return Ok(());
            }
            _ => return Ok(()),
        };
        let records = self.records.lock();
        let mut records = records.unwrap_or_else(PoisonError::into_inner);
        records.push((**record).clone());
        if record.step >= self.step {
            Err(PipelineError::Interrupted)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn times_do_not_count_and_leaves_are_named() {
        let was = StepRecord {
            step: 3,
            loss: 0.5,
            metrics: json!({"entropy": 1.0, "kl": {"k1": 2.0}}),
            ..StepRecord::default()
        };
        let mut is = StepRecord {
            wall_s: 9.0,
            rollout_s: 4.0,
            ..was.clone()
        };
        assert!(step_changes(&was, &is).unwrap().is_empty());
        is.loss = 0.25;
        is.metrics = json!({"entropy": 1.0, "kl": {"k1": 2.5, "k3": 1.0}});
        let changes = step_changes(&was, &is).unwrap();
        let fields: Vec<_> = changes.iter().map(|c| c.field.as_str()).collect();
        assert_eq!(fields, ["loss", "metrics.kl.k1", "metrics.kl.k3"]);
        assert_eq!((changes[0].step, &changes[0].was), (3, &json!(0.5)));
        assert_eq!(changes[2].was, Value::Null);
    }

    #[test]
    fn a_session_ends_after_its_step() {
        let mut stop = StopAfter::new(2);
        let step = |step| {
            let record = StepRecord {
                step,
                ..StepRecord::default()
            };
            RunEvent::Step(Arc::new(record))
        };
        assert!(stop.record(&RunEvent::Described("x".into())).is_ok());
        assert!(stop.record(&step(1)).is_ok());
        let ended = stop.record(&step(2)).unwrap_err();
        assert!(ended.is_interrupt());
        assert_eq!(stop.records().len(), 2);
    }
}
