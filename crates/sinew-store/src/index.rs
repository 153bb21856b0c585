//! The SQLite index: the location of each episode, and the batch that trained it.
//!
//! The index can be rebuilt from the segments. Each row has a checksum in its last column ([`checksums`]):
//! SQLite detects a damaged page, and the checksum detects a damaged value. Numbers of the store are unsigned
//! and SQLite's are signed, so [`signed`] refuses values that do not fit.

use crate::checksums::{self, real};
use crate::codec::Mark;
use crate::error::StoreError;
use crate::facets::{self, Facets};
use crate::ledger;
use crate::private::restrict;
use crate::rows;
use crate::schema::{FORMAT, SCHEMA};
use crate::segment::Location;
use crate::sqlite_int::signed;
use crate::store::{Cursor, EndKind, EpisodeSummary, GcPolicy, StoreStats, TrainedBatch};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, params};
use serde::Deserialize;
use sinew_types::{EpisodeId, GroupId, TaskId, Trace};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Maximum time that a call waits for another process's transaction.
const BUSY: Duration = Duration::from_secs(10);

/// Cache for pages of the index, in KiB. The gateway creates random ids, which access the whole index.
const CACHE_KIB: i64 = 16 << 10;

/// Pages of the write-ahead log, 4 KiB each, after which they are moved into the index. Each move
/// synchronizes both files.
const LOG_PAGES: i64 = 4096;

/// Opens or creates the index, and checks it. Commits are written to the write-ahead log but not synchronized
/// at once: lost entries are restored from the segments.
pub(crate) fn open(path: &Path) -> Result<Connection, StoreError> {
    let bad = bad_index(path);
    let connection = Connection::open(path).map_err(&bad)?;
    restrict(path).map_err(|e| StoreError::io(path, e))?;
    connection.busy_timeout(BUSY)?;
    let journal = connection.pragma_update(None, "journal_mode", "WAL");
    journal.map_err(&bad)?;
    let empty = is_empty(&connection).map_err(&bad)?;
    if !empty {
        check(&connection, path)?;
    }
    prepare(connection, empty)
}

/// Refuses an index of another format, and one that is damaged.
fn check(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let checked = check_format(connection, path).and_then(|()| checksums::check(connection, path));
    checked.map_err(|e| blame(e, path))
}

/// Whether the index was never written.
fn is_empty(connection: &Connection) -> rusqlite::Result<bool> {
    let count: i64 =
        connection.query_row("SELECT COUNT(*) FROM sqlite_schema", [], |r| r.get(0))?;
    Ok(count == 0)
}

/// Converts SQLite's report of damage into [`StoreError::DamagedIndex`], which names the file and the remedy.
fn blame(error: StoreError, path: &Path) -> StoreError {
    match error {
        StoreError::Index(source) => bad_index(path)(source),
        other => other,
    }
}

/// Converts an error of the index file; a full disk keeps its own variant.
fn bad_index(path: &Path) -> impl Fn(rusqlite::Error) -> StoreError {
    use rusqlite::ErrorCode::{DatabaseCorrupt, NotADatabase, TypeMismatch, Unknown};
    |source| match StoreError::from(source) {
        StoreError::Index(source) => match source.sqlite_error_code() {
            // Errors without a code: a value has another type than its column.
            None | Some(DatabaseCorrupt | NotADatabase | TypeMismatch | Unknown) => {
                StoreError::DamagedIndex {
                    path: path.to_owned(),
                    reason: source.to_string(),
                }
            }
            _ => StoreError::BadIndex {
                path: path.to_owned(),
                source,
            },
        },
        other => other,
    }
}

/// Opens an index for reading while another process may be writing it.
pub(crate) fn open_read_only(path: &Path) -> Result<Connection, StoreError> {
    let connection = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)
        .map_err(bad_index(path))?;
    connection.busy_timeout(BUSY)?;
    let (connection, empty) = match is_empty(&connection) {
        Ok(empty) => (connection, empty),
        // Readers of a log need files next to it. If none may be made and nothing is in the log, the file is
        // read as it lies there.
        Err(e) if cannot_write(&e) && !has_log(path) => {
            let connection = open_immutable(path).map_err(bad_index(path))?;
            let empty = is_empty(&connection).map_err(bad_index(path))?;
            (connection, empty)
        }
        Err(e) => return Err(bad_index(path)(e)),
    };
    if empty {
        return Err(StoreError::Missing {
            path: path.to_owned(),
        });
    }
    check(&connection, path)?;
    Ok(connection)
}

/// Whether SQLite failed because it has to write but may not: a reader on a read-only medium.
fn cannot_write(error: &rusqlite::Error) -> bool {
    use rusqlite::ErrorCode::{CannotOpen, ReadOnly};
    matches!(error.sqlite_error_code(), Some(ReadOnly | CannotOpen))
}

/// Whether the write-ahead log of the index contains commits.
fn has_log(path: &Path) -> bool {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    std::fs::metadata(log).is_ok_and(|file| file.len() > 0)
}

/// Opens an index that no process writes.
fn open_immutable(path: &Path) -> rusqlite::Result<Connection> {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                uri.push(char::from(*byte))
            }
            other => uri.push_str(&format!("%{other:02x}")),
        }
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI;
    Connection::open_with_flags(uri + "?immutable=1", flags)
}

/// Refuses an index of another format.
fn check_format(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let format: i64 = connection.query_row("PRAGMA user_version", [], |r| r.get(0))?;
    if format == FORMAT {
        return Ok(());
    }
    Err(StoreError::Format {
        path: path.to_owned(),
        actual: format,
        expected: FORMAT,
    })
}

/// Creates an index in memory.
#[cfg(test)]
pub(crate) fn in_memory() -> Result<Connection, StoreError> {
    prepare(Connection::open_in_memory()?, true)
}

/// Configures a connection, and creates the tables of an empty index and its format in one transaction.
fn prepare(mut connection: Connection, empty: bool) -> Result<Connection, StoreError> {
    connection.pragma_update(None, "synchronous", "NORMAL")?;
    connection.pragma_update(None, "cache_size", -CACHE_KIB)?;
    connection.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
    if empty {
        let tx = connection.transaction()?;
        tx.execute_batch(SCHEMA)?;
        tx.pragma_update(None, "user_version", FORMAT)?;
        tx.commit()?;
    }
    Ok(connection)
}

/// Reads a count; a negative value, which the store never writes, becomes 0.
pub(crate) fn unsigned(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(|v| v.max(0) as u64)
}

/// Whether an id is taken: the episode was committed, trained or removed by garbage collection.
pub(crate) fn knows(connection: &Connection, episode: &str) -> Result<bool, StoreError> {
    let mut query = connection.prepare_cached("SELECT 1 FROM episodes WHERE episode = ?1")?;
    Ok(query.exists([episode])?)
}

/// Value of the column `success` for a success; 0 is a failure.
const SUCCEEDED: i64 = 1;
/// Value of `success` for an episode without a score; filters by success or reward never match it.
const UNSCORED: i64 = 2;

fn score_code(s: &EpisodeSummary) -> i64 {
    if s.unscored {
        UNSCORED
    } else {
        i64::from(s.success)
    }
}

/// Index entry of a trace; built before any lock is taken.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) summary: EpisodeSummary,
    facets: Facets,
    /// Id in an external system.
    external: Option<String>,
}

impl Entry {
    /// The entry of a trace.
    pub(crate) fn of(trace: &Trace) -> Self {
        Self {
            summary: EpisodeSummary::of(trace),
            facets: Facets::of(trace),
            external: trace.origin.external.clone(),
        }
    }
}

/// Returns the sequence number of the next episode.
fn next_seq(tx: &Transaction<'_>) -> Result<i64, StoreError> {
    let mut last = tx.prepare_cached("SELECT seq FROM sqlite_sequence WHERE name = 'episodes'")?;
    let last: Option<i64> = last.query_row([], |r| r.get(0)).optional()?;
    Ok(last.unwrap_or(0) + 1)
}

/// Inserts an episode. A known episode stays unchanged, unless only the mark of its batch is known (`ended`
/// is -1), since marks can precede traces in a rebuilt index.
pub(crate) fn insert(tx: &Transaction<'_>, entry: &Entry, at: Location) -> Result<(), StoreError> {
    let s = &entry.summary;
    let int = ValueRef::Integer;
    fn text(text: &str) -> ValueRef<'_> {
        ValueRef::from(text)
    }
    let seq = next_seq(tx)?;
    let values = [
        int(seq),
        text(s.episode.as_str()),
        text(s.group.as_str()),
        text(s.task.as_str()),
        text(&s.task_kind),
        int(signed("draw", s.draw)?),
        text(&s.purpose),
        real(s.reward),
        int(score_code(s)),
        int(s.end.code()),
        int(s.turns.into()),
        int(signed("sampled_tokens", s.sampled_tokens)?),
        real(s.started_unix_s),
        real(s.total_s),
        int(at.segment.into()),
        int(signed("offset", at.offset)?),
        int(at.bytes.into()),
        ValueRef::Null,
    ];
    let new = checksums::insert(
        tx,
        "INSERT INTO episodes (seq, episode, grp, task, task_kind, step, purpose, reward, success,
            ended, turns, sampled_tokens, started_unix_s, total_s, segment, offset, bytes, batch, sum)
         VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12,?13,?14,?15,?16,?17,?18,?19)
         ON CONFLICT (episode) DO NOTHING",
        &values,
    )?;
    let seq = if new { seq } else { complete(tx, s, at)? };
    facets::insert(tx, seq, &entry.facets)?;
    match &entry.external {
        Some(external) => ledger::name_externally(tx, external, s.episode.as_str()),
        None => Ok(()),
    }
}

/// Completes the row of an episode of which only a mark is known. Returns its sequence number.
fn complete(tx: &Transaction<'_>, s: &EpisodeSummary, at: Location) -> Result<i64, StoreError> {
    let mut statement = tx.prepare_cached(
        "UPDATE episodes SET grp = ?2, task = ?3, task_kind = ?4, step = ?5,
            purpose = ?6, reward = ?7, success = ?8, ended = ?9, turns = ?10,
            sampled_tokens = ?11, started_unix_s = ?12, total_s = ?13, segment = ?14,
            offset = ?15, bytes = ?16
         WHERE episode = ?1 AND ended = -1",
    )?;
    let episode = s.episode.as_str();
    statement.execute(params![
        episode,
        s.group.as_str(),
        s.task.as_str(),
        s.task_kind,
        signed("draw", s.draw)?,
        s.purpose,
        s.reward,
        score_code(s),
        s.end.code(),
        s.turns,
        signed("sampled_tokens", s.sampled_tokens)?,
        s.started_unix_s,
        s.total_s,
        at.segment,
        signed("offset", at.offset)?,
        at.bytes,
    ])?;
    checksums::seal(tx, "episodes", "episode = ?1", &[&episode])?;
    let mut find = tx.prepare_cached("SELECT seq FROM episodes WHERE episode = ?1")?;
    Ok(find.query_row([episode], |r| r.get(0))?)
}

/// Records that all records of a segment up to `end` are indexed.
pub(crate) fn set_indexed(tx: &Transaction<'_>, segment: u32, end: u64) -> Result<(), StoreError> {
    let mut statement = tx.prepare_cached(
        "INSERT INTO segments (number, indexed) VALUES (?1, ?2)
         ON CONFLICT (number) DO UPDATE SET indexed = excluded.indexed",
    )?;
    statement.execute(params![segment, signed("indexed", end)?])?;
    checksums::seal(tx, "segments", "number = ?1", &[&segment])
}

/// Returns number, indexed bytes, and whether it is marked as dead, for each segment in ascending order.
pub(crate) fn segments(connection: &Connection) -> Result<Vec<(u32, u64, bool)>, StoreError> {
    let sql = "SELECT number, indexed, dead FROM segments ORDER BY number";
    rows::all(connection, sql, [], |r| {
        Ok((r.get("number")?, unsigned(r, "indexed")?, r.get("dead")?))
    })
}

/// Marks a file as dead, whose records were moved. It is removed now, or at the next opening after a crash.
pub(crate) fn kill_segment(tx: &Transaction<'_>, segment: u32) -> Result<(), StoreError> {
    tx.execute("UPDATE segments SET dead = 1 WHERE number = ?1", [segment])?;
    checksums::seal(tx, "segments", "number = ?1", &[&segment])
}

/// Deletes the row of a removed file.
pub(crate) fn bury_segment(connection: &Connection, segment: u32) -> Result<(), StoreError> {
    connection.execute("DELETE FROM segments WHERE number = ?1", [segment])?;
    Ok(())
}

/// Reads the location of a row's record.
fn location(row: &Row<'_>) -> rusqlite::Result<Location> {
    Ok(Location {
        segment: row.get("segment")?,
        offset: unsigned(row, "offset")?,
        bytes: row.get("bytes")?,
    })
}

/// Location of an episode; `None` if it is unknown or removed.
pub(crate) fn find(connection: &Connection, episode: &str) -> Result<Option<Location>, StoreError> {
    let mut query = connection.prepare_cached(
        "SELECT segment, offset, bytes FROM episodes
         WHERE episode = ?1 AND segment IS NOT NULL",
    )?;
    Ok(query.query_row([episode], location).optional()?)
}

/// Reads the summary of an episode from its row.
pub(crate) fn summary(row: &Row<'_>) -> rusqlite::Result<EpisodeSummary> {
    let text = |column| row.get::<_, String>(column);
    // SQLite keeps NaN as null.
    let number = |column| -> rusqlite::Result<f64> {
        Ok(row.get::<_, Option<f64>>(column)?.unwrap_or(f64::NAN))
    };
    let ended: i64 = row.get("ended")?;
    Ok(EpisodeSummary {
        cursor: Cursor(unsigned(row, "seq")?),
        episode: EpisodeId(text("episode")?),
        group: GroupId(text("grp")?),
        task: TaskId(text("task")?),
        task_kind: text("task_kind")?,
        draw: unsigned(row, "step")?,
        purpose: text("purpose")?,
        reward: row.get("reward")?,
        success: row.get::<_, i64>("success")? == SUCCEEDED,
        unscored: row.get::<_, i64>("success")? == UNSCORED,
        end: EndKind::from_code(ended).ok_or(rusqlite::Error::IntegralValueOutOfRange(0, ended))?,
        turns: row.get("turns")?,
        sampled_tokens: unsigned(row, "sampled_tokens")?,
        started_unix_s: number("started_unix_s")?,
        total_s: number("total_s")?,
        trained_in: row.get("batch")?,
        update: row
            .get::<_, Option<i64>>("trained_by")?
            .map(|u| u.max(0) as u64),
    })
}

/// Returns the batch that trained an episode; the outer `None` means that the episode is unknown.
pub(crate) fn trained_in(
    connection: &Connection,
    episode: &str,
) -> Result<Option<Option<String>>, StoreError> {
    let mut query = connection.prepare_cached("SELECT batch FROM episodes WHERE episode = ?1")?;
    Ok(query.query_row([episode], |r| r.get(0)).optional()?)
}

/// Returns the update with this name.
pub(crate) fn batch(connection: &Connection, id: &str) -> Result<Option<TrainedBatch>, StoreError> {
    let mut query = connection
        .prepare_cached("SELECT batch, step, fence, episodes FROM batches WHERE batch = ?1")?;
    let found = query.query_row([id], trained_batch).optional()?;
    Ok(found)
}

/// JSON value of the column `episodes`.
#[derive(Deserialize)]
struct MarkedEpisodes {
    episodes: Vec<EpisodeId>,
    dropped: BTreeMap<EpisodeId, String>,
    detail: serde_json::Value,
}

/// Reads an update from its row.
fn trained_batch(row: &Row<'_>) -> rusqlite::Result<TrainedBatch> {
    let json: String = row.get("episodes")?;
    let trained: MarkedEpisodes = serde_json::from_str(&json).map_err(|e| {
        rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(e))
    })?;
    Ok(TrainedBatch {
        batch: row.get("batch")?,
        step: unsigned(row, "step")?,
        episodes: trained.episodes,
        dropped: trained.dropped,
        fence: unsigned(row, "fence")?,
        detail: trained.detail,
    })
}

/// All updates, in the order of their first marks.
pub(crate) fn batches(connection: &Connection) -> Result<Vec<TrainedBatch>, StoreError> {
    let sql = "SELECT batch, step, fence, episodes FROM batches ORDER BY seq";
    rows::all(connection, sql, [], trained_batch)
}

/// Returns the highest owner that an update names; 0 if there is none.
pub(crate) fn newest_fence(connection: &Connection) -> Result<u64, StoreError> {
    let sql = "SELECT COALESCE(MAX(fence), 0) AS fence FROM batches";
    Ok(connection.query_row(sql, [], |row| unsigned(row, "fence"))?)
}

/// Returns the batches of an update, in order.
pub(crate) fn batches_of(
    connection: &Connection,
    step: u64,
) -> Result<Vec<TrainedBatch>, StoreError> {
    let sql = "SELECT batch, step, fence, episodes FROM batches WHERE step = ?1 ORDER BY seq";
    rows::all(connection, sql, [signed("step", step)?], trained_batch)
}

/// Inserts a batch mark; it replaces an earlier mark of the batch.
pub(crate) fn mark(tx: &Transaction<'_>, mark: &Mark, at: Location) -> Result<(), StoreError> {
    let detail: serde_json::Value = serde_json::from_str(&mark.detail).unwrap_or_default();
    let json = serde_json::json!({
        "episodes": mark.episodes, "dropped": mark.dropped, "detail": detail,
    });
    let before = batch(tx, &mark.batch)?;
    for episode in before.iter().flat_map(|b| &b.episodes) {
        tx.execute(
            "UPDATE episodes SET batch = NULL WHERE episode = ?1 AND batch = ?2",
            params![episode.as_str(), mark.batch],
        )?;
        checksums::seal(tx, "episodes", "episode = ?1", &[&episode.as_str()])?;
    }
    tx.execute(
        "INSERT INTO batches (batch, step, fence, episodes, segment, offset, bytes)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT (batch) DO UPDATE SET step = excluded.step, fence = excluded.fence,
            episodes = excluded.episodes, segment = excluded.segment, offset = excluded.offset,
            bytes = excluded.bytes",
        params![
            mark.batch,
            signed("step", mark.step)?,
            signed("fence", mark.fence)?,
            json.to_string(),
            at.segment,
            signed("offset", at.offset)?,
            at.bytes
        ],
    )?;
    checksums::seal(tx, "batches", "batch = ?1", &[&mark.batch])?;
    // An episode that gc removed before the index was lost is known only from here.
    let mut insert = tx.prepare_cached(
        "INSERT INTO episodes (episode, grp, task, task_kind, step, purpose, reward, success,
            ended, turns, sampled_tokens, batch)
         VALUES (?1, '', '', '', ?3, '', 0, 0, -1, 0, 0, ?2)
         ON CONFLICT (episode) DO UPDATE SET batch = excluded.batch",
    )?;
    for episode in &mark.episodes {
        insert.execute(params![episode, mark.batch, signed("step", mark.step)?])?;
        checksums::seal(tx, "episodes", "episode = ?1", &[episode])?;
    }
    Ok(())
}

/// Counts over all episodes; the bytes of the segments are not included.
pub(crate) fn stats(connection: &Connection) -> Result<StoreStats, StoreError> {
    let mut stats = connection.query_row(
        "SELECT COUNT(segment) AS episodes,
            COALESCE(SUM(success = 1 AND segment IS NOT NULL), 0) AS successes,
            COALESCE(SUM(ended = 2 AND segment IS NOT NULL), 0) AS failed,
            COUNT(batch) AS trained, COUNT(*) - COUNT(segment) AS collected,
            COALESCE(SUM(CASE WHEN segment IS NULL THEN 0 ELSE sampled_tokens END), 0) AS tokens
         FROM episodes",
        [],
        |r| {
            Ok(StoreStats {
                episodes: unsigned(r, "episodes")?,
                successes: unsigned(r, "successes")?,
                failed: unsigned(r, "failed")?,
                trained: unsigned(r, "trained")?,
                collected: unsigned(r, "collected")?,
                sampled_tokens: unsigned(r, "tokens")?,
                ..StoreStats::default()
            })
        },
    )?;
    let count: i64 = connection.query_row("SELECT COUNT(*) FROM batches", [], |r| r.get(0))?;
    stats.batches = count.max(0) as u64;
    Ok(stats)
}

/// Returns the episodes that a policy selects for removal, with their locations.
pub(crate) fn collectable(
    connection: &Connection,
    policy: GcPolicy,
) -> Result<Vec<(String, Location)>, StoreError> {
    let sql = "SELECT e.episode, e.segment, e.offset, e.bytes
         FROM episodes e LEFT JOIN batches b ON b.batch = e.batch
         WHERE e.segment IS NOT NULL AND CASE WHEN e.batch IS NULL THEN NOT ?2 ELSE b.step < ?1 END";
    let before = i64::try_from(policy.before_update).unwrap_or(i64::MAX);
    rows::all(connection, sql, (before, policy.keep_untrained), |r| {
        Ok((r.get("episode")?, location(r)?))
    })
}

/// Returns segments without live records: copies of an unfinished garbage collection.
pub(crate) fn lifeless(connection: &Connection) -> Result<Vec<u32>, StoreError> {
    let sql = "SELECT number FROM segments WHERE NOT dead
           AND NOT EXISTS (SELECT 1 FROM episodes WHERE segment = number)
           AND NOT EXISTS (SELECT 1 FROM batches WHERE segment = number)
           AND NOT EXISTS (SELECT 1 FROM scores WHERE segment = number)";
    rows::all(connection, sql, [], |r| r.get(0))
}

/// Returns the live records of a segment (episodes, batches or scores) by name and location.
pub(crate) fn living(
    connection: &Connection,
    table: Table,
    segment: u32,
) -> Result<Vec<(String, Location)>, StoreError> {
    let sql = match table {
        Table::Episodes => {
            "SELECT episode AS name, segment, offset, bytes FROM episodes
             WHERE segment = ?1 ORDER BY seq"
        }
        Table::Batches => {
            "SELECT batch AS name, segment, offset, bytes FROM batches
             WHERE segment = ?1 ORDER BY seq"
        }
        Table::Scores => {
            "SELECT CAST(seq AS TEXT) AS name, segment, offset, bytes FROM scores
             WHERE segment = ?1 ORDER BY seq"
        }
    };
    rows::all(connection, sql, [segment], |r| {
        Ok((r.get("name")?, location(r)?))
    })
}

/// Returns the locations of a segment's records, the last one first.
pub(crate) fn records(connection: &Connection, segment: u32) -> Result<Vec<Location>, StoreError> {
    let sql = "SELECT segment, offset, bytes FROM episodes WHERE segment = ?1
         UNION ALL SELECT segment, offset, bytes FROM batches WHERE segment = ?1
         UNION ALL SELECT segment, offset, bytes FROM scores WHERE segment = ?1
         ORDER BY offset DESC";
    rows::all(connection, sql, [segment], location)
}

/// Returns the segments that contain an episode, a mark or a score, in ascending order.
pub(crate) fn located(connection: &Connection) -> Result<Vec<u32>, StoreError> {
    let sql = "SELECT segment FROM episodes WHERE segment IS NOT NULL
         UNION SELECT segment FROM batches UNION SELECT segment FROM scores ORDER BY segment";
    rows::all(connection, sql, [], |r| r.get(0))
}

/// Returns the episodes in a segment from a byte offset on.
pub(crate) fn episodes_from(
    connection: &Connection,
    segment: u32,
    from: u64,
) -> Result<Vec<String>, StoreError> {
    let sql = "SELECT episode FROM episodes WHERE segment = ?1 AND offset >= ?2 ORDER BY seq";
    let place = [i64::from(segment), signed("offset", from)?];
    rows::all(connection, sql, place, |r| r.get(0))
}

/// Deletes episodes and their scores. Those that a batch trained stay known, so that none is trained again.
/// Returns the ids of the others, then those of the trained ones.
pub(crate) fn forget(
    tx: &Transaction<'_>,
    names: &[String],
) -> Result<(Vec<EpisodeId>, Vec<EpisodeId>), StoreError> {
    let (mut untrained, mut trained) = (Vec::new(), Vec::new());
    for name in names {
        ledger::forget(tx, name)?;
        match trained_in(tx, name)? {
            Some(Some(_)) => {
                relocate(tx, Table::Episodes, name, None)?;
                trained.push(EpisodeId(name.clone()));
            }
            Some(None) => {
                tx.execute("DELETE FROM episodes WHERE episode = ?1", [name])?;
                untrained.push(EpisodeId(name.clone()));
            }
            None => {}
        }
    }
    facets::prune(tx)?;
    Ok((untrained, trained))
}

/// Returns the batches whose marks are in a segment from a byte offset on.
pub(crate) fn batches_from(
    connection: &Connection,
    segment: u32,
    from: u64,
) -> Result<Vec<TrainedBatch>, StoreError> {
    let sql = "SELECT batch, step, fence, episodes FROM batches
         WHERE segment = ?1 AND offset >= ?2 ORDER BY seq";
    let place = [i64::from(segment), signed("offset", from)?];
    rows::all(connection, sql, place, trained_batch)
}

/// Table that contains the index row of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    /// Traces.
    Episodes,
    /// Marks of updates.
    Batches,
    /// Scores, by row number.
    Scores,
}

/// Updates the location of a record; `None` (only for episodes) marks it as removed.
pub(crate) fn relocate(
    tx: &Transaction<'_>,
    table: Table,
    name: &str,
    to: Option<Location>,
) -> Result<(), StoreError> {
    let sql = match table {
        Table::Episodes => {
            "UPDATE episodes SET segment = ?2, offset = ?3, bytes = ?4 WHERE episode = ?1"
        }
        Table::Batches => {
            "UPDATE batches SET segment = ?2, offset = ?3, bytes = ?4 WHERE batch = ?1"
        }
        Table::Scores => {
            "UPDATE scores SET segment = ?2, offset = ?3, bytes = ?4
             WHERE seq = CAST(?1 AS INTEGER)"
        }
    };
    let offset = to.map(|l| signed("offset", l.offset)).transpose()?;
    let mut statement = tx.prepare_cached(sql)?;
    statement.execute(params![
        name,
        to.map(|l| l.segment),
        offset,
        to.map(|l| l.bytes)
    ])?;
    match table {
        Table::Episodes => checksums::seal(tx, "episodes", "episode = ?1", &[&name]),
        Table::Batches => checksums::seal(tx, "batches", "batch = ?1", &[&name]),
        Table::Scores => checksums::seal(tx, "scores", "seq = CAST(?1 AS INTEGER)", &[&name]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reading still works for a reader that may not write.
    #[test]
    fn an_index_is_read_without_files_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("50% of #1?.sqlite");
        let connection = open(&path).unwrap();
        connection
            .execute("INSERT INTO segments VALUES (3, 7, 0, 0)", [])
            .unwrap();
        assert!(has_log(&path));
        drop(connection);
        assert!(!has_log(&path));
        let reader = open_immutable(&path).unwrap();
        let indexed: i64 = reader
            .query_row("SELECT indexed FROM segments", [], |r| r.get(0))
            .unwrap();
        assert_eq!(indexed, 7);
        assert!(reader.execute("DELETE FROM segments", []).is_err());
        let files = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(files, 1);
    }
}
