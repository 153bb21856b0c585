//! One row of a file, and the errors that name it.

use crate::error::TasksError;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes of one row. A longer one is an error: it would not fit any context.
pub const MAX_ROW_BYTES: usize = 16 << 20;

/// Maximum number of rows of a taskset, which all stay in memory.
pub const MAX_ROWS: usize = 10_000_000;

/// One row of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// File that holds the row.
    pub path: Arc<Path>,
    /// Line in the file, from 1. A row of a CSV file can span lines: this is its first one.
    pub line: usize,
    /// Values by column name, in the order of the file.
    pub columns: Map<String, Value>,
}

impl Row {
    /// An error that names this row.
    pub(crate) fn error(&self, message: impl Into<String>) -> TasksError {
        row_error(&self.path, self.line, message)
    }
}

/// An error that names a row.
pub(crate) fn row_error(path: &Path, line: usize, message: impl Into<String>) -> TasksError {
    TasksError::Row {
        path: path.into(),
        line,
        message: message.into(),
    }
}

/// An error of a path.
pub(crate) fn read_error(path: &Path, source: std::io::Error) -> TasksError {
    TasksError::Read {
        path: path.into(),
        source,
    }
}

/// Appends a row, unless there are too many.
pub(crate) fn push(
    path: &Arc<Path>,
    line: usize,
    columns: Map<String, Value>,
    rows: &mut Vec<Row>,
) -> Result<(), TasksError> {
    if rows.len() >= MAX_ROWS {
        let message = format!("more than {MAX_ROWS} rows; split the file, or use a filter before");
        return Err(row_error(path, line, message));
    }
    rows.push(Row {
        path: Arc::clone(path),
        line,
        columns,
    });
    Ok(())
}
