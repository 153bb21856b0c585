//! Opening a store: the index catches up with the segments, torn tails go.

use crate::codec::{self, Mark};
use crate::error::StoreError;
use crate::index;
use crate::segment::{FILE_HEADER, Record, RecordKind, SegmentDir};
use crate::store::EpisodeSummary;
use rusqlite::{Connection, Transaction};
use sinew_types::Trace;
use std::fs::OpenOptions;
use std::path::PathBuf;

/// What opening a store found and repaired.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were in a segment and not in the index.
    pub indexed: u64,
    /// Bytes of an unfinished commit that were cut off the newest segment.
    pub cut_bytes: u64,
    /// Files that gc had given up.
    pub removed_segments: u64,
    /// Older files that are shorter than the index says, or unreadable from some byte on. What
    /// lies there cannot be read; everything else can.
    pub damaged: Vec<PathBuf>,
}

/// Returns the segment to go on in, and its length (0: it does not exist yet).
pub(crate) fn run(
    segments: &SegmentDir,
    connection: &mut Connection,
) -> Result<(Recovery, (u32, u64)), StoreError> {
    let mut recovery = Recovery::default();
    let known = index::segments(connection)?;
    for &(number, _, dead) in &known {
        if dead {
            segments.remove(number)?;
            index::bury_segment(connection, number)?;
            recovery.removed_segments += 1;
        }
    }
    let files = segments.list()?;
    let newest = files.last().map(|f| f.0);
    let mut end = (newest.map_or(0, |n| n + 1), 0);
    for (number, length) in files {
        let indexed = known.iter().find(|k| k.0 == number && !k.2);
        let indexed = indexed.map_or(0, |k| k.1);
        let last = newest == Some(number);
        if length < indexed {
            recovery.damaged.push(segments.path_of(number));
            continue;
        }
        let good = catch_up(segments, connection, number, indexed, &mut recovery)?;
        if good < length && !last {
            recovery.damaged.push(segments.path_of(number));
        }
        if last {
            recovery.cut_bytes += length - good;
            cut(segments, number, good)?;
            end = (number, good);
        }
    }
    let missing = |k: &&(u32, u64, bool)| !k.2 && !segments.path_of(k.0).exists();
    let missing = known.iter().filter(missing).map(|k| segments.path_of(k.0));
    recovery.damaged.extend(missing);
    let highest = known.iter().map(|k| k.0 + 1).max().unwrap_or(0);
    if end.1 == 0 {
        end.0 = end.0.max(highest);
    }
    Ok((recovery, end))
}

/// Indexes what lies behind `indexed`; returns where the last whole frame ends.
fn catch_up(
    segments: &SegmentDir,
    connection: &mut Connection,
    number: u32,
    indexed: u64,
    recovery: &mut Recovery,
) -> Result<u64, StoreError> {
    let tx = connection.transaction()?;
    let good = segments.scan(number, indexed, |record| {
        recovery.indexed += 1;
        enter(segments, &tx, &record)
    })?;
    if good > indexed {
        index::set_indexed(&tx, number, good)?;
    }
    tx.commit()?;
    Ok(good)
}

fn enter(segments: &SegmentDir, tx: &Transaction<'_>, record: &Record) -> Result<(), StoreError> {
    let corrupt = |reason| StoreError::Corrupt {
        path: segments.path_of(record.location.segment),
        offset: record.location.offset,
        reason,
    };
    let (codec, raw_len, payload) = (record.codec, record.raw_len, &record.payload);
    match record.kind {
        RecordKind::Trace => {
            let trace: Trace = codec::decode(codec, raw_len, payload).map_err(corrupt)?;
            index::insert(tx, &EpisodeSummary::of(&trace), record.location)
        }
        RecordKind::Mark => {
            let mark: Mark = codec::decode(codec, raw_len, payload).map_err(corrupt)?;
            if index::batch(tx, &mark.batch)?.is_some() {
                return Ok(());
            }
            index::mark(tx, &mark, record.location)
        }
    }
}

/// Makes a file end at `length`; less than a header is begun anew by the writer.
fn cut(segments: &SegmentDir, number: u32, length: u64) -> Result<(), StoreError> {
    let path = segments.path_of(number);
    let length = if length < FILE_HEADER { 0 } else { length };
    let file = OpenOptions::new().write(true).open(&path);
    let done = file.and_then(|f| {
        if f.metadata()?.len() > length {
            f.set_len(length)?;
            f.sync_all()?;
        }
        Ok(())
    });
    done.map_err(|e| StoreError::io(&path, e))
}
