//! Downloads over HTTPS: resumed after an interruption, checked, put into the cache in one step.
//!
//! The crate hf-hub (0.5) is not used: it compares no content with its hash, and bounds neither the size of a
//! file nor the time of a transfer.
//!
//! A file is written as `blobs/ETAG.incomplete` under a lock that `huggingface_hub` takes as well,
//! compared with its SHA-256, and renamed; links in `snapshots/` are made last. So a killed
//! download is resumed by the next one, and a snapshot that is complete by its names is complete by
//! its content.

use super::card::{Card, MAX_CARD_BYTES};
use super::dataset::{Selection, select};
use super::{SIDE_FILES, marker};
use crate::error::HubError;
use crate::lookup::{Progress, ResolveEnv};
use crate::safetensors::{INDEX, SINGLE, read_index};
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header;
use reqwest::redirect::Policy;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use sinew_http::{cause, tls};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum length of the hub's list of files.
const MAX_API_BYTES: u64 = 16 << 20;
/// Maximum size of a file, 1 TiB.
const MAX_FILE_BYTES: u64 = 1 << 40;
/// Maximum bytes of a data set's files, 64 GiB: its rows are kept in memory.
const MAX_DATASET_BYTES: u64 = 64 << 30;
/// Maximum redirects of one request.
const MAX_REDIRECTS: usize = 5;
/// Attempts in a row that bring no byte before a download is given up.
const MAX_ATTEMPTS: u32 = 4;
/// Pause after the first failed attempt; doubles with each one.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Limit of a TCP and TLS connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Wall time of a question about a file.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// Wall time of one attempt at a transfer; the next continues where it ended.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(300);
/// Size of a copied piece; progress is reported after each.
const COPY_BYTES: usize = 1 << 18;

/// One repository of the hub and its folder in the cache.
pub(super) struct Hub<'a> {
    /// `ORG/NAME` of a model, `datasets/ORG/NAME` of a data set, as in addresses.
    repo: &'a str,
    root: &'a Path,
    env: &'a ResolveEnv,
    client: Client,
    /// Follows no redirects, so that their headers can be read.
    direct: Client,
}

/// The hub's list of a revision's files.
#[derive(Deserialize)]
struct Revision {
    /// The commit that the revision names now.
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    /// Bytes; reported for data sets, where it is asked for.
    #[serde(default)]
    size: Option<u64>,
}

/// Identity and size of a file, as the hub reports them.
struct Remote {
    /// Name of the content in the cache: SHA-256 of large files, git's id of small ones.
    etag: String,
    /// Size in bytes, if the hub reports it.
    size: Option<u64>,
    /// Maximum bytes that are taken.
    limit: u64,
}

/// Kind of an attempt's failure.
enum Failure {
    /// Another attempt can succeed: no answer, an interrupted transfer, a server that is
    /// overloaded.
    Passing(HubError),
    /// Another attempt would fail as well: no such file, no access, a local error.
    Final(HubError),
}

impl<'a> Hub<'a> {
    /// The client for `repo`, whose cache folder is `root`.
    ///
    /// # Errors
    /// If no HTTP client can be made, with the reason.
    pub(super) fn new(
        repo: &'a str,
        root: &'a Path,
        env: &'a ResolveEnv,
    ) -> Result<Self, HubError> {
        Ok(Self {
            repo,
            root,
            env,
            client: client(Policy::limited(MAX_REDIRECTS))?,
            direct: client(Policy::none())?,
        })
    }

    /// Brings every needed file of `revision` into the cache and returns its directory:
    /// `config.json`, tokenizer files, and the weights as one file or as the shards that the index
    /// names.
    ///
    /// # Errors
    /// The address and the reason. Files that are complete stay in the cache.
    pub(super) fn snapshot(&self, revision: &str) -> Result<PathBuf, HubError> {
        let listing = self.listing(revision)?;
        let dir = self.root.join("snapshots").join(&listing.sha);
        fs::create_dir_all(&dir).map_err(HubError::file(&dir))?;
        let has = |name: &str| listing.siblings.iter().any(|file| file.rfilename == name);
        if !has("config.json") {
            return Err(HubError::NoConfig);
        }
        let fetch = |file: &str| {
            self.file(&listing.sha, file, &dir, MAX_FILE_BYTES)
                .map(drop)
        };
        fetch("config.json")?;
        for file in SIDE_FILES.iter().filter(|file| has(file)) {
            fetch(file)?;
        }
        if has(SINGLE) {
            fetch(SINGLE)?;
        } else if has(INDEX) {
            fetch(INDEX)?;
            let index = read_index(&dir.join(INDEX))?;
            let shards: std::collections::BTreeSet<_> = index.values().collect();
            shards.into_iter().try_for_each(|shard| fetch(shard))?;
        } else {
            return Err(HubError::NoWeights(SINGLE, INDEX));
        }
        self.refer(revision, &listing.sha)?;
        Ok(dir)
    }

    /// Brings the files of rows of a data set's configuration into the cache, and returns their commit and
    /// names.
    ///
    /// # Errors
    /// Same as for [`Hub::snapshot`], or if there are no files of rows, too many bytes, or several
    /// configurations and none is named.
    pub(super) fn data_files(
        &self,
        revision: &str,
        config: Option<&str>,
    ) -> Result<(String, Selection), HubError> {
        let listing = self.listing(revision)?;
        let dir = self.root.join("snapshots").join(&listing.sha);
        // The folder of the marker means that this download has begun: without its marker it is not whole.
        let marker = marker(self.root, &listing.sha, config);
        for dir in [Some(dir.as_path()), marker.parent()].into_iter().flatten() {
            fs::create_dir_all(dir).map_err(HubError::file(dir))?;
        }
        let names: Vec<String> = listing
            .siblings
            .iter()
            .map(|f| f.rfilename.clone())
            .collect();
        let text = |name: &str| match names.iter().any(|n| n == name) {
            false => Ok(None),
            true => self.description(&listing.sha, name, &dir).map(Some),
        };
        let (readme, infos) = (text("README.md")?, text("dataset_infos.json")?);
        let card = Card::read(readme.as_deref(), infos.as_deref())?;
        let selection = select(&names, &card, config)?;
        let sizes = listing
            .siblings
            .iter()
            .filter_map(|f| Some((f.rfilename.as_str(), f.size?)));
        let sizes: BTreeMap<&str, u64> = sizes.collect();
        let known = selection.files().filter_map(|name| sizes.get(name));
        let mut left = MAX_DATASET_BYTES;
        let announced = known.fold(0_u64, |sum, size| sum.saturating_add(*size));
        if announced > left {
            return Err(HubError::LargeDataset {
                bytes: announced,
                limit: MAX_DATASET_BYTES,
            });
        }
        for name in selection.files() {
            left = left.saturating_sub(self.file(&listing.sha, name, &dir, left)?);
        }
        let json = serde_json::to_vec(&selection).map_err(HubError::Note)?;
        write_atomic(&marker, &json).map_err(HubError::file(&marker))?;
        self.refer(revision, &listing.sha)?;
        Ok((listing.sha, selection))
    }

    /// The text of a small file that describes a data set.
    fn description(&self, sha: &str, name: &str, dir: &Path) -> Result<String, HubError> {
        self.file(sha, name, dir, MAX_CARD_BYTES)?;
        super::read_text(&dir.join(name), MAX_CARD_BYTES)
    }

    /// Notes the commit of a branch or tag, after its files.
    fn refer(&self, revision: &str, sha: &str) -> Result<(), HubError> {
        if super::is_commit(revision) {
            return Ok(());
        }
        let reference = self.root.join("refs").join(revision);
        write_atomic(&reference, sha.as_bytes()).map_err(HubError::file(&reference))
    }

    /// Address of a path of the hub.
    fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.env.hub_endpoint.trim_end_matches('/'))
    }

    /// Commit and files of a revision.
    fn listing(&self, revision: &str) -> Result<Revision, HubError> {
        let revision = revision.replace('/', "%2F");
        let (kind, sizes) = match self.repo.starts_with("datasets/") {
            true => ("api", "?blobs=true"),
            false => ("api/models", ""),
        };
        let url = self.url(&format!("{kind}/{}/revision/{revision}{sizes}", self.repo));
        let text = self.retry(|| {
            let mut text = String::new();
            let mut body = self.get(&url, None)?.take(MAX_API_BYTES + 1);
            body.read_to_string(&mut text)
                .map_err(|error| broken(&url, &error))?;
            match text.len() as u64 > MAX_API_BYTES {
                true => Err(Failure::Final(HubError::LargeAnswer {
                    url: url.clone(),
                    limit: MAX_API_BYTES,
                })),
                false => Ok(text),
            }
        })?;
        match serde_json::from_str::<Revision>(&text) {
            Ok(listing) if super::is_commit(&listing.sha) => Ok(listing),
            Ok(Revision { sha, .. }) => Err(HubError::Commit { url, sha }),
            Err(error) => Err(HubError::Json { url, error }),
        }
    }

    /// A GET from byte `from` on (a range), or of the whole.
    fn get(&self, url: &str, from: Option<u64>) -> Result<Response, Failure> {
        let mut request = self.client.get(url).timeout(TRANSFER_TIMEOUT);
        if let Some(from) = from {
            request = request.header(header::RANGE, format!("bytes={from}-"));
        }
        self.send(url, request)
    }

    /// Sends a request with the token, which a redirect to another host does not get.
    fn send(&self, url: &str, request: RequestBuilder) -> Result<Response, Failure> {
        let mut request = request.header(header::ACCEPT_ENCODING, "identity");
        if let Some(token) = &self.env.hub_token {
            request = request.bearer_auth(token);
        }
        let response = request.send();
        let response = response.map_err(|e| broken(url, &e))?;
        self.check(url, response)
    }

    /// Refuses an answer that is not a success, with what to do where something helps.
    fn check(&self, url: &str, response: Response) -> Result<Response, Failure> {
        let status = response.status().as_u16();
        let hint = match status {
            200..=399 => return Ok(response),
            401 | 403 => match self.env.hub_token {
                Some(_) => ": it does not exist, or HF_TOKEN gives no access",
                None => ": it does not exist, or it is private or gated and needs HF_TOKEN",
            },
            404 => ": no such repository, revision or file",
            _ => "",
        };
        let error = HubError::Status {
            url: url.to_owned(),
            status,
            hint,
        };
        Err(match status {
            408 | 429 | 500..=599 => Failure::Passing(error),
            _ => Failure::Final(error),
        })
    }

    /// Runs `attempt` until it succeeds, fails for good, or has failed [`MAX_ATTEMPTS`] times in a
    /// row.
    fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, HubError> {
        let mut pause = FIRST_PAUSE;
        for left in (0..MAX_ATTEMPTS).rev() {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error)) if left == 0 => return Err(error),
                Err(Failure::Passing(_)) => std::thread::sleep(pause),
            }
            pause *= 2;
        }
        Err(HubError::NoAttempt)
    }

    /// Identity and size of a file, from the answer before any redirect to another host.
    fn remote(&self, url: &str) -> Result<Remote, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let request = self.direct.head(&url).timeout(HEAD_TIMEOUT);
            let response = self.send(&url, request)?;
            let text = |name: &str| response.headers().get(name)?.to_str().ok();
            let linked = text("x-linked-etag");
            // A renamed repository redirects within the hub; large files elsewhere, with a linked tag.
            match text("location") {
                Some(path) if linked.is_none() && path.starts_with('/') => {
                    url = self.url(path.trim_start_matches('/'));
                    continue;
                }
                _ => {}
            }
            let raw = linked.or_else(|| text("etag")).unwrap_or_default();
            let etag = raw.trim_start_matches("W/").trim_matches('"').to_owned();
            let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-';
            if etag.is_empty() || etag.len() > 128 || !etag.bytes().all(plain) {
                let tag = raw.to_owned();
                return Err(Failure::Final(HubError::Tag { url, tag }));
            }
            let size = if linked.is_some() {
                text("x-linked-size")
            } else {
                text("content-length")
            };
            let size = size.and_then(|size| size.parse().ok());
            if size.is_some_and(|size: u64| size > MAX_FILE_BYTES) {
                let limit = MAX_FILE_BYTES;
                return Err(Failure::Final(HubError::LargeRemote { url, limit }));
            }
            let limit = MAX_FILE_BYTES;
            return Ok(Remote { etag, size, limit });
        }
        let limit = MAX_REDIRECTS;
        Err(Failure::Final(HubError::Redirects { url, limit }))
    }

    /// Brings one file of commit `sha`, of at most `limit` bytes, into the cache and links it into `dir`.
    /// Returns its bytes.
    fn file(&self, sha: &str, name: &str, dir: &Path, limit: u64) -> Result<u64, HubError> {
        let link = dir.join(name);
        let size = || link.metadata().map(|meta| meta.len());
        let too_large = |bytes| match bytes > limit {
            true => Err(HubError::Limit {
                name: name.to_owned(),
                bytes,
                limit,
            }),
            false => Ok(bytes),
        };
        if let Ok(bytes) = size() {
            return too_large(bytes);
        }
        let url = self.url(&format!("{}/resolve/{sha}/{}", self.repo, escaped(name)));
        let mut remote = self.retry(|| self.remote(&url))?;
        remote.size.map_or(Ok(0), too_large)?;
        remote.limit = limit.min(MAX_FILE_BYTES);
        let blobs = self.root.join("blobs");
        let blob = blobs.join(&remote.etag);
        let failed = HubError::file(&blob);
        fs::create_dir_all(&blobs).map_err(failed)?;
        let _lock = self.lock(&remote.etag).map_err(failed)?;
        if !blob.is_file() {
            self.blob(&url, name, &remote, &blob)?;
        }
        // Files of data sets are in separate folders.
        let up = "../".repeat(2 + name.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&remote.etag);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        match std::os::unix::fs::symlink(target, &link) {
            Err(error) if !link.is_file() => Err(failed(error)),
            _ => size().map_err(failed),
        }
    }

    /// The lock that `huggingface_hub` takes as well; held until the file is dropped.
    fn lock(&self, etag: &str) -> io::Result<File> {
        let folder = self.root.file_name().unwrap_or_default();
        let dir = self.env.hub_cache.join(".locks").join(folder);
        fs::create_dir_all(&dir)?;
        let file = File::create(dir.join(format!("{etag}.lock")))?;
        file.lock()?;
        Ok(file)
    }

    /// Downloads a file next to its final name, checks it, and renames it. Attempts are counted
    /// anew after each one that has brought bytes.
    fn blob(&self, url: &str, name: &str, remote: &Remote, blob: &Path) -> Result<(), HubError> {
        let partial = blob.with_file_name(format!("{}.incomplete", remote.etag));
        let failed = HubError::file(&partial);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&partial).map_err(failed)?;
        let mut last = file.metadata().map_err(failed)?.len();
        // Attempts count anew after each that brought bytes.
        loop {
            let done = self.retry(|| match self.transfer(url, name, remote, &mut file) {
                Err(Failure::Passing(error)) => {
                    let length = file.metadata().map(|meta| meta.len()).unwrap_or(last);
                    let moved = length > last;
                    last = length;
                    if moved {
                        Ok(false)
                    } else {
                        Err(Failure::Passing(error))
                    }
                }
                other => other.map(|()| true),
            })?;
            if done {
                break;
            }
        }
        if let Err(error) = verify(&mut file, url, remote) {
            // A wrong file would be resumed for ever.
            let _ = fs::remove_file(&partial);
            return Err(error);
        }
        file.sync_all().map_err(failed)?;
        fs::rename(&partial, blob).map_err(failed)
    }

    /// One attempt to bring the rest of a file.
    fn transfer(
        &self,
        url: &str,
        name: &str,
        remote: &Remote,
        file: &mut File,
    ) -> Result<(), Failure> {
        let local = |error: io::Error| Failure::Final(error.into());
        let mut at = file.seek(SeekFrom::End(0)).map_err(local)?;
        if remote.size == Some(at) {
            return Ok(());
        }
        if remote.size.is_some_and(|size| at > size) {
            at = 0;
        }
        let mut response = self.get(url, (at > 0).then_some(at))?;
        if response.status().as_u16() != 206 {
            at = 0;
        }
        file.set_len(at).map_err(local)?;
        file.seek(SeekFrom::Start(at)).map_err(local)?;
        let mut buffer = vec![0; COPY_BYTES];
        let limit = remote.size.unwrap_or(remote.limit);
        loop {
            let n = match response.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) => return Err(broken(url, &error)),
            };
            at += n as u64;
            if at > limit {
                let url = url.to_owned();
                return Err(Failure::Final(HubError::Announced { url, limit }));
            }
            file.write_all(&buffer[..n]).map_err(local)?;
            if let Some(progress) = &self.env.progress {
                progress(Progress {
                    file: name,
                    bytes: at,
                    total: remote.size,
                });
            }
        }
        match remote.size {
            Some(size) if at < size => Err(Failure::Passing(HubError::Short {
                url: url.to_owned(),
                found: at,
                size,
            })),
            _ => Ok(()),
        }
    }
}

/// A request without an answer, or an answer that breaks off: another attempt can succeed.
fn broken(url: &str, error: &(dyn std::error::Error + 'static)) -> Failure {
    Failure::Passing(HubError::Request {
        url: url.to_owned(),
        reason: cause(error),
    })
}

/// A client that trusts Mozilla's root certificates, which are built into the program.
fn client(redirects: Policy) -> Result<Client, HubError> {
    Client::builder()
        .tls_backend_preconfigured(tls())
        .redirect(redirects)
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("sinew/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| HubError::Client(cause(&error)))
}

/// Compares a large file with its SHA-256. Small files have git's id as their name, and are checked only by
/// length.
fn verify(file: &mut File, url: &str, remote: &Remote) -> Result<(), HubError> {
    let is_sha256 = remote.etag.len() == 64 && remote.etag.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_sha256 {
        return Ok(());
    }
    let mut hash = Sha256::new();
    let mut buffer = vec![0; COPY_BYTES];
    let unread = |error| HubError::Read {
        url: url.to_owned(),
        error,
    };
    file.seek(SeekFrom::Start(0)).map_err(unread)?;
    loop {
        let n = file.read(&mut buffer).map_err(unread)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    let found: String = hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if found.eq_ignore_ascii_case(&remote.etag) {
        return Ok(());
    }
    Err(HubError::Digest {
        url: url.to_owned(),
        found,
        expected: remote.etag.clone(),
    })
}

/// A file's path as part of an address: every byte but letters, digits, `-._~` and `/` as `%XX`.
fn escaped(name: &str) -> String {
    let mut text = String::with_capacity(name.len());
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                text.push(char::from(byte));
            }
            other => text.push_str(&format!("%{other:02X}")),
        }
    }
    text
}

/// Writes a file that is whole or not there.
fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let mut staging = tempfile::NamedTempFile::new_in(parent)?;
    staging.write_all(bytes)?;
    staging.as_file().sync_all()?;
    staging.persist(path).map_err(|error| error.error)?;
    Ok(())
}
