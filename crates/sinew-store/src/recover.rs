//! Opening a store: the index catches up with the segments, torn tails go.
//!
//! A tail is torn if the newest file ends in what is no whole frame, whether or not the index knows
//! of it: a medium that lost power may have lost what it had confirmed. Damage with something
//! readable behind it is no torn tail. It stays, and is told when it is read.

use crate::codec::{self, Mark};
use crate::error::StoreError;
use crate::index;
use crate::segment::{FILE_HEADER, Record, RecordKind, SegmentDir};
use crate::store::{EpisodeSummary, TrainedBatch};
use rusqlite::{Connection, Transaction};
use sinew_types::{EpisodeId, Trace};
use std::fs::OpenOptions;
use std::path::PathBuf;

/// What opening a store found and repaired.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Records that were in a segment and not in the index.
    pub indexed: u64,
    /// Bytes of an unfinished commit that were cut off the newest segment.
    pub cut_bytes: u64,
    /// Committed episodes that lay in a torn tail and that no batch had trained: unknown now, so
    /// that they can be run and committed again.
    pub torn: Vec<EpisodeId>,
    /// Those of a torn tail that a batch had trained: known as such, but not to be read.
    pub torn_trained: Vec<EpisodeId>,
    /// Files that gc had given up.
    pub removed_segments: u64,
    /// Older files that are shorter than the index says, or unreadable from some byte on. What
    /// lies there cannot be read; everything else can.
    pub damaged: Vec<PathBuf>,
}

/// What opening found.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    pub(crate) recovery: Recovery,
    /// The segment to go on in, and its length (0: it does not exist yet).
    pub(crate) end: (u32, u64),
    /// Batches whose marks were torn: the index still has them, the segments must get them again.
    pub(crate) unmarked: Vec<TrainedBatch>,
}

/// Brings segments and index together.
pub(crate) fn run(
    segments: &SegmentDir,
    connection: &mut Connection,
) -> Result<Opened, StoreError> {
    let mut recovery = Recovery::default();
    let mut unmarked = Vec::new();
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
        let mut indexed = indexed;
        if last && let Some(whole) = torn_at(segments, connection, number, length, indexed)? {
            unmarked = index::batches_from(connection, number, whole)?;
            forget(connection, number, whole, &mut recovery)?;
            indexed = whole;
        }
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
    Ok(Opened {
        recovery,
        end,
        unmarked,
    })
}

/// Where the newest file is whole up to, if the end of what the index knows of it cannot be read.
/// `None` also if something behind the damage can be: then it is more than a torn tail.
fn torn_at(
    segments: &SegmentDir,
    connection: &Connection,
    number: u32,
    length: u64,
    indexed: u64,
) -> Result<Option<u64>, StoreError> {
    let mut readable = Vec::new();
    let mut first_torn = None;
    for at in index::records(connection, number)? {
        match segments.read(at) {
            Ok(_) if first_torn.is_none() => break,
            Ok(_) => readable.push(at.offset),
            Err(StoreError::Corrupt { .. }) if readable.is_empty() => first_torn = Some(at.offset),
            Err(StoreError::Corrupt { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    if first_torn.is_none() && length >= indexed {
        return Ok(None);
    }
    let whole = segments.scan(number, 0, |_| Ok(()))?;
    // Records of the torn frame itself may have survived: a commit is there whole or not at all.
    let own = segments.frame_end(number, whole)?.unwrap_or(whole);
    let behind = readable.iter().any(|&offset| offset >= whole.max(own));
    Ok((!behind).then_some(whole))
}

/// Takes what lay behind `whole` out of the index.
fn forget(
    connection: &mut Connection,
    number: u32,
    whole: u64,
    recovery: &mut Recovery,
) -> Result<(), StoreError> {
    let tx = connection.transaction()?;
    let (torn, trained) = index::forget(&tx, number, whole)?;
    index::set_indexed(&tx, number, whole)?;
    tx.commit()?;
    recovery.torn.extend(torn);
    recovery.torn_trained.extend(trained);
    Ok(())
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
