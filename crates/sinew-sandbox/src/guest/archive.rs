//! Work folders as lists of entries, and as archives that depend only on the content.
//!
//! The archive has the format of the process level: a tar file, sorted, without owners and times. So a
//! snapshot of one level can be started at another.

use crate::SandboxError;
use crate::archive::reader::{self, Budget, Kind, ReadError, ReadLimits};
use crate::archive::{Writer, spool};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Maximum number of names in a path, as in [`ReadLimits::work_folder`].
const MAX_DEPTH: usize = 65;

/// Reasons for which an archive cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// An entry does not fit into an archive, or a file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The archive, or an entry of it, is not allowed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The thread that read or wrote it panicked.
    #[error(transparent)]
    Thread(#[from] tokio::task::JoinError),
}

/// Kind of an entry, with its content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file and its content.
    File(Vec<u8>),
    /// A folder.
    Folder,
    /// A symbolic link and where it points.
    Link(PathBuf),
}

/// One entry of a work folder; folders come before what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Path below the work folder, in plain parts.
    pub path: PathBuf,
    /// Rights, nine bits.
    pub mode: u32,
    /// Type of the entry, with the content of a file or the target of a link.
    pub kind: EntryKind,
}

/// Whether every part of a path is a plain name.
pub(crate) fn plain(path: &Path) -> bool {
    let parts = path.components();
    let all = parts.clone().all(|c| matches!(c, Component::Normal(_)));
    all && (1..=MAX_DEPTH).contains(&parts.count())
}

/// Writes a work folder as an archive of at most `max_bytes`.
///
/// # Errors
/// If a name does not fit into an archive, or the archive not where it is written.
pub fn pack<W: Write>(entries: &[Entry], out: W, max_bytes: u64) -> Result<W, ArchiveError> {
    let mut writer = Writer::new(out, max_bytes);
    for Entry { path, mode, kind } in entries {
        let written = match kind {
            EntryKind::File(content) => writer.file(path, *mode, &content.as_slice()),
            EntryKind::Folder => writer.folder(path, *mode),
            EntryKind::Link(target) => writer.link(path, *mode, target),
        };
        written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))?;
    }
    Ok(writer.end()?)
}

/// The entries of an archive with at most `max_bytes` of content.
///
/// # Errors
/// Fails if an entry is not a plain file, folder or link in a folder that is one, or if it is too large.
/// Holes count as the zeros that they read as, further names of a file as separate files.
pub fn unpack(archive: impl Read, max_bytes: u64) -> Result<Vec<Entry>, ArchiveError> {
    let mut entries = Vec::<Entry>::new();
    let mut links = std::collections::HashSet::new();
    let mut files = std::collections::HashMap::new();
    let mut budget = Budget::new(ReadLimits::work_folder(max_bytes));
    let read = reader::read(archive, &mut budget, |entry, budget| {
        let path = std::mem::take(&mut entry.path);
        if !plain(&path) {
            return Err("it names the work folder itself".into());
        }
        if path.ancestors().skip(1).any(|p| links.contains(p)) {
            return Err("it is below a link".into());
        }
        let kind = match &entry.kind {
            Kind::Folder => EntryKind::Folder,
            Kind::Symlink(target) => {
                links.insert(path.clone());
                EntryKind::Link(target.clone())
            }
            Kind::HardLink(first) => {
                let first = files.get(first).map(|at: &usize| &entries[*at].kind);
                let Some(EntryKind::File(content)) = first else {
                    return Err("it links to no file before it".into());
                };
                budget.charge(content.len() as u64)?;
                EntryKind::File(content.clone())
            }
            Kind::File => {
                let content = entry.bytes(budget)?;
                files.insert(path.clone(), entries.len());
                EntryKind::File(content)
            }
            Kind::Device(kind) => {
                return Err(format!("it is a device or pipe ({kind})").into());
            }
        };
        let mode = entry.mode & 0o777;
        entries.push(Entry { path, mode, kind });
        Ok(())
    });
    read?;
    Ok(entries)
}

/// Same as [`pack`], into a file without a name, on a thread that may wait.
///
/// # Errors
/// Fails as [`pack`] does.
pub async fn export(entries: Arc<Vec<Entry>>, max_bytes: u64) -> Result<File, SandboxError> {
    let work = move || -> Result<File, ArchiveError> {
        let file = spool(&[])?;
        let mut file = pack(&entries, file, max_bytes)?;
        file.rewind()?;
        Ok(file)
    };
    apart("export", work).await
}

/// Same as [`unpack`], from the current position of a file, on a thread that may wait.
///
/// # Errors
/// Fails as [`unpack`] does.
pub async fn import(archive: File, max_bytes: u64) -> Result<Vec<Entry>, SandboxError> {
    apart("import", move || unpack(BufReader::new(archive), max_bytes)).await
}

async fn apart<T: Send + 'static>(
    operation: &str,
    work: impl FnOnce() -> Result<T, ArchiveError> + Send + 'static,
) -> Result<T, SandboxError> {
    let done = tokio::task::spawn_blocking(work).await;
    let done = done.unwrap_or_else(|e| Err(e.into()));
    done.map_err(|e| SandboxError::io(operation, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packed(entries: &[Entry]) -> Result<Vec<u8>, ArchiveError> {
        pack(entries, Vec::new(), 1 << 30)
    }

    fn entry(path: &str, kind: EntryKind) -> Entry {
        Entry {
            path: path.into(),
            mode: 0o640,
            kind,
        }
    }

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(name in "[a-z]{1,200}", content in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let entries = vec![
                entry("d", EntryKind::Folder),
                entry(&format!("d/{name}"), EntryKind::File(content)),
                entry("l", EntryKind::Link("/etc/passwd".into())),
            ];
            let archive = packed(&entries).unwrap();
            prop_assert_eq!(unpack(archive.as_slice(), 1 << 20).unwrap(), entries);
        }

        #[test]
        fn any_bytes_are_refused_or_taken(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            if let Ok(entries) = unpack(bytes.as_slice(), 1000) {
                prop_assert!(entries.iter().all(|e| plain(&e.path)));
            }
        }
    }

    #[test]
    fn hostile_archives_are_refused() {
        let big = packed(&[entry("a", EntryKind::File(vec![0; 100]))]).unwrap();
        assert!(
            unpack(big.as_slice(), 99)
                .unwrap_err()
                .to_string()
                .contains("more than 99")
        );
        let behind = [
            entry("l", EntryKind::Link("/tmp".into())),
            entry("l/x", EntryKind::File(Vec::new())),
        ];
        let behind = packed(&behind).unwrap();
        assert!(
            unpack(behind.as_slice(), 100)
                .unwrap_err()
                .to_string()
                .contains("entry 2")
        );
        assert!(packed(&[entry("../x", EntryKind::Folder)]).is_err());
    }

    #[test]
    fn further_names_of_a_file_are_files_of_their_own() {
        let mut writer = Writer::new(Vec::new(), 1 << 20);
        let content: &[u8] = &[7; 100];
        writer.file(Path::new("a"), 0o600, &content).unwrap();
        writer
            .hard_link(Path::new("b"), 0o600, Path::new("a"))
            .unwrap();
        let archive = writer.end().unwrap();
        let entries = unpack(archive.as_slice(), 200).unwrap();
        assert_eq!(entries[1].kind, entries[0].kind);
        assert!(
            unpack(archive.as_slice(), 199)
                .unwrap_err()
                .to_string()
                .contains("more than 199")
        );
        let mut writer = Writer::new(Vec::new(), 1 << 20);
        writer
            .hard_link(Path::new("b"), 0o600, Path::new("a"))
            .unwrap();
        let none = writer.end().unwrap();
        assert!(
            unpack(none.as_slice(), 9)
                .unwrap_err()
                .to_string()
                .contains("no file before")
        );
    }

    #[test]
    fn a_name_without_end_is_refused_at_once() {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o644);
        builder.append_link(&mut header, "l", "x").unwrap();
        // A lookup of every part of this folder name among the links would need half a million steps.
        let name = "a/".repeat(1 << 19);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(0);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, &name[..name.len() - 1], &b""[..])
            .unwrap();
        let archive = builder.into_inner().unwrap();
        let told = unpack(archive.as_slice(), 1000).unwrap_err().to_string();
        assert!(
            told.contains("names and extensions") && told.len() < 200,
            "{}",
            told.len()
        );
    }
}
