//! Rows of Parquet files.

use crate::error::TasksError;
use crate::row::{Rows, row_error};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Appends the rows of a Parquet file. The line of a row is its index, from 1. Numbers of rows and bytes are
/// compared with the limits before anything is decoded.
pub(crate) fn read(path: &Arc<Path>, file: File, rows: &mut Rows) -> Result<(), TasksError> {
    let failed = |line, e: &dyn std::fmt::Display| row_error(path, line, e.to_string());
    let reader = SerializedFileReader::new(file).map_err(|e| failed(0, &e))?;
    let (count, bytes) = announced(reader.metadata());
    rows.room(path, count, count, bytes)?;
    let found = reader.get_row_iter(None).map_err(|e| failed(0, &e))?;
    for (at, row) in found.enumerate() {
        let row = row.map_err(|e| failed(at + 1, &e))?;
        let Value::Object(columns) = row.to_json_value() else {
            return Err(row_error(path, at + 1, "not a table of columns"));
        };
        let bytes = columns
            .iter()
            .map(|(name, v)| name.len() + bytes_of(v))
            .sum();
        rows.push(path, at + 1, columns, bytes)?;
    }
    Ok(())
}

/// Rows and decoded bytes, as the file announces them.
fn announced(meta: &ParquetMetaData) -> (usize, u64) {
    let rows = usize::try_from(meta.file_metadata().num_rows()).unwrap_or(usize::MAX);
    let groups = meta.row_groups().iter();
    let bytes = groups.map(|g| u64::try_from(g.total_byte_size()).unwrap_or(u64::MAX));
    (rows, bytes.fold(0, u64::saturating_add))
}

/// Approximate bytes of a value as text.
fn bytes_of(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(bytes_of).sum(),
        Value::Object(map) => map.iter().map(|(name, v)| name.len() + bytes_of(v)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
    }
}
