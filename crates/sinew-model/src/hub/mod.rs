//! Models and data sets of the Hugging Face hub, in the cache layout that `huggingface_hub` uses:
//! `models--ORG--NAME/{refs/REVISION, snapshots/COMMIT/FILE -> ../../blobs/ETAG, blobs/ETAG}`.
//!
//! A model that `hf download` has fetched is thus found here, and the other way round.
//!
//! The whole files of a data set are noted last, in `datasets--ORG--NAME/.sinew/COMMIT/CONFIG.json`.

mod card;
mod dataset;
#[cfg(feature = "hub")]
mod download;

use crate::error::HubError;
use crate::lookup::{ResolveEnv, ResolveError};
use crate::safetensors::{INDEX, SINGLE, read_index};
use card::{Card, MAX_CARD_BYTES};
use dataset::{Selection, select};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Files taken in addition to the weights, where the repository has them.
#[cfg(feature = "hub")]
const SIDE_FILES: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
];

/// Maximum bytes of the marker file that lists a data set's files.
const MAX_MARKER_BYTES: u64 = 64 << 20;

/// Maximum files of a snapshot that another program made, and maximum folders within folders.
const MAX_WALK: (usize, usize) = (100_000, 8);

/// Files of a model that are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Configuration, tokenizer and weights.
    Whole,
    /// Configuration and tokenizer of a model whose weights are elsewhere.
    WithoutWeights,
}

/// Rows of a data set of the hub, on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubRows {
    /// Files to train on, in the order of their names; never empty.
    pub train: Vec<PathBuf>,
    /// Files that are held out; empty if the data set has one split.
    pub held_out: Vec<PathBuf>,
    /// Parts that are left out, with the reason, for users.
    pub notes: Vec<String>,
}

impl HubRows {
    fn of(root: &Path, commit: &str, selection: Selection) -> Self {
        let dir = root.join("snapshots").join(commit);
        let paths = |names: Vec<String>| names.into_iter().map(|n| dir.join(n)).collect();
        Self {
            train: paths(selection.train),
            held_out: paths(selection.held_out),
            notes: selection.notes,
        }
    }
}

/// The directory of one revision, from the cache or (unless offline) from the hub.
///
/// # Errors
/// Offline, if the cache has not all of its files; online, if the hub does not answer or a file is damaged.
pub(crate) fn snapshot(
    repo: &str,
    revision: &str,
    extent: Extent,
    env: &ResolveEnv,
) -> Result<PathBuf, ResolveError> {
    let root = env
        .hub_cache
        .join(format!("models--{}", repo.replace('/', "--")));
    let cached = cached_snapshot(&root, revision, extent);
    let is_commit = is_commit(revision);
    match cached {
        // A commit never changes; a branch can, so the hub is asked for it again.
        Some(dir) if is_commit || env.offline => Ok(dir),
        _ if env.offline => Err(ResolveError::Offline {
            repo: repo.to_owned(),
            cache: env.hub_cache.clone(),
        }),
        cached => online(repo, cached.is_some(), || {
            model(repo, revision, extent, &root, env)
        }),
    }
}

/// The files of rows of a data set's configuration, from the cache or (unless offline) from the hub.
///
/// # Errors
/// Offline, if the cache does not have all of them; online, if the hub does not answer; if the data set has
/// no rows, or several configurations and none is named.
pub(crate) fn dataset(
    repo: &str,
    config: Option<&str>,
    revision: &str,
    env: &ResolveEnv,
) -> Result<HubRows, ResolveError> {
    let name = format!("datasets--{}", repo.replace('/', "--"));
    let root = env.hub_cache.join(name);
    let failed = |reason| ResolveError::Hub {
        repo: repo.to_owned(),
        reason,
    };
    let commit = if is_commit(revision) {
        Some(revision.to_owned())
    } else {
        // The reference is written after the last file.
        fs::read_to_string(root.join("refs").join(revision)).ok()
    };
    let commit = commit.map(|c| c.trim().to_owned()).filter(|c| is_commit(c));
    let cached = commit.map(|c| cached_rows(&root, &c, config, env.offline).map(|rows| (c, rows)));
    let cached = cached.transpose().map_err(failed)?;
    match cached {
        // A commit never changes; a branch can, so the hub is asked for it again.
        Some((commit, Some(rows))) if env.offline || is_commit(revision) => {
            Ok(HubRows::of(&root, &commit, rows))
        }
        _ if env.offline => Err(ResolveError::Offline {
            repo: repo.to_owned(),
            cache: env.hub_cache.clone(),
        }),
        cached => {
            let offline = cached.map(|(commit, _)| cached_rows(&root, &commit, config, true));
            let known = matches!(offline, Some(Ok(Some(_))));
            let (commit, rows) = online(repo, known, || rows(repo, config, revision, &root, env))?;
            Ok(HubRows::of(&root, &commit, rows))
        }
    }
}

/// The note that a configuration's files are all there, written after them.
fn marker(root: &Path, commit: &str, config: Option<&str>) -> PathBuf {
    let name = config.map_or("default.json".to_owned(), |c| format!("config-{c}.json"));
    root.join(".sinew").join(commit).join(name)
}

/// The files of a configuration in the cache, `None` if they are not all there.
///
/// A snapshot of another program counts only if `offline`: nothing shows that it is whole, and the hub can be
/// asked.
fn cached_rows(
    root: &Path,
    commit: &str,
    config: Option<&str>,
    offline: bool,
) -> Result<Option<Selection>, HubError> {
    let dir = root.join("snapshots").join(commit);
    let marker = marker(root, commit, config);
    if let Ok(text) = read_text(&marker, MAX_MARKER_BYTES) {
        let noted: Option<Selection> = serde_json::from_str(&text).ok();
        return Ok(noted.filter(|s| s.files().all(|name| dir.join(name).is_file())));
    }
    // A download that began here and has no note is not whole.
    let begun = marker.parent().is_some_and(Path::is_dir);
    if !offline || begun || !dir.is_dir() {
        return Ok(None);
    }
    let mut names = Vec::new();
    walk(&dir, "", 0, &mut names).map_err(HubError::file(&dir))?;
    let text = |name: &str| {
        if dir.join(name).is_file() {
            read_text(&dir.join(name), MAX_CARD_BYTES).map(Some)
        } else {
            Ok(None)
        }
    };
    let (readme, infos) = (text("README.md")?, text("dataset_infos.json")?);
    let card = Card::read(readme.as_deref(), infos.as_deref())?;
    select(&names, &card, config).map(Some)
}

/// Adds the files of a folder and of the folders in it, as paths from the first.
fn walk(dir: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if entry.path().is_file() {
            names.push(name);
        } else if depth < MAX_WALK.1 && entry.file_type()?.is_dir() {
            walk(&entry.path(), &format!("{name}/"), depth + 1, names)?;
        }
        if names.len() > MAX_WALK.0 {
            return Err(std::io::Error::other("too many files"));
        }
    }
    Ok(())
}

/// A file of text of at most `limit` bytes.
fn read_text(path: &Path, limit: u64) -> Result<String, HubError> {
    let failed = HubError::file(path);
    let mut text = String::new();
    let mut file = fs::File::open(path).map_err(failed)?.take(limit + 1);
    file.read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > limit {
        Err(HubError::LargeFile {
            path: path.to_owned(),
            limit,
        })
    } else {
        Ok(text)
    }
}

/// Runs a download; its failure names the copy in the cache, if there is one.
fn online<T>(
    repo: &str,
    cached: bool,
    download: impl FnOnce() -> Result<T, HubError>,
) -> Result<T, ResolveError> {
    download().map_err(|reason| ResolveError::Hub {
        repo: repo.to_owned(),
        reason: if cached {
            HubError::Cached(Box::new(reason))
        } else {
            reason
        },
    })
}

#[cfg(feature = "hub")]
fn model(
    repo: &str,
    revision: &str,
    extent: Extent,
    root: &Path,
    env: &ResolveEnv,
) -> Result<PathBuf, HubError> {
    download::Hub::new(repo, root, env)?.snapshot(revision, extent)
}

#[cfg(feature = "hub")]
fn rows(
    repo: &str,
    config: Option<&str>,
    revision: &str,
    root: &Path,
    env: &ResolveEnv,
) -> Result<(String, Selection), HubError> {
    let repo = format!("datasets/{repo}");
    download::Hub::new(&repo, root, env)?.data_files(revision, config)
}

#[cfg(not(feature = "hub"))]
fn model(
    _repo: &str,
    _revision: &str,
    _extent: Extent,
    _root: &Path,
    env: &ResolveEnv,
) -> Result<PathBuf, HubError> {
    Err(HubError::NoFeature(env.hub_cache.clone()))
}

#[cfg(not(feature = "hub"))]
fn rows(
    _repo: &str,
    _config: Option<&str>,
    _revision: &str,
    _root: &Path,
    env: &ResolveEnv,
) -> Result<(String, Selection), HubError> {
    Err(HubError::NoFeature(env.hub_cache.clone()))
}

/// Whether a revision names a commit: it never changes.
fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns the cached snapshot that `revision` names, if all needed files exist.
fn cached_snapshot(root: &Path, revision: &str, extent: Extent) -> Option<PathBuf> {
    let commit = if is_commit(revision) {
        revision.to_owned()
    } else {
        fs::read_to_string(root.join("refs").join(revision))
            .ok()?
            .trim()
            .to_owned()
    };
    let dir = root.join("snapshots").join(&commit);
    (is_commit(&commit) && is_complete(&dir, extent)).then_some(dir)
}

/// Whether a snapshot has a configuration and all of its weights, every shard of an index included; without
/// weights, a configuration, which is written after the files of the tokenizer.
fn is_complete(dir: &Path, extent: Extent) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let sharded = || {
        let shards = read_index(&dir.join(INDEX));
        shards.is_ok_and(|map| map.values().all(|file| has(file)))
    };
    let rest = match extent {
        Extent::Whole => has(SINGLE) || (has(INDEX) && sharded()),
        Extent::WithoutWeights => has("tokenizer.json"),
    };
    rest && has("config.json")
}
