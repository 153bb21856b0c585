//! A checkpoint while it is written: a folder under a temporary name.

use super::parts::write_part;
use super::{CHECKSUMS, CheckpointError, CheckpointStore, Checksum, Part, TEMPORARY};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// A file that another process wrote and synced into the folder of a [`Draft`].
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct StoredFile {
    /// Path relative to the folder.
    pub path: String,
    /// Length.
    pub bytes: u64,
    /// BLAKE3 of the contents, hexadecimal.
    pub blake3: String,
}

/// A checkpoint that is not committed yet. Dropping it removes its folder.
#[derive(Debug)]
pub struct Draft<'a> {
    store: &'a CheckpointStore,
    name: String,
    temporary: PathBuf,
    checksums: BTreeMap<String, Checksum>,
    /// Folders of adopted files, which have to be synced.
    folders: BTreeSet<PathBuf>,
    is_committed: bool,
}

impl<'a> Draft<'a> {
    pub(super) fn new(store: &'a CheckpointStore, name: String) -> Result<Self, CheckpointError> {
        let temporary = store.dir.join(format!("{TEMPORARY}{name}"));
        if temporary.exists() {
            store.remove_dir(&temporary)?;
        }
        let draft = Self {
            store,
            name,
            temporary,
            checksums: BTreeMap::new(),
            folders: BTreeSet::new(),
            is_committed: false,
        };
        let created = store.storage.create_dir(&draft.temporary);
        created.map_err(|e| CheckpointError::io("create", &draft.temporary, e))?;
        Ok(draft)
    }

    /// Folder into which other processes write their files.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// Writes a file and syncs it.
    ///
    /// # Errors
    /// If the disk refuses, or the part has no plain file name of its own.
    pub fn write(&mut self, part: &Part<'_>) -> Result<(), CheckpointError> {
        let file = part.file();
        let plain = !file.is_empty() && !file.contains(['/', '\\']) && !file.starts_with('.');
        if !plain || file == CHECKSUMS || self.checksums.contains_key(file) {
            return Err(CheckpointError::Part {
                file: file.to_owned(),
                reason: "a part needs a plain file name of its own".to_owned(),
            });
        }
        let (bytes, blake3) = write_part(&*self.store.storage, &self.temporary, part)?;
        let checksum = Checksum { bytes, blake3 };
        self.checksums.insert(part.file().to_owned(), checksum);
        Ok(())
    }

    /// Takes over a file that another process wrote into the folder. Its length is compared now, and its
    /// checksum whenever the checkpoint is loaded: the writer computed it from memory, so a second reading of
    /// every file would double the time of a save.
    ///
    /// # Errors
    /// If the file is not there, has another length, or its path leaves the folder or is taken.
    pub fn adopt(&mut self, file: &StoredFile) -> Result<(), CheckpointError> {
        let refused = |reason: String| CheckpointError::Part {
            file: file.path.clone(),
            reason,
        };
        let relative = Path::new(&file.path);
        let inside = relative
            .components()
            .all(|part| matches!(part, Component::Normal(_)));
        if !inside || file.path == CHECKSUMS || self.checksums.contains_key(&file.path) {
            let reason = "an adopted file needs a path of its own inside the checkpoint";
            return Err(refused(reason.to_owned()));
        }
        let path = self.temporary.join(relative);
        let length = fs::metadata(&path).map_err(|e| CheckpointError::io("read", &path, e))?;
        if length.len() != file.bytes {
            return Err(refused(format!(
                "it has {} bytes, its writer reported {}",
                length.len(),
                file.bytes
            )));
        }
        self.folders.extend(path.parent().map(Path::to_owned));
        let checksum = Checksum {
            bytes: file.bytes,
            blake3: file.blake3.clone(),
        };
        self.checksums.insert(file.path.clone(), checksum);
        Ok(())
    }

    /// Writes the checksums, syncs the folders, and makes the checkpoint the one that `LATEST` names. Returns
    /// its folder.
    ///
    /// # Errors
    /// Same as [`CheckpointStore::save`]. If a newer owner of the run exists, the checkpoint gets no name.
    pub fn commit(mut self) -> Result<PathBuf, CheckpointError> {
        let store = self.store;
        let bytes =
            serde_json::to_vec_pretty(&self.checksums).map_err(|e| CheckpointError::Part {
                file: CHECKSUMS.to_owned(),
                reason: e.to_string(),
            })?;
        let last = Part::Bytes {
            file: CHECKSUMS.to_owned(),
            bytes,
        };
        write_part(&*store.storage, &self.temporary, &last)?;
        self.folders.remove(&self.temporary);
        for folder in &self.folders {
            store.sync_dir(folder)?;
        }
        store.sync_dir(&self.temporary)?;
        store.fence.check()?;
        let target = store.dir.join(&self.name);
        store.put_aside(&self.name)?;
        store.rename(&self.temporary, &target)?;
        store.sync_dir(&store.dir)?;
        self.is_committed = true;
        store.point_latest(&self.name)?;
        store.prune(&self.name);
        Ok(target)
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if !self.is_committed {
            // Best effort: the next save removes what cannot be removed now.
            let _ = self.store.storage.remove_dir(&self.temporary);
        }
    }
}
