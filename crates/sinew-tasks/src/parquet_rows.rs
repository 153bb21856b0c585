//! Rows of Parquet files.

use crate::error::TasksError;
use crate::row::{Row, push, row_error};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Appends the rows of a Parquet file. The line of a row is its index, from 1.
pub(crate) fn read(path: &Arc<Path>, file: File, rows: &mut Vec<Row>) -> Result<(), TasksError> {
    let failed = |line, e: &dyn std::fmt::Display| row_error(path, line, e.to_string());
    let reader = SerializedFileReader::new(file).map_err(|e| failed(0, &e))?;
    let found = reader.get_row_iter(None).map_err(|e| failed(0, &e))?;
    for (at, row) in found.enumerate() {
        let row = row.map_err(|e| failed(at + 1, &e))?;
        let Value::Object(columns) = row.to_json_value() else {
            return Err(row_error(path, at + 1, "not a table of columns"));
        };
        push(path, at + 1, columns, rows)?;
    }
    Ok(())
}
