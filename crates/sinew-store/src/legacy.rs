//! Queues of earlier formats, whose rows lay in the index, move into files of their own.

use crate::aside;
use crate::error::StoreError;
use crate::queue;
use crate::schema::{BEFORE_CONTENT, WITH_QUEUES};
use rusqlite::Connection;
use std::path::Path;

/// Moves the rows of an index of an earlier format; leases and counts of deliveries begin anew. A crash in
/// between moves them again: a file that was begun is begun anew, as nothing reads it before the index says
/// that all of them are there.
pub(crate) fn move_out(connection: &mut Connection, directory: &Path) -> Result<(), StoreError> {
    let format: i64 = connection.query_row("PRAGMA user_version", [], |r| r.get(0))?;
    if format != WITH_QUEUES {
        return Ok(());
    }
    let names = connection
        .prepare("SELECT DISTINCT queue FROM queue_rows")?
        .query_map([], |r| r.get(0))?
        .collect::<Result<Vec<String>, _>>()?;
    for name in names {
        let path = queue::file(directory, &name)?;
        aside::remove(&path)?;
        let mut query = connection
            .prepare("SELECT key, payload FROM queue_rows WHERE queue = ?1 ORDER BY seq")?;
        let rows = query.query_map([name], |r| Ok((r.get(0)?, r.get(1)?)))?;
        queue::seed(&path, &mut rows.map(|r| r.map_err(StoreError::from)))?;
    }
    let tx = connection.transaction()?;
    tx.execute_batch("DROP TABLE queue_rows; DROP TABLE queues;")?;
    tx.pragma_update(None, "user_version", BEFORE_CONTENT)?;
    Ok(tx.commit()?)
}
