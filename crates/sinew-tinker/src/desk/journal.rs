//! The journal: an SQLite file with everything that the desk has promised. One thread uses it.
//!
//! A commit is on the storage device when it returns (`synchronous = FULL`). Many calls share one commit
//! ([`super::clerk`]).

mod checkpoints;
mod commands;
mod models;
mod samplers;
mod sessions;

pub(super) use checkpoints::CheckpointRow;
pub(super) use commands::{CommandEnd, CommandRow, NewCommand, ReplayRow, TenantUse};
pub(super) use models::ModelRow;
pub(super) use samplers::SamplerRow;
pub(super) use sessions::{FinishRow, SessionRow};

use super::schema::{FILE_NAME, FORMAT, SCHEMA};
use super::types::Refusal;
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Params, Row};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{DirBuilder, File, Permissions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum wait for another program that reads the file.
const BUSY: Duration = Duration::from_secs(10);
/// Pages of 4 KiB in the write-ahead log after which they are moved into the file.
const LOG_PAGES: i64 = 4096;
/// Free pages that one upkeep gives back to the file system.
const FREED_PAGES: i64 = 4096;

/// Reasons why the desk does not open.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The file system refuses.
    #[error("{path}: {source}")]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Its reason.
        source: std::io::Error,
    },
    /// Another process uses the folder.
    #[error("{path} is in use by another server: stop it, or take another folder")]
    Locked {
        /// The state folder.
        path: PathBuf,
    },
    /// The journal was written by another version.
    #[error(
        "{path} has format {actual}, this program writes {expected}: take another folder, or the \
         program that wrote it"
    )]
    Format {
        /// The journal.
        path: PathBuf,
        /// Its format.
        actual: i64,
        /// The format of this program.
        expected: i64,
    },
    /// The journal cannot be read or made.
    #[error("{path}: {why}")]
    Journal {
        /// The journal.
        path: PathBuf,
        /// The reason, in words.
        why: String,
    },
    /// A limit that is out of its range.
    #[error(transparent)]
    Limit(#[from] super::config::LimitError),
    /// The trainer or a thread did not start.
    #[error("{0}")]
    Start(String),
}

impl From<rusqlite::Error> for Refusal {
    fn from(error: rusqlite::Error) -> Self {
        Self::Failed(format!("journal: {error}"))
    }
}

/// The open journal. Its folder belongs to this process while it is open.
pub(super) struct Journal {
    connection: Connection,
    /// Held while the file is open; a kill releases it.
    _lock: File,
    /// Changes at the last `begin`.
    #[cfg(test)]
    changes: u64,
    #[cfg(test)]
    pub(super) death: Option<std::sync::Arc<super::testing::Death>>,
}

/// Converts for SQLite, which has no unsigned integers. No count here comes near the limit.
fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Reads a count.
fn count(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(|value| value.max(0) as u64)
}

/// Reads a count that may be missing.
fn maybe_count(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<u64>> {
    let value: Option<i64> = row.get(column)?;
    Ok(value.map(|value| value.max(0) as u64))
}

/// Reads a value that [`packed`] wrote.
fn unpacked<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let bytes: Vec<u8> = row.get(column)?;
    rmp_serde::from_slice(&bytes)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, Type::Blob, Box::new(e)))
}

/// Reads a value that [`packed`] wrote, or null.
fn maybe_unpacked<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    let bytes: Option<Vec<u8>> = row.get(column)?;
    let Some(bytes) = bytes else { return Ok(None) };
    rmp_serde::from_slice(&bytes)
        .map(Some)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, Type::Blob, Box::new(e)))
}

/// A small value as a blob.
fn packed<T: Serialize>(value: &T) -> rusqlite::Result<Vec<u8>> {
    rmp_serde::to_vec_named(value).map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
}

impl Journal {
    /// Opens or makes the journal of a state folder.
    ///
    /// # Errors
    /// If the folder is in use, or its journal cannot be read.
    pub(super) fn open(folder: &Path) -> Result<Self, OpenError> {
        let io = |path: &Path, source| OpenError::Io {
            path: path.to_owned(),
            source,
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|e| io(folder, e))?;
        let lock_path = folder.join("lock");
        let lock = File::create(&lock_path).map_err(|e| io(&lock_path, e))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(OpenError::Locked {
                    path: folder.to_owned(),
                });
            }
            Err(TryLockError::Error(e)) => return Err(io(&lock_path, e)),
        }
        let path = folder.join(FILE_NAME);
        let failed = |e: rusqlite::Error| OpenError::Journal {
            path: path.clone(),
            why: e.to_string(),
        };
        let connection = Connection::open(&path).map_err(failed)?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(|e| io(&path, e))?;
        let format = prepare(&connection).map_err(failed)?;
        if format != FORMAT {
            return Err(OpenError::Format {
                path,
                actual: format,
                expected: FORMAT,
            });
        }
        Ok(Self {
            connection,
            _lock: lock,
            #[cfg(test)]
            changes: 0,
            #[cfg(test)]
            death: None,
        })
    }

    /// Begins a transaction.
    pub(super) fn begin(&mut self) -> rusqlite::Result<()> {
        #[cfg(test)]
        {
            self.changes = self.connection.total_changes();
        }
        self.connection.execute_batch("BEGIN")
    }

    /// Ends a transaction; on `Ok` its changes are on the storage device.
    pub(super) fn commit(&mut self) -> rusqlite::Result<()> {
        #[cfg(test)]
        if self.changed()
            && self
                .death
                .as_ref()
                .is_some_and(|death| death.before_commit())
        {
            self.connection.execute_batch("ROLLBACK")?;
            return Err(rusqlite::Error::InvalidQuery);
        }
        let committed = self.connection.execute_batch("COMMIT");
        if committed.is_err() && !self.connection.is_autocommit() {
            // The error that is returned is the commit's.
            let _ = self.connection.execute_batch("ROLLBACK");
        }
        committed
    }

    /// Undoes the open transaction, if there is one.
    pub(super) fn undo(&self) {
        if !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "the journal's transaction was not undone");
        }
    }

    /// Whether the open transaction has changed something.
    #[cfg(test)]
    fn changed(&self) -> bool {
        self.connection.total_changes() != self.changes
    }

    /// Begins a part of a transaction that can be undone by itself.
    pub(super) fn mark(&self) -> rusqlite::Result<()> {
        self.connection.execute_batch("SAVEPOINT call")
    }

    /// Ends the part: its changes stay, or are undone.
    pub(super) fn settle(&self, keep: bool) -> rusqlite::Result<()> {
        if !keep {
            self.connection.execute_batch("ROLLBACK TO call")?;
        }
        self.connection.execute_batch("RELEASE call")
    }

    /// Changes rows.
    fn change(&self, sql: &str, params: impl Params) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql)?.execute(params)?;
        Ok(())
    }

    /// The row of a query, if there is one.
    fn row<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Option<T>> {
        let mut query = self.connection.prepare_cached(sql)?;
        query.query_row(params, read).optional()
    }

    /// The rows of a query.
    fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> rusqlite::Result<Vec<T>> {
        let mut query = self.connection.prepare_cached(sql)?;
        let rows = query.query_map(params, read)?;
        rows.collect()
    }

    /// The number that a query computes.
    fn number(&self, sql: &str, params: impl Params) -> rusqlite::Result<u64> {
        let mut query = self.connection.prepare_cached(sql)?;
        let number: i64 = query.query_row(params, |row| row.get(0))?;
        Ok(number.max(0) as u64)
    }

    /// Gives free pages of the file back to the file system.
    pub(super) fn give_back(&self) -> rusqlite::Result<()> {
        let text = format!("PRAGMA incremental_vacuum({FREED_PAGES})");
        let mut vacuum = self.connection.prepare(&text)?;
        // Each step frees a page.
        let mut rows = vacuum.query([])?;
        while rows.next()?.is_some() {}
        Ok(())
    }

    /// Bytes of the file.
    pub(super) fn bytes(&self) -> rusqlite::Result<u64> {
        Ok(self.number("PRAGMA page_count", [])? * self.number("PRAGMA page_size", [])?)
    }
}

/// Configures a connection, and makes the tables of an empty journal. Returns its format.
fn prepare(connection: &Connection) -> rusqlite::Result<i64> {
    connection.busy_timeout(BUSY)?;
    let tables: i64 =
        connection.query_row("SELECT COUNT(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if tables == 0 {
        // Has an effect only while there is no table.
        connection.pragma_update(None, "auto_vacuum", "INCREMENTAL")?;
    }
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
    connection.set_prepared_statement_cache_capacity(128);
    if tables == 0 {
        let text = format!("BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT");
        connection.execute_batch(&text)?;
    }
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}
