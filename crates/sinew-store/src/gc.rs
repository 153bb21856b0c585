//! Garbage collection: removes traces by copying the live records of a segment and removing the file.
//!
//! The order of the steps ensures that a crash neither loses nor revives a record. First the copies are made
//! durable. Then one transaction points the index to the copies and marks the old file as dead. Then the file
//! is removed, or at the next opening after a crash.

use crate::error::StoreError;
use crate::facets;
use crate::index::{self, Table};
use crate::ledger;
use crate::segment::{Frame, Location, SegmentDir, Writer};
use crate::store::GcReport;
use rusqlite::Connection;
use std::collections::{BTreeSet, HashSet};

/// Size in bytes at which a frame of copies is written.
const FRAME_BYTES: u64 = 8 << 20;

/// Removes the selected episodes, segment by segment.
///
/// # Errors
/// If the medium or the index fails. Segments that were already processed stay so.
pub(crate) fn run(
    segments: &SegmentDir,
    writer: &mut Writer,
    connection: &mut Connection,
    doomed: Vec<(String, Location)>,
) -> Result<GcReport, StoreError> {
    let mut affected: BTreeSet<u32> = doomed.iter().map(|(_, at)| at.segment).collect();
    affected.extend(index::lifeless(connection)?);
    if affected.contains(&writer.segment()) {
        // Copies must not land in a file that is about to go.
        writer.abandon();
    }
    let doomed: HashSet<String> = doomed.into_iter().map(|(name, _)| name).collect();
    let mut report = GcReport::default();
    for &segment in &affected {
        let before: u64 = report.bytes;
        report.bytes = before + collect(segments, writer, connection, segment, &doomed)?;
    }
    let tx = connection.transaction()?;
    facets::prune(&tx)?;
    tx.commit()?;
    report.episodes = doomed.len() as u64;
    Ok(report)
}

/// Processes one segment; returns the number of bytes that it frees.
fn collect(
    segments: &SegmentDir,
    writer: &mut Writer,
    connection: &mut Connection,
    segment: u32,
    doomed: &HashSet<String>,
) -> Result<u64, StoreError> {
    let mut gone = Vec::new();
    let mut moved: Vec<(Table, String, Location)> = Vec::new();
    let mut copied = 0;
    let mut pending = PendingCopies::default();
    for table in [Table::Batches, Table::Episodes, Table::Scores] {
        for (name, at) in index::living(connection, table, segment)? {
            if table == Table::Episodes && doomed.contains(&name) {
                gone.push(name);
                continue;
            }
            pending.copy(segments, at)?;
            pending.names.push((table, name));
            if pending.frame.len() >= FRAME_BYTES {
                copied += pending.write(writer, &mut moved)?;
            }
        }
    }
    copied += pending.write(writer, &mut moved)?;
    let freed = file_length(segments, segment)?;
    let tx = connection.transaction()?;
    for (table, name, to) in &moved {
        index::relocate(&tx, *table, name, Some(*to))?;
    }
    for name in &gone {
        index::relocate(&tx, Table::Episodes, name, None)?;
        ledger::forget(&tx, name)?;
    }
    index::kill_segment(&tx, segment)?;
    if !moved.is_empty() {
        index::set_indexed(&tx, writer.segment(), writer.length())?;
    }
    tx.commit()?;
    segments.remove(segment)?;
    index::bury_segment(connection, segment)?;
    Ok(freed.saturating_sub(copied))
}

/// Copies that have not been written.
#[derive(Default)]
struct PendingCopies {
    /// Copied records, at most about [`FRAME_BYTES`].
    frame: Frame,
    /// Index rows of these records, in the same order.
    names: Vec<(Table, String)>,
}

impl PendingCopies {
    /// Reads and verifies a record, and copies it without decoding.
    fn copy(&mut self, segments: &SegmentDir, at: Location) -> Result<(), StoreError> {
        let record = segments.read(at)?;
        self.frame
            .push_parts(record.kind, record.codec, record.raw_len, &record.payload);
        Ok(())
    }

    /// Writes the copies and updates their locations. Returns the number of written bytes.
    fn write(
        &mut self,
        writer: &mut Writer,
        moved: &mut Vec<(Table, String, Location)>,
    ) -> Result<u64, StoreError> {
        if self.frame.is_empty() {
            return Ok(0);
        }
        let frame = std::mem::take(&mut self.frame);
        let names = std::mem::take(&mut self.names);
        let locations = writer.append(&frame)?;
        let placed = names.into_iter().zip(locations);
        moved.extend(placed.map(|((table, name), at)| (table, name, at)));
        Ok(frame.len())
    }
}

/// Returns the length of a segment's file; 0 if it does not exist.
fn file_length(segments: &SegmentDir, segment: u32) -> Result<u64, StoreError> {
    let files = segments.list()?;
    let found = files.iter().find(|(number, _)| *number == segment);
    Ok(found.map_or(0, |(_, length)| *length))
}
