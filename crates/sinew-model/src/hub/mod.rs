//! Models of the Hugging Face hub, in the cache layout that `huggingface_hub` uses:
//! `models--ORG--NAME/{refs/REVISION, snapshots/COMMIT/FILE -> ../../blobs/ETAG, blobs/ETAG}`.
//!
//! So a model that `hf download` has fetched is found here, and the other way round.

#[cfg(feature = "hub")]
mod download;

use crate::lookup::{ResolveEnv, ResolveError};
use crate::safetensors::{INDEX, SINGLE, read_index};
use std::fs;
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

/// Kind of a repository.
enum Kind {
    Model,
    Dataset,
}

/// The directory of one revision, from the cache or (unless offline) from the hub.
///
/// # Errors
/// Offline, if the cache has not all of its weights; online, if the hub does not answer or a file
/// is damaged.
pub(crate) fn snapshot(
    repo: &str,
    revision: &str,
    env: &ResolveEnv,
) -> Result<PathBuf, ResolveError> {
    let root = env
        .hub_cache
        .join(format!("models--{}", repo.replace('/', "--")));
    let cached = cached_snapshot(&root, revision);
    let is_commit = is_commit(revision);
    match cached {
        // A commit never changes; a branch can, so the hub is asked for it again.
        Some(dir) if is_commit || env.offline => Ok(dir),
        _ if env.offline => Err(ResolveError::Offline {
            repo: repo.to_owned(),
            cache: env.hub_cache.clone(),
        }),
        cached => online(Kind::Model, repo, revision, &root, env, cached.is_some()),
    }
}

/// The directory of a data set's files, from the cache or (unless offline) from the hub. Files of rows and
/// their description are taken, nothing else.
pub(crate) fn dataset(
    repo: &str,
    revision: &str,
    env: &ResolveEnv,
) -> Result<PathBuf, ResolveError> {
    let name = format!("datasets--{}", repo.replace('/', "--"));
    let root = env.hub_cache.join(name);
    // The reference is written after the last file.
    let commit = match is_commit(revision) {
        true => Some(revision.to_owned()),
        false => fs::read_to_string(root.join("refs").join(revision)).ok(),
    };
    let cached = commit.map(|c| root.join("snapshots").join(c.trim()));
    match cached.filter(|dir| dir.is_dir()) {
        Some(dir) if env.offline => Ok(dir),
        _ if env.offline => Err(ResolveError::Offline {
            repo: repo.to_owned(),
            cache: env.hub_cache.clone(),
        }),
        cached => online(Kind::Dataset, repo, revision, &root, env, cached.is_some()),
    }
}

#[cfg(feature = "hub")]
fn online(
    kind: Kind,
    repo: &str,
    revision: &str,
    root: &Path,
    env: &ResolveEnv,
    cached: bool,
) -> Result<PathBuf, ResolveError> {
    let found = match kind {
        Kind::Model => download::Hub::new(repo, root, env).and_then(|hub| hub.snapshot(revision)),
        Kind::Dataset => download::Hub::new(&format!("datasets/{repo}"), root, env)
            .and_then(|hub| hub.data_files(revision)),
    };
    found.map_err(|reason| ResolveError::Hub {
        repo: repo.to_owned(),
        reason: match cached {
            true => format!("{reason} (HF_HUB_OFFLINE=1 uses the copy in the cache)"),
            false => reason,
        },
    })
}

#[cfg(not(feature = "hub"))]
fn online(
    _kind: Kind,
    repo: &str,
    _revision: &str,
    _root: &Path,
    env: &ResolveEnv,
    _cached: bool,
) -> Result<PathBuf, ResolveError> {
    let reason = "this build has no `hub` feature: put the model into the cache with `hf download`";
    let cache = env.hub_cache.display();
    Err(ResolveError::Hub {
        repo: repo.to_owned(),
        reason: format!("{reason} ({cache})"),
    })
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The snapshot that `revision` names in the cache, if all its weights are there.
fn cached_snapshot(root: &Path, revision: &str) -> Option<PathBuf> {
    let commit = match is_commit(revision) {
        true => revision.to_owned(),
        false => fs::read_to_string(root.join("refs").join(revision))
            .ok()?
            .trim()
            .to_owned(),
    };
    let dir = root.join("snapshots").join(&commit);
    (is_commit(&commit) && is_complete(&dir)).then_some(dir)
}

/// Whether a snapshot has a configuration and all of its weights, every shard of an index included.
fn is_complete(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    let sharded = || {
        let shards = read_index(&dir.join(INDEX));
        shards.is_ok_and(|map| map.values().all(|file| has(file)))
    };
    has("config.json") && (has(SINGLE) || (has(INDEX) && sharded()))
}
