//! Recordings: what an episode was answered, kept so that it can be answered so again.
//!
//! `episodes/NAME.jsonl` has one line for each answer, `cache/KEY.json` one shared answer each,
//! `bodies/HASH` the content of bodies, named by BLAKE3 and checked when read.

use crate::config::Mode;
use bytes::Bytes;
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Headers that differ between runs of the same episode and mean nothing to the answer.
const VOLATILE: [&str; 6] = [
    "user-agent",
    "x-request-id",
    "x-correlation-id",
    "traceparent",
    "tracestate",
    "idempotency-key",
];

/// An answer as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A line, or the content of a cache file.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    key: String,
    ordinal: u64,
    status: u16,
    /// Values byte by byte as Latin-1, as headers need not be UTF-8.
    headers: Vec<(String, String)>,
    body: String,
}

#[derive(Debug, Default)]
struct State {
    seen: HashMap<String, u64>,
    entries: HashMap<(String, u64), Entry>,
    log: Option<File>,
}

/// The recordings that a session reads or writes.
#[derive(Debug)]
pub(crate) struct Recordings {
    mode: Mode,
    folder: PathBuf,
    state: Mutex<State>,
}

/// What identifies a request.
pub(crate) fn key(mode: Mode, method: &str, url: &str, headers: &HeaderMap, body: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut part = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(method.as_bytes());
    part(url.as_bytes());
    // In the shared cache every header counts: one that a server heeds although it should not
    // would else let an episode poison what others get.
    let counts = |name: &str| mode == Mode::Cache || !VOLATILE.contains(&name);
    let mut list: Vec<_> = headers.iter().filter(|(n, _)| counts(n.as_str())).collect();
    list.sort_by(|a, b| (a.0.as_str(), a.1.as_bytes()).cmp(&(b.0.as_str(), b.1.as_bytes())));
    for (name, value) in list {
        part(name.as_str().as_bytes());
        part(value.as_bytes());
    }
    part(body);
    hasher.finalize().to_hex().to_string()
}

/// Whether an answer may be given to other episodes.
pub(crate) fn shareable(
    method: &str,
    request: &HeaderMap,
    answer: &Answer,
    credential: bool,
) -> bool {
    let private = ["authorization", "cookie"]
        .iter()
        .any(|n| request.contains_key(*n));
    let kept = answer.headers.get_all("cache-control").iter().any(|v| {
        let text = v.to_str().unwrap_or("no-store").to_ascii_lowercase();
        text.contains("no-store") || text.contains("private")
    });
    let safe = ["GET", "HEAD"].contains(&method) && answer.status == 200;
    safe && !private && !credential && !kept && !answer.headers.contains_key("set-cookie")
}

/// Names of episodes become names of files.
fn plain_name(name: &str) -> bool {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    !name.is_empty() && name.len() <= 128 && !name.starts_with('.') && name.bytes().all(fine)
}

/// A file that appears whole or not at all.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let folder = path
        .parent()
        .ok_or_else(|| io::Error::other("a path without a folder"))?;
    fs::create_dir_all(folder)?;
    let unique = format!("{:?}", std::thread::current().id());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = folder.join(format!(".{name}.{}.{unique}", std::process::id()));
    let mut file = File::create(&part)?;
    file.write_all(content)?;
    file.sync_data()?;
    fs::rename(&part, path)
}

impl Recordings {
    /// For one episode.
    pub(crate) fn open(mode: Mode, folder: &Path, episode: &str) -> io::Result<Self> {
        if !plain_name(episode) {
            let text = format!(
                "episode {episode:?}; allowed: 1 to 128 of a-z, A-Z, 0-9, -, _ and . inside"
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let path = folder.join("episodes").join(format!("{episode}.jsonl"));
        let mut state = State::default();
        match mode {
            Mode::Record => {
                fs::create_dir_all(folder.join("episodes"))?;
                state.log = Some(File::create(&path)?);
            }
            Mode::Replay => {
                let text = fs::read_to_string(&path)
                    .map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
                for line in text.lines() {
                    let entry: Entry = serde_json::from_str(line)?;
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
            state: Mutex::new(state),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Which of several equal requests this is: asked once for each request, in order of arrival.
    pub(crate) fn ordinal(&self, key: &str) -> u64 {
        if self.mode == Mode::Cache {
            return 0;
        }
        let mut state = self.lock();
        let seen = state.seen.entry(key.into()).or_default();
        *seen += 1;
        *seen - 1
    }

    /// The answer that was kept.
    pub(crate) fn find(&self, key: &str, ordinal: u64) -> io::Result<Option<Answer>> {
        let entry = match self.mode {
            Mode::Replay => self.lock().entries.remove(&(key.into(), ordinal)),
            Mode::Cache => match fs::read(self.cache_path(key)) {
                Ok(bytes) => Some(serde_json::from_slice(&bytes)?),
                Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                Err(e) => return Err(e),
            },
            Mode::Live | Mode::Record => None,
        };
        entry.map(|e: Entry| self.answer(e)).transpose()
    }

    fn answer(&self, entry: Entry) -> io::Result<Answer> {
        let path = self.folder.join("bodies").join(&entry.body);
        let body = fs::read(&path)?;
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
        Ok(Answer {
            status: entry.status,
            headers,
            body: body.into(),
        })
    }

    fn cache_path(&self, key: &str) -> PathBuf {
        self.folder.join("cache").join(format!("{key}.json"))
    }

    /// Keeps an answer.
    pub(crate) fn keep(&self, key: &str, ordinal: u64, answer: &Answer) -> io::Result<()> {
        let body = blake3::hash(&answer.body).to_hex().to_string();
        let path = self.folder.join("bodies").join(&body);
        if !path.exists() {
            write_whole(&path, &answer.body)?;
        }
        let latin1 = |v: &HeaderValue| v.as_bytes().iter().map(|&b| char::from(b)).collect();
        let entry = Entry {
            key: key.into(),
            ordinal,
            status: answer.status,
            headers: answer
                .headers
                .iter()
                .map(|(n, v)| (n.as_str().into(), latin1(v)))
                .collect(),
            body,
        };
        let mut line = serde_json::to_vec(&entry)?;
        if self.mode == Mode::Cache {
            return write_whole(&self.cache_path(key), &line);
        }
        line.push(b'\n');
        match &mut self.lock().log {
            Some(log) => log.write_all(&line),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(body: &'static str) -> Answer {
        let mut headers = HeaderMap::new();
        headers.append("x-a", HeaderValue::from_bytes(b"caf\xe9").unwrap());
        headers.append("x-a", HeaderValue::from_static("two"));
        Answer {
            status: 200,
            headers,
            body: body.into(),
        }
    }

    #[test]
    fn equal_requests_get_their_answers_in_order_and_then_none() {
        let dir = tempfile::tempdir().unwrap();
        let record = Recordings::open(Mode::Record, dir.path(), "e-1").unwrap();
        for body in ["first", "second"] {
            record
                .keep("k", record.ordinal("k"), &answer(body))
                .unwrap();
        }
        let replay = Recordings::open(Mode::Replay, dir.path(), "e-1").unwrap();
        let next = || replay.find("k", replay.ordinal("k")).unwrap();
        assert_eq!(
            (next(), next(), next()),
            (Some(answer("first")), Some(answer("second")), None)
        );
    }

    #[test]
    fn a_changed_body_and_a_name_that_is_a_path_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let record = Recordings::open(Mode::Record, dir.path(), "e").unwrap();
        record.keep("k", 0, &answer("true")).unwrap();
        let body = fs::read_dir(dir.path().join("bodies"))
            .unwrap()
            .next()
            .unwrap()
            .unwrap();
        fs::write(body.path(), "false").unwrap();
        let replay = Recordings::open(Mode::Replay, dir.path(), "e").unwrap();
        assert_eq!(
            replay.find("k", 0).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        for name in ["../e", "", ".e", "a/b", "a\0"] {
            assert!(
                Recordings::open(Mode::Record, dir.path(), name).is_err(),
                "{name:?}"
            );
        }
    }

    #[test]
    fn in_the_shared_cache_every_header_makes_another_key() {
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
    fn private_answers_are_not_shared() {
        let (plain, mut private) = (HeaderMap::new(), HeaderMap::new());
        private.insert("authorization", HeaderValue::from_static("x"));
        let ok = answer("x");
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
            &Answer { status: 404, ..ok },
            false
        ));
    }
}
