//! Journal of open rollouts: captured data is on disk before a client sees it, so that a crash loses none of
//! it.
//!
//! The file has one line per append: eight hexadecimal digits of its BLAKE3 hash, a space, JSON. A thread
//! writes many lines at once and synchronizes them with one fsync. Files are numbered; one is removed when
//! every rollout in it is finished. Opening the journal returns the open rollouts, and starts a new file.
//!
//! Invariants: the appends of a rollout are in order and without a gap; after a failed append, all later ones
//! of that rollout except its end fail. An append that [`Receipt::wait`] confirmed is found by the next
//! opening, even if an opening in between was killed or found a full disk. An incomplete line at the end of a
//! file is dropped; a damaged line before it is an error.

use crate::session::{Entry, RolloutSpec};
use serde::{Deserialize, Serialize};
use sinew_dialect::ApiError;
use sinew_store::{private_dir, private_file};
use sinew_types::EpisodeId;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use tokio::sync::oneshot;

/// Capacity of the queue of appends to the writer thread.
const QUEUE: usize = 16_384;

/// Maximum number of lines per fsync.
const BATCH: usize = 1024;

/// Number of checksum digits in a line.
const CHECK: usize = 8;

/// Suffix of a new file until it contains all recovered data; no opening reads it.
const PART: &str = ".part";

/// Settings of a journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalOptions {
    /// Size of a file in bytes above which a new file starts. The last batch of lines may exceed it.
    pub file_bytes: u64,
    /// Maximum size of all files in bytes; appends above it are refused.
    pub max_bytes: u64,
}

impl Default for JournalOptions {
    fn default() -> Self {
        Self {
            file_bytes: 64 << 20,
            max_bytes: 8 << 30,
        }
    }
}

/// Reasons why a journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Path of the file.
        path: PathBuf,
        source: std::io::Error,
    },
    /// A line before the last one is damaged, so that entries after it would have a gap.
    #[error("{path} line {line}: {reason}; move the file away to go on without what is in it")]
    Corrupt {
        path: PathBuf,
        line: usize,
        reason: String,
    },
}

/// Record about a rollout.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub(crate) enum Record {
    /// The first record of a rollout.
    Opened {
        spec: Box<RolloutSpec>,
        /// BLAKE3 hash of its key, in hexadecimal.
        key: String,
        /// Trace id of its `traceparent`, in hexadecimal.
        trace_id: String,
        opened_s: f64,
    },
    /// Changes of its session since the last record.
    Entries { entries: Vec<Entry> },
    /// The trace of the rollout is in the store.
    Finished,
}

/// A line without its checksum.
#[derive(Serialize, Deserialize)]
struct Line {
    rollout: EpisodeId,
    record: Record,
}

/// A rollout that was open when the last process ended.
#[derive(Debug)]
pub(crate) struct RecoveredRollout {
    pub(crate) id: EpisodeId,
    pub(crate) spec: RolloutSpec,
    pub(crate) key: String,
    pub(crate) trace_id: String,
    pub(crate) opened_s: f64,
    pub(crate) entries: Vec<Entry>,
}

/// A line in the queue of the writer thread.
struct PendingLine {
    rollout: EpisodeId,
    line: Vec<u8>,
    /// Whether it is the last line of the rollout.
    finished: bool,
    /// Receives the result after the fsync.
    done: oneshot::Sender<std::io::Result<()>>,
}

/// Confirmation of an append; it resolves when the append is on disk.
#[derive(Debug)]
pub(crate) struct Receipt(oneshot::Receiver<std::io::Result<()>>);

impl Receipt {
    /// Waits until the append is durable.
    pub(crate) async fn wait(self) -> Result<(), ApiError> {
        let told = self
            .0
            .await
            .unwrap_or_else(|_| Err(std::io::Error::other("its thread ended")));
        told.map_err(|why| ApiError::overloaded("journal_failed", format!("journal: {why}")))
    }
}

/// The journal of one gateway.
#[derive(Debug)]
pub struct Journal {
    /// Queue to the writer thread; `None` while the journal closes.
    queue: Option<SyncSender<PendingLine>>,
    thread: Option<JoinHandle<()>>,
    recovered: std::sync::Mutex<Vec<RecoveredRollout>>,
}

impl Journal {
    /// Opens the journal in `directory`, which is created if it is missing, and reads the open rollouts.
    ///
    /// # Errors
    /// If a file cannot be read or written, or is damaged.
    pub fn open(directory: &Path, options: JournalOptions) -> Result<Self, JournalError> {
        let failed = |source| JournalError::Io {
            path: directory.to_owned(),
            source,
        };
        private_dir(directory).map_err(failed)?;
        let old = numbered(directory).map_err(failed)?;
        let recovered = read_all(&old)?;
        let next = old.last().map_or(0, |(number, _)| number + 1);
        let writer = Writer::start(directory, next, options, old, &recovered)?;
        let (queue, appends) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new()
            .name("sinew-journal".into())
            .spawn(move || writer.run(&appends))
            .map_err(failed)?;
        Ok(Self {
            queue: Some(queue),
            thread: Some(thread),
            recovered: std::sync::Mutex::new(recovered),
        })
    }

    /// Rollouts that were open when the journal was last written; returned once.
    pub(crate) fn take_recovered(&self) -> Vec<RecoveredRollout> {
        let recovered = self.recovered.lock();
        std::mem::take(&mut *recovered.unwrap_or_else(std::sync::PoisonError::into_inner))
    }

    /// Queues a record. Never blocks, since the caller holds the lock that keeps the order of the rollout's
    /// records.
    pub(crate) fn append(&self, rollout: &EpisodeId, record: Record) -> Result<Receipt, ApiError> {
        let refused = |why: &str| ApiError::overloaded("journal_failed", format!("journal: {why}"));
        let finished = record == Record::Finished;
        let line = line(rollout, record).map_err(|e| refused(&e.to_string()))?;
        let (done, receipt) = oneshot::channel();
        let append = PendingLine {
            rollout: rollout.clone(),
            line,
            finished,
            done,
        };
        let queue = self.queue.as_ref().ok_or_else(|| refused("it is closed"))?;
        queue.try_send(append).map_err(|e| match e {
            TrySendError::Full(_) => refused("too many appends wait for the disk"),
            TrySendError::Disconnected(_) => refused("its thread ended"),
        })?;
        Ok(Receipt(receipt))
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // The thread writes what is queued, then ends.
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // All waiters got the error of a panic there.
            let _ = thread.join();
        }
    }
}

/// Formats a record as a line of the file.
fn line(rollout: &EpisodeId, record: Record) -> serde_json::Result<Vec<u8>> {
    let json = serde_json::to_vec(&Line {
        rollout: rollout.clone(),
        record,
    })?;
    let mut line = Vec::with_capacity(json.len() + CHECK + 2);
    line.extend_from_slice(check(&json).as_bytes());
    line.push(b' ');
    line.extend_from_slice(&json);
    line.push(b'\n');
    Ok(line)
}

/// The checksum of a line's JSON.
fn check(json: &[u8]) -> String {
    crate::keys::hex(&blake3::hash(json).as_bytes()[..CHECK / 2])
}

fn file_name(number: u64) -> String {
    format!("journal-{number:08}.log")
}

/// Journal files, oldest first.
fn numbered(directory: &Path) -> std::io::Result<Vec<(u64, PathBuf)>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let digits = name.strip_prefix("journal-");
        let digits = digits.and_then(|n| n.strip_suffix(".log"));
        if let Some(number) = digits.and_then(|n| n.parse().ok()) {
            files.push((number, path));
        }
    }
    files.sort();
    Ok(files)
}

/// Reads all files and returns the rollouts that are still open. Only the last line of a file may be
/// incomplete.
fn read_all(files: &[(u64, PathBuf)]) -> Result<Vec<RecoveredRollout>, JournalError> {
    let mut open: BTreeMap<String, RecoveredRollout> = BTreeMap::new();
    for (_, path) in files {
        let bytes = std::fs::read(path).map_err(|source| JournalError::Io {
            path: path.clone(),
            source,
        })?;
        let mut rest = bytes.as_slice();
        let mut number = 0;
        while let Some(end) = rest.iter().position(|&b| b == b'\n') {
            number += 1;
            let (text, tail) = (&rest[..end], &rest[end + 1..]);
            rest = tail;
            match parse(text) {
                Ok(line) => take(&mut open, line),
                // The last line was being written when the process ended.
                Err(reason) if tail.is_empty() => {
                    tracing::error!(file = %path.display(), line = number, %reason, "the last line is left out");
                    break;
                }
                Err(reason) => {
                    return Err(JournalError::Corrupt {
                        path: path.clone(),
                        line: number,
                        reason: reason.to_string(),
                    });
                }
            }
        }
    }
    Ok(open.into_values().collect())
}

/// Reasons why a line cannot be read.
#[derive(Debug, thiserror::Error)]
enum LineError {
    #[error("the line has no checksum")]
    NoChecksum,
    #[error("the checksum is wrong")]
    Checksum,
    #[error(transparent)]
    Json(#[from] serde_json::Error),
}

/// Parses a line and verifies its checksum.
fn parse(text: &[u8]) -> Result<Line, LineError> {
    let (sum, json) = text.split_at_checked(CHECK).ok_or(LineError::NoChecksum)?;
    let json = json.strip_prefix(b" ").ok_or(LineError::NoChecksum)?;
    if check(json).as_bytes() != sum {
        return Err(LineError::Checksum);
    }
    Ok(serde_json::from_slice(json)?)
}

/// Applies a line to the open rollouts.
fn take(open: &mut BTreeMap<String, RecoveredRollout>, line: Line) {
    let id = line.rollout.as_str().to_owned();
    match line.record {
        Record::Opened {
            spec,
            key,
            trace_id,
            opened_s,
        } => {
            let recovered = RecoveredRollout {
                id: line.rollout,
                spec: *spec,
                key,
                trace_id,
                opened_s,
                entries: Vec::new(),
            };
            open.insert(id, recovered);
        }
        Record::Entries { entries } => {
            // Entries after the end are those of calls that the end aborted.
            if let Some(recovered) = open.get_mut(&id) {
                recovered.entries.extend(entries);
            }
        }
        Record::Finished => {
            open.remove(&id);
        }
    }
}

/// A journal file, with the rollouts that have records in it.
#[derive(Debug)]
struct Segment {
    path: PathBuf,
    bytes: u64,
    /// Unfinished rollouts with records in the file.
    open: HashSet<EpisodeId>,
}

impl Segment {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            bytes: 0,
            open: HashSet::new(),
        }
    }
}

/// State of the writer thread.
#[derive(Debug)]
struct Writer {
    directory: PathBuf,
    options: JournalOptions,
    /// Number of the next file.
    next: u64,
    file: File,
    /// Journal files; the last one is being written.
    segments: Vec<Segment>,
    /// Rollouts with an append that could not be written; their recovery ends there.
    gaps: HashSet<EpisodeId>,
}

impl Writer {
    /// Writes the recovered data into a new file, which appears atomically, and then removes the old files.
    fn start(
        directory: &Path,
        number: u64,
        options: JournalOptions,
        old: Vec<(u64, PathBuf)>,
        recovered: &[RecoveredRollout],
    ) -> Result<Self, JournalError> {
        let path = directory.join(file_name(number));
        let part = directory.join(file_name(number) + PART);
        let failed = |source| JournalError::Io {
            path: path.clone(),
            source,
        };
        // A part file is left of an opening that was killed here.
        match std::fs::remove_file(&part) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(failed(e)),
            _ => {}
        }
        let mut writer = Self {
            directory: directory.to_owned(),
            options,
            next: number + 1,
            file: create(&part).map_err(failed)?,
            segments: vec![Segment::new(path.clone())],
            gaps: HashSet::new(),
        };
        let written = writer.rewrite(recovered).and_then(|()| {
            std::fs::rename(&part, &path)?;
            File::open(directory)?.sync_all()
        });
        if let Err(e) = written {
            // This error tells more than one of a failed removal; the old files are all there.
            let _ = std::fs::remove_file(&part);
            return Err(failed(e));
        }
        // The new file now holds everything.
        for (_, path) in old {
            std::fs::remove_file(&path).map_err(|source| JournalError::Io { path, source })?;
        }
        Ok(writer)
    }

    /// Writes the recovered data as two records per rollout.
    fn rewrite(&mut self, recovered: &[RecoveredRollout]) -> std::io::Result<()> {
        for rollout in recovered {
            let opened = Record::Opened {
                spec: Box::new(rollout.spec.clone()),
                key: rollout.key.clone(),
                trace_id: rollout.trace_id.clone(),
                opened_s: rollout.opened_s,
            };
            let entries = Record::Entries {
                entries: rollout.entries.clone(),
            };
            for record in [opened, entries] {
                self.write(&rollout.id, &line(&rollout.id, record)?)?;
            }
        }
        self.file.sync_all()
    }

    /// Writes a line, unless the journal is full.
    fn write(&mut self, rollout: &EpisodeId, line: &[u8]) -> std::io::Result<()> {
        let used: u64 = self.segments.iter().map(|s| s.bytes).sum();
        if used + line.len() as u64 > self.options.max_bytes {
            return Err(std::io::Error::other(format!(
                "it holds {used} of {} bytes: finish rollouts",
                self.options.max_bytes
            )));
        }
        if let Err(e) = self.file.write_all(line) {
            self.cut()?;
            return Err(e);
        }
        if let Some(segment) = self.segments.last_mut() {
            segment.bytes += line.len() as u64;
            segment.open.insert(rollout.clone());
        }
        Ok(())
    }

    /// Truncates the file to remove the part of a line that a failed write left.
    fn cut(&mut self) -> std::io::Result<()> {
        let whole = self.segments.last().map_or(0, |s| s.bytes);
        self.file.set_len(whole).or_else(|_| self.rotate())
    }

    /// Writes an append, unless an earlier one of its rollout failed. The end of a rollout is written in any
    /// case.
    fn append(&mut self, append: &PendingLine) -> std::io::Result<()> {
        if self.gaps.contains(&append.rollout) && !append.finished {
            return Err(std::io::Error::other(
                "an earlier part of this rollout could not be written: open another",
            ));
        }
        self.write(&append.rollout, &append.line)
    }

    /// Writes waiting appends, synchronizes them with one fsync and answers them, until the journal is
    /// closed.
    fn run(mut self, appends: &Receiver<PendingLine>) {
        while let Ok(first) = appends.recv() {
            let mut batch = vec![first];
            while batch.len() < BATCH
                && let Ok(next) = appends.try_recv()
            {
                batch.push(next);
            }
            let mut told = Vec::with_capacity(batch.len());
            for append in &batch {
                let written = self.append(append);
                if written.is_err() {
                    self.gaps.insert(append.rollout.clone());
                }
                told.push(written);
            }
            if let Err(e) = self.file.sync_data() {
                // Unknown lines of these are on disk, so nothing may follow them.
                for (append, told) in batch.iter().zip(&mut told) {
                    self.gaps.insert(append.rollout.clone());
                    *told = Err(std::io::Error::new(e.kind(), e.to_string()));
                }
                if let Err(error) = self.rotate() {
                    tracing::error!(%error, "no new file of the journal");
                }
            }
            for (append, told) in batch.into_iter().zip(told) {
                if append.finished {
                    self.gaps.remove(&append.rollout);
                }
                if append.finished && told.is_ok() {
                    self.segments.iter_mut().for_each(|s| {
                        s.open.remove(&append.rollout);
                    });
                }
                // A receipt that was dropped needs no answer.
                let _ = append.done.send(told);
            }
            if let Err(error) = self.tidy() {
                tracing::error!(%error, "the journal could not be tidied");
            }
        }
    }

    /// Starts a new file if this one is full, and removes files that are no longer needed.
    fn tidy(&mut self) -> std::io::Result<()> {
        let limit = self.options.file_bytes;
        if self.segments.last().is_some_and(|s| s.bytes > limit) {
            self.rotate()?;
        }
        let last = self.segments.len() - 1;
        // A later file may hold an end, an earlier one a beginning: oldest first, and
        // none after one that stays.
        let old = self.segments[..last].iter();
        let gone = old.take_while(|s| s.open.is_empty()).count();
        for segment in self.segments.drain(..gone) {
            std::fs::remove_file(&segment.path)?;
        }
        Ok(())
    }

    /// Continues in a new file.
    fn rotate(&mut self) -> std::io::Result<()> {
        let path = self.directory.join(file_name(self.next));
        // Even if what follows fails: the file may be there then.
        self.next += 1;
        let file = create(&path)?;
        File::open(&self.directory)?.sync_all()?;
        self.file = file;
        self.segments.push(Segment::new(path));
        Ok(())
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    private_file().create_new(true).append(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::Reward;
    use std::collections::HashMap;

    fn entries(reward: f64) -> Record {
        let reward = Reward {
            reward,
            ..Reward::default()
        };
        Record::Entries {
            entries: vec![Entry::Rewarded { reward }],
        }
    }

    fn opened(key: &str) -> Record {
        Record::Opened {
            spec: Box::default(),
            key: key.into(),
            trace_id: String::new(),
            opened_s: 1.0,
        }
    }

    fn wait(journal: &Journal, id: &str, record: Record) -> Result<(), ApiError> {
        let receipt = journal.append(&EpisodeId::new(id), record)?;
        tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap()
            .block_on(receipt.wait())
    }

    fn open_ids(directory: &Path) -> HashMap<String, usize> {
        let journal = Journal::open(directory, JournalOptions::default()).unwrap();
        let recovered = journal.take_recovered().into_iter();
        recovered
            .map(|r| (r.id.as_str().to_owned(), r.entries.len()))
            .collect()
    }

    #[test]
    fn what_was_open_is_found_again_and_again() {
        let folder = tempfile::tempdir().unwrap();
        {
            let journal = Journal::open(folder.path(), JournalOptions::default()).unwrap();
            for id in ["a", "b"] {
                wait(&journal, id, opened("k")).unwrap();
                wait(&journal, id, entries(1.0)).unwrap();
            }
            wait(&journal, "b", Record::Finished).unwrap();
            wait(&journal, "b", entries(2.0)).unwrap();
        }
        for _ in 0..2 {
            let open = open_ids(folder.path());
            assert_eq!(open, HashMap::from([("a".to_owned(), 1)]));
            assert_eq!(numbered(folder.path()).unwrap().len(), 1);
        }
    }

    #[test]
    fn a_torn_end_is_dropped_and_damage_is_told() {
        let folder = tempfile::tempdir().unwrap();
        {
            let journal = Journal::open(folder.path(), JournalOptions::default()).unwrap();
            wait(&journal, "a", opened("k")).unwrap();
            wait(&journal, "a", entries(1.0)).unwrap();
        }
        let path = numbered(folder.path()).unwrap().remove(0).1;
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 5]).unwrap();
        assert_eq!(open_ids(folder.path())["a"], 0);
        let path = numbered(folder.path()).unwrap().remove(0).1;
        let mut damaged = whole;
        damaged[20] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        let refused = Journal::open(folder.path(), JournalOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("line 1"), "{refused}");
    }

    #[test]
    fn files_go_when_nobody_needs_them_and_have_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let options = JournalOptions {
            file_bytes: 400,
            max_bytes: 4000,
        };
        let journal = Journal::open(folder.path(), options).unwrap();
        for round in 0..40 {
            let id = format!("r{round}");
            wait(&journal, &id, opened("k")).unwrap();
            wait(&journal, &id, entries(1.0)).unwrap();
            wait(&journal, &id, Record::Finished).unwrap();
        }
        assert!(numbered(folder.path()).unwrap().len() <= 2);
        let refused = (0..40).find_map(|_| wait(&journal, "long", entries(1.0)).err());
        let refused = refused.unwrap();
        assert!(refused.message.contains("finish rollouts"), "{refused}");
    }

    /// Bytes of the disk.
    const SMALL_DISK: u64 = 128 << 10;

    /// The root of a small disk, in a run of the named test that this one starts; `None` in this
    /// one, once that has passed.
    fn small_disk(test: &str) -> Option<PathBuf> {
        if let Some(folder) = std::env::var_os("SINEW_SMALL_DISK") {
            return Some(folder.into());
        }
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "mount -t tmpfs -o size={SMALL_DISK} tmpfs \"$SINEW_SMALL_DISK\" && exec \"$0\" --exact {test}"
        );
        let status = std::process::Command::new("unshare")
            .args(["-Urm", "sh", "-c", &script])
            .arg(std::env::current_exe().unwrap())
            .env("SINEW_SMALL_DISK", folder.path())
            .status();
        assert!(
            status.unwrap().success(),
            "with a small disk; `unshare -Urm` must work here"
        );
        None
    }

    /// Entries that take about so many bytes.
    fn large(bytes: usize) -> Record {
        let metrics = std::collections::BTreeMap::from([("x".repeat(bytes), 1.0)]);
        let reward = Reward {
            metrics,
            ..Reward::default()
        };
        Record::Entries {
            entries: vec![Entry::Rewarded { reward }],
        }
    }

    #[test]
    fn a_full_disk_tears_no_line_leaves_no_gap_and_is_got_over() {
        let Some(folder) =
            small_disk("journal::tests::a_full_disk_tears_no_line_leaves_no_gap_and_is_got_over")
        else {
            return;
        };
        let ballast = folder.join("ballast");
        std::fs::write(&ballast, vec![0; 64 << 10]).unwrap();
        {
            let journal = Journal::open(&folder, JournalOptions::default()).unwrap();
            for id in ["a", "b"] {
                wait(&journal, id, opened("k")).unwrap();
                wait(&journal, id, large(5000)).unwrap();
            }
            let refused = (0..40).find_map(|_| wait(&journal, "a", large(5000)).err());
            assert!(refused.unwrap().message.contains("No space left"));
            std::fs::remove_file(&ballast).unwrap();
            // Entries after the lost part of `a` would not fit the ones on disk.
            let refused = wait(&journal, "a", entries(1.0)).unwrap_err();
            assert!(refused.message.contains("earlier part"), "{refused}");
            wait(&journal, "b", entries(1.0)).unwrap();
            wait(&journal, "c", opened("k")).unwrap();
        }
        let open = open_ids(&folder);
        assert_eq!((open["b"], open["c"]), (2, 0), "{open:?}");
        assert!(open["a"] >= 1);
        // Opening writes a new file: without free space for it, the old one stays as it is.
        let used = std::fs::metadata(&numbered(&folder).unwrap()[0].1)
            .unwrap()
            .len();
        std::fs::write(&ballast, vec![0; (SMALL_DISK - used) as usize - (16 << 10)]).unwrap();
        let refused = Journal::open(&folder, JournalOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("No space left"), "{refused}");
        std::fs::remove_file(&ballast).unwrap();
        assert_eq!(open_ids(&folder), open);
        assert_eq!(numbered(&folder).unwrap().len(), 1);
    }
}
