//! The cache: one folder for each image, there as a whole or not at all.
//!
//! `ID-1/root` and `ID-1/image.json`, where ID is the SHA-256 of the image's configuration, which
//! names the content of every layer. It is built as `ID-1.partial` while its builder holds a lock
//! on `ID-1.lock`, and gets its name by one rename. Whoever holds the lock may remove a partial
//! one, so what a killed builder left is gone with the next that unpacks anything. Its files are
//! on disk before it has its name, which a loss of power therefore leaves to whole ones only.

use crate::documents::{self, ImageConfig};
use crate::layer::Builder;
use crate::source::Source;
use crate::{ImageError, UnpackLimits, io_error, split_tag};
use rustix::fs::{FlockOperation, Mode, OFlags, ResolveFlags, flock, openat2};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Changes when what a layer becomes changes.
const FORMAT: u32 = 1;

/// Where programs are if the image does not say.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An unpacked image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Hexadecimal SHA-256 of its configuration.
    pub id: String,
    /// Its root file system; nobody may write there.
    pub root: PathBuf,
    /// What it wants to run.
    pub config: ImageConfig,
    /// Bytes of the files of all layers.
    pub bytes: u64,
    /// Whether it was unpacked now, not found.
    pub fresh: bool,
}

impl Image {
    /// Where a program stands inside that is called by its name alone: the first folder of the
    /// image's `PATH` that has it. A name with a slash is what it is.
    ///
    /// # Errors
    /// If no folder has it.
    pub fn program(&self, name: &str) -> Result<String, ImageError> {
        if name.contains('/') {
            return Ok(name.into());
        }
        let path = self.config.env.iter().rev().find(|(n, _)| n == "PATH");
        let path = path.map_or(USUAL_PATH, |(_, v)| v.as_str());
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

/// `image.json` of an entry.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    config: ImageConfig,
    bytes: u64,
    entries: u64,
    layers: usize,
}

fn at<'a>(path: &'a Path) -> impl Fn(std::io::Error) -> ImageError + 'a {
    move |e| io_error(path.display().to_string(), e)
}

/// Finds an image in `cache`, or puts it there. `path` may end in `:TAG`, where an archive holds
/// several.
///
/// # Errors
/// [`ImageError`]: nothing is there, it is for other machines, damaged, hostile or too large.
pub fn unpack(path: &Path, cache: &Path, limits: &UnpackLimits) -> Result<Image, ImageError> {
    let (path, tag) = split_tag(path);
    let source = Source::open(&path)?;
    let parts = documents::parts(&source, tag.as_deref(), limits)?;
    let mut make = fs::DirBuilder::new();
    make.recursive(true).mode(0o700);
    make.create(cache).map_err(at(cache))?;
    let cache = cache.canonicalize().map_err(at(cache))?;
    let name = format!("{}-{FORMAT}", parts.id);
    let place = cache.join(&name);
    if let Some(image) = found(&place, &parts.id) {
        return Ok(image);
    }
    let _lock = lock(&cache, &name, true)?;
    // Another process may have been quicker.
    if let Some(image) = found(&place, &parts.id) {
        return Ok(image);
    }
    sweep(&cache, &name)?;
    let partial = cache.join(format!("{name}.partial"));
    let built = build(&partial, &source, &parts, limits).and_then(|()| all_to_disk(&partial));
    if let Err(e) = built {
        // What it says is more than that of a failed removal.
        let _ = fs::remove_dir_all(&partial);
        return Err(e);
    }
    fs::rename(&partial, &place).map_err(at(&place))?;
    let folder = File::open(&cache).and_then(|folder| folder.sync_all());
    folder.map_err(at(&cache))?;
    let image = found(&place, &parts.id)
        .ok_or_else(|| io_error("read the cache", "image.json is missing"))?;
    Ok(Image {
        fresh: true,
        ..image
    })
}

/// Unpacks an archive of a root (tar, packed by gzip or zstd or not) into `target`, a new folder, as
/// if it were the only layer of an image.
///
/// # Errors
/// [`ImageError`]: it cannot be read, is hostile or too large; nothing is left of it then.
pub fn unpack_root(archive: &Path, target: &Path, limits: &UnpackLimits) -> Result<(), ImageError> {
    let file = File::open(archive).map_err(at(archive))?;
    fs::create_dir(target).map_err(at(target))?;
    fs::set_permissions(target, fs::Permissions::from_mode(0o755)).map_err(at(target))?;
    let unpacked = Builder::new(target, limits).and_then(|mut b| b.apply_plain(file));
    if unpacked.is_err() {
        // What it says is more than that of a failed removal.
        let _ = fs::remove_dir_all(target);
    }
    unpacked
}

/// Waits until the file system of an entry holds all of it, so that a name given afterwards stands
/// for a whole entry even after a loss of power.
fn all_to_disk(entry: &Path) -> Result<(), ImageError> {
    let folder = File::open(entry).map_err(at(entry))?;
    rustix::fs::syncfs(&folder).map_err(|e| io_error(format!("sync {}", entry.display()), e))
}

fn found(place: &Path, id: &str) -> Option<Image> {
    let note: Note = serde_json::from_slice(&fs::read(place.join("image.json")).ok()?).ok()?;
    Some(Image {
        id: id.into(),
        root: place.join("root"),
        config: note.config,
        bytes: note.bytes,
        fresh: false,
    })
}

/// Holds the right to build an entry until it is dropped, also by being killed.
fn lock(cache: &Path, name: &str, wait: bool) -> Result<Option<File>, ImageError> {
    let path = cache.join(format!("{name}.lock"));
    let opened = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path);
    let file = opened.map_err(at(&path))?;
    let how = match wait {
        true => FlockOperation::LockExclusive,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match flock(&file, how) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(io_error(format!("lock {}", path.display()), e)),
    }
}

/// Removes what builders that are gone have left; `own` is the name whose lock is held.
fn sweep(cache: &Path, own: &str) -> Result<(), ImageError> {
    for entry in fs::read_dir(cache).map_err(at(cache))?.flatten() {
        let file_name = entry.file_name();
        let Some(name) = file_name.to_str().and_then(|n| n.strip_suffix(".partial")) else {
            continue;
        };
        let held = match name == own {
            true => None,
            false => match lock(cache, name, false)? {
                None => continue,
                held => held,
            },
        };
        fs::remove_dir_all(entry.path()).map_err(at(&entry.path()))?;
        drop(held);
    }
    Ok(())
}

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
    let note = Note {
        config: parts.config.clone(),
        bytes: builder.bytes,
        entries: builder.entries,
        layers: parts.layers.len(),
    };
    let text = serde_json::to_vec_pretty(&note).map_err(|e| io_error("write image.json", e))?;
    let path = partial.join("image.json");
    fs::write(&path, text).map_err(at(&path))
}
