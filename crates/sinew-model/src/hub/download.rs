//! Downloads over HTTPS: resumed where they broke off, checked, put into the cache in one step.
//!
//! Not by hf-hub (0.5): it compares no content with its hash, and bounds neither the size of a file
//! nor the time of a transfer.
//!
//! A file is written as `blobs/ETAG.incomplete` under a lock that `huggingface_hub` takes as well,
//! compared with its SHA-256, and renamed; links in `snapshots/` are made last. So a killed
//! download is resumed by the next one, and a snapshot that is complete by its names is complete by
//! its content.

use super::SIDE_FILES;
use crate::lookup::{Progress, ResolveEnv};
use crate::safetensors::{INDEX, SINGLE, read_index};
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header;
use reqwest::redirect::Policy;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum length of the hub's list of files.
const MAX_API_BYTES: u64 = 16 << 20;
/// Maximum size of a file, 1 TiB.
const MAX_FILE_BYTES: u64 = 1 << 40;
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
/// Wall time of one attempt at a transfer; the next goes on where it ended.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(300);
/// Size of a copied piece; progress is reported after each.
const COPY_BYTES: usize = 1 << 18;

/// Endings of files of rows.
const DATA_FILES: [&str; 5] = [".parquet", ".jsonl", ".json", ".csv", ".tsv"];

/// Whether a file of a data set has rows. Names with parts that leave the folder have none.
fn is_rows(name: &str) -> bool {
    let inside = name
        .split('/')
        .all(|part| !part.is_empty() && !part.starts_with('.'));
    inside && DATA_FILES.iter().any(|ending| name.ends_with(ending))
}

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
}

/// Identity and size of a file, as the hub reports them.
struct Remote {
    /// Name of the content in the cache: SHA-256 of large files, git's id of small ones.
    etag: String,
    /// Size in bytes, if the hub reports it.
    size: Option<u64>,
}

/// How an attempt failed.
enum Failure {
    /// Another attempt can succeed: no answer, an interrupted transfer, a server that is
    /// overloaded.
    Passing(String),
    /// Another attempt would fail as well: no such file, no access, a local error.
    Final(String),
}

impl<'a> Hub<'a> {
    /// The client for `repo`, whose cache folder is `root`.
    ///
    /// # Errors
    /// If no HTTP client can be made, with the reason.
    pub(super) fn new(repo: &'a str, root: &'a Path, env: &'a ResolveEnv) -> Result<Self, String> {
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
    /// With the address and the reason. Files that are complete stay in the cache.
    pub(super) fn snapshot(&self, revision: &str) -> Result<PathBuf, String> {
        let listing = self.listing(revision)?;
        let dir = self.root.join("snapshots").join(&listing.sha);
        fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let has = |name: &str| listing.siblings.iter().any(|file| file.rfilename == name);
        if !has("config.json") {
            return Err("the repository has no config.json".to_owned());
        }
        let fetch = |file: &str| self.file(&listing.sha, file, &dir);
        fetch("config.json")?;
        for file in SIDE_FILES.iter().filter(|file| has(file)) {
            fetch(file)?;
        }
        if has(SINGLE) {
            fetch(SINGLE)?;
        } else if has(INDEX) {
            fetch(INDEX)?;
            let index = read_index(&dir.join(INDEX)).map_err(|error| error.to_string())?;
            let shards: std::collections::BTreeSet<_> = index.values().collect();
            shards.into_iter().try_for_each(|shard| fetch(shard))?;
        } else {
            return Err(format!(
                "the repository has neither `{SINGLE}` nor `{INDEX}`"
            ));
        }
        self.refer(revision, &listing.sha)?;
        Ok(dir)
    }

    /// Brings every file of rows of a data set into the cache and returns its directory.
    ///
    /// # Errors
    /// As of [`Hub::snapshot`], or if there is no file of rows.
    pub(super) fn data_files(&self, revision: &str) -> Result<PathBuf, String> {
        let listing = self.listing(revision)?;
        let dir = self.root.join("snapshots").join(&listing.sha);
        fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let names = listing.siblings.iter().map(|file| file.rfilename.as_str());
        let rows: Vec<&str> = names.filter(|name| is_rows(name)).collect();
        if rows.is_empty() {
            return Err(format!(
                "the data set has no files that end in {}",
                DATA_FILES.join(", ")
            ));
        }
        for name in rows {
            self.file(&listing.sha, name, &dir)?;
        }
        self.refer(revision, &listing.sha)?;
        Ok(dir)
    }

    /// Notes the commit of a branch or tag, after its files.
    fn refer(&self, revision: &str, sha: &str) -> Result<(), String> {
        if super::is_commit(revision) {
            return Ok(());
        }
        let reference = self.root.join("refs").join(revision);
        write_atomic(&reference, sha.as_bytes())
            .map_err(|error| format!("{}: {error}", reference.display()))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/{path}", self.env.hub_endpoint.trim_end_matches('/'))
    }

    fn listing(&self, revision: &str) -> Result<Revision, String> {
        let revision = revision.replace('/', "%2F");
        let kind = match self.repo.starts_with("datasets/") {
            true => "api",
            false => "api/models",
        };
        let url = self.url(&format!("{kind}/{}/revision/{revision}", self.repo));
        let text = self.retry(|| {
            let mut text = String::new();
            let mut body = self.get(&url, None)?.take(MAX_API_BYTES + 1);
            body.read_to_string(&mut text)
                .map_err(|error| Failure::Passing(format!("{url}: {}", cause(&error))))?;
            match text.len() as u64 > MAX_API_BYTES {
                true => Err(Failure::Final(format!(
                    "{url}: more than {MAX_API_BYTES} bytes"
                ))),
                false => Ok(text),
            }
        })?;
        let listing: Revision =
            serde_json::from_str(&text).map_err(|error| format!("{url}: {error}"))?;
        if !super::is_commit(&listing.sha) {
            return Err(format!("{url}: `{}` is no commit", listing.sha));
        }
        Ok(listing)
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
        let response = response.map_err(|e| Failure::Passing(format!("{url}: {}", cause(&e))))?;
        self.check(url, response)
    }

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
        Err(match status {
            408 | 429 | 500..=599 => Failure::Passing(text),
            _ => Failure::Final(text),
        })
    }

    /// Runs `attempt` until it succeeds, fails for good, or has failed [`MAX_ATTEMPTS`] times in a
    /// row.
    fn retry<T>(&self, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, String> {
        let mut pause = FIRST_PAUSE;
        for left in (0..MAX_ATTEMPTS).rev() {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(Failure::Final(text)) => return Err(text),
                Err(Failure::Passing(text)) if left == 0 => return Err(text),
                Err(Failure::Passing(_)) => std::thread::sleep(pause),
            }
            pause *= 2;
        }
        Err("no attempt was made".to_owned())
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
                return Err(Failure::Final(format!(
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
                return Err(Failure::Final(format!(
                    "{url}: larger than {MAX_FILE_BYTES} bytes"
                )));
            }
            return Ok(Remote { etag, size });
        }
        Err(Failure::Final(format!(
            "{url}: more than {MAX_REDIRECTS} redirects"
        )))
    }

    /// Brings one file of commit `sha` into the cache and links it into `dir`.
    fn file(&self, sha: &str, name: &str, dir: &Path) -> Result<(), String> {
        let link = dir.join(name);
        if link.is_file() {
            return Ok(());
        }
        let url = self.url(&format!("{}/resolve/{sha}/{name}", self.repo));
        let remote = self.retry(|| self.remote(&url))?;
        let blobs = self.root.join("blobs");
        let blob = blobs.join(&remote.etag);
        let failed = |error: io::Error| format!("{}: {error}", blob.display());
        fs::create_dir_all(&blobs).map_err(failed)?;
        let _lock = self.lock(&remote.etag).map_err(failed)?;
        if !blob.is_file() {
            self.blob(&url, name, &remote, &blob)?;
        }
        // Files of data sets are in folders of their own.
        let up = "../".repeat(2 + name.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&remote.etag);
        if let Some(parent) = link.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
        }
        match std::os::unix::fs::symlink(target, &link) {
            Err(error) if !link.is_file() => Err(failed(error)),
            _ => Ok(()),
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
    fn blob(&self, url: &str, name: &str, remote: &Remote, blob: &Path) -> Result<(), String> {
        let partial = blob.with_file_name(format!("{}.incomplete", remote.etag));
        let failed = |error: io::Error| format!("{}: {error}", partial.display());
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = options.open(&partial).map_err(failed)?;
        let mut last = file.metadata().map_err(failed)?.len();
        // Attempts count anew after each that brought bytes.
        loop {
            let done = self.retry(|| match self.transfer(url, name, remote, &mut file) {
                Err(Failure::Passing(text)) => {
                    let length = file.metadata().map(|meta| meta.len()).unwrap_or(last);
                    let moved = length > last;
                    last = length;
                    if moved {
                        Ok(false)
                    } else {
                        Err(Failure::Passing(text))
                    }
                }
                other => other.map(|()| true),
            })?;
            if done {
                break;
            }
        }
        if let Err(text) = verify(&mut file, remote) {
            // A wrong file would be resumed for ever.
            let _ = fs::remove_file(&partial);
            return Err(format!("{url}: {text}"));
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
        let local = |error: io::Error| Failure::Final(format!("writing the cache: {error}"));
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
        let limit = remote.size.unwrap_or(MAX_FILE_BYTES);
        loop {
            let n = match response.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) => {
                    let why = cause(&error);
                    return Err(Failure::Passing(format!("{url}: {why}")));
                }
            };
            at += n as u64;
            if at > limit {
                return Err(Failure::Final(format!(
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
            Some(size) if at < size => {
                Err(Failure::Passing(format!("{url}: {at} of {size} bytes")))
            }
            _ => Ok(()),
        }
    }
}

/// A client that trusts Mozilla's root certificates, which are built into the program.
fn client(redirects: Policy) -> Result<Client, String> {
    let roots = RootCertStore::from_iter(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    let tls = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Client::builder()
        .tls_backend_preconfigured(tls)
        .redirect(redirects)
        .connect_timeout(CONNECT_TIMEOUT)
        .user_agent(concat!("sinew/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(|error| cause(&error))
}

/// The innermost reason of an error: the outer ones repeat the address.
fn cause(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Compares a large file with its SHA-256. Small files have git's id as their name, and are checked
/// by length alone.
fn verify(file: &mut File, remote: &Remote) -> Result<(), String> {
    let is_sha256 = remote.etag.len() == 64 && remote.etag.bytes().all(|b| b.is_ascii_hexdigit());
    if !is_sha256 {
        return Ok(());
    }
    let mut hash = Sha256::new();
    let mut buffer = vec![0; COPY_BYTES];
    file.seek(SeekFrom::Start(0))
        .map_err(|error| error.to_string())?;
    loop {
        let n = file.read(&mut buffer).map_err(|error| error.to_string())?;
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
    Err(format!(
        "content has SHA-256 {found}, expected {}",
        remote.etag
    ))
}

fn write_atomic(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let mut staging = tempfile::NamedTempFile::new_in(parent)?;
    staging.write_all(bytes)?;
    staging.as_file().sync_all()?;
    staging.persist(path).map_err(|error| error.error)?;
    Ok(())
}
