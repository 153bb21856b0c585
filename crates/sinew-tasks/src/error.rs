//! Reasons why tasks cannot be read.

use std::path::PathBuf;

/// Reason why a file of tasks or a setting of `[tasks]` is refused.
#[derive(Debug, thiserror::Error)]
pub enum TasksError {
    /// A file or folder cannot be read.
    #[error("tasks: {}: {source}; paths are relative to the current folder", path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// A file or folder has no known format.
    #[error("tasks: {}: {reason}", path.display())]
    Format { path: PathBuf, reason: String },
    /// A row is invalid. Lines are counted from 1; of Parquet files they are rows.
    #[error("tasks: {}, line {line}: {message}", path.display())]
    Row {
        path: PathBuf,
        line: usize,
        message: String,
    },
    /// A row that code made is invalid. Indices are counted from 0.
    #[error("tasks: {by}, index {index}: {message}")]
    Made {
        by: String,
        index: usize,
        message: String,
    },
    /// A key of `[tasks]` is invalid.
    #[error("tasks.{key} = {value}: {reason}")]
    Key {
        key: &'static str,
        value: String,
        reason: String,
    },
}
