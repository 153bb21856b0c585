//! Rows of files, by the format that the file's name says.

use crate::error::TasksError;
use crate::row::{MAX_ROW_BYTES, Row, push, read_error, row_error};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

/// Format of a file with rows, by its ending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    JsonLines,
    /// One JSON array of objects.
    Json,
    Csv {
        delimiter: u8,
    },
    Parquet,
}

/// The format of a file, `None` if the ending is no known one.
fn format(path: &Path) -> Option<Format> {
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    Some(match ending.as_str() {
        "jsonl" | "ndjson" => Format::JsonLines,
        "json" => Format::Json,
        "csv" => Format::Csv { delimiter: b',' },
        "tsv" => Format::Csv { delimiter: b'\t' },
        "parquet" => Format::Parquet,
        _ => return None,
    })
}

/// Whether a file has a known format.
pub(crate) fn is_known(path: &Path) -> bool {
    format(path).is_some()
}

/// Appends the rows of a file.
pub(crate) fn read_file(path: &Path, rows: &mut Vec<Row>) -> Result<(), TasksError> {
    let Some(format) = format(path) else {
        return Err(TasksError::Format {
            path: path.into(),
            reason: "the format of this file is unknown; allowed: .jsonl, .json, .csv, .tsv, \
                     .parquet, or a folder of such files"
                .into(),
        });
    };
    let open = File::open(path).map_err(|source| read_error(path, source))?;
    let shared: Arc<Path> = path.into();
    match format {
        Format::JsonLines => json_lines(&shared, BufReader::new(open), rows),
        Format::Json => json_array(&shared, open, rows),
        Format::Csv { delimiter } => csv_rows(&shared, open, delimiter, rows),
        Format::Parquet => parquet_rows(&shared, open, rows),
    }
}

/// JSON objects, one a line. Empty lines are skipped.
fn json_lines(
    path: &Arc<Path>,
    mut from: impl BufRead,
    rows: &mut Vec<Row>,
) -> Result<(), TasksError> {
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let mut limited = std::io::Read::take(&mut from, MAX_ROW_BYTES as u64 + 1);
        let read = limited.read_until(b'\n', &mut text);
        if read.map_err(|e| read_error(path, e))? == 0 {
            break;
        }
        if text.len() > MAX_ROW_BYTES {
            let message = format!("longer than {MAX_ROW_BYTES} bytes");
            return Err(row_error(path, line, message));
        }
        let bytes = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let columns: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| {
            let found = String::from_utf8_lossy(bytes.trim_ascii_end());
            let start: String = found.chars().take(60).collect();
            row_error(path, line, format!("not a JSON object: {e}: {start}"))
        })?;
        push(path, line, columns, rows)?;
    }
    Ok(())
}

/// One JSON array. The line of a row is its index, from 1, since the parser keeps no lines.
fn json_array(path: &Arc<Path>, file: File, rows: &mut Vec<Row>) -> Result<(), TasksError> {
    let all: Vec<Value> = serde_json::from_reader(BufReader::new(file))
        .map_err(|e| row_error(path, e.line(), format!("not a JSON array of objects: {e}")))?;
    for (at, value) in all.into_iter().enumerate() {
        let Value::Object(columns) = value else {
            let message = format!("element {} is no JSON object", at + 1);
            return Err(row_error(path, at + 1, message));
        };
        push(path, at + 1, columns, rows)?;
    }
    Ok(())
}

/// Delimited text whose first line names the columns. Values are text.
fn csv_rows(
    path: &Arc<Path>,
    file: File,
    delimiter: u8,
    rows: &mut Vec<Row>,
) -> Result<(), TasksError> {
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .from_reader(BufReader::new(file));
    let failed = |e: csv::Error| {
        let line = e.position().map_or(1, |p| p.line() as usize);
        row_error(path, line, e.to_string())
    };
    let names = reader.headers().map_err(failed)?.clone();
    let mut seen = std::collections::BTreeSet::new();
    if let Some(twice) = names.iter().find(|n| !seen.insert(*n)) {
        let message = format!("the column {twice:?} is named twice");
        return Err(row_error(path, 1, message));
    }
    for record in reader.records() {
        let record = record.map_err(failed)?;
        let line = record.position().map_or(0, |p| p.line() as usize);
        let bytes: usize = record.iter().map(str::len).sum();
        if bytes > MAX_ROW_BYTES {
            let message = format!("longer than {MAX_ROW_BYTES} bytes");
            return Err(row_error(path, line, message));
        }
        let cells = names.iter().zip(record.iter());
        let columns = cells.map(|(n, v)| (n.to_owned(), v.into())).collect();
        push(path, line, columns, rows)?;
    }
    Ok(())
}

#[cfg(feature = "parquet")]
use crate::parquet_rows::read as parquet_rows;

#[cfg(not(feature = "parquet"))]
fn parquet_rows(path: &Arc<Path>, _file: File, _rows: &mut Vec<Row>) -> Result<(), TasksError> {
    Err(TasksError::Format {
        path: path.as_ref().into(),
        reason: "this build reads no Parquet files: build with `--features parquet` (the wheel \
                 has it), or convert the file to .jsonl"
            .into(),
    })
}
