//! Checkpoints that are either complete or absent.
//!
//! A checkpoint is a directory written under a temporary name, synced file by file, renamed, and
//! then named by the `LATEST` file, which is replaced by a rename: that last rename is the commit.
//! It ties weights, optimizer, step and trained batch ids together because they are one directory.
//!
//! ```text
//! DIR/LATEST                               name of the committed checkpoint
//!     step-00000012/checksums.json         length and BLAKE3 of every other file, written last
//!                   state.json             step, trained batches, settings
//!                   model.safetensors      or adapter_model.safetensors
//!                   optimizer.safetensors  first and second moments, f32
//!     .tmp-step-00000013/                  an interrupted save, removed by the next one
//! ```
//!
//! A process can die between the two renames. The directory that it leaves is newer than the one that
//! `LATEST` names: it is not committed, and the next save of its step takes its name, so that names do not
//! depend on crashes.
//!
//! Invariants: whatever operation fails or wherever the process dies, the directory that `LATEST` named
//! before is untouched and loadable; every file is checked against its BLAKE3 before it is used; a damaged
//! checkpoint is skipped in favour of the next older valid one, and this is reported.
//!
//! The tests let [`Storage`] fail each single operation in turn.

mod draft;
mod parts;
mod storage;

pub use draft::{Draft, StoredFile};
pub use parts::{Part, StoredTensors};
pub use storage::{DiskStorage, Storage, StorageFile};

use crate::policy_error::PolicyError;
use parts::{read_safetensors, write_part};
use serde::{Deserialize, Serialize};
use sinew_types::{Fence, FenceError};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file that commits a checkpoint. It contains the name of the committed directory.
const LATEST: &str = "LATEST";
/// File with the checksums of all files of a checkpoint; it is written last.
const CHECKSUMS: &str = "checksums.json";
/// Prefix of directories that are not committed.
const TEMPORARY: &str = ".tmp-";

/// Reasons for which a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The disk or a quota is full. The previous checkpoint is intact.
    #[error(
        "no room to write {path}: {source}; free space or lower `keep`, the previous checkpoint is intact"
    )]
    DiskFull { path: PathBuf, source: io::Error },
    /// The file system refuses: rights, or mounted read-only.
    #[error("not allowed to {operation} {path}: {source}")]
    Permission {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// Any other error of the file system.
    #[error("cannot {operation} {path}: {source}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// A file does not match its checksum.
    #[error("{path} is damaged: {reason}")]
    Corrupt { path: PathBuf, reason: String },
    /// All checkpoints are damaged. Each is listed with its reason.
    #[error("no checkpoint in {dir} is usable: {}", listed(.tried))]
    NoneUsable {
        dir: PathBuf,
        tried: Vec<SkippedCheckpoint>,
    },
    /// The checkpoint is intact but belongs to another kind of run: other weights, or a newer format.
    #[error("checkpoint {path} does not fit this run: {reason}")]
    Mismatch { path: PathBuf, reason: String },
    /// A file cannot be part of a checkpoint, because of its name or its content.
    #[error("checkpoint part {file} is invalid: {reason}")]
    Part { file: String, reason: String },
    /// The policy could not write or restore its state.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// Another process owns the run now. `LATEST` is unchanged.
    #[error(transparent)]
    Fence(#[from] FenceError),
}

fn listed(skipped: &[SkippedCheckpoint]) -> String {
    let mut text = String::new();
    for (n, s) in skipped.iter().enumerate() {
        let _ = write!(
            text,
            "{}{}: {}",
            if n > 0 { "; " } else { "" },
            s.name,
            s.reason
        );
    }
    text
}

impl CheckpointError {
    fn io(operation: &'static str, path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            // The writer treats a file-size limit (EFBIG) and a quota as a full disk.
            io::ErrorKind::StorageFull
            | io::ErrorKind::QuotaExceeded
            | io::ErrorKind::FileTooLarge => Self::DiskFull { path, source },
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::Permission {
                    operation,
                    path,
                    source,
                }
            }
            _ => Self::Io {
                operation,
                path,
                source,
            },
        }
    }
}

/// A damaged checkpoint that was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkippedCheckpoint {
    /// Name of its directory, or `LATEST`.
    pub name: String,
    /// Description of the damage, for display.
    pub reason: String,
}

/// A checkpoint whose files all match their checksums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedCheckpoint {
    pub path: PathBuf,
    /// Newer checkpoints that were skipped; report them to the user.
    pub skipped: Vec<SkippedCheckpoint>,
}

impl LoadedCheckpoint {
    /// Reads a file as bytes.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn bytes(&self, file: &str) -> Result<Vec<u8>, CheckpointError> {
        let path = self.path.join(file);
        fs::read(&path).map_err(|e| CheckpointError::io("read", &path, e))
    }

    /// The error of a checkpoint that is intact and of another kind of run.
    pub fn mismatch(&self, reason: String) -> CheckpointError {
        CheckpointError::Mismatch {
            path: self.path.clone(),
            reason,
        }
    }

    /// Reads all tensors of a safetensors file into memory.
    ///
    /// # Errors
    /// If the file is not a safetensors file of F32, F16 or BF16.
    pub fn tensors(&self, file: &str) -> Result<StoredTensors, CheckpointError> {
        read_safetensors(&self.path.join(file))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Checksum {
    bytes: u64,
    blake3: String,
}

/// The checkpoints of one run. Only one process may write at a time, the newest owner of the run
/// ([`CheckpointStore::fenced`]); readers need no lock.
#[derive(Debug)]
pub struct CheckpointStore {
    dir: PathBuf,
    /// Number of checkpoints to keep, at least 1.
    keep: usize,
    storage: Box<dyn Storage>,
    /// Checked before a checkpoint gets its name, and before `LATEST` names it.
    fence: Fence,
}

impl CheckpointStore {
    /// Opens the directory `dir`, which is created if missing. The newest `keep` checkpoints (at least 1) are
    /// kept.
    pub fn open(dir: impl Into<PathBuf>, keep: usize) -> Result<Self, CheckpointError> {
        Self::with_storage(dir, keep, Box::new(DiskStorage))
    }

    /// Like [`open`](Self::open), with another storage for writing.
    pub fn with_storage(
        dir: impl Into<PathBuf>,
        keep: usize,
        storage: Box<dyn Storage>,
    ) -> Result<Self, CheckpointError> {
        let dir = dir.into();
        storage
            .create_dir(&dir)
            .map_err(|e| CheckpointError::io("create", &dir, e))?;
        Ok(Self {
            dir,
            keep: keep.max(1),
            storage,
            fence: Fence::default(),
        })
    }

    /// Refuses to name a checkpoint once `fence` does not allow it. The default allows everything.
    #[must_use]
    pub fn fenced(mut self, fence: Fence) -> Self {
        self.fence = fence;
        self
    }

    /// Begins the checkpoint of `step`, which [`Draft::commit`] completes.
    ///
    /// # Errors
    /// If its folder cannot be created.
    pub fn begin(&self, step: u64) -> Result<Draft<'_>, CheckpointError> {
        Draft::new(self, self.free_name(step)?)
    }

    /// Writes and commits the checkpoint of `step`; returns its directory. Blocks until all data is on the
    /// storage device.
    ///
    /// After an error, readers still find the previous checkpoint. The only exception is a failure of the
    /// last operation (the fsync that protects the commit from a power failure): then a reader may find the
    /// new one.
    ///
    /// # Errors
    /// [`CheckpointError::DiskFull`] and the others; a part without its own plain file name is refused.
    pub fn save(&self, step: u64, parts: &[Part<'_>]) -> Result<PathBuf, CheckpointError> {
        let mut draft = self.begin(step)?;
        for part in parts {
            draft.write(part)?;
        }
        draft.commit()
    }

    /// Makes `LATEST` name this checkpoint, by a rename: the commit.
    fn point_latest(&self, name: &str) -> Result<(), CheckpointError> {
        self.fence.check()?;
        let file = format!("{TEMPORARY}{LATEST}");
        let temporary = self.dir.join(&file);
        if temporary.exists() {
            self.storage
                .remove_file(&temporary)
                .map_err(|e| CheckpointError::io("remove", &temporary, e))?;
        }
        let part = Part::Bytes {
            file,
            bytes: format!("{name}\n").into_bytes(),
        };
        write_part(&*self.storage, &self.dir, &part)?;
        self.rename(&temporary, &self.dir.join(LATEST))?;
        self.sync_dir(&self.dir)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), CheckpointError> {
        self.storage
            .rename(from, to)
            .map_err(|e| CheckpointError::io("rename to", to, e))
    }

    fn sync_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        self.storage
            .sync_dir(path)
            .map_err(|e| CheckpointError::io("sync", path, e))
    }

    fn remove_dir(&self, path: &Path) -> Result<(), CheckpointError> {
        self.storage
            .remove_dir(path)
            .map_err(|e| CheckpointError::io("remove", path, e))
    }

    /// Renames a directory that was not committed, so that its name becomes free; the next prune removes it.
    fn put_aside(&self, name: &str) -> Result<(), CheckpointError> {
        let left = self.dir.join(name);
        if !left.exists() {
            return Ok(());
        }
        let aside = self.dir.join(format!("{TEMPORARY}aside-{name}"));
        if aside.exists() {
            self.remove_dir(&aside)?;
        }
        self.rename(&left, &aside)
    }

    /// Returns `step-00000012`, or this name with a suffix if it is committed. A committed directory is never
    /// written again, so a repeated step cannot damage the one that `LATEST` names.
    fn free_name(&self, step: u64) -> Result<String, CheckpointError> {
        let mut taken = self.names()?;
        // The newest checkpoint is loaded if there is no pointer.
        let latest = fs::read_to_string(self.dir.join(LATEST)).unwrap_or_default();
        if let Some(committed) = taken.iter().position(|name| name == latest.trim()) {
            taken.truncate(committed + 1);
        }
        let plain = format!("step-{step:08}");
        let free = |name: &String| !taken.contains(name);
        std::iter::once(plain.clone())
            .chain((1u32..).map(|n| format!("{plain}.{n:04}")))
            .find(free)
            .ok_or_else(|| CheckpointError::Part {
                file: plain,
                reason: "no free directory name".to_owned(),
            })
    }

    /// Names of complete (renamed) checkpoints, oldest first.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let failed = |e| CheckpointError::io("list", &self.dir, e);
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if let Some(name) = name.to_str()
                && name.starts_with("step-")
            {
                names.push(name.to_owned());
            }
        }
        names.sort_by_key(|name| order(name));
        Ok(names)
    }

    /// Removes old checkpoints beyond the newest `keep`, and leftovers of interrupted saves. Errors are
    /// ignored, since the new checkpoint is already committed.
    fn prune(&self, committed: &str) {
        let mut old = self.names().unwrap_or_default();
        old.retain(|n| n != committed);
        old.truncate((old.len() + 1).saturating_sub(self.keep));
        for name in &old {
            let _ = self.storage.remove_dir(&self.dir.join(name));
        }
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let stale = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
            if stale && entry.path().is_dir() {
                let _ = self.storage.remove_dir(&entry.path());
            }
        }
    }

    /// Loads the committed checkpoint, or the newest valid one if that is damaged. `None` if there is none.
    /// Reads every file once to verify its checksum.
    ///
    /// # Errors
    /// If there are checkpoints and all are damaged.
    pub fn load(&self) -> Result<Option<LoadedCheckpoint>, CheckpointError> {
        let mut skipped = Vec::new();
        let mut names = self.names()?;
        names.reverse();
        match fs::read_to_string(self.dir.join(LATEST)) {
            Ok(text) => {
                let latest = text.trim().to_owned();
                match names.iter().position(|n| *n == latest) {
                    Some(at) => names[..=at].rotate_right(1),
                    None => skipped.push(SkippedCheckpoint {
                        name: LATEST.to_owned(),
                        reason: format!("names {latest:?}, which does not exist"),
                    }),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound && names.is_empty() => {}
            Err(e) => skipped.push(SkippedCheckpoint {
                name: LATEST.to_owned(),
                reason: format!(
                    "{e}: it names the newest checkpoint, which is looked for by its number"
                ),
            }),
        }
        for name in names {
            let path = self.dir.join(&name);
            match verify(&path) {
                Ok(()) => return Ok(Some(LoadedCheckpoint { path, skipped })),
                Err(error) => skipped.push(SkippedCheckpoint {
                    name,
                    reason: error.to_string(),
                }),
            }
        }
        if skipped.is_empty() {
            return Ok(None);
        }
        Err(CheckpointError::NoneUsable {
            dir: self.dir.clone(),
            tried: skipped,
        })
    }
}

impl CheckpointStore {
    /// Makes `LATEST` name the loaded checkpoint from which a run continues, if it names another one or none.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn commit(&self, loaded: &LoadedCheckpoint) -> Result<(), CheckpointError> {
        let name = loaded.path.file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        match fs::read_to_string(self.dir.join(LATEST)) {
            Ok(latest) if latest.trim() == name => Ok(()),
            _ => self.point_latest(&name),
        }
    }

    /// Loads the checkpoint `name` and verifies all checksums.
    ///
    /// # Errors
    /// If it is not there, or damaged.
    pub fn named(&self, name: &str) -> Result<LoadedCheckpoint, CheckpointError> {
        let path = self.dir.join(name);
        verify(&path)?;
        Ok(LoadedCheckpoint {
            path,
            skipped: Vec::new(),
        })
    }
}

/// BLAKE3 over the names and checksums of a checkpoint's files, except for optimizer and state: 64
/// hexadecimal digits. It identifies the weights and their tokenizer. Only the list of checksums is read.
///
/// # Errors
/// If there is no list of checksums, or it cannot be read.
pub fn weights_hash(checkpoint: &Path) -> Result<String, CheckpointError> {
    let mut hasher = blake3::Hasher::new();
    for (file, checksum) in checksums(checkpoint)? {
        let optimizer = file == "optimizer.safetensors" || file.starts_with("optimizer/");
        if !optimizer && file != "state.json" {
            hasher.update(format!("{file} {}\n", checksum.blake3).as_bytes());
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Sort key of a checkpoint name: step and suffix number; other names sort first.
fn order(name: &str) -> (Option<u64>, Option<u32>, String) {
    let number = name.trim_start_matches("step-");
    let (step, repetition) = number.split_once('.').unwrap_or((number, "0"));
    (step.parse().ok(), repetition.parse().ok(), name.to_owned())
}

fn corrupt(path: &Path, reason: String) -> CheckpointError {
    CheckpointError::Corrupt {
        path: path.to_owned(),
        reason,
    }
}

/// Reads the checksums of a checkpoint's files, by name.
fn checksums(path: &Path) -> Result<BTreeMap<String, Checksum>, CheckpointError> {
    let list = path.join(CHECKSUMS);
    let bytes = fs::read(&list).map_err(|e| CheckpointError::io("read", &list, e))?;
    serde_json::from_slice(&bytes).map_err(|e| corrupt(&list, e.to_string()))
}

/// Verifies the length and the BLAKE3 hash of every file of a checkpoint.
fn verify(path: &Path) -> Result<(), CheckpointError> {
    for (file, expected) in &checksums(path)? {
        let path = path.join(file);
        let failed = |e| CheckpointError::io("read", &path, e);
        let actual = fs::metadata(&path).map_err(failed)?.len();
        if actual != expected.bytes {
            let reason = format!("it has {actual} bytes, expected {}", expected.bytes);
            return Err(corrupt(&path, reason));
        }
        let mut hasher = blake3::Hasher::new();
        let reader = fs::File::open(&path).map_err(failed)?;
        hasher.update_reader(reader).map_err(failed)?;
        if hasher.finalize().to_hex().as_str() != expected.blake3 {
            return Err(corrupt(&path, "its BLAKE3 does not match".to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
