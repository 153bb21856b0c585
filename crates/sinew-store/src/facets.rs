//! What episodes are found by besides the columns of their row: environment, versions, last turn.
//!
//! A table of its own, so that an index of an earlier format is read as it is. A store that is opened for
//! writing fills it for the episodes that lack it, a page at a time, so that a kill in between costs a page.

use crate::codec;
use crate::error::StoreError;
use crate::segment::{Location, SegmentDir};
use crate::signed::signed;
use crate::sums;
use rusqlite::{Connection, OptionalExtension, Transaction, params};
use sinew_types::{TokenKind, Trace};

/// Episodes whose facets are made in one transaction.
const PAGE: usize = 500;

/// Facets of one episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facets {
    /// [`Trace::environment`].
    pub(crate) env: String,
    /// Oldest and newest policy version of its sampled tokens; `None` without any.
    pub(crate) versions: Option<(u64, u64)>,
    /// Number of its last sampled turn, from 1; 0 without any.
    pub(crate) last_turn: u32,
}

impl Facets {
    /// The facets of a trace.
    pub(crate) fn of(trace: &Trace) -> Self {
        let sampled = || trace.nodes.iter().filter(|n| n.kind == TokenKind::Sampled);
        let versions = || {
            sampled()
                .flat_map(|n| &n.versions)
                .map(|span| span.version.0)
        };
        Self {
            env: trace.environment().to_owned(),
            versions: versions().min().zip(versions().max()),
            last_turn: sampled().map(|n| n.turn).max().unwrap_or(0),
        }
    }
}

/// Enters the facets of an episode that has a row, unless they are there.
pub(crate) fn insert(
    tx: &Transaction<'_>,
    episode: &str,
    facets: &Facets,
) -> Result<(), StoreError> {
    let mut find = tx.prepare_cached("SELECT seq FROM episodes WHERE episode = ?1")?;
    let Some(seq): Option<i64> = find.query_row([episode], |r| r.get(0)).optional()? else {
        return Ok(());
    };
    let version = |v: Option<u64>| v.map(|v| signed("version", v)).transpose();
    let mut insert = tx.prepare_cached(
        "INSERT OR IGNORE INTO facets (seq, env, first_version, last_version, last_turn)
         VALUES (?1, ?2, ?3, ?4, ?5)",
    )?;
    insert.execute(params![
        seq,
        facets.env,
        version(facets.versions.map(|v| v.0))?,
        version(facets.versions.map(|v| v.1))?,
        facets.last_turn,
    ])?;
    sums::seal(tx, "facets", "seq = ?1", &[&seq])
}

/// Removes the facets of episodes that are gone.
pub(crate) fn prune(tx: &Transaction<'_>) -> Result<(), StoreError> {
    tx.execute(
        "DELETE FROM facets WHERE NOT EXISTS (
            SELECT 1 FROM episodes e WHERE e.seq = facets.seq AND e.segment IS NOT NULL)",
        [],
    )?;
    Ok(())
}

/// Makes the facets of all episodes that an earlier format left without any.
///
/// # Errors
/// If a trace cannot be read or the index cannot be written. What was made before stays.
pub(crate) fn fill(segments: &SegmentDir, connection: &mut Connection) -> Result<(), StoreError> {
    let mut after = 0;
    loop {
        let page = lacking(connection, after)?;
        let Some((last, _)) = page.last() else {
            return Ok(());
        };
        after = *last;
        let tx = connection.transaction()?;
        for (_, at) in page {
            let record = segments.read(at)?;
            let trace: Result<Trace, String> =
                codec::decode(record.codec, record.raw_len, &record.payload);
            let trace = trace.map_err(|reason| StoreError::Corrupt {
                path: segments.path_of(at.segment),
                offset: at.offset,
                reason,
            })?;
            insert(&tx, trace.episode.as_str(), &Facets::of(&trace))?;
        }
        tx.commit()?;
    }
}

/// The next episodes without facets, with where they lie.
fn lacking(connection: &Connection, after: i64) -> Result<Vec<(i64, Location)>, StoreError> {
    let mut query = connection.prepare_cached(
        "SELECT seq, segment, offset, bytes FROM episodes
         WHERE seq > ?1 AND segment IS NOT NULL
           AND NOT EXISTS (SELECT 1 FROM facets f WHERE f.seq = episodes.seq)
         ORDER BY seq LIMIT ?2",
    )?;
    let rows = query.query_map(params![after, PAGE as i64], |row| {
        let at = Location {
            segment: row.get("segment")?,
            offset: row.get::<_, i64>("offset")?.max(0) as u64,
            bytes: row.get("bytes")?,
        };
        Ok((row.get("seq")?, at))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}
