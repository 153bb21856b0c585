//! One row of a file, and the errors that name it.

use crate::error::TasksError;
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes of one row. A longer one is an error: it would not fit any context.
pub const MAX_ROW_BYTES: usize = 16 << 20;

/// Maximum number of rows of a source, which all stay in memory.
pub const MAX_ROWS: usize = 10_000_000;

/// Maximum bytes of all rows of a source, 8 GiB: they all stay in memory. They count as they are in the
/// files, those of CSV with the names of their columns and a constant for each cell.
pub const MAX_BYTES: u64 = 8 << 30;

/// Limits of what is read; those of the constants but in tests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of one row.
    pub(crate) row_bytes: usize,
    /// Number of rows.
    pub(crate) rows: usize,
    /// Bytes of all rows.
    pub(crate) bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            row_bytes: MAX_ROW_BYTES,
            rows: MAX_ROWS,
            bytes: MAX_BYTES,
        }
    }
}

/// Rows that are read one after the other, within limits.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    /// Rows in the order of their files.
    pub(crate) rows: Vec<Row>,
    pub(crate) limits: Limits,
    /// Bytes of the rows so far.
    bytes: u64,
}

impl Rows {
    /// Refuses `rows` more, or `bytes` more, than there is room for.
    pub(crate) fn room(
        &self,
        path: &Path,
        line: usize,
        rows: usize,
        bytes: u64,
    ) -> Result<(), TasksError> {
        let Limits { rows: most, .. } = self.limits;
        if rows > most.saturating_sub(self.rows.len()) {
            let message =
                format!("more than {most} rows; split the file, or leave rows out before");
            return Err(row_error(path, line, message));
        }
        let most = self.limits.bytes;
        if bytes > most.saturating_sub(self.bytes) {
            let message = format!(
                "more than {most} bytes of rows, which all stay in memory; split the file, or leave rows out \
                 before"
            );
            return Err(row_error(path, line, message));
        }
        Ok(())
    }

    /// The error of a row with too many bytes.
    pub(crate) fn too_long(&self, path: &Path, line: usize) -> TasksError {
        let message = format!("longer than {} bytes", self.limits.row_bytes);
        row_error(path, line, message)
    }

    /// Adds a row of `bytes` bytes, unless it is too long, or there are too many.
    pub(crate) fn push(
        &mut self,
        path: &Arc<Path>,
        line: usize,
        columns: Map<String, Value>,
        bytes: usize,
    ) -> Result<(), TasksError> {
        if bytes > self.limits.row_bytes {
            return Err(self.too_long(path, line));
        }
        self.room(path, line, 1, bytes as u64)?;
        self.bytes += bytes as u64;
        self.rows.push(Row {
            path: Arc::clone(path),
            line,
            made: false,
            columns,
        });
        Ok(())
    }
}

/// One row of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// File that holds the row, or what made it.
    pub path: Arc<Path>,
    /// Line in the file, from 1. A row of a CSV file can span lines: this is its first one. Rows that were
    /// made have an index from 0.
    pub line: usize,
    /// No line of a file: code made the row.
    pub made: bool,
    /// Values by column name, in the order of the file.
    pub columns: Map<String, Value>,
}

impl Row {
    /// An error that names this row.
    pub(crate) fn error(&self, message: impl Into<String>) -> TasksError {
        if self.made {
            TasksError::Made {
                by: self.path.display().to_string(),
                index: self.line,
                message: message.into(),
            }
        } else {
            row_error(&self.path, self.line, message)
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
