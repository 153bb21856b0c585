//! Rows of tasks from Python code: pages of a worker, within limits.
//!
//! [`read_rows`] asks the worker for the rows from an offset, counts them against the [`RowLimits`], and
//! turns each into the caller's form. [`PythonRows`] are rows as tables of columns, for a recipe whose tasks
//! come from a function.
//!
//! Rows are read when a run starts, and the worker ends afterwards: the order and the number of tasks do not
//! depend on code that runs during training.

use crate::code::PythonCode;
use crate::error::{RowError, RowsError, StartError};
use crate::target::{Target, TargetKind};
use crate::worker::THREADED;
use crate::workers::{PythonWorkers, WorkersConfig};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use sinew_env::Split;
use sinew_sandbox::SandboxSpec;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limits of the rows of one split. More rows or bytes are an error, so that a generator without an end does
/// not fill the memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLimits {
    /// Number of rows.
    pub rows: usize,
    /// Bytes of all rows as JSON.
    pub bytes: usize,
    /// Time for all rows. Each page has the deadline of a call besides.
    pub time: Duration,
}

impl Default for RowLimits {
    /// A million rows, 1 GiB, 10 minutes.
    fn default() -> Self {
        Self {
            rows: 1_000_000,
            bytes: 1 << 30,
            time: Duration::from_secs(600),
        }
    }
}

/// A page as the worker sends it.
#[derive(Deserialize)]
struct Page {
    /// Rows as JSON text.
    rows: Vec<String>,
    /// There are no more.
    done: bool,
}

/// All rows of a split from a target that gives rows, each by `made` from its index and its JSON text. The
/// first bad row is an error with its index, before the next page is requested. It blocks the thread. The
/// worker is not trusted: this side counts rows, bytes and time.
pub(crate) fn read_rows<T>(
    workers: &PythonWorkers,
    target: usize,
    split: Split,
    seed: u64,
    limits: RowLimits,
    made: impl Fn(usize, &str) -> Result<T, RowError>,
) -> Result<Vec<T>, RowsError> {
    let (mut rows, mut bytes, started) = (Vec::new(), 0, Instant::now());
    loop {
        let request = json!({
            "op": "tasks", "target": target, "split": split.as_str(), "seed": seed, "offset": rows.len(),
        });
        let page: Page = serde_json::from_value(workers.call_blocking(request, THREADED)?)?;
        let done = page.done || page.rows.is_empty();
        bytes += page.rows.iter().map(String::len).sum::<usize>();
        for row in &page.rows {
            let index = rows.len();
            let row = made(index, row).map_err(|reason| RowsError::Row { index, reason })?;
            rows.push(row);
        }
        let split = split.as_str();
        let over = match () {
            () if rows.len() > limits.rows => format!("more than {} rows", limits.rows),
            () if bytes > limits.bytes => format!("more than {} bytes of rows", limits.bytes),
            () if !done && started.elapsed() > limits.time => {
                let seconds = limits.time.as_secs();
                format!("rows for more than {seconds} s")
            }
            () if done => return Ok(rows),
            () => continue,
        };
        return Err(RowsError::Over { over, split });
    }
}

/// Rows of a function of the user, such as `gen.py:rows`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PythonRows {
    /// Rows to train on, or all of them. A row is a JSON object.
    pub train: Vec<Map<String, Value>>,
    /// Rows of the held-out split, if the function has the parameter `split`.
    pub held_out: Option<Vec<Map<String, Value>>>,
}

impl PythonRows {
    /// Runs the function in a sandboxed worker with the limits `spec`, within `limits` for each split, and
    /// ends the worker. `split` (`train`, `held-out`) and `seed` are given where it has parameters of these
    /// names. `python` is the interpreter: a path, or a name in `PATH`. It blocks the thread.
    ///
    /// # Errors
    /// If the code does not load or raises, a limit is passed, or a row is not an object: the message names
    /// its index, from 0.
    pub fn read(
        source: &str,
        python: &str,
        seed: u64,
        spec: SandboxSpec,
        limits: RowLimits,
    ) -> Result<Self, StartError> {
        let target = Target::parse(source, TargetKind::Tasks, Path::new("."))?;
        let search = std::env::var("PATH").unwrap_or_default();
        let code = PythonCode::find(&[target], python, &search)?;
        // One more lives for a moment while a dead worker is replaced.
        let mut config = WorkersConfig::new(code.process_provider(2)?);
        (config.workers, config.spec) = (1, spec);
        Self::of(&PythonWorkers::start(config, code)?, source, seed, limits)
    }

    /// Reads like [`PythonRows::read`], from the first target of workers that run.
    ///
    /// # Errors
    /// Same as [`PythonRows::read`].
    pub fn of(
        workers: &PythonWorkers,
        source: &str,
        seed: u64,
        limits: RowLimits,
    ) -> Result<Self, StartError> {
        let wrong = |reason: RowsError| StartError::Target {
            value: source.into(),
            reason: reason.to_string(),
        };
        let split = |split: Split| {
            read_rows(workers, 0, split, seed, limits, |_, row| columns(row)).map_err(wrong)
        };
        let splits = workers.describe(0)["splits"] == true;
        Ok(Self {
            train: split(Split::Train)?,
            held_out: splits.then(|| split(Split::HeldOut)).transpose()?,
        })
    }
}

/// Columns of a row.
///
/// # Errors
/// If the text is not JSON, or its value is not an object. The message quotes at most 60 characters of it.
fn columns(row: &str) -> Result<Map<String, Value>, RowError> {
    let value = sinew_types::json::from_str(row);
    match value.map_err(|e| RowError::Value(format!("no JSON: {e}")))? {
        Value::Object(columns) => Ok(columns),
        other => {
            let shown: String = other.to_string().chars().take(60).collect();
            let why = format!("a row is a text or a dict of columns, not {shown}");
            Err(RowError::Value(why))
        }
    }
}
