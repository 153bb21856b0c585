//! An Arrow IPC stream of the schema: a row a trajectory, columns named as the fields of JSON, and
//! the fields of the batch as metadata of the schema (`sinew.version`, `sinew.tokenizer`,
//! `sinew.model`, `sinew.source`). Nulls are fields left out. `messages`, `tools`, `metrics`, `end`
//! and `finish` can be JSON in text columns.
//!
//! A stream comes from outside, so everything about it is bounded: rows, nesting, and values per
//! byte.

use crate::reason::Reason;
use crate::schema::Batch;
use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, RecordBatch};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use arrow_schema::{DataType, Schema};
use serde_json::{Map, Value, json};

/// Columns whose text is JSON.
const JSON_COLUMNS: [&str; 5] = ["messages", "tools", "metrics", "end", "finish"];

/// Maximum nesting of columns: a trajectory has its nodes, these their tokens.
const MAX_DEPTH: usize = 12;

/// Values that a stream of any length can hold; beyond them, one for each `BYTES_OF_VALUE`. Columns
/// without values of their own take no bytes, so a short stream could claim any number of them.
const SPARE_VALUES: usize = 1 << 16;
/// Minimum bytes of the stream for each further value.
const BYTES_OF_VALUE: usize = 2;

fn wrong(detail: impl std::fmt::Display) -> Reason {
    Reason::Schema {
        detail: format!("Arrow stream: {detail}"),
    }
}

/// Reads the batch of a stream, of up to `max_rows` trajectories.
///
/// # Errors
/// If the bytes are no stream, hold more rows or values than allowed, or a column of another type
/// than the schema's.
pub fn batch(bytes: Vec<u8>, max_rows: usize) -> Result<Batch, Reason> {
    // The reader checks offsets and lengths, but has asserts for what it takes for granted.
    let read = std::panic::catch_unwind(|| read(bytes, max_rows));
    read.unwrap_or_else(|_| Err(wrong("it contradicts itself")))
}

/// Reads a stream, record batch by record batch.
fn read(bytes: Vec<u8>, max_rows: usize) -> Result<Batch, Reason> {
    let mut values = Left(bytes.len() / BYTES_OF_VALUE + SPARE_VALUES);
    let mut buffer = Buffer::from_vec(bytes);
    let mut decoder = StreamDecoder::new();
    let mut trajectories = Vec::new();
    let mut schema: Option<std::sync::Arc<Schema>> = None;
    while !buffer.is_empty() {
        let left = buffer.len();
        let rows = decoder.decode(&mut buffer).map_err(wrong)?;
        schema = decoder.schema().or(schema);
        if let Some(rows) = rows {
            if trajectories.len() + rows.num_rows() > max_rows {
                return Err(Reason::TooLarge {
                    field: "trajectories".into(),
                    value: (trajectories.len() + rows.num_rows()) as u64,
                    limit: max_rows as u64,
                });
            }
            for row in 0..rows.num_rows() {
                trajectories.push(trajectory(&rows, row, &mut values)?);
            }
        } else if buffer.len() == left {
            break;
        }
    }
    decoder.finish().map_err(wrong)?;
    let schema = schema.ok_or_else(|| wrong("it has no schema"))?;
    let meta = |name: &str| schema.metadata().get(name).cloned();
    let version =
        meta("sinew.version").ok_or_else(|| wrong("metadata sinew.version is missing"))?;
    Ok(Batch {
        version: version
            .parse()
            .map_err(|_| wrong("metadata sinew.version is no number"))?,
        tokenizer: meta("sinew.tokenizer"),
        model: meta("sinew.model"),
        source: meta("sinew.source"),
        trajectories,
    })
}

/// Values that the stream can still have.
struct Left(usize);

fn trajectory(rows: &RecordBatch, row: usize, left: &mut Left) -> Result<Value, Reason> {
    let mut out = Map::new();
    for (field, column) in rows.schema_ref().fields().iter().zip(rows.columns()) {
        let value = value(field.name(), column.as_ref(), row, 0, left)?;
        if !value.is_null() {
            out.insert(field.name().clone(), value);
        }
    }
    Ok(Value::Object(out))
}

/// The value of a column in one row, as JSON.
fn value(
    name: &str,
    column: &dyn Array,
    row: usize,
    depth: usize,
    left: &mut Left,
) -> Result<Value, Reason> {
    left.0 = left.0.checked_sub(1).ok_or_else(|| {
        wrong(format!(
            "it has more values than one for each {BYTES_OF_VALUE} bytes"
        ))
    })?;
    if depth > MAX_DEPTH {
        return Err(wrong(format!("column {name} is nested too deeply")));
    }
    if column.is_null(row) {
        return Ok(Value::Null);
    }
    let mut list = |items: &dyn Array| -> Result<Value, Reason> {
        (0..items.len())
            .map(|i| value(name, items, i, depth + 1, left))
            .collect()
    };
    Ok(match column.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => column.as_boolean().value(row).into(),
        DataType::Int8 => column.as_primitive::<Int8Type>().value(row).into(),
        DataType::Int16 => column.as_primitive::<Int16Type>().value(row).into(),
        DataType::Int32 => column.as_primitive::<Int32Type>().value(row).into(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).into(),
        DataType::UInt8 => column.as_primitive::<UInt8Type>().value(row).into(),
        DataType::UInt16 => column.as_primitive::<UInt16Type>().value(row).into(),
        DataType::UInt32 => column.as_primitive::<UInt32Type>().value(row).into(),
        DataType::UInt64 => column.as_primitive::<UInt64Type>().value(row).into(),
        // A number that is not finite becomes null, which the checks report.
        DataType::Float32 => json!(f64::from(column.as_primitive::<Float32Type>().value(row))),
        DataType::Float64 => json!(column.as_primitive::<Float64Type>().value(row)),
        DataType::Utf8 => text(name, column.as_string::<i32>().value(row))?,
        DataType::LargeUtf8 => text(name, column.as_string::<i64>().value(row))?,
        DataType::List(_) => list(&column.as_list::<i32>().value(row))?,
        DataType::LargeList(_) => list(&column.as_list::<i64>().value(row))?,
        DataType::Struct(fields) => {
            let mut out = Map::new();
            for (field, column) in fields.iter().zip(column.as_struct().columns()) {
                let value = value(field.name(), column.as_ref(), row, depth + 1, left)?;
                if !value.is_null() {
                    out.insert(field.name().clone(), value);
                }
            }
            Value::Object(out)
        }
        other => {
            return Err(wrong(format!(
                "column {name} has type {other}, which is not read"
            )));
        }
    })
}

/// A text, or the JSON in it for columns that hold JSON.
fn text(name: &str, text: &str) -> Result<Value, Reason> {
    if !JSON_COLUMNS.contains(&name) {
        return Ok(text.into());
    }
    sinew_types::json::from_str(text).map_err(|e| wrong(format!("column {name} is no JSON: {e}")))
}
