//! Rows of files, read in the format of the file's name.

use crate::error::TasksError;
use crate::row::{Rows, read_error, row_error};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};
use sinew_types::json::Quoted;
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
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

/// The format of a file, `None` if the ending is not a known one.
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
pub(crate) fn read_file(path: &Path, rows: &mut Rows) -> Result<(), TasksError> {
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
fn json_lines(path: &Arc<Path>, mut from: impl BufRead, rows: &mut Rows) -> Result<(), TasksError> {
    let mut text = Vec::new();
    let limit = rows.limits.row_bytes;
    for line in 1.. {
        text.clear();
        let mut limited = Read::take(&mut from, limit as u64 + 1);
        let read = limited.read_until(b'\n', &mut text);
        if read.map_err(|e| read_error(path, e))? == 0 {
            break;
        }
        if text.len() > limit {
            return Err(rows.too_long(path, line));
        }
        let bytes = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&text);
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        let columns: Map<String, Value> = sinew_types::json::from_slice(bytes).map_err(|e| {
            let found = String::from_utf8_lossy(bytes.trim_ascii_end());
            let start: String = found.chars().take(60).collect();
            // The place in the row would read as another line of the file.
            let why = e.to_string();
            let why = why.split(" at line ").next().unwrap_or(&why);
            row_error(path, line, format!("not a JSON object: {why}: {start}"))
        })?;
        rows.push(path, line, columns, text.len())?;
    }
    Ok(())
}

/// Counts what a parser reads, and ends it at the limit: parsers buffer a whole row, however long.
struct Metered<'a, R> {
    inner: R,
    /// Bytes that may still be read.
    left: &'a Cell<usize>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other("the row is too long"));
        }
        let most = buffer.len().min(left);
        let n = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - n);
        Ok(n)
    }
}

/// Bytes that a parser may read ahead of a row's end.
const AHEAD: usize = 64 << 10;

/// Maximum columns of a CSV file.
const MAX_COLUMNS: usize = 10_000;

/// Bytes that a cell of a row takes in memory, on top of its name and its value: its entry in the row's map
/// (72) and the headers of two allocations.
const CELL_BYTES: usize = 104;

/// One JSON array, element by element. The line of a row is its index, from 1, since the parser keeps no
/// lines.
fn json_array(path: &Arc<Path>, file: impl Read, rows: &mut Rows) -> Result<(), TasksError> {
    let left = Cell::new(rows.limits.row_bytes + AHEAD);
    let inner = BufReader::new(file);
    let metered = Metered { inner, left: &left };
    let mut parser = serde_json::Deserializer::from_reader(Quoted::new(metered));
    let mut elements = Elements {
        path,
        rows,
        left: &left,
        at: 0,
        failed: None,
    };
    let read = parser.deserialize_seq(&mut elements);
    let read = read.and_then(|()| parser.end());
    match (read, elements.failed) {
        (Ok(()), _) => Ok(()),
        (Err(_), Some(failed)) => Err(failed),
        (Err(_), None) if left.get() == 0 => Err(elements.rows.too_long(path, elements.at + 1)),
        (Err(e), None) => {
            let message = format!("not a JSON array of objects: {e}");
            Err(row_error(path, e.line(), message))
        }
    }
}

/// Takes the elements of an array as rows.
struct Elements<'a> {
    path: &'a Arc<Path>,
    rows: &'a mut Rows,
    left: &'a Cell<usize>,
    /// Elements so far.
    at: usize,
    /// Reason of a row that was refused, which the parser's error cannot carry.
    failed: Option<TasksError>,
}

impl<'de> Visitor<'de> for &mut Elements<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let most = self.rows.limits.row_bytes + AHEAD;
        while let Some(value) = list.next_element::<Value>()? {
            self.at += 1;
            let bytes = most - self.left.replace(most);
            let pushed = match value {
                Value::Object(columns) => self.rows.push(self.path, self.at, columns, bytes),
                _ => {
                    let message = format!("element {} is no JSON object", self.at);
                    Err(row_error(self.path, self.at, message))
                }
            };
            if let Err(failed) = pushed {
                self.failed = Some(failed);
                return Err(A::Error::custom("a row is refused"));
            }
        }
        Ok(())
    }
}

/// Delimited text whose first line names the columns. Values are text.
fn csv_rows(
    path: &Arc<Path>,
    file: impl Read,
    delimiter: u8,
    rows: &mut Rows,
) -> Result<(), TasksError> {
    let most = rows.limits.row_bytes + AHEAD;
    let left = Cell::new(most);
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(delimiter)
        .from_reader(Metered {
            inner: file,
            left: &left,
        });
    let too_long = |line| {
        let message = format!("longer than {} bytes; is a quote left open?", most - AHEAD);
        row_error(path, line, message)
    };
    let failed = |e: csv::Error, line| match e.position() {
        _ if left.get() == 0 => too_long(line),
        at => row_error(path, at.map_or(1, |p| p.line() as usize), e.to_string()),
    };
    let names = reader.headers().map_err(|e| failed(e, 1))?.clone();
    if names.len() > MAX_COLUMNS {
        let message = format!(
            "{} columns; allowed: up to {MAX_COLUMNS}; remove some, or is the delimiter another one?",
            names.len()
        );
        return Err(row_error(path, 1, message));
    }
    let mut seen = std::collections::BTreeSet::new();
    if let Some(twice) = names.iter().find(|n| !seen.insert(*n)) {
        let message = format!("the column {twice:?} is named twice");
        return Err(row_error(path, 1, message));
    }
    let mut record = csv::StringRecord::new();
    loop {
        left.set(most);
        let line = reader.position().line() as usize;
        if !reader
            .read_record(&mut record)
            .map_err(|e| failed(e, line))?
        {
            break;
        }
        let line = record.position().map_or(line, |p| p.line() as usize);
        let cells = names.iter().zip(record.iter());
        // Short cells take more memory than the file's bytes: every row has the names again.
        let sizes = cells.clone().map(|(n, v)| n.len() + v.len() + CELL_BYTES);
        let bytes = sizes.sum();
        let columns = cells.map(|(n, v)| (n.to_owned(), v.into())).collect();
        rows.push(path, line, columns, bytes)?;
    }
    Ok(())
}

#[cfg(feature = "parquet")]
use crate::parquet_rows::read as parquet_rows;

#[cfg(not(feature = "parquet"))]
fn parquet_rows(path: &Arc<Path>, _file: File, _rows: &mut Rows) -> Result<(), TasksError> {
    Err(TasksError::Format {
        path: path.as_ref().into(),
        reason: "this build reads no Parquet files: build with `--features parquet` (the wheel \
                 has it), or convert the file to .jsonl"
            .into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Limits;

    /// Sends the same bytes for ever, and counts them.
    struct Endless<'a> {
        piece: &'a [u8],
        at: usize,
        sent: &'a Cell<usize>,
    }

    impl Read for Endless<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            for byte in buffer.iter_mut() {
                *byte = self.piece[self.at % self.piece.len()];
                self.at += 1;
            }
            self.sent.set(self.sent.get() + buffer.len());
            Ok(buffer.len())
        }
    }

    /// The error of `head` and then `piece` again and again, and the bytes that were read for it.
    fn endless(head: &str, piece: &str, limits: Limits) -> (String, usize) {
        let sent = Cell::new(0);
        let path: Arc<Path> = Path::new("x").into();
        let mut rows = Rows::default();
        rows.limits = limits;
        let tail = Endless {
            piece: piece.as_bytes(),
            at: 0,
            sent: &sent,
        };
        let all = head.as_bytes().chain(tail);
        let error = if head.starts_with('[') {
            json_array(&path, all, &mut rows)
        } else {
            csv_rows(&path, all, b',', &mut rows)
        };
        (error.unwrap_err().to_string(), sent.get())
    }

    #[test]
    fn names_and_cells_of_csv_rows_count_and_columns_are_limited() {
        let path: Arc<Path> = Path::new("x").into();
        let read = |text: &str, bytes| {
            let mut rows = Rows::default();
            rows.limits.bytes = bytes;
            csv_rows(&path, text.as_bytes(), b',', &mut rows).map_err(|e| e.to_string())
        };
        let table = format!("{},b\n1,2\n1,2\n", "a".repeat(1000));
        let row = (1001 + 2 + 2 * CELL_BYTES) as u64;
        read(&table, 2 * row).unwrap();
        let error = read(&table, 2 * row - 1).unwrap_err();
        assert!(error.contains("line 3: more than"), "{error}");

        let named = |n: usize| (0..n).map(|i| format!("c{i},")).collect::<String>() + "z\n";
        read(&named(MAX_COLUMNS - 1), row).unwrap();
        let error = read(&named(MAX_COLUMNS), row).unwrap_err();
        assert!(
            error.contains("line 1: 10001 columns; allowed: up to 10000"),
            "{error}"
        );
    }

    #[test]
    fn endless_rows_and_endless_files_end_at_the_limits() {
        let limits = Limits {
            row_bytes: 10_000,
            rows: 50,
            bytes: 1 << 20,
        };
        let few = Limits {
            rows: 1_000_000,
            ..limits
        };
        let long = "\"x\": \"yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy\"";
        for (head, piece, limits, expected) in [
            (
                "[{\"a\": 1}, {\"x\": \"",
                "y",
                limits,
                "line 2: longer than 10000 bytes",
            ),
            (
                "[{\"x\": [",
                "1,",
                limits,
                "line 1: longer than 10000 bytes",
            ),
            ("[{}", ", {}", limits, "line 51: more than 50 rows"),
            (
                "[{}",
                &format!(", {{{long}}}"),
                few,
                "more than 1048576 bytes",
            ),
            (
                "a,b\n1,2\n1,\"",
                "y",
                limits,
                "line 3: longer than 10000 bytes; is a quote left open?",
            ),
            ("a,b\n", "1,2\n", limits, "line 52: more than 50 rows"),
            (
                "a,b\n",
                "yyyyyyyyyyyyyyyyyyyyyyyy,2\n",
                few,
                "more than 1048576 bytes",
            ),
            ("\"a", "y", limits, "line 1: longer than 10000 bytes"),
        ] {
            let (error, sent) = endless(head, piece, limits);
            assert!(error.contains(expected), "{head}: {error}");
            assert!(sent < 2 << 20, "{head}: {sent} bytes were read");
        }
    }
}
