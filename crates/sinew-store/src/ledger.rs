//! Score tables of the index: records in order of arrival, and external ids.
//!
//! [`is_new`] checks a record before any write. Then its bytes are written to the segment, and [`insert`]
//! adds it to the index with the location of these bytes. [`of_episode`] and [`page`] read records back.
//!
//! Two tables: `scores` has a row for each record, numbered by `seq` in the order of arrival, and
//! `externals` a row for each id that an external system gave an episode. Their rows have checksums
//! ([`checksums`]), so that damage is detected.

use crate::checksums;
use crate::error::StoreError;
use crate::rows;
use crate::score::{MAX_SCORES, Score, ScoreRecord, ScoreRefused};
use crate::segment::Location;
use crate::sqlite_int::signed;
use crate::store::{Cursor, MAX_PAGE, ScorePage};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use sinew_types::EpisodeId;

/// Inserts a record; an existing one stays unchanged. Returns whether it is new.
///
/// # Errors
/// If the time or the offset is above 2^63 - 1, or the index fails.
pub(crate) fn insert(
    tx: &Transaction<'_>,
    record: &ScoreRecord,
    at: Location,
) -> Result<bool, StoreError> {
    if holds(tx, record)? {
        return Ok(false);
    }
    let (value, reason) = columns(&record.score);
    let mut statement = tx.prepare_cached(
        "INSERT INTO scores (episode, name, source, at_us, value, reason, segment, offset, bytes)
         VALUES (?1,?2,?3,?4,?5,?6,?7,?8,?9)",
    )?;
    let seq = statement.insert(params![
        record.episode.as_str(),
        record.name,
        record.source,
        signed("at", record.at_us)?,
        value,
        reason,
        at.segment,
        signed("offset", at.offset)?,
        at.bytes,
    ])?;
    checksums::seal(tx, "scores", "seq = ?1", &[&seq])?;
    Ok(true)
}

/// Converts a score to its two columns, one of which is null.
fn columns(score: &Score) -> (Option<f64>, Option<&str>) {
    match score {
        Score::Value(value) => (Some(*value), None),
        Score::Unscored(reason) => (None, Some(reason)),
    }
}

/// Whether exactly this record exists. Two missing scores with the same reason are equal, and so are two
/// equal numbers.
fn holds(connection: &Connection, record: &ScoreRecord) -> Result<bool, StoreError> {
    let (value, reason) = columns(&record.score);
    let mut query = connection.prepare_cached(
        "SELECT 1 FROM scores WHERE episode = ?1 AND name = ?2 AND source = ?3 AND at_us = ?4
           AND value IS ?5 AND reason IS ?6",
    )?;
    Ok(query.exists(params![
        record.episode.as_str(),
        record.name,
        record.source,
        signed("at", record.at_us)?,
        value,
        reason
    ])?)
}

/// Whether a record has to be written; `false` if it exists. `more` counts records of its episode that are
/// about to be written. The inner error refuses only this record: its episode is unknown or was removed, or
/// has [`MAX_SCORES`] records. The outer error is a failure of the index and ends the call.
pub(crate) fn is_new(
    connection: &Connection,
    record: &ScoreRecord,
    more: usize,
) -> Result<Result<bool, ScoreRefused>, StoreError> {
    let episode = || record.episode.clone();
    let mut query =
        connection.prepare_cached("SELECT segment IS NOT NULL FROM episodes WHERE episode = ?1")?;
    let there: Option<bool> = query
        .query_row([record.episode.as_str()], |r| r.get(0))
        .optional()?;
    match there {
        None => return Ok(Err(ScoreRefused::UnknownEpisode { episode: episode() })),
        Some(false) => return Ok(Err(ScoreRefused::Collected { episode: episode() })),
        Some(true) => {}
    }
    if holds(connection, record)? {
        return Ok(Ok(false));
    }
    let mut query = connection.prepare_cached("SELECT COUNT(*) FROM scores WHERE episode = ?1")?;
    let count: i64 = query.query_row([record.episode.as_str()], |r| r.get(0))?;
    if count + more as i64 >= MAX_SCORES as i64 {
        return Ok(Err(ScoreRefused::TooMany { episode: episode() }));
    }
    Ok(Ok(true))
}

/// Reads a record from its row. A row without value and reason is unscored, with an empty reason.
fn record(row: &Row<'_>) -> rusqlite::Result<ScoreRecord> {
    let value: Option<f64> = row.get("value")?;
    let reason: Option<String> = row.get("reason")?;
    Ok(ScoreRecord {
        episode: EpisodeId(row.get("episode")?),
        name: row.get("name")?,
        source: row.get("source")?,
        at_us: row.get::<_, i64>("at_us")?.max(0) as u64,
        score: match value {
            Some(value) => Score::Value(value),
            None => Score::Unscored(reason.unwrap_or_default()),
        },
    })
}

/// Returns all records of an episode in order of arrival.
pub(crate) fn of_episode(
    connection: &Connection,
    episode: &str,
) -> Result<Vec<ScoreRecord>, StoreError> {
    let sql = "SELECT * FROM scores WHERE episode = ?1 ORDER BY seq";
    rows::all(connection, sql, [episode], record)
}

/// Returns the records after `after`, in order of arrival. `limit` is clamped to 1 to [`MAX_PAGE`]. The end
/// of the page is the cursor of the next one; for an empty page it is `after`, so that a reader can ask again
/// later.
pub(crate) fn page(
    connection: &Connection,
    after: Cursor,
    limit: usize,
) -> Result<ScorePage, StoreError> {
    let sql = "SELECT * FROM scores WHERE seq > ?1 ORDER BY seq LIMIT ?2";
    let from = i64::try_from(after.0).unwrap_or(i64::MAX);
    let limit = limit.clamp(1, MAX_PAGE) as i64;
    let rows = rows::all(connection, sql, [from, limit], |r| {
        Ok((r.get::<_, i64>("seq")?, record(r)?))
    })?;
    Ok(ScorePage {
        end: rows.last().map_or(after, |r| Cursor(r.0.max(0) as u64)),
        scores: rows.into_iter().map(|r| r.1).collect(),
    })
}

/// Stores the id of an episode in an external system. One id may belong to several episodes, and one episode
/// may have several ids. An existing pair stays unchanged.
pub(crate) fn name_externally(
    tx: &Transaction<'_>,
    external: &str,
    episode: &str,
) -> Result<(), StoreError> {
    let mut statement = tx.prepare_cached(
        "INSERT INTO externals (external, episode) VALUES (?1, ?2) ON CONFLICT DO NOTHING",
    )?;
    statement.execute([external, episode])?;
    let names: [&dyn rusqlite::ToSql; 2] = [&external, &episode];
    checksums::seal(tx, "externals", "external = ?1 AND episode = ?2", &names)
}

/// Returns the readable episodes with this external id, in commit order, at most `limit`. `limit` is clamped
/// to 1 to [`MAX_PAGE`].
pub(crate) fn named(
    connection: &Connection,
    external: &str,
    limit: usize,
) -> Result<Vec<EpisodeId>, StoreError> {
    let sql = "SELECT e.episode FROM externals x JOIN episodes e ON e.episode = x.episode
         WHERE x.external = ?1 AND e.segment IS NOT NULL ORDER BY e.seq LIMIT ?2";
    let limit = limit.clamp(1, MAX_PAGE) as i64;
    rows::all(connection, sql, (external, limit), |r| {
        Ok(EpisodeId(r.get(0)?))
    })
}

/// Deletes the scores and external ids of an episode.
pub(crate) fn forget(tx: &Transaction<'_>, episode: &str) -> Result<(), StoreError> {
    for sql in [
        "DELETE FROM scores WHERE episode = ?1",
        "DELETE FROM externals WHERE episode = ?1",
    ] {
        tx.prepare_cached(sql)?.execute([episode])?;
    }
    Ok(())
}

/// Deletes the scores of unreadable episodes. This runs at the end of a rebuild, since a score can precede
/// its trace if garbage collection moved the trace.
pub(crate) fn prune(tx: &Transaction<'_>) -> Result<(), StoreError> {
    prune_gone(tx, "scores", "episode")
}

/// Deletes the rows of a table whose `column` names an unreadable episode.
pub(crate) fn prune_gone(
    tx: &Transaction<'_>,
    table: &'static str,
    column: &'static str,
) -> Result<(), StoreError> {
    tx.execute(
        &format!(
            "DELETE FROM {table} WHERE NOT EXISTS (
                SELECT 1 FROM episodes e WHERE e.{column} = {table}.{column} AND e.segment IS NOT NULL)"
        ),
        [],
    )?;
    Ok(())
}

/// Returns the rows of a segment from a byte offset on.
pub(crate) fn rows_from(
    connection: &Connection,
    segment: u32,
    from: u64,
) -> Result<Vec<i64>, StoreError> {
    let sql = "SELECT seq FROM scores WHERE segment = ?1 AND offset >= ?2 ORDER BY seq";
    let place = [i64::from(segment), signed("offset", from)?];
    rows::all(connection, sql, place, |r| r.get(0))
}

/// Reads a row's record; `None` if the row does not exist.
pub(crate) fn row(connection: &Connection, seq: i64) -> Result<Option<ScoreRecord>, StoreError> {
    let mut query = connection.prepare_cached("SELECT * FROM scores WHERE seq = ?1")?;
    Ok(query.query_row([seq], record).optional()?)
}
