//! Checksums of the index's rows. SQLite notices when its own structure is damaged, but not when a bit
//! of a value is.

use crate::error::StoreError;
use crate::schema::{BEFORE_FACETS, BEFORE_LEDGER, FACETS, LEDGER, QUEUES, SCHEMA, WITH_QUEUES};
use rusqlite::types::{ToSql, ValueRef};
use rusqlite::{Connection, Row};
use std::path::Path;

const TABLES: [&str; 3] = ["segments", "episodes", "batches"];
/// Those of [`LEDGER`].
const LEDGER_TABLES: [&str; 2] = ["scores", "externals"];

/// The checksum of every column but the last, which holds it.
fn sum_of(row: &Row<'_>, columns: usize) -> rusqlite::Result<i64> {
    let mut crc = crc32fast::Hasher::new();
    for column in 0..columns.saturating_sub(1) {
        let (tag, bytes) = match row.get_ref(column)? {
            ValueRef::Null => (0, Vec::new()),
            ValueRef::Integer(n) => (1, n.to_le_bytes().to_vec()),
            ValueRef::Real(x) => (2, x.to_bits().to_le_bytes().to_vec()),
            ValueRef::Text(text) => (3, text.to_vec()),
            ValueRef::Blob(blob) => (4, blob.to_vec()),
        };
        crc.update(&[tag]);
        crc.update(&(bytes.len() as u64).to_le_bytes());
        crc.update(&bytes);
    }
    Ok(i64::from(crc.finalize()))
}

/// Writes the checksum of the row that `condition` names with `?1`, `?2`, ..., if there is one.
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

/// Refuses an index of which anything is not as it was written: its structure, the schema of its format, a
/// row.
pub(crate) fn check(connection: &Connection, path: &Path, format: i64) -> Result<(), StoreError> {
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
    let ledger: &[&str] = if format > BEFORE_LEDGER {
        fresh.execute_batch(LEDGER)?;
        &LEDGER_TABLES
    } else {
        &[]
    };
    let facets: &[&str] = if format > BEFORE_FACETS {
        fresh.execute_batch(FACETS)?;
        &["facets"]
    } else {
        &[]
    };
    let queues: &[&str] = if format <= WITH_QUEUES {
        fresh.execute_batch(QUEUES)?;
        &["queue_rows", "queues"]
    } else {
        &[]
    };
    if schema(connection)? != schema(&fresh)? {
        return Err(damaged("its tables have other columns".into()));
    }
    for table in TABLES.iter().chain(ledger).chain(facets).chain(queues) {
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
