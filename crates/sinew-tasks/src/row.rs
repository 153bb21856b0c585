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
    /// File that holds the row, or what made it.
    pub path: Arc<Path>,
    /// Line in the file, from 1. A row of a CSV file can span lines: this is its first one. Of rows that were
    /// made, the index from 0.
    pub line: usize,
    /// No line of a file: code made the row.
    pub made: bool,
    /// Values by column name, in the order of the file.
    pub columns: Map<String, Value>,
}

impl Row {
    /// An error that names this row.
    pub(crate) fn error(&self, message: impl Into<String>) -> TasksError {
        match self.made {
            false => row_error(&self.path, self.line, message),
            true => TasksError::Made {
                by: self.path.display().to_string(),
                index: self.line,
                message: message.into(),
            },
        }
    }
}

/// Rows that code made, in order. Too many are an error.
pub(crate) fn made_rows(by: &str, rows: Vec<Map<String, Value>>) -> Result<Vec<Row>, TasksError> {
    let (path, count): (Arc<Path>, _) = (Path::new(by).into(), rows.len());
    if count > MAX_ROWS {
        let message = format!("more than {MAX_ROWS} rows; use a filter before");
        return Err(row_error(&path, count, message));
    }
    let made = rows.into_iter().enumerate().map(|(line, columns)| Row {
        path: Arc::clone(&path),
        line,
        made: true,
        columns,
    });
    Ok(made.collect())
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
        made: false,
        columns,
    });
    Ok(())
}
