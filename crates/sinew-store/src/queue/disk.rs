//! [`DiskQueue`]: a queue in a separate SQLite file.
//!
//! Every changing call is one synchronized transaction. States are also kept in memory, values are not. Each
//! row of the file has a checksum in its last column: SQLite detects a damaged page, and the checksum detects
//! a damaged value. If a crash loses the tail of the log, the call of that tail was never answered.

use super::core::{Change, Claim, Hold, QueueCore, Row};
use super::local::{Backing, Local, local};
use super::rows::{Consumer, QueueError, QueueLimits};
use crate::error::StoreError;
use crate::private::{private_dir, restrict};
use crate::quarantine;
use crate::sqlite_int::signed;
use bytes::Bytes;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Transaction, params};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A durable queue: every change is on disk before its call returns. Only one process may open it at a time.
pub type DiskQueue = Local<Table>;

/// Format version, stored in `PRAGMA user_version`.
const FORMAT: i64 = 1;

/// Schema of the file. Any change of this text creates another format.
const SCHEMA: &str = "
CREATE TABLE rows (
    seq INTEGER PRIMARY KEY,
    key TEXT NOT NULL, grp TEXT NOT NULL, unit INTEGER NOT NULL, size INTEGER NOT NULL,
    priority INTEGER NOT NULL, tokens INTEGER NOT NULL, version INTEGER NOT NULL,
    done INTEGER NOT NULL,
    sum INTEGER NOT NULL
);
CREATE TABLE fields (
    seq INTEGER NOT NULL, name INTEGER NOT NULL, value BLOB NOT NULL, sum INTEGER NOT NULL,
    PRIMARY KEY (seq, name)
) WITHOUT ROWID;
CREATE TABLE claims (
    seq INTEGER NOT NULL, consumer INTEGER NOT NULL,
    state INTEGER NOT NULL, until_ms INTEGER NOT NULL, text TEXT NOT NULL,
    lease INTEGER, attempts INTEGER NOT NULL,
    sum INTEGER NOT NULL,
    PRIMARY KEY (seq, consumer)
) WITHOUT ROWID;
CREATE TABLE consumers (
    number INTEGER PRIMARY KEY, spec TEXT NOT NULL, sum INTEGER NOT NULL
);
CREATE TABLE names (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL, sum INTEGER NOT NULL
);
CREATE TABLE leases (
    id INTEGER PRIMARY KEY, next INTEGER NOT NULL, sum INTEGER NOT NULL
);
";

/// Maximum bytes of a queue's name.
const MAX_QUEUE_NAME: usize = 64;

/// Value of a claim's column `state`: not leased.
const OPEN: i64 = 0;
/// Value for a lease; `text` is the holder.
const LEASED: i64 = 1;
const ACKED: i64 = 2;
/// Value for a dead row; `text` is the reason.
const DEAD: i64 = 3;

/// The file of a queue.
#[derive(Debug)]
pub struct Table {
    path: PathBuf,
    connection: Connection,
}

impl DiskQueue {
    /// Opens the queue `name` of the store in a folder, or creates both. Another process may use the store
    /// itself meanwhile.
    ///
    /// # Errors
    /// Same as [`DiskQueue::open`], and if the name is not valid: it names a file.
    pub fn in_store(
        folder: &Path,
        name: &str,
        limits: QueueLimits,
        accept_loss: bool,
    ) -> Result<Self, StoreError> {
        let fits = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > MAX_QUEUE_NAME || !name.chars().all(fits) {
            return Err(StoreError::Queue(QueueError::Argument {
                field: "name".into(),
                value: format!("{name:?}"),
                allowed: format!("1 to {MAX_QUEUE_NAME} letters, digits, - and _"),
            }));
        }
        Self::open(&file(folder, name)?, limits, accept_loss)
    }

    /// Opens the queue in a file, or creates one. Earlier leases stay valid until they expire.
    ///
    /// # Errors
    /// [`StoreError::LostQueue`] if the file is damaged; with `accept_loss` it is put aside, as
    /// `FILE.damaged`, and an empty queue begun.
    pub fn open(path: &Path, limits: QueueLimits, accept_loss: bool) -> Result<Self, StoreError> {
        match load(path, limits) {
            Err(StoreError::LostQueue { .. }) if accept_loss => {
                quarantine::put_aside(path)?;
                load(path, limits)
            }
            opened => opened,
        }
    }
}

/// Returns the file of a store's queue, and creates its folder.
///
/// # Errors
/// If its folder cannot be made.
pub(crate) fn file(store: &Path, name: &str) -> Result<PathBuf, StoreError> {
    let folder = store.join("queue");
    private_dir(&folder).map_err(|e| StoreError::io(&folder, e))?;
    Ok(folder.join(format!("{name}.sqlite")))
}

/// Opens and checks a file.
fn load(path: &Path, limits: QueueLimits) -> Result<DiskQueue, StoreError> {
    let mut core = QueueCore::new(limits);
    let table = open(path, &mut core)?;
    Ok(local(core, table))
}

/// Opens and checks a file, and applies its states to `core`.
fn open(path: &Path, core: &mut QueueCore) -> Result<Table, StoreError> {
    let blame = |error: StoreError| match error {
        StoreError::Index(source) => bad_file(path, source),
        other => other,
    };
    if quarantine::is_hollow(path) {
        return Err(StoreError::LostQueue {
            path: path.to_owned(),
            reason: "it has no bytes, and a queue without rows has some".into(),
        });
    }
    if !path.exists() {
        let part = quarantine::part(path);
        quarantine::remove(&part)?;
        drop(open_at(&part, &mut QueueCore::new(QueueLimits::default())).map_err(blame)?);
        quarantine::name(path)?;
    }
    open_at(path, core).map_err(blame)
}

/// Opens a complete file, or creates one.
fn open_at(path: &Path, core: &mut QueueCore) -> Result<Table, StoreError> {
    let connection = Connection::open(path)?;
    restrict(path).map_err(|e| StoreError::io(path, e))?;
    // No second process, and no shared memory next to the file.
    connection.pragma_update(None, "locking_mode", "EXCLUSIVE")?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.set_prepared_statement_cache_capacity(32);
    let mut table = Table {
        path: path.to_owned(),
        connection,
    };
    table.prepare()?;
    core.apply(table.changes()?);
    Ok(table)
}

/// Turns an error of SQLite into an error about the file.
fn bad_file(path: &Path, source: rusqlite::Error) -> StoreError {
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => StoreError::Locked { path },
        // Errors without a code: a value has another type than its column.
        None
        | Some(
            ErrorCode::DatabaseCorrupt
            | ErrorCode::NotADatabase
            | ErrorCode::TypeMismatch
            | ErrorCode::Unknown,
        ) => StoreError::LostQueue {
            path,
            reason: source.to_string(),
        },
        Some(ErrorCode::DiskFull) => StoreError::DiskFull { path },
        _ => StoreError::BadIndex { path, source },
    }
}

/// Incremental checksum of a row.
#[derive(Default)]
struct QueueChecksum(crc32fast::Hasher);

impl QueueChecksum {
    fn number(mut self, value: i64) -> Self {
        self.0.update(&value.to_le_bytes());
        self
    }

    fn bytes(mut self, value: &[u8]) -> Self {
        self.0.update(&(value.len() as u64).to_le_bytes());
        self.0.update(value);
        self
    }

    fn end(self) -> i64 {
        i64::from(self.0.finalize())
    }
}

fn row_sum(seq: i64, row: &Row, done: bool) -> Result<i64, StoreError> {
    let sum = QueueChecksum::default().number(seq).number(i64::from(done));
    let sum = sum.bytes(row.key.as_bytes()).bytes(row.group.as_bytes());
    let sum = sum
        .number(signed("unit", row.unit)?)
        .number(row.size.into());
    let sum = sum
        .number(row.priority.into())
        .number(signed("tokens", row.tokens)?);
    Ok(sum.number(signed("version", row.version)?).end())
}

fn field_sum(seq: i64, name: i64, value: &[u8]) -> i64 {
    QueueChecksum::default()
        .number(seq)
        .number(name)
        .bytes(value)
        .end()
}

/// Stored columns of a claim: state, until, text, lease, attempts.
type Flat<'a> = (i64, i64, &'a str, Option<i64>, u32);

fn claim_sum(seq: i64, consumer: i64, (state, until, text, lease, attempts): Flat<'_>) -> i64 {
    let sum = QueueChecksum::default()
        .number(seq)
        .number(consumer)
        .number(state);
    let sum = sum.number(until).bytes(text.as_bytes());
    sum.number(lease.unwrap_or(-1))
        .number(attempts.into())
        .end()
}

fn text_sum(number: i64, text: &str) -> i64 {
    QueueChecksum::default()
        .number(number)
        .bytes(text.as_bytes())
        .end()
}

impl Backing for Table {
    fn write(&mut self, core: &QueueCore, changes: &[Change]) -> Result<bool, StoreError> {
        let path = &self.path;
        let failed = |error: StoreError| match error {
            StoreError::Index(source) => bad_file(path, source),
            other => other,
        };
        let connection = &mut self.connection;
        let written = (|| {
            let tx = connection.transaction()?;
            let (mut names, mut readers) = (core.names.len() as i64, core.readers.len() as i64);
            for change in changes {
                match change {
                    Change::Name(name) => {
                        let values = params![names, name, text_sum(names, name)];
                        insert(&tx, "INSERT INTO names VALUES (?1, ?2, ?3)", values)?;
                        names += 1;
                    }
                    Change::Join(spec) => {
                        let spec = serde_json::to_string(spec).unwrap_or_default();
                        let values = params![readers, spec, text_sum(readers, &spec)];
                        insert(&tx, "INSERT INTO consumers VALUES (?1, ?2, ?3)", values)?;
                        readers += 1;
                    }
                    other => write(&tx, core, other)?,
                }
            }
            tx.commit()?;
            Ok(true)
        })();
        written.map_err(failed)
    }

    fn read(&mut self, seq: u64, fields: &[usize]) -> Result<Vec<(usize, Bytes)>, StoreError> {
        let seq = signed("row", seq)?;
        let mut query = self
            .connection
            .prepare_cached("SELECT value, sum FROM fields WHERE seq = ?1 AND name = ?2")?;
        let mut values = Vec::with_capacity(fields.len());
        for &field in fields {
            let found: Option<(Vec<u8>, i64)> = query
                .query_row(params![seq, field as i64], |r| Ok((r.get(0)?, r.get(1)?)))
                .optional()?;
            let Some((value, sum)) = found else { continue };
            if sum != field_sum(seq, field as i64, &value) {
                return Err(self.damaged("the value of a row fails its checksum"));
            }
            values.push((field, value.into()));
        }
        Ok(values)
    }
}

/// Runs a prepared statement.
fn insert(
    tx: &Transaction<'_>,
    statement: &str,
    values: &[&dyn rusqlite::ToSql],
) -> Result<(), StoreError> {
    tx.prepare_cached(statement)?.execute(values)?;
    Ok(())
}

/// Writes one change of a row within a transaction.
fn write(tx: &Transaction<'_>, core: &QueueCore, change: &Change) -> Result<(), StoreError> {
    match change {
        Change::Insert { seq, row, values } => {
            let seq = signed("row", *seq)?;
            insert_row(tx, seq, row)?;
            for (name, value) in values {
                insert_field(tx, seq, *name, value)?;
            }
            Ok(())
        }
        Change::Write {
            seq, field, value, ..
        } => insert_field(tx, signed("row", *seq)?, *field, value),
        Change::Claim { seq, reader, claim } => insert_claim(tx, *seq, *reader, claim),
        Change::Finish { seq } => {
            let number = signed("row", *seq)?;
            insert(tx, "DELETE FROM fields WHERE seq = ?1", params![number])?;
            let Some(row) = core.rows.get(seq) else {
                return Ok(());
            };
            let statement = "UPDATE rows SET done = 1, sum = ?2 WHERE seq = ?1";
            insert(tx, statement, params![number, row_sum(number, row, true)?])
        }
        Change::Forget { seq } => {
            let seq = signed("row", *seq)?;
            for table in ["rows", "fields", "claims"] {
                let statement = format!("DELETE FROM {table} WHERE seq = ?1");
                insert(tx, &statement, params![seq])?;
            }
            Ok(())
        }
        Change::NextLease(next) => {
            let next = signed("lease", *next)?;
            let statement = "INSERT OR REPLACE INTO leases VALUES (0, ?1, ?2)";
            insert(
                tx,
                statement,
                params![next, QueueChecksum::default().number(next).end()],
            )
        }
        Change::Name(_) | Change::Join(_) => Ok(()),
    }
}

fn insert_row(tx: &Transaction<'_>, seq: i64, row: &Row) -> Result<(), StoreError> {
    insert(
        tx,
        "INSERT INTO rows VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        params![
            seq,
            &*row.key,
            &*row.group,
            signed("unit", row.unit)?,
            row.size,
            row.priority,
            signed("tokens", row.tokens)?,
            signed("version", row.version)?,
            row.done,
            row_sum(seq, row, row.done)?,
        ],
    )
}

fn insert_field(
    tx: &Transaction<'_>,
    seq: i64,
    name: usize,
    value: &[u8],
) -> Result<(), StoreError> {
    let name = name as i64;
    let sum = field_sum(seq, name, value);
    let statement = "INSERT OR REPLACE INTO fields VALUES (?1, ?2, ?3, ?4)";
    insert(tx, statement, params![seq, name, value, sum])
}

fn insert_claim(
    tx: &Transaction<'_>,
    seq: u64,
    reader: usize,
    claim: &Claim,
) -> Result<(), StoreError> {
    let (seq, reader) = (signed("row", seq)?, reader as i64);
    let (state, until, text) = match &claim.hold {
        Hold::Open => (OPEN, 0, ""),
        Hold::Leased { until_ms, holder } => (LEASED, signed("until_ms", *until_ms)?, &**holder),
        Hold::Acked => (ACKED, 0, ""),
        Hold::Dead { reason } => (DEAD, 0, &**reason),
    };
    let lease = claim.lease.map(|l| signed("lease", l)).transpose()?;
    let sum = claim_sum(seq, reader, (state, until, text, lease, claim.attempts));
    insert(
        tx,
        "INSERT OR REPLACE INTO claims VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        params![seq, reader, state, until, text, lease, claim.attempts, sum],
    )
}

impl Table {
    /// Returns the error for a damaged file.
    fn damaged(&self, reason: &str) -> StoreError {
        StoreError::LostQueue {
            path: self.path.clone(),
            reason: reason.to_owned(),
        }
    }

    /// Checks the file, and creates the tables of an empty one.
    fn prepare(&mut self) -> Result<(), StoreError> {
        let tables: i64 =
            self.connection
                .query_row("SELECT COUNT(*) FROM sqlite_schema", [], |r| r.get(0))?;
        if tables == 0 {
            let tx = self.connection.transaction()?;
            tx.execute_batch(SCHEMA)?;
            tx.pragma_update(None, "user_version", FORMAT)?;
            return Ok(tx.commit()?);
        }
        let format: i64 = self
            .connection
            .query_row("PRAGMA user_version", [], |r| r.get(0))?;
        if format != FORMAT {
            return Err(StoreError::Format {
                path: self.path.clone(),
                actual: format,
                expected: FORMAT,
            });
        }
        let verdict: String = self
            .connection
            .query_row("PRAGMA integrity_check(1)", [], |r| r.get(0))?;
        match verdict.as_str() {
            "ok" => Ok(()),
            other => Err(self.damaged(other.lines().next().unwrap_or_default())),
        }
    }

    /// Reads the whole file as changes of an empty queue.
    fn changes(&self) -> Result<Vec<Change>, StoreError> {
        let mut changes: Vec<Change> = Vec::new();
        for (number, name) in self.texts("SELECT number, name, sum FROM names ORDER BY number")? {
            if number != changes.len() as i64 {
                return Err(self.damaged("a name is missing"));
            }
            changes.push(Change::Name(name));
        }
        for (_, spec) in self.texts("SELECT number, spec, sum FROM consumers ORDER BY number")? {
            let spec: Consumer = serde_json::from_str(&spec)
                .map_err(|e| self.damaged(&format!("a consumer cannot be read: {e}")))?;
            changes.push(Change::Join(spec));
        }
        self.rows(&mut changes)?;
        self.claims(&mut changes)?;
        let next = self
            .connection
            .query_row("SELECT next, sum FROM leases", [], |r| {
                Ok((r.get(0)?, r.get(1)?))
            });
        let next: Option<(i64, i64)> = next.optional()?;
        if let Some((next, sum)) = next {
            self.verify(sum == QueueChecksum::default().number(next).end())?;
            changes.push(Change::NextLease(next.max(0) as u64));
        }
        Ok(changes)
    }

    fn verify(&self, fits: bool) -> Result<(), StoreError> {
        if fits {
            Ok(())
        } else {
            Err(self.damaged("a row fails its checksum"))
        }
    }

    /// Reads numbered texts.
    fn texts(&self, query: &str) -> Result<Vec<(i64, String)>, StoreError> {
        let mut query = self.connection.prepare(query)?;
        let mut rows = query.query([])?;
        let mut texts = Vec::new();
        while let Some(r) = rows.next()? {
            let (number, text): (i64, String) = (r.get(0)?, r.get(1)?);
            self.verify(r.get::<_, i64>(2)? == text_sum(number, &text))?;
            texts.push((number, text));
        }
        Ok(texts)
    }

    /// Reads the rows, with the sizes of their values.
    fn rows(&self, changes: &mut Vec<Change>) -> Result<(), StoreError> {
        let mut fields = self
            .connection
            .prepare("SELECT seq, name, value, sum FROM fields ORDER BY seq, name")?;
        let mut fields = fields.query([])?;
        let mut next = fields.next()?;
        let mut query = self.connection.prepare("SELECT * FROM rows ORDER BY seq")?;
        let mut rows = query.query([])?;
        while let Some(r) = rows.next()? {
            let number = |place| r.get::<_, i64>(place).map(|v| v.max(0) as u64);
            let seq: i64 = r.get(0)?;
            let mut row = Row {
                key: Arc::from(r.get::<_, String>(1)?),
                group: Arc::from(r.get::<_, String>(2)?),
                unit: number(3)?,
                size: r.get(4)?,
                priority: r.get(5)?,
                tokens: number(6)?,
                version: number(7)?,
                fields: 0,
                bytes: 0,
                done: r.get(8)?,
                claims: Vec::new(),
            };
            self.verify(r.get::<_, i64>(9)? == row_sum(seq, &row, row.done)?)?;
            while let Some(f) = next {
                let (of, name): (i64, i64) = (f.get(0)?, f.get(1)?);
                if of != seq {
                    break;
                }
                let value = f.get_ref(2)?.as_blob().unwrap_or_default();
                self.verify(f.get::<_, i64>(3)? == field_sum(seq, name, value))?;
                row.fields |= 1 << (name & 63);
                row.bytes += value.len() as u64;
                next = fields.next()?;
            }
            changes.push(Change::Insert {
                seq: seq.max(0) as u64,
                row,
                values: Vec::new(),
            });
        }
        match next {
            None => Ok(()),
            Some(_) => Err(self.damaged("a value belongs to no row")),
        }
    }

    fn claims(&self, changes: &mut Vec<Change>) -> Result<(), StoreError> {
        let readers = changes
            .iter()
            .filter(|c| matches!(c, Change::Join(_)))
            .count();
        let mut query = self.connection.prepare("SELECT * FROM claims")?;
        let mut rows = query.query([])?;
        while let Some(r) = rows.next()? {
            let (seq, reader): (i64, i64) = (r.get(0)?, r.get(1)?);
            let (state, until): (i64, i64) = (r.get(2)?, r.get(3)?);
            let text: String = r.get(4)?;
            let (lease, attempts): (Option<i64>, u32) = (r.get(5)?, r.get(6)?);
            let sum = claim_sum(seq, reader, (state, until, &text, lease, attempts));
            let known = (0..readers as i64).contains(&reader);
            self.verify(known && r.get::<_, i64>(7)? == sum)?;
            let hold = match state {
                LEASED => Hold::Leased {
                    until_ms: until.max(0) as u64,
                    holder: text.into(),
                },
                ACKED => Hold::Acked,
                DEAD => Hold::Dead {
                    reason: text.into(),
                },
                _ => Hold::Open,
            };
            changes.push(Change::Claim {
                seq: seq.max(0) as u64,
                reader: reader as usize,
                claim: Claim {
                    hold,
                    lease: lease.map(|l| l.max(0) as u64),
                    attempts,
                },
            });
        }
        Ok(())
    }
}
