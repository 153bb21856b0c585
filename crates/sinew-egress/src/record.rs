//! Recordings: responses of an episode that are stored for replay.
//!
//! `episodes/NAME.jsonl` has one line per response, `cache/KEY.json` one shared response per file, and
//! `bodies/HASH` the body with that BLAKE3 hash, which is checked on reading.

use crate::config::Mode;
use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Headers that differ between runs of the same episode and do not affect the response.
const VOLATILE: [&str; 6] = [
    "user-agent",
    "x-request-id",
    "x-correlation-id",
    "traceparent",
    "tracestate",
    "idempotency-key",
];

/// Maximum bytes of the recording of an episode, without its bodies.
const MAX_LOG_BYTES: u64 = 256 << 20;
/// Maximum bytes of a cached response, without its body.
const MAX_ENTRY_BYTES: u64 = 1 << 20;

/// A stored response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordedResponse {
    pub(crate) status: u16,
    /// Response headers without those of the connection.
    pub(crate) headers: HeaderMap,
    /// Complete body with secrets removed.
    pub(crate) body: Bytes,
}

/// A line of an episode's recording, or the content of a cache file.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    /// Hash of the request, see [`key`].
    key: String,
    /// Number of earlier requests with the same key.
    ordinal: u64,
    status: u16,
    /// Values byte by byte as Latin-1, because headers need not be UTF-8.
    headers: Vec<(String, String)>,
    /// BLAKE3 hash of the body.
    body: String,
}

/// State of a session.
#[derive(Debug, Default)]
struct State {
    /// Number of requests by key.
    seen: HashMap<String, u64>,
    /// Recorded responses that were not replayed yet.
    entries: HashMap<(String, u64), Entry>,
    /// The recording, in record mode.
    log: Option<Log>,
}

/// Recording of an episode. The file is locked, so that only one session writes it.
#[derive(Debug)]
struct Log {
    /// Locked file, positioned at the end.
    file: File,
    /// Bytes of complete lines.
    len: u64,
}

impl Log {
    /// Creates an empty recording.
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)?;
        file.try_lock().map_err(|e| match e {
            fs::TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::ResourceBusy,
                "the episode is being recorded by another sandbox",
            ),
            fs::TryLockError::Error(e) => e,
        })?;
        file.set_len(0)?;
        Ok(Self { file, len: 0 })
    }

    /// Appends a line, completely or not at all.
    fn line(&mut self, line: &[u8]) -> io::Result<()> {
        if let Err(e) = self.file.write_all(line) {
            // Removes an incomplete line.
            self.file.set_len(self.len)?;
            self.file.seek(SeekFrom::Start(self.len))?;
            return Err(e);
        }
        self.len += line.len() as u64;
        Ok(())
    }
}

/// Byte quota of a folder, shared by all sessions.
#[derive(Debug)]
pub(crate) struct FolderQuota {
    /// Used bytes.
    used: AtomicU64,
    /// Maximum bytes.
    max: u64,
}

impl FolderQuota {
    /// Creates a quota. Counts the existing files.
    pub(crate) fn of(folder: &Path, max: u64) -> io::Result<Self> {
        let mut used = 0;
        for name in ["episodes", "bodies", "cache"] {
            match fs::read_dir(folder.join(name)) {
                Ok(files) => {
                    for file in files {
                        used += file?.metadata()?.len();
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(Self {
            used: AtomicU64::new(used),
            max,
        })
    }

    /// Reserves bytes for a file or line.
    fn reserve(&self, bytes: usize) -> io::Result<()> {
        let bytes = bytes as u64;
        let used = self.used.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if used <= self.max {
            return Ok(());
        }
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        let text = format!("the folder may hold {} bytes (folder_bytes)", self.max);
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
    }
}

/// Recordings of a session.
#[derive(Debug)]
pub(crate) struct Recordings {
    /// Mode of the session.
    mode: Mode,
    /// Folder of recordings and cache.
    folder: PathBuf,
    /// Byte quota of the folder.
    quota: Arc<FolderQuota>,
    /// Requests and entries of this session.
    state: Mutex<State>,
}

/// A stored response whose body is not read yet.
#[derive(Debug)]
pub(crate) struct Found {
    entry: Entry,
    path: PathBuf,
    /// The body.
    file: File,
    /// Length of the body.
    bytes: u64,
}

impl Found {
    /// Length of the body.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the body and checks it.
    pub(crate) fn read(self) -> io::Result<RecordedResponse> {
        let Self {
            entry,
            path,
            file,
            bytes,
        } = self;
        let mut body = Vec::new();
        file.take(bytes).read_to_end(&mut body)?;
        let bad = |what: &str| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{}: {what}", path.display()),
            )
        };
        if blake3::hash(&body).to_hex().as_str() != entry.body {
            return Err(bad("the content is not what its name says"));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in entry.headers {
            let value: Option<Vec<u8>> = value.chars().map(|c| u8::try_from(c).ok()).collect();
            let name: HeaderName = name.parse().map_err(|_| bad("a recorded header's name"))?;
            let value = value.and_then(|v| HeaderValue::from_bytes(&v).ok());
            headers.append(name, value.ok_or_else(|| bad("a recorded header's value"))?);
        }
        Ok(RecordedResponse {
            status: entry.status,
            headers,
            body: body.into(),
        })
    }
}

/// Opens a regular file. Anything else, such as a pipe that nobody writes, is refused and not waited for.
fn open_regular(path: &Path) -> io::Result<File> {
    let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    let file = File::options()
        .read(true)
        .custom_flags(nonblock)
        .open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let text = format!("{name} is no regular file");
        Err(io::Error::new(io::ErrorKind::InvalidData, text))
    }
}

/// Reads a regular file of at most `max` bytes.
fn read_regular(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(max + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max {
        let text = format!("it is larger than {max} bytes");
        Err(io::Error::new(io::ErrorKind::FileTooLarge, text))
    } else {
        Ok(bytes)
    }
}

/// BLAKE3 hash of a request. Equal requests have equal keys.
pub(crate) fn key(mode: Mode, method: &str, url: &str, headers: &HeaderMap, body: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(method.as_bytes());
    part(url.as_bytes());
    // The shared cache uses every header. If a server obeyed an ignored header, an episode could
    // otherwise poison the responses of others.
    let counts = |name: &str| mode == Mode::Cache || !VOLATILE.contains(&name);
    let mut list: Vec<_> = headers.iter().filter(|(n, _)| counts(n.as_str())).collect();
    // Values of one name store their order, which is significant.
    list.sort_by(|a, b| a.0.as_str().cmp(b.0.as_str()));
    for (name, value) in list {
        part(name.as_str().as_bytes());
        part(value.as_bytes());
    }
    part(body);
    hasher.finalize().to_hex().to_string()
}

/// True if other episodes may get this response from the cache.
pub(crate) fn shareable(
    method: &str,
    request: &HeaderMap,
    response: &RecordedResponse,
    credential: bool,
) -> bool {
    let private = ["authorization", "cookie"]
        .iter()
        .any(|n| request.contains_key(*n));
    let kept = response.headers.get_all("cache-control").iter().any(|v| {
        let text = v.to_str().unwrap_or("no-store").to_ascii_lowercase();
        text.contains("no-store") || text.contains("private")
    });
    let safe = ["GET", "HEAD"].contains(&method) && response.status == 200;
    safe && !private && !credential && !kept && !response.headers.contains_key("set-cookie")
}

/// True if an episode name is a safe file name.
fn plain_name(name: &str) -> bool {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(fine)
}

/// Makes an empty recording of an episode that has none: a replay of it answers nothing.
///
/// # Errors
/// If the name is not a plain file name, or the folder cannot be written.
pub fn begin_empty(folder: &Path, episode: &str) -> io::Result<()> {
    let path = recording(folder, episode)?;
    fs::create_dir_all(folder.join("episodes"))?;
    File::options().create(true).append(true).open(path)?;
    Ok(())
}

/// File of an episode's recording.
fn recording(folder: &Path, episode: &str) -> io::Result<PathBuf> {
    if plain_name(episode) {
        return Ok(folder.join("episodes").join(format!("{episode}.jsonl")));
    }
    let text =
        format!("episode {episode:?}; allowed: 1 to 200 of a-z, A-Z, 0-9, -, _ and . inside");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Writes a file atomically through a temporary file.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .ok_or_else(|| io::Error::other("a path without a folder"))?;
    fs::create_dir_all(folder)?;
    let unique = format!("{:?}", std::thread::current().id());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = folder.join(format!(".{name}.{}.{unique}", std::process::id()));
    let written = File::create(&part).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_data()?;
        fs::rename(&part, path)
    });
    if written.is_err() {
        // The error of the write is more useful than that of the removal.
        let _ = fs::remove_file(&part);
    }
    written
}

impl Recordings {
    /// Opens the recordings of one episode.
    pub(crate) fn open(
        mode: Mode,
        folder: &Path,
        episode: &str,
        quota: Arc<FolderQuota>,
    ) -> io::Result<Self> {
        let path = recording(folder, episode)?;
        let mut state = State::default();
        match mode {
            Mode::Record => {
                fs::create_dir_all(folder.join("episodes"))?;
                state.log = Some(Log::open(&path)?);
            }
            Mode::Replay => {
                // Errors do not contain the folder, because the episode's name may come from a client.
                let name = format!("{episode}.jsonl");
                let text = read_regular(&path, MAX_LOG_BYTES)
                    .and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other))
                    .map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")))?;
                // An incomplete last line was never sent to a client.
                let whole = text.rfind('\n').map_or("", |end| &text[..end]);
                for (at, line) in whole.lines().enumerate() {
                    let entry: Entry = serde_json::from_str(line).map_err(|e| {
                        let text = format!("{name}, line {}: {e}", at + 1);
                        io::Error::new(io::ErrorKind::InvalidData, text)
                    })?;
                    state
                        .entries
                        .insert((entry.key.clone(), entry.ordinal), entry);
                }
            }
            Mode::Live | Mode::Cache => {}
        }
        Ok(Self {
            mode,
            folder: folder.into(),
            quota,
            state: Mutex::new(state),
        })
    }

    /// State of the recordings. A panic of another holder leaves at most a response that is not stored.
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of earlier requests with this key. Call it once per request, in order of arrival.
    pub(crate) fn ordinal(&self, key: &str) -> u64 {
        if self.mode == Mode::Cache {
            return 0;
        }
        let mut state = self.lock();
        let seen = state.seen.entry(key.into()).or_default();
        *seen += 1;
        *seen - 1
    }

    /// Finds a stored response. Its body is not read yet.
    pub(crate) fn find(&self, key: &str, ordinal: u64) -> io::Result<Option<Found>> {
        let entry = match self.mode {
            Mode::Replay => self.lock().entries.remove(&(key.into(), ordinal)),
            Mode::Cache => match read_regular(&self.cache_path(key), MAX_ENTRY_BYTES) {
                Ok(bytes) => Some(serde_json::from_slice(&bytes)?),
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(e) => return Err(e),
            },
            Mode::Live | Mode::Record => None,
        };
        let found = entry.map(|entry: Entry| {
            // A name that is not a hash could lead to another folder.
            if entry.body.len() != 64 || !entry.body.bytes().all(|b| b.is_ascii_hexdigit()) {
                let text = format!("{:?} is no name of a body", entry.body);
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            let path = self.folder.join("bodies").join(&entry.body);
            let file = open_regular(&path)?;
            let bytes = file.metadata()?.len();
            Ok(Found {
                entry,
                path,
                file,
                bytes,
            })
        });
        found.transpose()
    }

    /// File of a cached response.
    fn cache_path(&self, key: &str) -> PathBuf {
        self.folder.join("cache").join(format!("{key}.json"))
    }

    /// Stores a response. The body is stored once per content.
    pub(crate) fn store(
        &self,
        key: &str,
        ordinal: u64,
        response: &RecordedResponse,
    ) -> io::Result<()> {
        let body = blake3::hash(&response.body).to_hex().to_string();
        let path = self.folder.join("bodies").join(&body);
        if !path.exists() {
            self.quota.reserve(response.body.len())?;
            write_whole(&path, &response.body)?;
        }
        let latin1 = |v: &HeaderValue| v.as_bytes().iter().map(|&b| char::from(b)).collect();
        let entry = Entry {
            key: key.into(),
            ordinal,
            status: response.status,
            headers: response
                .headers
                .iter()
                .map(|(n, v)| (n.as_str().into(), latin1(v)))
                .collect(),
            body,
        };
        let mut line = serde_json::to_vec(&entry)?;
        self.quota.reserve(line.len() + 1)?;
        if self.mode == Mode::Cache {
            return write_whole(&self.cache_path(key), &line);
        }
        line.push(b'\n');
        match &mut self.lock().log {
            Some(log) => log.line(&line),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::{SMALL_DISK, small_disk};

    fn open(mode: Mode, folder: &Path, episode: &str) -> io::Result<Recordings> {
        let quota = FolderQuota::of(folder, 1 << 30)?;
        Recordings::open(mode, folder, episode, Arc::new(quota))
    }

    fn read(from: &Recordings, key: &str, ordinal: u64) -> io::Result<Option<RecordedResponse>> {
        from.find(key, ordinal)?.map(Found::read).transpose()
    }

    #[test]
    fn only_regular_files_are_recordings() {
        let dir = tempfile::tempdir().unwrap();
        let record = open(Mode::Record, dir.path(), "e").unwrap();
        record.store("k", 0, &response("true")).unwrap();
        let (log, other) = (
            dir.path().join("episodes/e.jsonl"),
            dir.path().join("other"),
        );
        fs::rename(&log, &other).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &log).unwrap();
        let error = open(Mode::Replay, dir.path(), "e").unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
        fs::remove_file(&log).unwrap();
        fs::rename(&other, &log).unwrap();
        let replay = open(Mode::Replay, dir.path(), "e").unwrap();
        let body = fs::read_dir(dir.path().join("bodies")).unwrap();
        let body = body.flatten().next().unwrap().path();
        fs::remove_file(&body).unwrap();
        // Nobody writes it.
        rustix::fs::mkfifoat(rustix::fs::CWD, &body, rustix::fs::Mode::RUSR).unwrap();
        let error = read(&replay, "k", 0).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }

    #[test]
    fn folder_quota_holds_over_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let store = |key: &str, body: &'static str, max| {
            let quota = Arc::new(FolderQuota::of(dir.path(), max).unwrap());
            let cache = Recordings::open(Mode::Cache, dir.path(), "e", quota).unwrap();
            cache.store(key, 0, &response(body))
        };
        store("k1", "one", 1000).unwrap();
        let error = store("k2", "two", 300).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().contains("300 bytes"), "{error}");
        store("k2", "two", 1000).unwrap();
    }

    fn response(body: &'static str) -> RecordedResponse {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        headers.append("x-a", HeaderValue::from_static("two"));
        RecordedResponse {
            status: 200,
            headers,
            body: body.into(),
        }
    }

    #[test]
    fn equal_requests_get_recorded_responses_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let record = open(Mode::Record, dir.path(), "e-1").unwrap();
        for body in ["first", "second"] {
            record
                .store("k", record.ordinal("k"), &response(body))
                .unwrap();
        }
        let replay = open(Mode::Replay, dir.path(), "e-1").unwrap();
        let next = || read(&replay, "k", replay.ordinal("k")).unwrap();
        assert_eq!(
            (next(), next(), next()),
            (Some(response("first")), Some(response("second")), None)
        );
    }

    #[test]
    fn changed_bodies_and_path_names_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let record = open(Mode::Record, dir.path(), "e").unwrap();
        record.store("k", 0, &response("true")).unwrap();
        let body = fs::read_dir(dir.path().join("bodies"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        fs::write(body.path(), "false").unwrap();
        let replay = open(Mode::Replay, dir.path(), "e").unwrap();
        assert_eq!(
            read(&replay, "k", 0).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        for name in ["../e", "", ".e", "a/b", "a\0"] {
            assert!(open(Mode::Record, dir.path(), name).is_err(), "{name:?}");
        }
    }

    #[test]
    fn shared_cache_keys_contain_every_header() {
        let mut headers = HeaderMap::new();
        let base = |mode, h: &HeaderMap| key(mode, "GET", "http://a/", h, b"");
        let (shared, own) = (base(Mode::Cache, &headers), base(Mode::Record, &headers));
        headers.insert("user-agent", HeaderValue::from_static("x"));
        assert_ne!(base(Mode::Cache, &headers), shared);
        assert_eq!(base(Mode::Record, &headers), own);
        headers.insert("x-forwarded-host", HeaderValue::from_static("evil"));
        assert_ne!(base(Mode::Record, &headers), own);
    }

    #[test]
    fn private_responses_are_not_shared() {
        let (plain, mut private) = (HeaderMap::new(), HeaderMap::new());
        private.insert("authorization", HeaderValue::from_static("x"));
        let ok = response("x");
        assert!(shareable("GET", &plain, &ok, false));
        assert!(!shareable("POST", &plain, &ok, false) && !shareable("GET", &private, &ok, false));
        assert!(!shareable("GET", &plain, &ok, true));
        let mut kept = ok.clone();
        kept.headers.insert(
            "cache-control",
            HeaderValue::from_static("max-age=1, Private"),
        );
        assert!(!shareable("GET", &plain, &kept, false));
        assert!(!shareable(
            "GET",
            &plain,
            &RecordedResponse { status: 404, ..ok },
            false
        ));
    }

    #[test]
    fn incomplete_lines_are_ignored_and_damaged_lines_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let record = open(Mode::Record, dir.path(), "e").unwrap();
        for body in ["first", "second"] {
            record
                .store("k", record.ordinal("k"), &response(body))
                .unwrap();
        }
        drop(record);
        let path = dir.path().join("episodes/e.jsonl");
        let whole = fs::read(&path).unwrap();
        fs::write(&path, &whole[..whole.len() - 9]).unwrap();
        let replay = open(Mode::Replay, dir.path(), "e").unwrap();
        assert_eq!(read(&replay, "k", 0).unwrap(), Some(response("first")));
        assert_eq!(read(&replay, "k", 1).unwrap(), None);
        fs::write(&path, [b"{]\n", whole.as_slice()].concat()).unwrap();
        let error = open(Mode::Replay, dir.path(), "e").unwrap_err();
        assert!(error.to_string().contains("e.jsonl, line 1"), "{error}");
    }

    #[test]
    fn full_disk_leaves_no_incomplete_responses() {
        let name = "record::tests::full_disk_leaves_no_incomplete_responses";
        let Some(dir) = small_disk(name) else { return };
        let ballast = dir.join("ballast");
        let large = |n: usize| {
            let mut large = response("");
            let value = HeaderValue::from_str(&"x".repeat(9000)).unwrap();
            large.headers.insert("x-large", value);
            large.body = format!("{n}").repeat(3000).into();
            large
        };
        for mode in [Mode::Record, Mode::Cache] {
            fs::write(&ballast, vec![0; SMALL_DISK / 2]).unwrap();
            let record = open(mode, &dir, "e").unwrap();
            let store = |n: usize| record.store(&format!("k{n}"), 0, &large(n));
            let failed = (0..20).find(|&n| store(n).is_err()).unwrap();
            fs::remove_file(&ballast).unwrap();
            store(failed + 1).unwrap();
            drop(record);
            let again = if mode == Mode::Record {
                Mode::Replay
            } else {
                mode
            };
            let replay = open(again, &dir, "e").unwrap();
            for n in 0..=failed + 1 {
                let found = read(&replay, &format!("k{n}"), 0).unwrap();
                assert_eq!(
                    found,
                    (n != failed).then(|| large(n)),
                    "{mode:?} {n} of {failed}"
                );
            }
            for folder in ["bodies", "cache"] {
                let left = fs::read_dir(dir.join(folder))
                    .into_iter()
                    .flatten()
                    .flatten();
                let parts = left.filter(|f| f.file_name().to_string_lossy().starts_with('.'));
                assert_eq!(parts.count(), 0, "{folder}");
            }
            for folder in ["bodies", "cache", "episodes"] {
                let _ = fs::remove_dir_all(dir.join(folder));
            }
        }
    }
}
