//! Checksums of the rows of the index. SQLite detects damage of its own structure, but not a changed bit in a
//! value.

use crate::error::StoreError;
use crate::schema::SCHEMA;
use rusqlite::types::{ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, Row, params_from_iter};
use std::path::Path;

const TABLES: [&str; 6] = [
    "segments",
    "episodes",
    "batches",
    "scores",
    "externals",
    "facets",
];

/// Incremental checksum of a row.
#[derive(Default)]
struct RowChecksum(crc32fast::Hasher);

impl RowChecksum {
    /// Adds the value of the next column.
    fn add(&mut self, value: ValueRef<'_>) {
        let number;
        let (tag, bytes): (u8, &[u8]) = match value {
            ValueRef::Null => (0, &[]),
            ValueRef::Integer(n) => {
                number = n.to_le_bytes();
                (1, &number)
            }
            ValueRef::Real(x) => {
                number = x.to_bits().to_le_bytes();
                (2, &number)
            }
            ValueRef::Text(text) => (3, text),
            ValueRef::Blob(blob) => (4, blob),
        };
        let mut header = [0; 9];
        header[0] = tag;
        header[1..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        self.0.update(&header);
        self.0.update(bytes);
    }

    fn end(self) -> i64 {
        i64::from(self.0.finalize())
    }
}

/// Computes the checksum of all columns but the last one, which stores it.
fn sum_of(row: &Row<'_>, columns: usize) -> rusqlite::Result<i64> {
    let mut sum = RowChecksum::default();
    for column in 0..columns.saturating_sub(1) {
        sum.add(row.get_ref(column)?);
    }
    Ok(sum.end())
}

/// Converts a number to the form in which SQLite stores reals: NaN becomes null, and -0 becomes 0.
pub(crate) fn real(x: f64) -> ValueRef<'static> {
    if x.is_nan() {
        ValueRef::Null
    } else {
        ValueRef::Real(x + 0.0)
    }
}

/// Inserts a row with its checksum, computed from the given values. (Reading the row back, as [`seal`] does,
/// would take as long as the rest of the insert.) Integer columns need integers, and real columns values of
/// [`real`]. `sql` has one `?` for each value and one for the checksum. Returns whether the row was inserted.
pub(crate) fn insert(
    connection: &Connection,
    sql: &'static str,
    values: &[ValueRef<'_>],
) -> Result<bool, StoreError> {
    let mut sum = RowChecksum::default();
    values.iter().for_each(|value| sum.add(*value));
    let sum = ValueRef::Integer(sum.end());
    let all = values.iter().chain([&sum]);
    let mut statement = connection.prepare_cached(sql)?;
    let inserted = statement.execute(params_from_iter(all.map(|v| ToSqlOutput::Borrowed(*v))))?;
    Ok(inserted > 0)
}

/// Writes the checksum of the row that `condition` selects with `?1`, `?2`, ..., if the row exists.
pub(crate) fn seal(
    connection: &Connection,
    table: &'static str,
    condition: &'static str,
    names: &[&dyn ToSql],
) -> Result<(), StoreError> {
    let mut query =
        connection.prepare_cached(&format!("SELECT * FROM {table} WHERE {condition}"))?;
    let columns = query.column_count();
    let mut rows = query.query(names)?;
    let Some(row) = rows.next()? else {
        return Ok(());
    };
    let sum = sum_of(row, columns)?;
    drop(rows);
    let place = names.len() + 1;
    let mut update = connection.prepare_cached(&format!(
        "UPDATE {table} SET sum = ?{place} WHERE {condition}"
    ))?;
    let mut values = names.to_vec();
    values.push(&sum);
    update.execute(&values[..])?;
    Ok(())
}

/// Refuses an index whose structure, schema or any row differs from the written state.
pub(crate) fn check(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let damaged = |reason: String| StoreError::DamagedIndex {
        path: path.to_owned(),
        reason,
    };
    let verdict: String = connection.query_row("PRAGMA integrity_check(1)", [], |r| r.get(0))?;
    if verdict != "ok" {
        return Err(damaged(verdict.lines().next().unwrap_or_default().into()));
    }
    let fresh = Connection::open_in_memory()?;
    fresh.execute_batch(SCHEMA)?;
    if schema(connection)? != schema(&fresh)? {
        return Err(damaged("its tables have other columns".into()));
    }
    for table in TABLES {
        let mut query = connection.prepare(&format!("SELECT * FROM {table}"))?;
        let columns = query.column_count();
        let mut rows = query.query([])?;
        let mut number = 0u64;
        while let Some(row) = rows.next()? {
            number += 1;
            if row.get::<_, i64>(columns - 1)? != sum_of(row, columns)? {
                return Err(damaged(format!(
                    "row {number} of table {table} fails its checksum"
                )));
            }
        }
    }
    Ok(())
}

fn schema(connection: &Connection) -> rusqlite::Result<Vec<(String, Option<String>)>> {
    let mut query = connection.prepare(
        "SELECT name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_stat%' ORDER BY name",
    )?;
    let rows = query.query_map([], |r| Ok((r.get(0)?, r.get(1)?)))?;
    rows.collect()
}
