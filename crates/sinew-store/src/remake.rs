//! Rebuilds an index that is missing or damaged: it is created empty, and recovery fills it from the
//! segments.
//!
//! The new index has a temporary name until recovery has processed the segments, since an empty index would
//! otherwise mean that there are no episodes.

use crate::error::StoreError;
use crate::index;
use crate::quarantine;
use crate::schema;
use rusqlite::Connection;
use std::path::{Path, PathBuf};

/// The index of a store.
pub(crate) struct FoundIndex {
    pub(crate) connection: Connection,
    /// Reason why the index is rebuilt; `None` if it is not.
    pub(crate) remade: Option<String>,
    path: PathBuf,
}

impl FoundIndex {
    /// Returns the index under its final name, after recovery has filled it.
    pub(crate) fn accepted(self) -> Result<Connection, StoreError> {
        if self.remade.is_none() {
            return Ok(self.connection);
        }
        self.connection.close().map_err(|(_, e)| e)?;
        quarantine::name(&self.path)?;
        index::open(&self.path)
    }
}

/// Opens the index of a store, or creates an empty one.
pub(crate) fn open(directory: &Path) -> Result<FoundIndex, StoreError> {
    let path = directory.join(schema::FILE_NAME);
    let reason = match path.try_exists() {
        Ok(false) => "it was missing".to_owned(),
        _ if quarantine::is_hollow(&path) => "it was empty".to_owned(),
        _ => match index::open(&path) {
            Ok(connection) => {
                return Ok(FoundIndex {
                    connection,
                    remade: None,
                    path,
                });
            }
            Err(StoreError::DamagedIndex { reason, .. }) => {
                quarantine::put_aside(&path)?;
                reason
            }
            Err(other) => return Err(other),
        },
    };
    let part = quarantine::part(&path);
    // An attempt that was refused or cut short left this.
    quarantine::remove(&part)?;
    Ok(FoundIndex {
        connection: index::open(&part)?,
        remade: Some(reason),
        path,
    })
}
