//! Tasks as two lists, such as those that the class of an environment provides itself.

use crate::env::EnvInfo;
use crate::error::RowError;
use crate::rows::{RowLimits, read_rows};
use crate::workers::PythonWorkers;
use serde_json::{Map, Value, json};
use sinew_env::{Split, Taskset, TasksetError};
use sinew_types::{Task, TaskId, mix_seed};

/// Divisor: one of this many rows is held out if `tasks` has no parameter `split`.
const HELD_OUT_EVERY: u64 = 20;

/// The tasks of each split in order.
#[derive(Clone, Debug)]
pub struct SplitTasks {
    name: String,
    train: Vec<Task>,
    held_out: Vec<Task>,
}

impl SplitTasks {
    /// Tasks under this name.
    pub fn new(name: &str, train: Vec<Task>, held_out: Vec<Task>) -> Self {
        Self {
            name: name.into(),
            train,
            held_out,
        }
    }

    /// Reads all rows of `tasks(split, seed)` of a class. A row is a text (the prompt) or an object; its
    /// fields are the columns of the task. `id`, `kind` and `prompt` name the task, its type and its text.
    ///
    /// `seed` goes to the class and into the seeds of the tasks. Every row whose hash is a multiple of 20 is
    /// held out if there is no parameter `split`. It blocks the thread.
    ///
    /// # Errors
    /// If the class has no `tasks`, it raises an error, a row is neither text nor an object, or no row is
    /// held out. There may be none to train on: then the tasks are only measured.
    pub fn of_class(
        workers: &PythonWorkers,
        target: usize,
        name: &str,
        seed: u64,
    ) -> Result<Self, TasksetError> {
        let info: EnvInfo = serde_json::from_value(workers.describe(target).clone())
            .map_err(|e| config_error(name, e.to_string()))?;
        if !info.tasks {
            let why = "it has no `tasks`: add a static method tasks(split, seed) that returns rows";
            return Err(config_error(name, format!("{}: {why}", info.place)));
        }
        let rows = |split: Split| read_split(workers, target, name, split, seed);
        let (train, held_out) = if info.splits {
            (rows(Split::Train)?, rows(Split::HeldOut)?)
        } else {
            let held = |t: &Task| row_hash(t).is_multiple_of(HELD_OUT_EVERY);
            rows(Split::Train)?.into_iter().partition(|t| !held(t))
        };
        if held_out.is_empty() {
            let split = Split::HeldOut.as_str();
            return Err(config_error(
                name,
                format!("tasks gives no row for the split {split}"),
            ));
        }
        Ok(Self::new(name, train, held_out))
    }

    fn split(&self, split: Split) -> &[Task] {
        match split {
            Split::Train => &self.train,
            Split::HeldOut => &self.held_out,
        }
    }
}

/// An error of the class as a whole.
fn config_error(name: &str, why: String) -> TasksetError {
    TasksetError::Config {
        taskset: name.into(),
        field: "env.module",
        value: name.into(),
        allowed: why,
    }
}

/// A hash of the row that neither its place nor its id changes.
fn row_hash(task: &Task) -> u64 {
    let row = json!([task.prompt, task.data]).to_string();
    let hash = blake3::hash(row.as_bytes());
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_be_bytes(bytes)
}

/// All tasks of a split. The first invalid row is an error with its number.
fn read_split(
    workers: &PythonWorkers,
    target: usize,
    name: &str,
    split: Split,
    seed: u64,
) -> Result<Vec<Task>, TasksetError> {
    let limits = RowLimits::default();
    let made = |index: usize, row: &str| task(row, index, split, seed);
    read_rows(workers, target, split, seed, limits, made)
        .map_err(|why| config_error(name, why.to_string()))
}

/// A task of a row, which is JSON text.
fn task(row: &str, index: usize, split: Split, seed: u64) -> Result<Task, RowError> {
    let row: Value = sinew_types::json::from_str(row)?;
    let Value::Object(mut columns) = row else {
        let why = "a row is a text or an object with columns";
        return Err(RowError::Value(why.into()));
    };
    let id = match columns.shift_remove("id") {
        None | Some(Value::Null) => format!("{}-{index}", split.as_str()),
        Some(Value::String(id)) => id,
        Some(other) => other.to_string(),
    };
    Ok(Task {
        id: TaskId::new(id),
        kind: named_text(&mut columns, "kind")?.unwrap_or_else(|| "python".into()),
        preamble: Vec::new(),
        prompt: named_text(&mut columns, "prompt")?.unwrap_or_default(),
        seed: columns
            .get("seed")
            .and_then(Value::as_u64)
            .unwrap_or_else(|| mix_seed(seed, index as u64)),
        data: Value::Object(columns),
    })
}

/// Takes a column of text out of a row.
fn named_text(columns: &mut Map<String, Value>, name: &str) -> Result<Option<String>, RowError> {
    match columns.shift_remove(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => {
            let why = format!("{name} is {other}: a text is needed");
            Err(RowError::Value(why))
        }
    }
}

impl Taskset for SplitTasks {
    fn name(&self) -> &str {
        &self.name
    }

    fn len(&self, split: Split) -> usize {
        self.split(split).len()
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        let tasks = self.split(split);
        tasks
            .get(index)
            .cloned()
            .ok_or_else(|| TasksetError::Index {
                taskset: self.name.clone(),
                split,
                index,
                len: tasks.len(),
            })
    }
}
