//! Tasksets: indexed collections of tasks in two disjoint splits.

use serde::{Deserialize, Serialize};
use sinew_types::Task;

/// Which part of a taskset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    Train,
    HeldOut,
}

impl Split {
    /// The name as it stands in task ids.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
        }
    }
}

/// Why a taskset could not be made or a task not be had.
#[derive(Debug, thiserror::Error)]
pub enum TasksetError {
    #[error("taskset {taskset}: no {split} task {index}, there are {len}", split = split.as_str())]
    Index {
        taskset: String,
        split: Split,
        index: usize,
        len: usize,
    },
    #[error("taskset {taskset}: {field} is {value}: {allowed}")]
    Config {
        taskset: String,
        field: &'static str,
        value: String,
        allowed: String,
    },
    #[error("taskset {taskset}, line {line}: {message}")]
    Row {
        taskset: String,
        line: usize,
        message: String,
    },
}

/// An indexed collection of tasks. Equal configurations give equal tasks with equal ids.
pub trait Taskset: Send + Sync {
    /// Name by which recipes select it.
    fn name(&self) -> &str;

    /// Number of tasks in a split.
    fn len(&self, split: Split) -> usize;

    /// Whether a split has no task.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// The task at `index` of a split.
    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError>;
}
