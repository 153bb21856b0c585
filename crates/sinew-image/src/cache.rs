//! Cache of unpacked images, with one folder per image.
//!
//! The folder `ID-2` has `root` and `image.json`, where ID is the SHA-256 of the image's configuration, which
//! contains the digests of all layers. It is built as `ID-2.partial` under a lock on `ID-2.lock` and then
//! renamed, so that it is complete or absent. The owner of a lock may remove the partial folder. The next
//! unpack removes the partial folders of killed processes. Files are synced to disk before the rename, so
//! that a power loss leaves only complete entries.

use crate::documents::{self, ImageConfig};
use crate::layer::Builder;
use crate::source::Source;
use crate::{ImageError, UnpackLimits, io_error, split_tag};
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags, flock, openat2};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Version of the unpacked format.
const FORMAT: u32 = 2;

/// Pause between two attempts to lock an entry.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// Search path for programs if the image has none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An unpacked image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Hexadecimal SHA-256 of the configuration.
    pub id: String,
    /// Root file system. It must not be modified.
    pub root: PathBuf,
    /// Default program and environment.
    pub config: ImageConfig,
    /// Bytes of the files of all layers.
    pub bytes: u64,
    /// True if this call has unpacked the image.
    pub fresh: bool,
}

impl Image {
    /// Path of a program inside the image: the first folder of the image's `PATH` that contains `name`. A
    /// name with a slash is returned unchanged.
    ///
    /// # Errors
    /// [`ImageError::NoProgram`] if no folder contains it.
    pub fn program(&self, name: &str) -> Result<String, ImageError> {
        if name.contains('/') {
            return Ok(name.into());
        }
        let path = self.config.env.iter().rev().find(|(n, _)| n == "PATH");
        let path = path.map_or(DEFAULT_PATH, |(_, v)| v.as_str());
        let root = File::open(&self.root).map_err(at(&self.root))?;
        let there = |candidate: &String| {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            openat2(&root, candidate.as_str(), flags, Mode::empty(), resolve).is_ok()
        };
        let mut candidates = path.split(':').map(|folder| format!("{folder}/{name}"));
        candidates.find(there).ok_or_else(|| ImageError::NoProgram {
            name: name.into(),
            path: path.into(),
        })
    }
}

/// Content of `image.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Metadata {
    /// Default program and environment.
    config: ImageConfig,
    /// Bytes of the files of all layers.
    bytes: u64,
    /// Number of unpacked entries.
    entries: u64,
    /// Number of layers.
    layers: usize,
}

/// Adds a path to an I/O error.
fn at<'a>(path: &'a Path) -> impl Fn(std::io::Error) -> ImageError + 'a {
    move |e| io_error(path.display().to_string(), e)
}

/// Returns an image of `cache`, and unpacks it if necessary. `path` may end in `:TAG` to choose an image of
/// an archive.
///
/// # Errors
/// [`ImageError`] if the image is missing, for another platform, damaged, hostile or too large.
pub fn unpack(path: &Path, cache: &Path, limits: &UnpackLimits) -> Result<Image, ImageError> {
    let (path, tag) = split_tag(path);
    let source = Source::open(&path)?;
    let parts = documents::parts(&source, tag.as_deref(), limits)?;
    let cache = prepare(cache)?;
    let name = format!("{}-{FORMAT}", parts.id);
    let folder = cache.join(&name);
    if let Some(image) = found(&folder, &parts.id) {
        return Ok(image);
    }
    let _lock = lock(&cache, &name, true)?;
    // Another process may have unpacked it in the meantime.
    if let Some(image) = found(&folder, &parts.id) {
        return Ok(image);
    }
    sweep(&cache, &name)?;
    let partial = cache.join(format!("{name}.partial"));
    let built = build(&partial, &source, &parts, limits).and_then(|()| sync_to_disk(&partial));
    if let Err(e) = built {
        // The error of the build is more useful than that of the removal.
        let _ = fs::remove_dir_all(&partial);
        return Err(e);
    }
    fs::rename(&partial, &folder).map_err(at(&folder))?;
    let synced = File::open(&cache).and_then(|cache| cache.sync_all());
    synced.map_err(at(&cache))?;
    let image = found(&folder, &parts.id)
        .ok_or_else(|| io_error("read the cache", "image.json is missing"))?;
    Ok(Image {
        fresh: true,
        ..image
    })
}

/// Creates the cache, and returns its path without links.
pub(crate) fn prepare(cache: &Path) -> Result<PathBuf, ImageError> {
    let mut make = fs::DirBuilder::new();
    make.recursive(true).mode(0o700);
    make.create(cache).map_err(at(cache))?;
    cache.canonicalize().map_err(at(cache))
}

/// The image with this id, if it was unpacked.
pub(crate) fn get(cache: &Path, id: &str) -> Option<Image> {
    found(&cache.join(format!("{id}-{FORMAT}")), id)
}

/// Removes an entry. A process that unpacks the same image waits, and unpacks it again.
pub(crate) fn remove(cache: &Path, id: &str) -> Result<(), ImageError> {
    let name = format!("{id}-{FORMAT}");
    let _lock = lock(cache, &name, true)?;
    let (folder, partial) = (cache.join(&name), cache.join(format!("{name}.partial")));
    // Renamed first, so that no process finds half of it; the next unpack removes what is left.
    fs::rename(&folder, &partial).map_err(at(&folder))?;
    fs::remove_dir_all(&partial).map_err(at(&partial))
}

/// Unpacks an archive of a root file system (tar, optionally compressed by gzip or zstd) into the new folder
/// `target`, like the only layer of an image.
///
/// # Errors
/// [`ImageError`] if the archive cannot be read, is hostile or too large. `target` is removed then.
pub fn unpack_root(archive: &Path, target: &Path, limits: &UnpackLimits) -> Result<(), ImageError> {
    let file = File::open(archive).map_err(at(archive))?;
    fs::create_dir(target).map_err(at(target))?;
    fs::set_permissions(target, fs::Permissions::from_mode(0o755)).map_err(at(target))?;
    let unpacked = Builder::new(target, limits).and_then(|mut b| b.apply_plain(file));
    if unpacked.is_err() {
        // The first error is more useful than that of the removal.
        let _ = fs::remove_dir_all(target);
    }
    unpacked
}

/// Syncs the file system of an entry, so that a renamed entry is complete after a power loss.
fn sync_to_disk(entry: &Path) -> Result<(), ImageError> {
    let folder = File::open(entry).map_err(at(entry))?;
    rustix::fs::syncfs(&folder).map_err(|e| io_error(format!("sync {}", entry.display()), e))
}

/// Reads a complete entry.
fn found(folder: &Path, id: &str) -> Option<Image> {
    let metadata: Metadata =
        serde_json::from_slice(&fs::read(folder.join("image.json")).ok()?).ok()?;
    Some(Image {
        id: id.into(),
        root: folder.join("root"),
        config: metadata.config,
        bytes: metadata.bytes,
        fresh: false,
    })
}

/// Locks an entry until the file is dropped or the process ends. `None` without `wait` if another process has
/// the lock.
fn lock(cache: &Path, name: &str, wait: bool) -> Result<Option<File>, ImageError> {
    let path = cache.join(format!("{name}.lock"));
    let opened = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path);
    let file = opened.map_err(at(&path))?;
    let how = if wait {
        FlockOperation::LockExclusive
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match flock(&file, how) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(io_error(format!("lock {}", path.display()), e)),
    }
}

/// Locks an entry, and waits for another process that has the lock until `deadline`.
pub(crate) fn lock_until(cache: &Path, name: &str, deadline: Instant) -> Result<File, ImageError> {
    loop {
        if let Some(held) = lock(cache, name, false)? {
            return Ok(held);
        }
        if Instant::now() + LOCK_PAUSE > deadline {
            let why = "another process holds it; its pull takes longer than this one may wait";
            return Err(io_error(format!("lock {name}"), why));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}

/// Removes partial folders of ended processes. `own` is the entry whose lock is held.
fn sweep(cache: &Path, own: &str) -> Result<(), ImageError> {
    for entry in fs::read_dir(cache).map_err(at(cache))?.flatten() {
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str().and_then(|n| n.strip_suffix(".partial")) else {
            continue;
        };
        let held = if name == own {
            None
        } else {
            match lock(cache, name, false)? {
                None => continue,
                held => held,
            }
        };
        fs::remove_dir_all(entry.path()).map_err(at(&entry.path()))?;
        drop(held);
    }
    Ok(())
}

/// Unpacks all layers into the folder `partial`.
fn build(
    partial: &Path,
    source: &Source,
    parts: &documents::Parts,
    limits: &UnpackLimits,
) -> Result<(), ImageError> {
    let root = partial.join("root");
    fs::create_dir_all(&root).map_err(at(&root))?;
    fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).map_err(at(&root))?;
    let mut builder = Builder::new(&root, limits)?;
    for (n, layer) in parts.layers.iter().enumerate() {
        builder.apply(source, n + 1, layer)?;
    }
    let metadata = Metadata {
        config: parts.config.clone(),
        bytes: builder.budget.bytes(),
        entries: builder.budget.entries(),
        layers: parts.layers.len(),
    };
    let text = serde_json::to_vec_pretty(&metadata).map_err(|e| io_error("write image.json", e))?;
    let path = partial.join("image.json");
    fs::write(&path, text).map_err(at(&path))
}
