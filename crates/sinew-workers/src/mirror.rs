//! Weights of a run on a worker's host: fetched once for all of its workers, verified, then named.
//!
//! ```text
//! DIR/v00000013-9f3c12ab/   as in the folder of the owner
//! DIR/LATEST                the newest version that is complete and verified
//! DIR/.lock                 held while a version is fetched
//! DIR/.users                held by every worker that follows the folder; the last one removes it
//! ```
//!
//! The folder is best on `/dev/shm`: there a version is in the memory of the host once.

use crate::client::{DeskClient, DeskError};
use crate::terms::PublishedMark;
use crate::weights::MANIFEST;
use sinew_engines::{FollowError, WeightsFollower};
use sinew_types::{WeightsId, WeightsManifest, WeightsNameError};
use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Name of the newest version, as followers read it.
const LATEST: &str = "LATEST";
/// Longest wait for another worker of this host that fetches weights.
const LOCK_WAIT: Duration = Duration::from_secs(600);
/// Interval between two attempts at the lock.
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// Maximum number of files of one version.
const MAX_FILES: usize = 4096;

/// Reasons for which a version is not here.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// The owner gave no answer.
    #[error(transparent)]
    Desk(#[from] DeskError),
    /// The file system refused an operation.
    #[error("{}: {source}\n  hint: --weights-dir names another folder for weights", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The fetched files are not those of the manifest.
    #[error(transparent)]
    Weights(#[from] FollowError),
    /// The owner named no weights.
    #[error(transparent)]
    Name(#[from] WeightsNameError),
    /// The manifest is not the one that the owner announced, or names what no manifest may.
    #[error("weights {id}: {why}; they are not loaded")]
    Manifest {
        /// Name of the weights.
        id: String,
        /// Reason, in words.
        why: String,
    },
    /// Another worker fetches weights for too long.
    #[error("{}: another worker of this host fetches weights for 10 minutes; it may hang", path.display())]
    Busy {
        /// The lock.
        path: PathBuf,
    },
}

/// A folder that mirrors the weights of an owner.
#[derive(Debug)]
pub struct WeightsMirror {
    root: PathBuf,
    /// Locked, shared by all workers that use the folder.
    users: File,
}

impl WeightsMirror {
    /// Opens a folder, or makes it.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn open(root: &Path) -> Result<Self, MirrorError> {
        // The last worker of before may remove the folder meanwhile.
        for _ in 0..3 {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(root).map_err(at(root))?;
            let path = root.join(".users");
            let users = match File::create(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                users => users.map_err(at(&path))?,
            };
            users.lock_shared().map_err(at(&path))?;
            if path.exists() {
                return Ok(Self {
                    root: root.to_owned(),
                    users,
                });
            }
        }
        Err(at(root)(io::Error::other("it is removed again and again")))
    }

    /// Follows what the folder holds.
    pub fn follower(&self) -> WeightsFollower {
        WeightsFollower::new(&self.root)
    }

    /// Fetches a version, unless the folder has it: another worker may have been first. When this returns,
    /// the version is the newest one of the folder, and verified.
    ///
    /// # Errors
    /// If the owner does not answer or has replaced it, a checksum is wrong, or the folder cannot be written.
    /// The version before stays the newest then.
    pub fn sync(&self, owner: &DeskClient, mark: &PublishedMark) -> Result<(), MirrorError> {
        let id: WeightsId = mark.id.parse()?;
        let path = self.root.join(".lock");
        let lock = File::create(&path).map_err(at(&path))?;
        let end = Instant::now() + LOCK_WAIT;
        while let Err(e) = lock.try_lock() {
            match e {
                fs::TryLockError::Error(e) => return Err(at(&path)(e)),
                fs::TryLockError::WouldBlock if Instant::now() > end => {
                    return Err(MirrorError::Busy { path });
                }
                fs::TryLockError::WouldBlock => std::thread::sleep(LOCK_PAUSE),
            }
        }
        if self.has(mark) && self.latest() == Some(id) {
            return Ok(());
        }
        if !self.has(mark) {
            self.fetch(owner, id, Some(&mark.manifest))?;
        }
        let base = self.verified(owner, id)?;
        let before = self.latest();
        self.point_to(id)?;
        self.prune(&[Some(id), base, before])
    }

    /// Whether the manifest of a version is here.
    fn has(&self, mark: &PublishedMark) -> bool {
        let path = self.root.join(&mark.id).join(MANIFEST);
        let bytes = fs::read(path).ok();
        bytes.is_some_and(|bytes| blake3::hash(&bytes).to_hex().as_str() == mark.manifest)
    }

    /// The newest version of the folder.
    fn latest(&self) -> Option<WeightsId> {
        let text = fs::read_to_string(self.root.join(LATEST)).ok()?;
        text.trim().parse().ok()
    }

    /// Verifies a version, with the one that its differences are of. What is wrong is fetched again once.
    fn verified(
        &self,
        owner: &DeskClient,
        id: WeightsId,
    ) -> Result<Option<WeightsId>, MirrorError> {
        let manifest = self.manifest(id)?;
        let base = manifest.base.map(|base| WeightsId::new(base, id.lineage));
        let mut fresh = true;
        if let Some(base) = base {
            fresh = !self.root.join(base.folder_name()).join(MANIFEST).exists();
            if fresh {
                self.fetch(owner, base, None)?;
            }
        }
        match WeightsFollower::verify(&self.root, id) {
            Err(_) if !fresh => {
                // The base may be one of another session with the same name.
                let base = base.unwrap_or(id);
                self.fetch(owner, base, None)?;
                WeightsFollower::verify(&self.root, id)?;
            }
            Err(wrong) => {
                remove(&self.root.join(id.folder_name()))?;
                return Err(wrong.into());
            }
            Ok(()) => {}
        }
        Ok(base)
    }

    fn manifest(&self, id: WeightsId) -> Result<WeightsManifest, MirrorError> {
        let path = self.root.join(id.folder_name()).join(MANIFEST);
        let bytes = fs::read(&path).map_err(at(&path))?;
        read(id, &bytes)
    }

    /// Fetches all files of a version, whose manifest has the hash `expected`. It gets its name when it is
    /// whole.
    fn fetch(
        &self,
        owner: &DeskClient,
        id: WeightsId,
        expected: Option<&str>,
    ) -> Result<(), MirrorError> {
        let name = id.folder_name();
        let part = self.root.join(format!(".{name}.part"));
        remove(&part)?;
        fs::create_dir(&part).map_err(at(&part))?;
        let path = part.join(MANIFEST);
        fetch_file(owner, &name, MANIFEST, &path)?;
        let bytes = fs::read(&path).map_err(at(&path))?;
        let hash = blake3::hash(&bytes).to_hex();
        if expected.is_some_and(|expected| expected != hash.as_str()) {
            return Err(MirrorError::Manifest {
                id: name,
                why: "its manifest is not the announced one".into(),
            });
        }
        let manifest = read(id, &bytes)?;
        let files: BTreeSet<&str> = manifest.tensors.iter().map(|t| t.file.as_str()).collect();
        for file in files.iter().filter(|file| **file != MANIFEST) {
            fetch_file(owner, &name, file, &part.join(file))?;
        }
        let target = self.root.join(&name);
        remove(&target)?;
        fs::rename(&part, &target).map_err(at(&part))
    }

    /// Names the newest version, in one step.
    fn point_to(&self, id: WeightsId) -> Result<(), MirrorError> {
        let part = self.root.join(format!(".{LATEST}.part"));
        fs::write(&part, id.folder_name()).map_err(at(&part))?;
        fs::rename(&part, self.root.join(LATEST)).map_err(at(&part))
    }

    /// Removes all versions but those of `kept`. Whoever reads one has its files open.
    fn prune(&self, kept: &[Option<WeightsId>]) -> Result<(), MirrorError> {
        for entry in fs::read_dir(&self.root).map_err(at(&self.root))? {
            let entry = entry.map_err(at(&self.root))?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let found = name.parse::<WeightsId>().ok();
            let begun = name.starts_with(".v") && name.ends_with(".part");
            if begun || (found.is_some() && !kept.contains(&found)) {
                remove(&entry.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for WeightsMirror {
    /// The last worker of a host removes the folder, which may be memory.
    fn drop(&mut self) {
        // Another worker holds it, or the folder is gone: both are as good.
        let is_last = self.users.unlock().is_ok() && self.users.try_lock().is_ok();
        if is_last && let Err(error) = remove(&self.root) {
            tracing::warn!(%error, "weights were left in their folder");
        }
    }
}

/// A manifest, which must be that of `id` and name plain files.
fn read(id: WeightsId, bytes: &[u8]) -> Result<WeightsManifest, MirrorError> {
    let wrong = |why: String| MirrorError::Manifest {
        id: id.to_string(),
        why,
    };
    let manifest: WeightsManifest =
        serde_json::from_slice(bytes).map_err(|e| wrong(format!("its manifest: {e}")))?;
    if manifest.id() != id {
        return Err(wrong(format!("its manifest is of {}", manifest.id())));
    }
    let plain = |file: &str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        !file.is_empty() && !file.starts_with('.') && file.chars().all(fits)
    };
    let files = manifest.tensors.iter().map(|t| t.file.clone());
    let files: BTreeSet<String> = files.collect();
    if let Some(file) = files.iter().find(|file| !plain(file)) {
        return Err(wrong(format!("its manifest names the file {file:?}")));
    }
    if files.len() > MAX_FILES {
        let count = files.len();
        return Err(wrong(format!("it has {count} files, allowed: {MAX_FILES}")));
    }
    Ok(manifest)
}

/// Fetches a file, part by part.
fn fetch_file(owner: &DeskClient, weights: &str, file: &str, to: &Path) -> Result<(), MirrorError> {
    let mut out = File::create(to).map_err(at(to))?;
    let mut from = 0;
    loop {
        let part = owner.part(weights, file, from)?;
        out.write_all(&part.bytes).map_err(at(to))?;
        from += part.bytes.len() as u64;
        if from >= part.length {
            return Ok(());
        }
    }
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> MirrorError + use<> {
    let path = path.to_owned();
    move |source| MirrorError::Io { path, source }
}

fn remove(path: &Path) -> Result<(), MirrorError> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(at(path)(e)),
        _ => Ok(()),
    }
}
