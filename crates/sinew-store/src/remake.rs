//! A damaged index is put aside and begun anew; recovery then fills it from the segments.

use crate::aside;
use crate::error::StoreError;
use crate::index;
use crate::schema;
use rusqlite::Connection;
use std::path::Path;

/// Opens the index of a store. With the reason, if it had to be begun anew.
pub(crate) fn open(
    directory: &Path,
    accept_loss: bool,
) -> Result<(Connection, Option<String>), StoreError> {
    let path = directory.join(schema::FILE_NAME);
    let reason = match index::open(&path) {
        Ok(connection) => return Ok((connection, None)),
        Err(StoreError::DamagedIndex { reason, .. }) => reason,
        Err(other) => return Err(other),
    };
    // Of an earlier format, whose queues lie nowhere else.
    if index::holds_queue_rows(&path) && !accept_loss {
        return Err(StoreError::LostQueue { path, reason });
    }
    aside::put_aside(&path)?;
    Ok((index::open(&path)?, Some(reason)))
}
