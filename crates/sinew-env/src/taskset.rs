//! Tasksets: indexed collections of tasks with two disjoint splits.

use serde::{Deserialize, Serialize};
use sinew_types::Task;
use std::ops::Range;

/// Part of a taskset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Split {
    /// Tasks for training.
    Train,
    /// Tasks for evaluation.
    HeldOut,
}

impl Split {
    /// Name in task ids.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
        }
    }
}

/// Reason why a taskset or a task is not available.
#[derive(Debug, thiserror::Error)]
pub enum TasksetError {
    /// The index is not below the length of the split.
    #[error("taskset {taskset}: no {split} task {index}, there are {len}", split = split.as_str())]
    Index {
        /// Name of the taskset.
        taskset: String,
        /// The requested split.
        split: Split,
        /// The requested index, from 0.
        index: usize,
        /// Number of tasks of the split.
        len: usize,
    },
    /// A setting is invalid.
    #[error("taskset {taskset}: {field} is {value}: {allowed}")]
    Config {
        /// Name of the taskset.
        taskset: String,
        /// Name of the setting.
        field: &'static str,
        /// Value as it is printed.
        value: String,
        /// Allowed values in words.
        allowed: String,
    },
    /// A row of the data is invalid. Lines are counted from 1.
    #[error("taskset {taskset}, line {line}: {message}")]
    Row {
        /// Name of the taskset.
        taskset: String,
        /// Line number; for generated tasks, the index.
        line: usize,
        /// Reason in words.
        message: String,
    },
}

/// An indexed collection of tasks. Equal settings give equal tasks with equal ids.
pub trait Taskset: Send + Sync {
    /// Name in recipes.
    fn name(&self) -> &str;

    /// Number of tasks in a split.
    fn len(&self, split: Split) -> usize;

    /// True if a split has no tasks.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == 0
    }

    /// Returns the task at `index` of a split.
    ///
    /// # Errors
    /// [`TasksetError::Index`] if the index is not below the length.
    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError>;

    /// Type of the task at `index` of a split, without the work of making the task.
    ///
    /// # Errors
    /// Same as of [`Taskset::get`].
    fn kind(&self, split: Split, index: usize) -> Result<String, TasksetError> {
        Ok(self.get(split, index)?.kind)
    }

    /// Tasks that were left out and why, for users.
    fn notes(&self) -> Vec<String> {
        Vec::new()
    }

    /// Names and training tasks of the environments of a mixture, in order. Other tasksets have one range
    /// without a name.
    fn members(&self) -> Vec<(&str, Range<usize>)> {
        vec![("", 0..self.len(Split::Train))]
    }
}

/// Taskset without tasks, for runs in which external agents bring their own.
#[derive(Clone, Copy, Debug)]
pub struct NoTasks;

impl Taskset for NoTasks {
    fn name(&self) -> &str {
        "none"
    }

    fn len(&self, _split: Split) -> usize {
        0
    }

    fn get(&self, split: Split, index: usize) -> Result<Task, TasksetError> {
        Err(TasksetError::Index {
            taskset: "none".into(),
            split,
            index,
            len: 0,
        })
    }
}
