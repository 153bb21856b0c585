//! Exports a store as a data set with one row per episode: JSON lines, Parquet or an Arrow file.
//!
//! Rows are read and written one page at a time, so that memory use is bounded by one page. A file gets its
//! final name only when it is complete.

use crate::error::StoreError;
use crate::export_row::{ExportFormat, ExportRow, RowWriter};
use crate::reader::StoreReader;
use crate::store::{Filter, MAX_PAGE};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Maximum number of rows in memory, and in a row group.
const PAGE_ROWS: usize = 1000;
/// Bytes of rows in memory after which they are written, 32 MiB.
const PAGE_BYTES: usize = 32 << 20;

/// Counts of exported rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportedRows {
    /// Number of rows.
    pub episodes: u64,
    /// Number of rows whose `messages` are null, because a part of the conversation has only tokens.
    pub without_messages: u64,
}

struct JsonLines(BufWriter<File>);

impl RowWriter for JsonLines {
    fn write(&mut self, rows: &[ExportRow]) -> io::Result<()> {
        for row in rows {
            serde_json::to_writer(&mut self.0, row)?;
            self.0.write_all(b"\n")?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> io::Result<File> {
        self.0.into_inner().map_err(io::IntoInnerError::into_error)
    }
}

/// Writes the episodes that fit a filter to a file, at most `limit` of them, in commit order. `tokens` adds
/// the tokens of each episode. Returns the counts of the written file. An existing file is replaced when the
/// new one is complete.
///
/// # Errors
/// If an episode cannot be read or the file cannot be written; no file is left behind then.
pub fn export(
    store: &StoreReader,
    filter: &Filter,
    limit: Option<usize>,
    path: &Path,
    format: ExportFormat,
    tokens: bool,
) -> Result<ExportedRows, StoreError> {
    let part = part_of(path);
    let failed = |e: io::Error| StoreError::io(path, e);
    let written = (|| {
        let file = File::create(&part).map_err(failed)?;
        let mut writer = writer(format, file, tokens).map_err(failed)?;
        let count = rows(store, filter, limit, tokens, |page| {
            writer.write(page).map_err(failed)
        })?;
        let file = writer.finish().map_err(failed)?;
        file.sync_all().map_err(failed)?;
        fs::rename(&part, path).map_err(failed)?;
        Ok(count)
    })();
    if written.is_err() {
        // There may be none.
        let _ = fs::remove_file(&part);
    }
    written
}

/// Returns the temporary name of an incomplete file, in the same folder.
fn part_of(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.part", std::process::id()))
}

fn writer(format: ExportFormat, file: File, tokens: bool) -> io::Result<Box<dyn RowWriter>> {
    match format {
        ExportFormat::JsonLines => Ok(Box::new(JsonLines(BufWriter::new(file)))),
        #[cfg(feature = "columns")]
        other => crate::columns::writer(other, file, tokens),
        #[cfg(not(feature = "columns"))]
        _ => {
            let _ = tokens;
            Err(io::Error::other(
                "this build writes no Parquet or Arrow files: build with `--features parquet`, or name a \
                 .jsonl file",
            ))
        }
    }
}

/// Passes the rows to `page`, at most one page at a time.
fn rows(
    store: &StoreReader,
    filter: &Filter,
    limit: Option<usize>,
    tokens: bool,
    mut page: impl FnMut(&[ExportRow]) -> Result<(), StoreError>,
) -> Result<ExportedRows, StoreError> {
    let mut left = limit.unwrap_or(usize::MAX);
    let (mut exported, mut bytes) = (ExportedRows::default(), 0);
    let mut held: Vec<ExportRow> = Vec::new();
    let mut filter = filter.clone();
    while left > 0 {
        let page_rows = if filter.unique {
            // Each page reads the contents before it again.
            MAX_PAGE
        } else {
            PAGE_ROWS
        };
        filter.limit = page_rows.min(left);
        let found = store.list(&filter)?;
        left -= found.episodes.len();
        for summary in &found.episodes {
            // Removed by gc since it was listed.
            let Some(trace) = store.get(&summary.episode)? else {
                continue;
            };
            let row = ExportRow::of(summary, &trace, tokens);
            bytes += row.bytes();
            exported.episodes += 1;
            exported.without_messages += u64::from(row.messages.is_none());
            held.push(row);
            if held.len() >= PAGE_ROWS || bytes >= PAGE_BYTES {
                page(&held)?;
                held.clear();
                bytes = 0;
            }
        }
        let Some(next) = found.next else { break };
        filter.after = Some(next);
    }
    if !held.is_empty() {
        page(&held)?;
    }
    Ok(exported)
}
