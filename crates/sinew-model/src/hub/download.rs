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
use super::{Extent, SIDE_FILES, marker};
use crate::error::HubError;
use crate::lookup::{Progress, ResolveEnv};
use crate::safetensors::{INDEX, SINGLE, read_index};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use sinew_http::blocking::{self, Client, RequestBuilder, Response};
use sinew_http::header::{self, HeaderMap, HeaderValue};
use sinew_http::{ClientOptions, HttpError, Method, Retry, cause, may_pass};
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
const TRIES: Retry = Retry::doubling(4, Duration::from_millis(200), Duration::from_millis(800));
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
    /// Bytes; reported for data sets, where it is requested.
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

/// A failed attempt. No answer, an interrupted transfer and an overloaded server may pass; no such file, no
/// access and a local error last.
type Failure = sinew_http::Failure<String>;

/// The failure of an attempt that can succeed later.
fn passing(url: &str, why: impl std::fmt::Display) -> Failure {
    Failure::Passing(format!("{url}: {why}"), None)
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
            client: client(MAX_REDIRECTS)?,
            direct: client(0)?,
        })
    }

    /// Brings every needed file of `revision` into the cache and returns its directory: tokenizer files,
    /// `config.json`, and the weights as one file or as the shards that the index names.
    ///
    /// # Errors
    /// The address and the reason. Files that are complete stay in the cache.
    pub(super) fn snapshot(&self, revision: &str, extent: Extent) -> Result<PathBuf, HubError> {
        let listing = self.listing(revision)?;
        let dir = self.root.join("snapshots").join(&listing.sha);
        fs::create_dir_all(&dir).map_err(HubError::file(&dir))?;
        let has = |name: &str| listing.siblings.iter().any(|file| file.rfilename == name);
        if !has("config.json") {
            let why = "the repository has no config.json";
            return Err(HubError::Repository(why.to_owned()));
        }
        let fetch = |file: &str| {
            self.file(&listing.sha, file, &dir, MAX_FILE_BYTES)
                .map(drop)
        };
        for file in SIDE_FILES.iter().filter(|file| has(file)) {
            fetch(file)?;
        }
        fetch("config.json")?;
        if extent == Extent::WithoutWeights {
            // They are elsewhere.
        } else if has(SINGLE) {
            fetch(SINGLE)?;
        } else if has(INDEX) {
            fetch(INDEX)?;
            let index = read_index(&dir.join(INDEX))?;
            let shards: std::collections::BTreeSet<_> = index.values().collect();
            shards.into_iter().try_for_each(|shard| fetch(shard))?;
        } else {
            let why = format!("the repository has neither `{SINGLE}` nor `{INDEX}`");
            return Err(HubError::Repository(why));
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
        let text = |name: &str| {
            if names.iter().any(|n| n == name) {
                self.description(&listing.sha, name, &dir).map(Some)
            } else {
                Ok(None)
            }
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
            return Err(HubError::Repository(format!(
                "its files have {announced} bytes; allowed: up to {MAX_DATASET_BYTES}. Take a \
                 configuration, or a data set of its own with the rows that are needed"
            )));
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

    /// Stores the commit of a branch or tag, after its files.
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
        let (kind, sizes) = if self.repo.starts_with("datasets/") {
            ("api", "?blobs=true")
        } else {
            ("api/models", "")
        };
        let url = self.url(&format!("{kind}/{}/revision/{revision}{sizes}", self.repo));
        let text = retry(|| {
            blocking::read(self.get(&url, None)?, MAX_API_BYTES).map_err(|error| match error {
                HttpError::TooLarge(limit) => {
                    Failure::Lasting(format!("{url}: more than {limit} bytes"))
                }
                error => passing(&url, error),
            })
        })?;
        let wrong = |why: &dyn std::fmt::Display| HubError::Request(format!("{url}: {why}"));
        let listing: Revision = serde_json::from_slice(&text).map_err(|e| wrong(&e))?;
        if super::is_commit(&listing.sha) {
            Ok(listing)
        } else {
            Err(wrong(&format_args!("`{}` is no commit", listing.sha)))
        }
    }

    /// A GET from byte `from` on (a range), or of the whole.
    fn get(&self, url: &str, from: Option<u64>) -> Result<Response, Failure> {
        let request = self.client.request(Method::GET, url);
        let mut request = request.timeout(TRANSFER_TIMEOUT);
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
        let response = request.send().map_err(|e| passing(url, cause(&e)))?;
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
        let text = format!("{url} answers {status}{hint}");
        Err(if may_pass(status) {
            Failure::Passing(text, None)
        } else {
            Failure::Lasting(text)
        })
    }

    /// Identity and size of a file, from the answer before any redirect to another host.
    fn remote(&self, url: &str) -> Result<Remote, Failure> {
        let mut url = url.to_owned();
        for _ in 0..MAX_REDIRECTS {
            let request = self.direct.request(Method::HEAD, &url);
            let response = self.send(&url, request.timeout(HEAD_TIMEOUT))?;
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
                return Err(Failure::Lasting(format!(
                    "{url}: tag `{raw}` does not identify a file"
                )));
            }
            let size = if linked.is_some() {
                text("x-linked-size")
            } else {
                text("content-length")
            };
            let size = size.and_then(|size| size.parse().ok());
            if size.is_some_and(|size: u64| size > MAX_FILE_BYTES) {
                return Err(Failure::Lasting(format!(
                    "{url}: larger than {MAX_FILE_BYTES} bytes"
                )));
            }
            let limit = MAX_FILE_BYTES;
            return Ok(Remote { etag, size, limit });
        }
        Err(Failure::Lasting(format!(
            "{url}: more than {MAX_REDIRECTS} redirects"
        )))
    }

    /// Brings one file of commit `sha`, of at most `limit` bytes, into the cache and links it into `dir`.
    /// Returns its bytes.
    fn file(&self, sha: &str, name: &str, dir: &Path, limit: u64) -> Result<u64, HubError> {
        let link = dir.join(name);
        let size = || link.metadata().map(|meta| meta.len());
        let too_large = |bytes| {
            if bytes > limit {
                let why = format!("{name}: {bytes} bytes; allowed: up to {limit}");
                Err(HubError::Repository(why))
            } else {
                Ok(bytes)
            }
        };
        if let Ok(bytes) = size() {
            return too_large(bytes);
        }
        let url = self.url(&format!("{}/resolve/{sha}/{}", self.repo, escaped(name)));
        let mut remote = retry(|| self.remote(&url))?;
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

    /// Downloads a file next to its final name, verifies and renames it. The count of attempts restarts after
    /// each one that received bytes.
    fn blob(&self, url: &str, name: &str, remote: &Remote, blob: &Path) -> Result<(), HubError> {
        let partial = blob.with_file_name(format!("{}.incomplete", remote.etag));
        let failed = HubError::file(&partial);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&partial).map_err(failed)?;
        let mut last = file.metadata().map_err(failed)?.len();
        // Attempts count anew after each that brought bytes.
        loop {
            let done = retry(|| match self.transfer(url, name, remote, &mut file) {
                Err(Failure::Passing(text, _)) => {
                    let length = file.metadata().map(|meta| meta.len()).unwrap_or(last);
                    let moved = length > last;
                    last = length;
                    if moved {
                        Ok(false)
                    } else {
                        Err(Failure::Passing(text, None))
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
        let local = |error: io::Error| Failure::Lasting(format!("writing the cache: {error}"));
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
            let n = response.read(&mut buffer);
            let n = n.map_err(|error| passing(url, cause(&error)))?;
            if n == 0 {
                break;
            }
            at += n as u64;
            if at > limit {
                return Err(Failure::Lasting(format!(
                    "{url}: more than the {limit} bytes announced"
                )));
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
            Some(size) if at < size => Err(passing(url, format!("{at} of {size} bytes"))),
            _ => Ok(()),
        }
    }
}

/// Creates a client that follows at most `redirects` redirects.
fn client(redirects: usize) -> Result<Client, HubError> {
    let agent = HeaderValue::from_static(concat!("sinew/", env!("CARGO_PKG_VERSION")));
    let client = Client::new(ClientOptions {
        connect: Some(CONNECT_TIMEOUT),
        redirects,
        proxy: true,
        headers: HeaderMap::from_iter([(header::USER_AGENT, agent)]),
        ..ClientOptions::default()
    });
    client.map_err(|error| HubError::Request(error.to_string()))
}

/// Runs `attempt` until it succeeds, fails for good, or no try is left.
fn retry<T>(attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, HubError> {
    blocking::retry(TRIES, Some, attempt).map_err(|failure| HubError::Request(failure.into()))
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
    let unread = |error: io::Error| HubError::Request(format!("{url}: {error}"));
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
    Err(HubError::Request(format!(
        "{url}: content has SHA-256 {found}, expected {}",
        remote.etag
    )))
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
