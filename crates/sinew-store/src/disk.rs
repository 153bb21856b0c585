//! [`DiskStore`]: segment files and their index.
//!
//! Writes go to the newest segment first and to the index afterwards, in one transaction. After a crash
//! between the two, the next opening adds the frame to the index. If the transaction fails, the frame is
//! removed again. Every call holds the lock `writer` while it appends, so that frames are in the order of
//! commits. Commits that wait for this lock are written together: see [`crate::group`].

use crate::codec::{self, Mark};
use crate::damage::Recovery;
use crate::error::{StoreError, guard};
use crate::fence::FenceFile;
use crate::gc;
use crate::group::{self, Group, PendingCommit};
use crate::index::{self, Entry, Table};
use crate::ledger;
use crate::listing;
use crate::packed;
use crate::private::private_dir;
use crate::queue::{self, DiskQueue, QueueLimits};
use crate::reader;
use crate::recover;
use crate::remake;
use crate::score::{ScoreBatch, ScoreRecord, ScoreRefused};
use crate::segment::{Frame, Location, RecordKind, SegmentDir, Writer};
use crate::sqlite_int::signed;
use crate::store::{
    self, CommitOutcome, Cursor, Filter, GcPolicy, GcReport, Page, ScorePage, StoreStats,
    TraceStore, TrainedBatch,
};
use rusqlite::Connection;
use sinew_types::{EpisodeId, Trace};
use std::collections::{BTreeSet, HashSet};
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Maximum bytes of one commit. Opening a store reads each unindexed commit into memory as a whole.
const MAX_FRAME: u64 = 1 << 30;

/// Options of a [`DiskStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreOptions {
    /// Maximum bytes of a segment file; a commit that would exceed them goes to a new file. Default 64 MiB. A
    /// commit is never split, so a file with a single commit may be larger.
    pub segment_bytes: u64,
    /// Limit on the bytes of all segment files together. Default 64 GiB. Batch marks are accepted above it,
    /// since their training is already done.
    pub max_bytes: u64,
    /// Limit on the uncompressed bytes of one trace. Default 256 MiB.
    pub max_trace_bytes: u32,
    /// Whether records are compressed with zstd.
    pub compress: bool,
    /// Whether a store with unreadable parts is opened without them: see [`DiskStore::recovery`].
    pub accept_loss: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            max_bytes: 64 << 30,
            max_trace_bytes: 256 << 20,
            compress: true,
            accept_loss: false,
        }
    }
}

/// A store in one directory: `segments/*.seg`, `index.sqlite`, `lock`, and `owner.sqlite` once a number was
/// taken. Only one process may open it for writing.
#[derive(Debug)]
pub struct DiskStore {
    pub(crate) directory: PathBuf,
    /// Segment files, a log of all commits.
    pub(crate) segments: SegmentDir,
    /// Options given at opening.
    pub(crate) options: StoreOptions,
    /// Writer of the log. If both locks are needed, this one is taken before `connection`.
    pub(crate) writer: Mutex<Writer>,
    /// The index.
    pub(crate) connection: Mutex<Connection>,
    /// Commits that wait for the lock `writer`.
    waiting: Group,
    /// Nanoseconds that callers have waited for durable writes.
    waited_ns: AtomicU64,
    recovery: Recovery,
    /// The newest owner. A commit locks it after the other two.
    fence: FenceFile,
    /// Lock file, held while the store is open.
    _lock: File,
}

impl DiskStore {
    /// Opens the store in `directory`, or creates one. Removes an unfinished commit of a crash, indexes
    /// unindexed commits, and rebuilds a damaged index; see [`DiskStore::recovery`].
    ///
    /// # Errors
    /// [`StoreError::Damaged`] if committed data cannot be read and the options do not accept this loss.
    /// Nothing is changed in that case.
    pub fn open(directory: &Path, options: StoreOptions) -> Result<Self, StoreError> {
        private_dir(directory).map_err(|e| StoreError::io(directory, e))?;
        let lock = lock(directory)?;
        let segments = SegmentDir::open(directory.join("segments"))?;
        let mut found = remake::open(directory)?;
        let mut opened = recover::run(&segments, &mut found.connection, options.accept_loss)?;
        // A new store has nothing to index.
        let remade = found.remade.clone();
        opened.recovery.index_remade = remade.filter(|_| opened.recovery.indexed > 0);
        let connection = found.accepted()?;
        let fence = FenceFile::new(directory, index::newest_fence(&connection)?);
        let (segment, length) = opened.end;
        let writer = Writer::new(segments.clone(), segment, length, options.segment_bytes);
        let store = Self {
            directory: directory.to_owned(),
            segments,
            options,
            writer: Mutex::new(writer),
            connection: Mutex::new(connection),
            waiting: Group::default(),
            waited_ns: AtomicU64::new(0),
            recovery: opened.recovery,
            fence,
            _lock: lock,
        };
        store.mark_again(opened.unmarked)?;
        store.write_again(opened.unwritten)?;
        Ok(store)
    }

    /// Writes unreadable scores again, from their copy in the index.
    fn write_again(&self, rows: BTreeSet<i64>) -> Result<(), StoreError> {
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        let mut frame = Frame::default();
        let mut names = Vec::new();
        for row in rows {
            if let Some(record) = ledger::row(&connection, row)? {
                frame.push(RecordKind::Score, &self.encode_score(&record)?);
                names.push(row.to_string());
            }
        }
        if frame.is_empty() {
            return Ok(());
        }
        self.append(&mut writer, &mut connection, &frame, |tx, at| {
            let mut pairs = names.iter().zip(at);
            pairs.try_for_each(|(name, &at)| index::relocate(tx, Table::Scores, name, Some(at)))
        })
    }

    /// Encodes one score without compression, since scores are small.
    fn encode_score(&self, record: &ScoreRecord) -> Result<codec::Encoded, StoreError> {
        codec::encode(record, false).map_err(|reason| StoreError::Encode {
            episode: record.episode.clone(),
            reason,
        })
    }

    /// Writes unreadable batch marks again, from their copy in the index.
    fn mark_again(&self, batches: Vec<TrainedBatch>) -> Result<(), StoreError> {
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        for batch in batches {
            let mark = Mark::of(&batch);
            let frame = self.mark_frame(&mark)?;
            self.append(&mut writer, &mut connection, &frame, |tx, at| {
                index::relocate(tx, Table::Batches, &mark.batch, Some(at[0]))
            })?;
        }
        Ok(())
    }

    /// Builds the frame of an update's mark.
    fn mark_frame(&self, mark: &Mark) -> Result<Frame, StoreError> {
        let encoded =
            codec::encode(mark, self.options.compress).map_err(|reason| StoreError::Encode {
                episode: EpisodeId::new(mark.batch.clone()),
                reason,
            })?;
        let mut frame = Frame::default();
        frame.push(RecordKind::Mark, &encoded);
        Ok(frame)
    }

    /// Opens the queue `name` of this store in a separate file, or creates it. Earlier leases stay valid
    /// until they expire. A queue can be open only once at a time.
    ///
    /// # Errors
    /// [`StoreError::LostQueue`] if its file is damaged and the options do not accept the loss.
    pub fn queue(&self, name: &str, limits: QueueLimits) -> Result<DiskQueue, StoreError> {
        let path = queue::file(&self.directory, name)?;
        DiskQueue::open(&path, limits, self.options.accept_loss)
    }

    /// Repairs and damage found while opening.
    pub fn recovery(&self) -> &Recovery {
        &self.recovery
    }

    /// Folder of the store.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Appends to the log first, then to the index. If the index fails, the log entry is removed again.
    pub(crate) fn append(
        &self,
        writer: &mut Writer,
        connection: &mut Connection,
        frame: &Frame,
        enter: impl FnOnce(&rusqlite::Transaction<'_>, &[Location]) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let locations = writer.append(frame)?;
        let entered = (|| {
            let tx = connection.transaction()?;
            enter(&tx, &locations)?;
            index::set_indexed(&tx, writer.segment(), writer.length())?;
            tx.commit()?;
            Ok(())
        })();
        if entered.is_err() {
            let before = writer.length() - frame.len();
            writer.take_back(before);
        }
        entered
    }

    /// Commits the waiting entries in one frame. If that fails, each call is committed separately, so that
    /// each gets its own error.
    fn commit_together(
        &self,
        writer: &mut Writer,
        connection: &mut Connection,
        together: &[Arc<PendingCommit>],
    ) {
        let all = self.commit_entries(writer, connection, together);
        match (all, together) {
            (Ok(committed), _) => {
                let pairs = together.iter().zip(committed);
                pairs.for_each(|(ticket, committed)| ticket.end(Ok(committed)));
            }
            (Err(error), [ticket]) => ticket.end(Err(error)),
            (Err(_), _) => {
                for ticket in together {
                    let one = std::slice::from_ref(ticket);
                    let alone = self.commit_entries(writer, connection, one);
                    ticket.end(alone.map(|c| c.into_iter().next().unwrap_or_default()));
                }
            }
        }
    }

    /// Commits all given entries in one frame, or none.
    fn commit_entries(
        &self,
        writer: &mut Writer,
        connection: &mut Connection,
        together: &[Arc<PendingCommit>],
    ) -> Result<Vec<Vec<CommitOutcome>>, StoreError> {
        let mut frame = Frame::default();
        let mut new = Vec::new();
        let mut ids = HashSet::new();
        let mut out = Vec::with_capacity(together.len());
        for ticket in together {
            let mut committed = Vec::with_capacity(ticket.entries.len());
            for (entry, encoded) in &ticket.entries {
                let id = entry.summary.episode.as_str();
                if !ids.insert(id) || index::knows(connection, id)? {
                    committed.push(CommitOutcome::Duplicate);
                    continue;
                }
                frame.push(RecordKind::Trace, encoded);
                new.push(entry);
                committed.push(CommitOutcome::New);
            }
            out.push(committed);
        }
        if frame.is_empty() {
            return Ok(out);
        }
        self.check_room(frame.len())?;
        self.append(writer, connection, &frame, |tx, at| {
            let mut pairs = new.iter().zip(at);
            pairs.try_for_each(|(entry, &at)| index::insert(tx, entry, at))
        })?;
        Ok(out)
    }

    /// Refuses a write that would exceed [`StoreOptions::max_bytes`].
    fn check_room(&self, needed: u64) -> Result<(), StoreError> {
        let used = self.used_bytes()?;
        let limit = self.options.max_bytes;
        if used + needed > limit {
            return Err(StoreError::Full {
                used,
                needed,
                limit,
            });
        }
        Ok(())
    }

    /// Bytes of all segment files, from the file system.
    fn used_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.segments.list()?.iter().map(|(_, bytes)| bytes).sum())
    }

    /// Encodes a trace within [`StoreOptions::max_trace_bytes`].
    fn encode(&self, trace: &Trace) -> Result<codec::Encoded, StoreError> {
        let episode = || trace.episode.clone();
        let encoded =
            packed::encode(trace, self.options.compress).map_err(|reason| StoreError::Encode {
                episode: episode(),
                reason,
            })?;
        if encoded.raw_len > self.options.max_trace_bytes {
            return Err(StoreError::TooLarge {
                episode: episode(),
                field: "encoded length",
                value: u64::from(encoded.raw_len),
                limit: u64::from(self.options.max_trace_bytes),
            });
        }
        Ok(encoded)
    }
}

/// Calls that wait for durable storage.
impl DiskStore {
    /// Runs such a call and adds its duration to the waiting time.
    fn timed<T>(&self, write: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = write();
        let passed = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waited_ns.fetch_add(passed, Ordering::Relaxed);
        done
    }

    /// Commits the encoded traces of one call, together with those of other waiting calls.
    fn commit_ticket(
        &self,
        entries: Vec<(Entry, codec::Encoded)>,
    ) -> Result<Vec<CommitOutcome>, StoreError> {
        let ticket = self.waiting.join(entries)?;
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        // Another call may have carried it along; otherwise this one carries those that wait.
        loop {
            if let Some(done) = ticket.taken()? {
                return done;
            }
            let together = self.waiting.next(MAX_FRAME)?;
            self.commit_together(&mut writer, &mut connection, &together);
        }
    }

    /// Records the mark of an update, if its owner is the newest.
    fn mark_update(&self, update: &TrainedBatch, again: bool) -> Result<CommitOutcome, StoreError> {
        signed("step", update.step)?;
        store::check_batch(&update.batch, &update.episodes)?;
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        self.fence.commit(update.fence, || {
            self.enter_mark(&mut writer, &mut connection, update, again)
        })
    }

    /// Writes the mark of an update, unless it is known or an episode refuses it.
    fn enter_mark(
        &self,
        writer: &mut Writer,
        connection: &mut Connection,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError> {
        if let Some(known) = index::batch(connection, &update.batch)?.filter(|_| !again) {
            return store::same_batch(&known, update);
        }
        for episode in &update.episodes {
            match index::trained_in(connection, episode.as_str())? {
                None => {
                    return Err(StoreError::UnknownEpisode {
                        episode: episode.clone(),
                    });
                }
                Some(Some(trained_in)) if trained_in != update.batch => {
                    return Err(StoreError::TrainedTwice {
                        episode: episode.clone(),
                        trained_in,
                        batch: update.batch.clone(),
                    });
                }
                Some(_) => {}
            }
        }
        let mark = Mark::of(update);
        let frame = self.mark_frame(&mark)?;
        // Marks are small and end a step that is already paid for: the byte limit does not
        // hold them back.
        self.append(writer, connection, &frame, |tx, at| {
            index::mark(tx, &mark, at[0])
        })?;
        Ok(CommitOutcome::New)
    }

    /// Adds scores to the ledger.
    fn add_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        store::check_scores(records)?;
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        let mut frame = Frame::default();
        let (mut new, mut out) = (Vec::new(), Vec::with_capacity(records.len()));
        let mut batch = ScoreBatch::default();
        for record in records {
            let taken = match record.checked() {
                Ok(record) if batch.holds(&record) => Ok((record, false)),
                Ok(record) => ledger::is_new(&connection, &record, batch.of(&record.episode))?
                    .map(|new| (record, new)),
                Err(refused) => Err(refused),
            };
            out.push(match taken {
                Ok((record, true)) => {
                    frame.push(RecordKind::Score, &self.encode_score(&record)?);
                    batch.add(&record);
                    new.push(record);
                    Ok(CommitOutcome::New)
                }
                Ok((_, false)) => Ok(CommitOutcome::Duplicate),
                Err(refused) => Err(refused),
            });
        }
        if frame.is_empty() {
            return Ok(out);
        }
        self.check_room(frame.len())?;
        self.append(&mut writer, &mut connection, &frame, |tx, at| {
            let mut pairs = new.iter().zip(at);
            pairs.try_for_each(|(record, &at)| ledger::insert(tx, record, at).map(drop))
        })?;
        Ok(out)
    }
}

/// Takes the lock of a store, which is held while the file is open. If the process is killed, the lock is
/// released at once.
fn lock(directory: &Path) -> Result<File, StoreError> {
    let path = directory.join("lock");
    let file = File::create(&path).map_err(|e| StoreError::io(&path, e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(StoreError::Locked {
            path: directory.to_owned(),
        }),
        Err(TryLockError::Error(e)) => Err(StoreError::io(&path, e)),
    }
}

impl TraceStore for DiskStore {
    fn commit_batch(&self, traces: &[Trace]) -> Result<Vec<CommitOutcome>, StoreError> {
        // Encoding is the larger part of the work; it is done before anything is locked.
        let mut entries = Vec::with_capacity(traces.len());
        for trace in traces {
            trace.validate()?;
            signed("draw", trace.origin.draw)?;
            entries.push((Entry::of(trace), self.encode(trace)?));
        }
        let bytes = group::frame_bytes(&entries);
        if bytes > MAX_FRAME {
            return Err(StoreError::Argument {
                field: "bytes of the batch",
                value: bytes,
                allowed: format!("up to {MAX_FRAME}; commit fewer traces at a time"),
            });
        }
        self.timed(|| self.commit_ticket(entries))
    }

    fn get(&self, episode: &EpisodeId) -> Result<Option<Trace>, StoreError> {
        reader::read_trace(&self.segments, &self.connection, episode)
    }

    fn list(&self, filter: &Filter) -> Result<Page, StoreError> {
        listing::list(&*guard(&self.connection)?, filter)
    }

    fn commit_update(
        &self,
        update: &TrainedBatch,
        again: bool,
    ) -> Result<CommitOutcome, StoreError> {
        self.timed(|| self.mark_update(update, again))
    }

    fn take_fence(&self) -> Result<u64, StoreError> {
        self.timed(|| self.fence.take())
    }

    fn newest_fence(&self) -> Result<u64, StoreError> {
        self.fence.newest()
    }

    fn trained_batches(&self) -> Result<Vec<TrainedBatch>, StoreError> {
        index::batches(&*guard(&self.connection)?)
    }

    fn waited_s(&self) -> f64 {
        self.waited_ns.load(Ordering::Relaxed) as f64 / 1e9
    }

    fn stats(&self) -> Result<StoreStats, StoreError> {
        let bytes = self.used_bytes()?;
        let stats = index::stats(&*guard(&self.connection)?)?;
        Ok(StoreStats { bytes, ..stats })
    }

    fn put_scores(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, ScoreRefused>>, StoreError> {
        self.timed(|| self.add_scores(records))
    }

    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        ledger::of_episode(&*guard(&self.connection)?, episode.as_str())
    }

    fn scores_after(&self, after: Cursor, limit: usize) -> Result<ScorePage, StoreError> {
        ledger::page(&*guard(&self.connection)?, after, limit)
    }

    fn named(&self, external: &str, limit: usize) -> Result<Vec<EpisodeId>, StoreError> {
        ledger::named(&*guard(&self.connection)?, external, limit)
    }

    fn remove(&self, episodes: &[EpisodeId]) -> Result<GcReport, StoreError> {
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        let mut doomed = Vec::with_capacity(episodes.len());
        for episode in episodes {
            let found = index::find(&connection, episode.as_str())?;
            doomed.extend(found.map(|at| (episode.0.clone(), at)));
        }
        gc::run(&self.segments, &mut writer, &mut connection, doomed)
    }

    fn gc(&self, policy: GcPolicy) -> Result<GcReport, StoreError> {
        let mut writer = guard(&self.writer)?;
        let mut connection = guard(&self.connection)?;
        let doomed = index::collectable(&connection, policy)?;
        gc::run(&self.segments, &mut writer, &mut connection, doomed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::Fault;
    use sinew_types::{
        EpisodeEnd, GroupId, NO_PARENT, Node, Origin, Outcome, Provenance, TRACE_FORMAT_VERSION,
        TaskId, Timing, TokenKind,
    };

    fn trace(id: &str) -> Trace {
        let node = Node::given(NO_PARENT, 0, TokenKind::Prompt, vec![7; 40], Vec::new());
        Trace {
            format_version: TRACE_FORMAT_VERSION,
            episode: EpisodeId::new(id),
            group: GroupId::new("g"),
            task: TaskId::new("t"),
            task_kind: String::new(),
            origin: Origin {
                purpose: "train".into(),
                ..Origin::default()
            },
            provenance: Provenance::default(),
            nodes: vec![node],
            outcome: Outcome::default(),
            end: EpisodeEnd::Terminated,
            timing: Timing::default(),
            ignored: std::collections::BTreeMap::new(),
        }
    }

    fn episodes(store: &DiskStore) -> u64 {
        store.stats().unwrap().episodes
    }

    #[test]
    fn a_full_disk_is_typed_and_leaves_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let store = open();
        store.commit(&trace("a")).unwrap();
        let bytes = store.stats().unwrap().bytes;
        for n in [0, 1, 16, 100, 1 << 20] {
            store.writer.lock().unwrap().fault = Some(Fault::FullAfter(n));
            let refused = store.commit_batch(&[trace("b"), trace("c")]);
            assert!(matches!(refused, Err(StoreError::DiskFull { .. })));
            let refused =
                store.commit_update(&TrainedBatch::new("m", 1, &[EpisodeId::new("a")]), false);
            assert!(matches!(refused, Err(StoreError::DiskFull { .. })));
            assert_eq!(store.stats().unwrap().bytes, bytes);
            assert_eq!(store.get(&EpisodeId::new("b")).unwrap(), None);
        }
        store.writer.lock().unwrap().fault = None;
        assert!(store.trained_batches().unwrap().is_empty());
        store.commit(&trace("b")).unwrap();
        drop(store);
        assert_eq!(episodes(&open()), 2);
    }

    #[test]
    fn after_a_failed_sync_the_file_is_not_trusted() {
        let directory = tempfile::tempdir().unwrap();
        let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let store = open();
        store.commit(&trace("a")).unwrap();
        store.writer.lock().unwrap().fault = Some(Fault::SyncFails);
        assert!(store.commit_batch(&[trace("b"), trace("c")]).is_err());
        store.writer.lock().unwrap().fault = None;
        assert_eq!(episodes(&store), 1);
        store.commit(&trace("d")).unwrap();
        assert_eq!(store.writer.lock().unwrap().segment(), 1);
        store.commit(&trace("b")).unwrap();
        drop(store);
        // The unacknowledged batch was on the medium whole, so that opening finds it whole; what
        // was committed since is not doubled.
        let store = open();
        assert_eq!(store.recovery().indexed, 2);
        assert_eq!(episodes(&store), 4);
        assert!(store.recovery().damaged.is_empty());
    }

    #[test]
    fn an_index_that_refuses_takes_the_log_back() {
        let directory = tempfile::tempdir().unwrap();
        let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let store = open();
        store.commit(&trace("a")).unwrap();
        let bytes = store.stats().unwrap().bytes;
        let refuse = |on: bool| {
            let connection = store.connection.lock().unwrap();
            connection.pragma_update(None, "query_only", on).unwrap();
        };
        refuse(true);
        let refused = store.commit(&trace("b"));
        assert!(matches!(refused, Err(StoreError::Index(_))));
        refuse(false);
        assert_eq!(store.stats().unwrap().bytes, bytes);
        assert_eq!(store.commit(&trace("b")).unwrap(), CommitOutcome::New);
        drop(store);
        assert_eq!(open().recovery(), &Recovery::default());
    }

    #[test]
    fn an_unfinished_gc_revives_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let open = || DiskStore::open(directory.path(), StoreOptions::default()).unwrap();
        let store = open();
        store.commit_batch(&[trace("a"), trace("b")]).unwrap();
        let policy = GcPolicy {
            before_update: 0,
            keep_untrained: false,
        };
        let file = store.segments.path_of(0);
        let old = std::fs::read(&file).unwrap();
        store.gc(policy).unwrap();
        // The state after a process died before it removed the file.
        std::fs::write(&file, old).unwrap();
        let mut connection = store.connection.lock().unwrap();
        let tx = connection.transaction().unwrap();
        index::set_indexed(&tx, 0, 16).unwrap();
        index::kill_segment(&tx, 0).unwrap();
        tx.commit().unwrap();
        drop(connection);
        drop(store);
        let store = open();
        assert_eq!(store.recovery().removed_segments, 1);
        assert_eq!(episodes(&store), 0);
        assert_eq!(store.commit(&trace("a")).unwrap(), CommitOutcome::Duplicate);
    }
}
