//! Reads a store that another process may be writing.

use crate::error::{RecordError, StoreError, guard};
use crate::index;
use crate::ledger;
use crate::listing;
use crate::packed;
use crate::schema;
use crate::score::{ScoreRecord, ScoreRefused};
use crate::segment::SegmentDir;
use crate::store::{Filter, Page, StoreStats, TraceStore, TrainedBatch};
use rusqlite::Connection;
use sinew_types::{EpisodeId, Trace};
use std::path::Path;
use std::sync::{Arc, Mutex};

/// A store opened for reading: that of a folder, or any other. Nothing is written through it, and a writer is
/// not blocked.
#[derive(Debug)]
pub struct StoreReader(Source);

#[derive(Debug)]
enum Source {
    Folder(FolderReader),
    Store(Arc<dyn TraceStore>),
}

/// The store of a folder. It takes no lock, writes nothing and repairs nothing. It never sees a partial
/// commit, since the index lists only durable records. The index is checked at opening, and each record when
/// it is read. Each call sees the commits of that moment. Commits that a crash left unindexed appear after a
/// writer has opened the store.
#[derive(Debug)]
pub(crate) struct FolderReader {
    /// Segment files, opened for reading only.
    segments: SegmentDir,
    /// Index, opened read-only. On a read-only medium without a write-ahead log, SQLite reads only the
    /// database file.
    connection: Mutex<Connection>,
}

impl FolderReader {
    /// Opens the store in `directory`, which must exist.
    pub(crate) fn open(directory: &Path) -> Result<Self, StoreError> {
        let path = directory.join(schema::FILE_NAME);
        if !path.is_file() {
            return Err(StoreError::Missing {
                path: directory.to_owned(),
            });
        }
        Ok(Self {
            segments: SegmentDir::existing(directory.join("segments")),
            connection: Mutex::new(index::open_read_only(&path)?),
        })
    }

    /// Whether the store would accept a score; `false` if it already has it.
    pub(crate) fn admits(
        &self,
        record: &ScoreRecord,
    ) -> Result<Result<bool, ScoreRefused>, StoreError> {
        match record.checked() {
            Ok(record) => ledger::is_new(&*guard(&self.connection)?, &record, 0),
            Err(refused) => Ok(Err(refused)),
        }
    }

    pub(crate) fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        ledger::of_episode(&*guard(&self.connection)?, episode.as_str())
    }

    pub(crate) fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError> {
        ledger::named(&*guard(&self.connection)?, external, limit)
    }

    /// Counts, and the bytes of all segment files.
    fn stats(&self) -> Result<StoreStats, StoreError> {
        let bytes = self.segments.list()?.iter().map(|(_, bytes)| bytes).sum();
        let stats = index::stats(&*guard(&self.connection)?)?;
        Ok(StoreStats { bytes, ..stats })
    }
}

impl StoreReader {
    /// Opens the store in `directory`, which must exist.
    ///
    /// # Errors
    /// If it holds no store, or its index cannot be read.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        FolderReader::open(directory).map(|folder| Self(Source::Folder(folder)))
    }

    /// A reader of a store that is open.
    pub fn of(store: Arc<dyn TraceStore>) -> Self {
        Self(Source::Store(store))
    }

    /// Returns the trace of an episode; `None` if the store does not contain it.
    pub fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        match &self.0 {
            Source::Folder(folder) => read_trace(&folder.segments, &folder.connection, episode),
            Source::Store(store) => store.get(episode),
        }
    }

    /// Episodes in the order of their commits.
    pub fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        match &self.0 {
            Source::Folder(folder) => listing::list(&*guard(&folder.connection)?, filter),
            Source::Store(store) => store.list(filter),
        }
    }

    /// Batches that were trained, in order.
    pub fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        match &self.0 {
            Source::Folder(folder) => index::batches(&*guard(&folder.connection)?),
            Source::Store(store) => store.trained_batches(),
        }
    }

    /// Returns the batches of an update; there are several if their marks differ.
    pub fn batches_of(&self, step: u64) -> Result<Vec<TrainedBatch>, StoreError> {
        match &self.0 {
            Source::Folder(folder) => index::batches_of(&*guard(&folder.connection)?, step),
            Source::Store(store) => store.batches_of(step),
        }
    }

    /// All scores of an episode, in the order in which they came.
    pub fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        match &self.0 {
            Source::Folder(folder) => folder.scores(episode),
            Source::Store(store) => store.scores(episode),
        }
    }

    /// Counts and sizes of the store.
    pub fn stats(&self) -> Result<StoreStats, StoreError> {
        match &self.0 {
            Source::Folder(folder) => folder.stats(),
            Source::Store(store) => store.stats(),
        }
    }
}

/// Finds an episode in the index and reads its record.
pub(crate) fn read_trace(
    segments: &SegmentDir,
    connection: &Mutex<Connection>,
    episode: &EpisodeId,
) -> Result<Option<Trace>, StoreError> {
    // The record may move once between the look-up and the read: gc copies it.
    for last in [false, true] {
        let found = index::find(&*guard(connection)?, episode.as_str())?;
        let Some(at) = found else { return Ok(None) };
        let record = match segments.read(at) {
            Err(StoreError::Io { .. }) if !last => continue,
            read => read?,
        };
        let corrupt = |reason| StoreError::Corrupt {
            path: segments.path_of(at.segment),
            offset: at.offset,
            reason,
        };
        let trace =
            packed::decode(record.codec, record.raw_len, &record.payload).map_err(corrupt)?;
        if &trace.episode != episode {
            return Err(corrupt(RecordError::OtherEpisode(trace.episode)));
        }
        return Ok(Some(trace));
    }
    Ok(None)
}
