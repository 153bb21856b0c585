//! Writes exported rows as Arrow columns, in Parquet and Arrow files. Messages, tools and metrics are JSON
//! text, since their structure differs between rows; tokens are lists.

use crate::export_row::{ExportFormat, ExportRow, RowWriter, TokenColumns};
use arrow_array::builder::{
    BooleanBuilder, Float32Builder, ListBuilder, UInt32Builder, UInt64Builder,
};
use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, RecordBatch, StringArray, UInt32Array, UInt64Array,
};
use arrow_ipc::writer::FileWriter;
use arrow_schema::ArrowError;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// A writer of one of the columnar formats.
pub(crate) fn writer(
    format: ExportFormat,
    file: File,
    tokens: bool,
) -> io::Result<Box<dyn RowWriter>> {
    let schema = batch(&[], tokens).map_err(io::Error::other)?.schema();
    if format == ExportFormat::Arrow {
        let inner = FileWriter::try_new(file, &schema).map_err(io::Error::other)?;
        return Ok(Box::new(Arrow { inner, tokens }));
    }
    let zstd = Compression::ZSTD(ZstdLevel::default());
    let properties = WriterProperties::builder().set_compression(zstd).build();
    let inner = ArrowWriter::try_new(file, schema, Some(properties)).map_err(io::Error::other)?;
    Ok(Box::new(Parquet { inner, tokens }))
}

struct Arrow {
    inner: FileWriter<File>,
    tokens: bool,
}

impl RowWriter for Arrow {
    fn write(&mut self, rows: &[ExportRow]) -> io::Result<()> {
        let batch = batch(rows, self.tokens).map_err(io::Error::other)?;
        self.inner.write(&batch).map_err(io::Error::other)
    }

    fn finish(self: Box<Self>) -> io::Result<File> {
        let mut inner = self.inner;
        inner.finish().map_err(io::Error::other)?;
        inner.into_inner().map_err(io::Error::other)
    }
}

struct Parquet {
    inner: ArrowWriter<File>,
    tokens: bool,
}

impl RowWriter for Parquet {
    fn write(&mut self, rows: &[ExportRow]) -> io::Result<()> {
        let batch = batch(rows, self.tokens).map_err(io::Error::other)?;
        self.inner.write(&batch).map_err(io::Error::other)?;
        // A row group a page, or all rows stay in memory.
        self.inner.flush().map_err(io::Error::other)
    }

    fn finish(self: Box<Self>) -> io::Result<File> {
        self.inner.into_inner().map_err(io::Error::other)
    }
}

/// Converts rows into columns. The schema depends only on `tokens`.
fn batch(rows: &[ExportRow], tokens: bool) -> Result<RecordBatch, ArrowError> {
    let text = |of: fn(&ExportRow) -> &str| -> ArrayRef {
        Arc::new(StringArray::from_iter_values(rows.iter().map(of)))
    };
    let json = |of: &dyn Fn(&ExportRow) -> serde_json::Result<String>| {
        let texts: Result<Vec<String>, _> = rows.iter().map(of).collect();
        let texts = texts.map_err(|e| ArrowError::ExternalError(Box::new(e)))?;
        Ok::<ArrayRef, ArrowError>(Arc::new(StringArray::from_iter_values(texts)))
    };
    let texts = |of: &dyn Fn(&ExportRow) -> Option<&[serde_json::Value]>| {
        let texts = rows
            .iter()
            .map(|row| of(row).map(serde_json::to_string).transpose());
        let texts: Result<Vec<Option<String>>, _> = texts.collect();
        let texts = texts.map_err(|e| ArrowError::ExternalError(Box::new(e)))?;
        Ok::<ArrayRef, ArrowError>(Arc::new(StringArray::from(texts)))
    };
    let count = |of: fn(&ExportRow) -> Option<u64>| -> ArrayRef {
        Arc::new(rows.iter().map(of).collect::<UInt64Array>())
    };
    let real = |of: fn(&ExportRow) -> Option<f64>| -> ArrayRef {
        Arc::new(rows.iter().map(of).collect::<Float64Array>())
    };
    let short = |of: fn(&ExportRow) -> u32| -> ArrayRef {
        Arc::new(UInt32Array::from_iter_values(rows.iter().map(of)))
    };
    let success: BooleanArray = rows.iter().map(|r| r.success).collect();
    let mut columns: Vec<(&str, ArrayRef, bool)> = vec![
        ("episode", text(|r| &r.episode), false),
        ("group", text(|r| &r.group), false),
        ("task", text(|r| &r.task), false),
        ("type", text(|r| &r.kind), false),
        ("environment", text(|r| &r.environment), false),
        ("purpose", text(|r| &r.purpose), false),
        ("draw", count(|r| Some(r.draw)), true),
        ("reward", real(|r| r.reward), true),
        ("success", Arc::new(success), true),
        (
            "metrics",
            json(&|r| serde_json::to_string(&r.metrics))?,
            false,
        ),
        ("end", text(|r| r.end), false),
        ("first_version", count(|r| r.first_version), true),
        ("last_version", count(|r| r.last_version), true),
        ("turns", short(|r| r.turns), false),
        ("sampled_tokens", count(|r| Some(r.sampled_tokens)), true),
        ("started_unix_s", real(|r| Some(r.started_unix_s)), true),
        ("total_s", real(|r| Some(r.total_s)), true),
        ("update", count(|r| r.update), true),
        ("paths", short(|r| r.paths), false),
        ("messages", texts(&|r| r.messages.as_deref())?, true),
        ("tools", texts(&|r| Some(r.tools.as_slice()))?, false),
    ];
    if tokens {
        columns.extend(lists(rows));
    }
    RecordBatch::try_from_iter_with_nullable(columns)
}

/// Builds the columns of tokens, as lists.
fn lists(rows: &[ExportRow]) -> [(&'static str, ArrayRef, bool); 4] {
    let mut ids = ListBuilder::new(UInt32Builder::new());
    let mut logprobs = ListBuilder::new(Float32Builder::new());
    let mut mask = ListBuilder::new(BooleanBuilder::new());
    let mut versions = ListBuilder::new(UInt64Builder::new());
    let none = TokenColumns::default();
    for row in rows {
        let tokens = row.tokens.as_ref().unwrap_or(&none);
        ids.append_value(tokens.tokens.iter().copied().map(Some));
        logprobs.append_value(tokens.logprobs.iter().copied());
        mask.append_value(tokens.mask.iter().copied().map(Some));
        versions.append_value(tokens.versions.iter().copied());
    }
    [
        ("tokens", Arc::new(ids.finish()), false),
        ("logprobs", Arc::new(logprobs.finish()), false),
        ("mask", Arc::new(mask.finish()), false),
        ("versions", Arc::new(versions.finish()), false),
    ]
}
