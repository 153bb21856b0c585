//! Recovery at opening: updates the index from the segments, and cuts off torn tails.
//!
//! A tail is torn if the newest file ends with an unfinished write, whether or not the index lists it: a disk
//! that lost power may have lost confirmed data. Every other unreadable part is damage. Complete frames after
//! damage are indexed, and the file stays unchanged. A store with damage is opened only if the caller accepts
//! the loss; otherwise nothing is changed.

use crate::codec::{self, Mark};
use crate::damage::{Damage, Loss, Recovery};
use crate::error::StoreError;
use crate::index::{self, Entry, Table};
use crate::ledger;
use crate::packed;
use crate::score::ScoreRecord;
use crate::segment::{FILE_HEADER, Location, Record, RecordKind, SegmentDir};
use crate::store::TrainedBatch;
use rusqlite::{Connection, Transaction};
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::path::PathBuf;

/// Results of recovery.
#[derive(Debug, Default)]
pub(crate) struct RecoveryResult {
    /// Report for the caller of the store.
    pub(crate) recovery: Recovery,
    /// The segment to append to, and its length (0 if it does not exist).
    pub(crate) end: (u32, u64),
    /// Batches whose marks cannot be read. The index still has them, and they must be written to the segments
    /// again.
    pub(crate) unmarked: Vec<TrainedBatch>,
    /// Rows of scores that must be written again for the same reason.
    pub(crate) unwritten: BTreeSet<i64>,
}

/// Makes segments and index consistent. With `accept_loss`, a damaged store is opened too: every indexed
/// record is then read. Unreadable episodes are forgotten; unreadable marks and scores are listed in the
/// result, to be written again.
pub(crate) fn run(
    segments: &SegmentDir,
    connection: &mut Connection,
    accept_loss: bool,
) -> Result<RecoveryResult, StoreError> {
    let removed_segments = remove_dead(segments, connection)?;
    let tx = connection.transaction()?;
    let mut pass = RecoveryPass {
        segments,
        tx: &tx,
        accept_loss,
        opened: RecoveryResult::default(),
        bad_headers: Vec::new(),
        cut: None,
    };
    pass.opened.recovery.removed_segments = removed_segments;
    pass.files()?;
    pass.give_up()?;
    let RecoveryPass {
        opened,
        bad_headers,
        cut,
        ..
    } = pass;
    if !opened.recovery.damaged.is_empty() && !accept_loss {
        return Err(StoreError::Damaged(Box::new(Loss::of(&opened.recovery))));
    }
    tx.commit()?;
    for segment in bad_headers {
        segments.restore_header(segment)?;
    }
    if let Some((segment, length)) = cut {
        self::cut(segments, segment, length)?;
    }
    Ok(opened)
}

/// Removes files that garbage collection marked as dead. Returns their number.
fn remove_dead(segments: &SegmentDir, connection: &Connection) -> Result<u64, StoreError> {
    let known = index::segments(connection)?;
    let dead: Vec<u32> = known.iter().filter(|k| k.2).map(|k| k.0).collect();
    for &number in &dead {
        segments.remove(number)?;
        index::bury_segment(connection, number)?;
    }
    Ok(dead.len() as u64)
}

/// State at the end of the newest file, compared with the index.
enum Tail {
    /// The indexed records can be read.
    Known,
    /// The file is torn after this byte offset.
    Torn(u64),
    /// The end cannot be read, and a torn write does not explain it.
    Damaged,
}

/// One pass over all files. It changes only the transaction.
struct RecoveryPass<'a> {
    /// The segment files, unchanged.
    segments: &'a SegmentDir,
    /// Transaction with all changes of the index.
    tx: &'a Transaction<'a>,
    /// Whether to continue without unreadable parts.
    accept_loss: bool,
    /// Results so far.
    opened: RecoveryResult,
    /// Files with a damaged header, which has to be written again. Their records are checked separately.
    bad_headers: Vec<u32>,
    /// The newest file, and the length to cut it to.
    cut: Option<(u32, u64)>,
}

impl RecoveryPass<'_> {
    /// Processes all files, the oldest first; then those that the index lists but that do not exist.
    fn files(&mut self) -> Result<(), StoreError> {
        let known = index::segments(self.tx)?;
        let files = self.segments.list()?;
        let newest = files.last().map(|f| f.0);
        self.opened.end = (newest.map_or(0, |n| n + 1), 0);
        for &(number, length) in &files {
            let indexed = known.iter().find(|k| k.0 == number).map_or(0, |k| k.1);
            self.file(number, length, indexed, newest == Some(number))?;
        }
        for &(number, indexed, _) in &known {
            if files.iter().all(|f| f.0 != number) {
                self.damage(number, 0, indexed);
                index::bury_segment(self.tx, number)?;
            }
        }
        let highest = known.iter().map(|k| k.0 + 1).max().unwrap_or(0);
        if self.opened.end.1 == 0 {
            self.opened.end.0 = self.opened.end.0.max(highest);
        }
        Ok(())
    }

    /// Processes one file: its tail if it is the newest, unindexed records, and unreadable parts.
    fn file(
        &mut self,
        number: u32,
        length: u64,
        mut indexed: u64,
        last: bool,
    ) -> Result<(), StoreError> {
        if !self.segments.has_header(number, self.accept_loss)? {
            self.damage(number, 0, FILE_HEADER);
        }
        if last {
            match self.tail(number, length, indexed)? {
                Tail::Known => {}
                Tail::Torn(whole) => {
                    self.forget_tail(number, whole)?;
                    indexed = whole;
                }
                Tail::Damaged => return index::set_indexed(self.tx, number, length),
            }
        } else if length < indexed {
            self.damage(number, length, indexed);
            return index::set_indexed(self.tx, number, length);
        } else if length == indexed && length < FILE_HEADER {
            // Its loss was accepted earlier.
            return Ok(());
        }
        let good = self.catch_up(number, indexed)?;
        let torn = last && good < length && self.segments.looks_torn(number, good)?;
        if good < length && !torn {
            self.damage(number, good, length);
            return index::set_indexed(self.tx, number, length);
        }
        if good > indexed {
            index::set_indexed(self.tx, number, good)?;
        }
        if last {
            self.opened.recovery.cut_bytes += length - good;
            self.cut = Some((number, good));
            self.opened.end = (number, good);
        }
        Ok(())
    }

    /// Checks the end of the newest file, if its last indexed record cannot be read or the file is shorter
    /// than its indexed part.
    fn tail(&mut self, number: u32, length: u64, indexed: u64) -> Result<Tail, StoreError> {
        let known = index::records(self.tx, number)?;
        let readable = known.first().map_or(Ok(true), |&at| self.readable(at))?;
        if readable && length >= indexed {
            return Ok(Tail::Known);
        }
        let scan = self
            .segments
            .scan(number, 0, self.accept_loss, |_| Ok(()))?;
        for &(from, to) in &scan.gaps {
            // A gap without indexed records was accepted earlier.
            if known.iter().any(|at| (from..to).contains(&at.offset)) {
                self.damage(number, from, to);
            }
        }
        if scan.end > indexed {
            return Ok(Tail::Known);
        }
        if length <= scan.end || self.segments.looks_torn(number, scan.end)? {
            return Ok(Tail::Torn(scan.end));
        }
        self.damage(number, scan.end, length.max(indexed));
        Ok(Tail::Damaged)
    }

    /// Whether a record can be read and matches its checksum.
    ///
    /// # Errors
    /// Failures that do not concern the record, such as a refused permission.
    fn readable(&self, at: Location) -> Result<bool, StoreError> {
        match self.segments.read(at) {
            Ok(_) => Ok(true),
            Err(StoreError::Corrupt { .. }) => Ok(false),
            Err(StoreError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
                Ok(false)
            }
            Err(other) => Err(other),
        }
    }

    /// Records an unreadable range once.
    fn damage(&mut self, number: u32, from: u64, to: u64) {
        let path = self.segments.path_of(number);
        if (from, to) == (0, FILE_HEADER) && path.exists() && !self.bad_headers.contains(&number) {
            self.bad_headers.push(number);
        }
        let damage = Damage { path, from, to };
        let damaged = &mut self.opened.recovery.damaged;
        if !damaged.contains(&damage) {
            damaged.push(damage);
        }
    }

    /// Forgets indexed episodes after byte `whole`, and collects the marks and scores there, to write them
    /// again.
    fn forget_tail(&mut self, number: u32, whole: u64) -> Result<(), StoreError> {
        let marks = index::batches_from(self.tx, number, whole)?;
        self.opened.unmarked.extend(marks);
        let scores = ledger::rows_from(self.tx, number, whole)?;
        self.opened.unwritten.extend(scores);
        let names = index::episodes_from(self.tx, number, whole)?;
        let (torn, trained) = index::forget(self.tx, &names)?;
        index::set_indexed(self.tx, number, whole)?;
        self.opened.recovery.torn.extend(torn);
        self.opened.recovery.torn_trained.extend(trained);
        Ok(())
    }

    /// Indexes the records after `indexed`; returns the end of the last complete frame.
    fn catch_up(&mut self, number: u32, indexed: u64) -> Result<u64, StoreError> {
        let (segments, tx) = (self.segments, self.tx);
        let (mut entered, mut unreadable) = (0, Vec::new());
        let scan = segments.scan(number, indexed, self.accept_loss, |record| {
            match enter(segments, tx, &record) {
                Ok(()) => entered += 1,
                Err(StoreError::Corrupt { .. }) => unreadable.push(record.location),
                Err(other) => return Err(other),
            }
            Ok(())
        })?;
        self.opened.recovery.indexed += entered;
        for (from, to) in scan.gaps {
            self.damage(number, from, to);
        }
        for at in unreadable {
            self.damage(number, at.offset, at.offset + u64::from(at.bytes));
        }
        Ok(scan.end)
    }

    /// Forgets indexed episodes that cannot be read from the segments, and collects such marks and scores to
    /// write them again: those of damaged files, or of all files if the loss is accepted.
    fn give_up(&mut self) -> Result<(), StoreError> {
        let damaged: BTreeSet<PathBuf> = self.opened.recovery.damaged.iter().map(path).collect();
        let (mut lost, mut marks) = (Vec::new(), Vec::new());
        for number in index::located(self.tx)? {
            if !self.accept_loss && !damaged.contains(&self.segments.path_of(number)) {
                continue;
            }
            for (name, at) in index::living(self.tx, Table::Episodes, number)? {
                if !self.readable(at)? {
                    lost.push(name);
                }
            }
            for (name, at) in index::living(self.tx, Table::Batches, number)? {
                if !self.readable(at)? {
                    marks.extend(index::batch(self.tx, &name)?);
                }
            }
            for (name, at) in index::living(self.tx, Table::Scores, number)? {
                if !self.readable(at)? {
                    self.opened.unwritten.extend(name.parse::<i64>().ok());
                }
            }
        }
        let (lost, trained) = index::forget(self.tx, &lost)?;
        self.opened.recovery.lost = lost;
        self.opened.recovery.lost_trained = trained;
        ledger::prune(self.tx)?;
        let known: BTreeSet<String> = self.opened.unmarked.iter().map(batch).collect();
        marks.retain(|b| !known.contains(&b.batch));
        self.opened.unmarked.extend(marks);
        Ok(())
    }
}

fn path(damage: &Damage) -> PathBuf {
    damage.path.clone()
}

fn batch(batch: &TrainedBatch) -> String {
    batch.batch.clone()
}

/// Adds a record to the index if it is missing there, or if a newer mark replaces an older one.
fn enter(segments: &SegmentDir, tx: &Transaction<'_>, record: &Record) -> Result<(), StoreError> {
    let corrupt = |reason| StoreError::Corrupt {
        path: segments.path_of(record.location.segment),
        offset: record.location.offset,
        reason,
    };
    let (codec, raw_len, payload) = (record.codec, record.raw_len, &record.payload);
    match record.kind {
        RecordKind::Trace => {
            let trace = packed::decode(codec, raw_len, payload).map_err(corrupt)?;
            index::insert(tx, &Entry::of(&trace), record.location)
        }
        RecordKind::Score => {
            let score: ScoreRecord = codec::decode(codec, raw_len, payload).map_err(corrupt)?;
            ledger::insert(tx, &score, record.location).map(drop)
        }
        RecordKind::Mark => {
            let mark: Mark = codec::decode(codec, raw_len, payload).map_err(corrupt)?;
            // A later mark takes the place of an earlier one of its batch.
            if index::batch(tx, &mark.batch)?.is_some_and(|known| Mark::of(&known) == mark) {
                return Ok(());
            }
            index::mark(tx, &mark, record.location)
        }
    }
}

/// Cuts a file to `length`. If that is less than a header, the writer starts the file again.
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
