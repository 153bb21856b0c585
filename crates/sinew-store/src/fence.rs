//! Owners of a store: [`own`], and the file with the number of the newest one.
//!
//! The file is separate from the index, which is rebuilt from the segments if it is damaged: a number that
//! was taken and never committed would be forgotten then, and taken twice. It is an SQLite database with a
//! rollback journal, whose locks and synchronization also hold between hosts if the file system supports
//! locks; a write-ahead log does not. It is created when the first number is taken.
//!
//! A commit holds a read transaction of this file, so that no number is taken between its check and its end.

use crate::error::{StoreError, guard};
use crate::private::restrict;
use crate::sqlite_int::signed;
use crate::store::{self, TraceStore};
use rusqlite::{Connection, ErrorCode, OptionalExtension, TransactionBehavior, params};
use sinew_types::Fence;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Name of the file, in the store's directory.
const FILE_NAME: &str = "owner.sqlite";

/// Format version, stored in `PRAGMA user_version`.
const FORMAT: i64 = 1;

/// Schema of the file: one row. Any change of this text creates another format.
const SCHEMA: &str = "
CREATE TABLE owner (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    newest INTEGER NOT NULL,
    sum INTEGER NOT NULL                -- CRC-32 of `newest`, little-endian
);
";

/// Maximum wait for another process, which may be committing.
const BUSY: Duration = Duration::from_secs(10);

/// Makes the caller the owner of a store, and returns its fence, which allows nothing after the store is
/// closed. `run` is the folder of the run, for messages.
///
/// # Errors
/// If the store fails.
pub fn own(store: &Arc<dyn TraceStore>, run: &Path) -> Result<Fence, StoreError> {
    let number = store.take_fence()?;
    // The fence must not keep the lock of a store that its run has closed.
    let store = Arc::downgrade(store);
    let newest = move || match store.upgrade() {
        Some(store) => store.newest_fence().map_err(|e| e.to_string()),
        None => Err("its store is closed".to_owned()),
    };
    let run = run.display().to_string();
    Ok(Fence::new(number, run, Arc::new(newest)))
}

/// The file with the number of the newest owner.
#[derive(Debug)]
pub(crate) struct FenceFile {
    path: PathBuf,
    /// Highest owner that a commit named when the store was opened, which counts if the file is missing.
    committed: u64,
    /// The open file; `None` until it is needed and exists.
    connection: Mutex<Option<Connection>>,
}

impl FenceFile {
    /// The file of the store in `directory`, which need not exist. `committed` is the highest owner that a
    /// commit of the store names.
    pub(crate) fn new(directory: &Path, committed: u64) -> Self {
        Self {
            path: directory.join(FILE_NAME),
            committed,
            connection: Mutex::default(),
        }
    }

    /// Takes the number above the newest one.
    pub(crate) fn take(&self) -> Result<u64, StoreError> {
        let mut slot = guard(&self.connection)?;
        let connection = self.opened(&mut slot)?;
        self.next(connection).map_err(|e| self.blame(e))
    }

    /// The newest number.
    pub(crate) fn newest(&self) -> Result<u64, StoreError> {
        self.while_newest_is_known(Ok)
    }

    /// Runs a commit of owner `own` while no number can be taken, if `own` is the newest.
    pub(crate) fn commit<T>(
        &self,
        own: u64,
        write: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.while_newest_is_known(|newest| {
            store::check_fence(own, newest)?;
            write()
        })
    }

    /// Runs `act` on the newest number, which stays the newest meanwhile.
    fn while_newest_is_known<T>(
        &self,
        act: impl FnOnce(u64) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut slot = guard(&self.connection)?;
        if slot.is_none() && !self.path.exists() {
            return act(self.committed);
        }
        let connection = self.opened(&mut slot)?;
        let tx = connection.transaction().map_err(|e| self.blame(e.into()))?;
        // This read begins the transaction, which ends when it is dropped.
        let newest = self.read(&tx).map_err(|e| self.blame(e))?;
        act(newest)
    }

    /// Opens the file, or creates it.
    fn opened<'a>(
        &self,
        slot: &'a mut Option<Connection>,
    ) -> Result<&'a mut Connection, StoreError> {
        let connection = match slot.take() {
            Some(open) => open,
            None => self.open().map_err(|e| self.blame(e))?,
        };
        Ok(slot.insert(connection))
    }

    fn open(&self) -> Result<Connection, StoreError> {
        let mut connection = Connection::open(&self.path)?;
        restrict(&self.path).map_err(|e| StoreError::io(&self.path, e))?;
        connection.busy_timeout(BUSY)?;
        // Also the removal of the journal, which is the commit, is durable.
        connection.pragma_update(None, "synchronous", "EXTRA")?;
        self.prepare(&mut connection)?;
        Ok(connection)
    }

    /// Creates the table of an empty file, and refuses a file of another format.
    fn prepare(&self, connection: &mut Connection) -> Result<(), StoreError> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let tables: i64 =
            tx.query_row("SELECT COUNT(*) FROM sqlite_schema", [], |row| row.get(0))?;
        if tables == 0 {
            tx.execute_batch(SCHEMA)?;
            tx.pragma_update(None, "user_version", FORMAT)?;
        }
        let format: i64 = tx.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if format != FORMAT {
            return Err(StoreError::Format {
                path: self.path.clone(),
                actual: format,
                expected: FORMAT,
            });
        }
        tx.commit()?;
        Ok(())
    }

    /// Writes the number above the newest one, in one transaction that excludes other writers.
    fn next(&self, connection: &mut Connection) -> Result<u64, StoreError> {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let next = self.read(&tx)?.saturating_add(1);
        let number = signed("fence", next)?;
        tx.execute(
            "INSERT INTO owner (id, newest, sum) VALUES (1, ?1, ?2)
             ON CONFLICT (id) DO UPDATE SET newest = excluded.newest, sum = excluded.sum",
            params![number, sum(number)],
        )?;
        tx.commit()?;
        Ok(next)
    }

    /// Reads the newest number.
    fn read(&self, connection: &Connection) -> Result<u64, StoreError> {
        let mut query = connection.prepare_cached("SELECT newest, sum FROM owner")?;
        let found: Option<(i64, i64)> = query
            .query_row([], |row| Ok((row.get("newest")?, row.get("sum")?)))
            .optional()?;
        let newest = match found {
            None => 0,
            Some((number, written)) if number >= 0 && written == sum(number) => number as u64,
            Some(_) => return Err(self.lost("its number fails its checksum".into())),
        };
        Ok(newest.max(self.committed))
    }

    fn lost(&self, reason: String) -> StoreError {
        StoreError::LostFence {
            path: self.path.clone(),
            reason,
        }
    }

    /// Turns an error of SQLite into an error about the file.
    fn blame(&self, error: StoreError) -> StoreError {
        let StoreError::Index(source) = error else {
            return error;
        };
        let path = self.path.clone();
        match source.sqlite_error_code() {
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                StoreError::Locked { path }
            }
            // Errors without a code: a value has another type than its column.
            None
            | Some(
                ErrorCode::DatabaseCorrupt
                | ErrorCode::NotADatabase
                | ErrorCode::TypeMismatch
                | ErrorCode::Unknown,
            ) => self.lost(source.to_string()),
            _ => StoreError::BadIndex { path, source },
        }
    }
}

fn sum(number: i64) -> i64 {
    i64::from(crc32fast::hash(&number.to_le_bytes()))
}
