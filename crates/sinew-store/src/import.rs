//! Imports scores from JSON lines: a user's file, or the inbox of a store that another process writes.
//!
//! A row is `{"episode": ID, "name": NAME, "value": NUMBER or null}` with `external_id` in place of `episode`
//! if the episode has one, and optional `reason`, `at` (seconds since 1970) and `source`. An invalid row is
//! reported with its line number; the others are not affected.

use crate::disk::{DiskStore, StoreOptions};
use crate::error::StoreError;
use crate::reader::FolderReader;
use crate::score::{Score, ScoreRecord, in_force};
use crate::store::{CommitOutcome, TraceStore};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_types::EpisodeId;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Maximum bytes of a line; a longer one is an invalid row.
const MAX_LINE: u64 = 64 << 10;
/// Maximum number of lines that are read from a file; further lines are ignored.
const MAX_ROWS: usize = 10_000_000;
/// Number of rows that are stored at a time.
const CHUNK: usize = 4_096;
/// Maximum number of invalid rows that a report lists; all are counted.
const NAMED: usize = 100;
/// Source of rows that name none.
pub const IMPORT_SOURCE: &str = "import";

/// An invalid or refused row.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BadRow {
    /// Line number, from 1.
    pub line: usize,
    pub why: String,
}

/// Counts of the rows of a file, by result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ImportReport {
    /// Number of non-empty rows.
    pub rows: usize,
    /// Number of new scores.
    pub new: usize,
    /// Number of scores that were already stored.
    pub known: usize,
    /// Number of refused rows.
    pub refused: usize,
    /// The first refused rows.
    pub bad: Vec<BadRow>,
    /// Whether the scores wait in the inbox of a store that another process writes.
    pub queued: bool,
}

/// Destination of scores.
#[derive(Debug)]
enum ScoreTarget<'a> {
    /// A store that this process may write.
    Store(&'a dyn TraceStore),
    /// The store of a folder that another process writes; the scores go into its inbox.
    Live(&'a FolderReader, &'a Inbox),
}

/// A parsed row, before its episode is looked up.
struct Row {
    episode: Option<String>,
    external: Option<String>,
    name: String,
    source: Option<String>,
    at_us: Option<u64>,
    score: Score,
}

impl Row {
    /// Parses one line.
    ///
    /// # Errors
    /// A message in words: the field, its value and what is allowed.
    fn read(line: &[u8]) -> Result<Self, String> {
        let fields: serde_json::Map<String, Value> =
            serde_json::from_slice(line).map_err(|e| format!("not a JSON object: {e}"))?;
        const KNOWN: [&str; 7] = [
            "episode",
            "external_id",
            "name",
            "value",
            "reason",
            "at",
            "source",
        ];
        if let Some(unknown) = fields.keys().find(|k| !KNOWN.contains(&k.as_str())) {
            let shown: String = unknown.chars().take(40).collect();
            return Err(format!(
                "unknown field {shown:?}, allowed: {}",
                KNOWN.join(", ")
            ));
        }
        let text = |field: &str| match fields.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(format!("{field} is {other:.40}, allowed: a text")),
        };
        let reason = text("reason")?;
        let score = match fields.get("value") {
            None => return Err("value is missing; give a number, or null for no score".into()),
            Some(Value::Null) => {
                Score::Unscored(reason.unwrap_or_else(|| "no reason given".into()))
            }
            Some(value) => {
                let number = value.as_f64().filter(|v| v.is_finite());
                let wrong = || format!("value is {value:.40}, allowed: a finite number, or null");
                Score::Value(number.ok_or_else(wrong)?)
            }
        };
        let at_us = match fields.get("at") {
            None | Some(Value::Null) => None,
            Some(at) => {
                let seconds = at.as_f64().filter(|s| (0.0..=9e9).contains(s));
                let wrong = || format!("at is {at:.40}, allowed: seconds since 1970");
                Some((seconds.ok_or_else(wrong)? * 1e6).round() as u64)
            }
        };
        Ok(Self {
            episode: text("episode")?,
            external: text("external_id")?,
            name: text("name")?.ok_or("name is missing; give the component of the reward")?,
            source: text("source")?,
            at_us,
            score,
        })
    }
}

impl ScoreTarget<'_> {
    fn scores(&self, episode: &EpisodeId) -> Result<Vec<ScoreRecord>, StoreError> {
        match self {
            Self::Store(store) => store.scores(episode),
            Self::Live(reader, _) => reader.scores(episode),
        }
    }

    /// Returns the episode that a row names, which must be unique.
    fn episode(&self, row: &Row) -> Result<Result<EpisodeId, String>, StoreError> {
        let external = match (&row.episode, &row.external) {
            (Some(id), None) => return Ok(Ok(EpisodeId::new(id.clone()))),
            (None, Some(external)) => external,
            _ => return Ok(Err("give one of episode and external_id".into())),
        };
        let named = match self {
            Self::Store(store) => store.named(external, 2)?,
            Self::Live(reader, _) => reader.named(external, 2)?,
        };
        Ok(match named.as_slice() {
            [episode] => Ok(episode.clone()),
            [] => Err(format!("no episode has the external_id {external:?}")),
            _ => Err(format!(
                "several episodes have the external_id {external:?}: give the episode"
            )),
        })
    }

    /// Builds the record of a row; `None` if a row without a time repeats the present score.
    fn record(
        &self,
        row: Row,
        source: &str,
        now_us: u64,
    ) -> Result<Result<Option<ScoreRecord>, String>, StoreError> {
        let episode = match self.episode(&row)? {
            Ok(episode) => episode,
            Err(why) => return Ok(Err(why)),
        };
        let record = ScoreRecord {
            episode,
            name: row.name,
            source: row.source.unwrap_or_else(|| source.to_owned()),
            at_us: row.at_us.unwrap_or(now_us),
            score: row.score,
        };
        if row.at_us.is_none() {
            let known = self.scores(&record.episode)?;
            let key = (record.name.as_str(), record.source.as_str());
            if in_force(&known)
                .get(&key)
                .is_some_and(|k| k.score == record.score)
            {
                return Ok(Ok(None));
            }
        }
        Ok(Ok(Some(record)))
    }

    /// Stores records and returns the result of each.
    fn put(
        &self,
        records: &[ScoreRecord],
    ) -> Result<Vec<Result<CommitOutcome, String>>, StoreError> {
        let (reader, inbox) = match self {
            Self::Store(store) => {
                let put = store.put_scores(records)?.into_iter();
                return Ok(put.map(|r| r.map_err(|e| e.to_string())).collect());
            }
            Self::Live(reader, inbox) => (reader, inbox),
        };
        let (mut out, mut new) = (Vec::new(), Vec::new());
        for record in records {
            out.push(match reader.admits(record)? {
                Ok(true) => {
                    new.push(record.clone());
                    Ok(CommitOutcome::New)
                }
                Ok(false) => Ok(CommitOutcome::Duplicate),
                Err(refused) => Err(refused.to_string()),
            });
        }
        inbox.put(&new)?;
        Ok(out)
    }
}

/// Imports the rows of a file into a store. `source` and `now_us` are the source and time of rows without
/// their own. The call is idempotent: known scores have no effect.
///
/// # Errors
/// If the store or the file fails. Rows are stored 4,096 at a time; those stored before the failure stay
/// stored.
pub fn import_scores(
    rows: &mut dyn BufRead,
    store: &dyn TraceStore,
    source: &str,
    now_us: u64,
) -> Result<ImportReport, StoreError> {
    import(rows, &ScoreTarget::Store(store), source, now_us)
}

fn import(
    rows: &mut dyn BufRead,
    target: &ScoreTarget<'_>,
    source: &str,
    now_us: u64,
) -> Result<ImportReport, StoreError> {
    let mut report = ImportReport {
        queued: matches!(target, ScoreTarget::Live(..)),
        ..ImportReport::default()
    };
    let mut chunk: Vec<(usize, ScoreRecord)> = Vec::new();
    for number in 1..=MAX_ROWS {
        let line = next_line(rows).map_err(|e| StoreError::io(Path::new("rows"), e))?;
        let Some(line) = line else { break };
        let row = match line {
            Line::Whole(bytes) if bytes.iter().all(u8::is_ascii_whitespace) => continue,
            Line::Whole(bytes) => Row::read(&bytes),
            Line::TooLong => Err(format!("longer than {MAX_LINE} bytes")),
        };
        report.rows += 1;
        let record = match row {
            Ok(row) => target.record(row, source, now_us)?,
            Err(why) => Err(why),
        };
        match record {
            Ok(Some(record)) => chunk.push((number, record)),
            Ok(None) => report.known += 1,
            Err(why) => report.refuse(number, why),
        }
        if chunk.len() >= CHUNK {
            report.put(target, std::mem::take(&mut chunk))?;
        }
    }
    report.put(target, chunk)?;
    Ok(report)
}

impl ImportReport {
    fn refuse(&mut self, line: usize, why: String) {
        self.refused += 1;
        if self.bad.len() < NAMED {
            self.bad.push(BadRow { line, why });
        }
    }

    fn put(
        &mut self,
        target: &ScoreTarget<'_>,
        chunk: Vec<(usize, ScoreRecord)>,
    ) -> Result<(), StoreError> {
        let (lines, records): (Vec<usize>, Vec<ScoreRecord>) = chunk.into_iter().unzip();
        for (line, put) in lines.into_iter().zip(target.put(&records)?) {
            match put {
                Ok(CommitOutcome::New) => self.new += 1,
                Ok(CommitOutcome::Duplicate) => self.known += 1,
                Err(why) => self.refuse(line, why),
            }
        }
        self.bad.sort_by_key(|b| b.line);
        Ok(())
    }
}

/// A line of an untrusted file.
enum Line {
    Whole(Vec<u8>),
    /// The line was too long and was skipped.
    TooLong,
}

/// Reads the next line with its line break, if it has one; `None` at the end of the file.
fn next_line(rows: &mut dyn BufRead) -> std::io::Result<Option<Line>> {
    let mut line = Vec::new();
    let mut limited = (&mut *rows).take(MAX_LINE);
    if limited.read_until(b'\n', &mut line)? == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') || (line.len() as u64) < MAX_LINE {
        return Ok(Some(Line::Whole(line)));
    }
    while line.last() != Some(&b'\n') {
        line.clear();
        if (&mut *rows).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            break;
        }
    }
    Ok(Some(Line::TooLong))
}

/// Inbox for scores of a store that another process writes: a folder next to the store, whose files that
/// process reads. A file appears atomically, and is removed once its scores are in the store.
#[derive(Clone, Debug)]
pub struct Inbox {
    folder: PathBuf,
}

/// A line of a file of the inbox.
#[derive(Serialize, Deserialize)]
struct InboxLine(ScoreRecord);

impl Inbox {
    /// Maximum number of waiting files. Above it, an importer gets an error, since no run reads them.
    pub const MAX_FILES: usize = 10_000;

    /// The inbox of the store in `directory`.
    pub fn of_store(directory: &Path) -> Self {
        Self {
            folder: directory.join("inbox"),
        }
    }

    /// Waiting files in the order of their names.
    fn files(&self) -> Result<Vec<PathBuf>, StoreError> {
        let entries = match std::fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(StoreError::io(&self.folder, e)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(|e| StoreError::io(&self.folder, e))?.path();
            if path.extension().is_some_and(|e| e == "jsonl") {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
    }

    /// Writes scores durably, as one file.
    ///
    /// # Errors
    /// If the file system fails, or the inbox is full.
    pub fn put(&self, records: &[ScoreRecord]) -> Result<(), StoreError> {
        if records.is_empty() {
            return Ok(());
        }
        let error = |e| StoreError::io(&self.folder, e);
        std::fs::create_dir_all(&self.folder).map_err(error)?;
        let waiting = self.files()?.len();
        if waiting >= Self::MAX_FILES {
            return Err(StoreError::Argument {
                field: "files in the inbox",
                value: waiting as u64,
                allowed: format!("up to {}; is the run alive?", Self::MAX_FILES),
            });
        }
        let mut text = Vec::new();
        for record in records {
            serde_json::to_writer(&mut text, &InboxLine(record.clone()))
                .map_err(|e| error(e.into()))?;
            text.push(b'\n');
        }
        let (path, mut file) = self.create().map_err(error)?;
        file.write_all(&text)
            .and_then(|()| file.sync_all())
            .map_err(error)?;
        std::fs::rename(&path, path.with_extension("jsonl")).map_err(error)?;
        File::open(&self.folder)
            .and_then(|f| f.sync_all())
            .map_err(error)
    }

    /// Creates a file with a new unique name.
    fn create(&self) -> std::io::Result<(PathBuf, File)> {
        for number in 0u32.. {
            let name = format!("{}-{number:08}", std::process::id());
            let path = self.folder.join(&name).with_extension("new");
            let whole = path.with_extension("jsonl");
            if whole.exists() {
                continue;
            }
            match OpenOptions::new().write(true).create_new(true).open(&path) {
                // Another thread, or a process with this number in another container, was faster. Nobody
                // takes the name from now on.
                Ok(_) if whole.exists() => std::fs::remove_file(&path)?,
                Ok(file) => return Ok((path, file)),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(e),
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }

    /// Moves the waiting scores into the store. Returns the number of new scores, and the faults: each
    /// unreadable line as file and line number, and the reason of each refused score. A file with a fault is
    /// kept with the extension `bad`.
    ///
    /// # Errors
    /// If the store or the file system fails; scores stored before the failure stay stored.
    pub fn take(&self, store: &dyn TraceStore) -> Result<(usize, Vec<String>), StoreError> {
        let (mut new, mut bad) = (0, Vec::new());
        for path in self.files()? {
            let error = |e| StoreError::io(&path, e);
            let mut rows = BufReader::new(File::open(&path).map_err(error)?);
            let (mut records, mut faults, mut number) = (Vec::new(), Vec::new(), 0);
            while let Some(line) = next_line(&mut rows).map_err(error)? {
                number += 1;
                let posted = match &line {
                    Line::Whole(bytes) => serde_json::from_slice::<InboxLine>(bytes).ok(),
                    Line::TooLong => None,
                };
                match posted {
                    Some(InboxLine(record)) => records.push(record),
                    None => faults.push(format!("{} line {number}", path.display())),
                }
                if records.len() >= CHUNK {
                    new += put_all(store, &std::mem::take(&mut records), &mut faults)?;
                }
            }
            new += put_all(store, &records, &mut faults)?;
            if faults.is_empty() {
                std::fs::remove_file(&path).map_err(error)?
            } else {
                std::fs::rename(&path, path.with_extension("bad")).map_err(error)?
            }
            bad.extend(faults);
        }
        Ok((new, bad))
    }
}

/// Puts records and returns how many are new. A refused record is an error.
fn put_all(
    store: &dyn TraceStore,
    records: &[ScoreRecord],
    faults: &mut Vec<String>,
) -> Result<usize, StoreError> {
    let mut new = 0;
    for put in store.put_scores(records)? {
        match put {
            Ok(CommitOutcome::New) => new += 1,
            Ok(CommitOutcome::Duplicate) => {}
            Err(refused) => faults.push(refused.to_string()),
        }
    }
    Ok(new)
}

/// Imports the scores of a file into the store in `directory`, or writes them to its inbox while another
/// process writes the store. `live` means that another process is about to write it, so that this function
/// must not open it for writing.
///
/// # Errors
/// If there is no store, or the file or the store fails.
pub fn import_file(
    directory: &Path,
    file: &Path,
    source: &str,
    now_us: u64,
    live: bool,
) -> Result<ImportReport, StoreError> {
    let rows = File::open(file).map_err(|e| StoreError::io(file, e))?;
    let mut rows = BufReader::new(rows);
    // Refuses a folder without a store, which opening one for writing would make.
    let reader = FolderReader::open(directory)?;
    let opened = if live {
        None
    } else {
        match DiskStore::open(directory, StoreOptions::default()) {
            Err(StoreError::Locked { .. }) => None,
            opened => Some(opened?),
        }
    };
    let inbox = Inbox::of_store(directory);
    let target = match &opened {
        Some(store) => ScoreTarget::Store(store),
        None => ScoreTarget::Live(&reader, &inbox),
    };
    import(&mut rows, &target, source, now_us)
}
