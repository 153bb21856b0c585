//! Work folders as lists of entries, and as archives that depend on the content alone.
//!
//! The archive is that of the process level: a tar file, sorted, without owners and times. So a
//! snapshot of one level can be started at another.

use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Deepest path of an archive, in parts, and most entries.
const MAX_DEPTH: usize = 65;
const MAX_ENTRIES: usize = 65_536;
/// Longest name of an entry. Longer ones take memory, time and room in the error that refuses them.
const MAX_PATH_BYTES: usize = 17 << 10;

/// What an entry is.
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
    /// Below the work folder, in plain parts.
    pub path: PathBuf,
    /// Rights, nine bits.
    pub mode: u32,
    /// What it is.
    pub kind: EntryKind,
}

/// Whether every part of a path is a plain name.
pub(crate) fn plain(path: &Path) -> bool {
    let parts = path.components();
    let all = parts.clone().all(|c| matches!(c, Component::Normal(_)));
    all && (1..=MAX_DEPTH).contains(&parts.count())
}

/// The archive of a work folder.
///
/// # Errors
/// If a name does not fit into an archive.
pub fn pack(entries: &[Entry]) -> Result<Vec<u8>, String> {
    let mut builder = tar::Builder::new(Vec::new());
    for entry in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(entry.mode & 0o777);
        let failed = |e: std::io::Error| format!("{}: {e}", entry.path.display());
        let (kind, content): (_, &[u8]) = match &entry.kind {
            EntryKind::File(content) => (tar::EntryType::Regular, content),
            EntryKind::Folder => (tar::EntryType::Directory, &[]),
            EntryKind::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                builder
                    .append_link(&mut header, &entry.path, target)
                    .map_err(failed)?;
                continue;
            }
        };
        header.set_entry_type(kind);
        header.set_size(content.len() as u64);
        builder
            .append_data(&mut header, &entry.path, content)
            .map_err(failed)?;
    }
    builder.into_inner().map_err(|e| e.to_string())
}

/// The entries of an archive with at most `max_bytes` of content.
///
/// # Errors
/// If an entry is not a plain file, folder or link in a folder that is one, or if it is too large.
pub fn unpack(archive: &[u8], max_bytes: u64) -> Result<Vec<Entry>, String> {
    let failed = |e: std::io::Error| format!("archive: {e}");
    let mut archive = tar::Archive::new(archive);
    let (mut left, mut entries) = (max_bytes, Vec::<Entry>::new());
    let mut links = std::collections::HashSet::new();
    for entry in archive.entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let name = entry.path_bytes().len();
        if name > MAX_PATH_BYTES {
            let n = entries.len() + 1;
            return Err(format!(
                "archive: entry {n} has a name of {name} bytes, at most {MAX_PATH_BYTES}"
            ));
        }
        // Names of folders end in a slash.
        let path: PathBuf = entry.path().map_err(failed)?.components().collect();
        let behind_link = path.ancestors().skip(1).any(|p| links.contains(p));
        if !plain(&path) || behind_link || entries.len() >= MAX_ENTRIES {
            let path = path.display();
            return Err(format!(
                "archive: entry {} ({path}) is not allowed",
                entries.len() + 1
            ));
        }
        let mode = entry.header().mode().map_err(failed)? & 0o777;
        let kind = match entry.header().entry_type() {
            tar::EntryType::Directory => EntryKind::Folder,
            tar::EntryType::Symlink => {
                let target = entry.link_name().map_err(failed)?.unwrap_or_default();
                links.insert(path.clone());
                EntryKind::Link(target.into_owned())
            }
            tar::EntryType::Regular | tar::EntryType::Continuous => {
                if entry.size() > left {
                    return Err(format!("archive: more than {max_bytes} bytes of files"));
                }
                left -= entry.size();
                let mut content = Vec::new();
                let size = entry.size();
                (&mut entry)
                    .take(size)
                    .read_to_end(&mut content)
                    .map_err(failed)?;
                EntryKind::File(content)
            }
            other => {
                let path = path.display();
                return Err(format!("archive: {path} has type {other:?}"));
            }
        };
        entries.push(Entry { path, mode, kind });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
            let archive = pack(&entries).unwrap();
            prop_assert_eq!(unpack(&archive, 1 << 20).unwrap(), entries);
        }

        #[test]
        fn any_bytes_are_refused_or_taken(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            if let Ok(entries) = unpack(&bytes, 1000) {
                prop_assert!(entries.iter().all(|e| plain(&e.path)));
            }
        }
    }

    #[test]
    fn hostile_archives_are_refused() {
        let big = pack(&[entry("a", EntryKind::File(vec![0; 100]))]).unwrap();
        assert!(unpack(&big, 99).unwrap_err().contains("more than 99"));
        let behind = [
            entry("l", EntryKind::Link("/tmp".into())),
            entry("l/x", EntryKind::File(Vec::new())),
        ];
        let behind = pack(&behind).unwrap();
        assert!(unpack(&behind, 100).unwrap_err().contains("entry 2"));
        assert!(pack(&[entry("../x", EntryKind::Folder)]).is_err());
    }

    #[test]
    fn a_name_without_end_is_refused_at_once() {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o644);
        builder.append_link(&mut header, "l", "x").unwrap();
        // As a folder name each of its half million parts would be looked up among the links.
        let name = "a/".repeat(1 << 19);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(0);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, &name[..name.len() - 1], &b""[..])
            .unwrap();
        let archive = builder.into_inner().unwrap();
        let told = unpack(&archive, 1000).unwrap_err();
        assert!(
            told.contains("a name of 1048575 bytes") && told.len() < 200,
            "{}",
            told.len()
        );
    }
}
