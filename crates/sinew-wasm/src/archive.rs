//! File trees as tar archives in the format of the other levels, so that a snapshot of one level can be used
//! at another. Pure.
//!
//! Entries are sorted and have no owners and times, so that equal files give equal bytes. Trees have no
//! permissions and links: files have mode 0600 and folders 0700, like those of programs at the other levels.
//! An archive with a symbolic link is refused. A hard link becomes a separate file.

use crate::error::WasmError;
use crate::fs::resolve;
use crate::wire::Tree;
use sinew_sandbox::archive::Writer;
use sinew_sandbox::archive::reader::{self, Budget, Kind, ReadLimits};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

/// Maximum entries of an archive.
const MAX_ENTRIES: u64 = 4096;

/// Writes a tree as an archive of at most `max_bytes`.
///
/// # Errors
/// Returns an error if a name does not fit into an archive, or the archive exceeds `max_bytes`.
pub(crate) fn pack<W: Write>(tree: &Tree, out: W, max_bytes: u64) -> Result<W, WasmError> {
    let mut writer = Writer::new(out, max_bytes);
    // Sorted by path components, like at the other levels: `a/b` before `a.txt`.
    let mut entries: Vec<_> = tree.iter().collect();
    entries.sort_by(|a, b| a.0.split('/').cmp(b.0.split('/')));
    for (path, file) in entries {
        let name = Path::new(path);
        let written = match file.as_deref() {
            Some(content) => writer.file(name, 0o600, &content),
            None => writer.folder(name, 0o700),
        };
        written.map_err(|e| format!("{path}: {e}"))?;
    }
    Ok(writer.end()?)
}

/// Reads an archive with at most `max_bytes` of content.
///
/// # Errors
/// Returns an error if an entry is neither a file nor a folder with a normal path, or a limit is exceeded.
pub(crate) fn unpack(archive: impl Read, max_bytes: u64) -> Result<Tree, WasmError> {
    let mut tree = Tree::new();
    let limits = ReadLimits {
        entries: MAX_ENTRIES,
        ..ReadLimits::work_folder(max_bytes)
    };
    let read = reader::read(archive, &mut Budget::new(limits), |entry, budget| {
        let text = entry.path.to_str().ok_or("its path is not UTF-8")?;
        // A path of this level has at most as many names and bytes as `fs` allows.
        let path = resolve("", text).map_err(|e| format!("its path is refused ({e:?})"))?;
        if path.is_empty() || path == "tmp" || path.starts_with("tmp/") {
            return Err("it names the work folder itself, or is in tmp".into());
        }
        let file = match &entry.kind {
            Kind::Folder => None,
            Kind::HardLink(first) => {
                // Files are immutable here. A hard link shares the bytes but counts against the limit.
                let first = first.to_str().and_then(|first| tree.get(first)?.clone());
                let content: Arc<[u8]> = first.ok_or("it links to no file before it")?;
                budget.charge(content.len() as u64)?;
                Some(content)
            }
            Kind::File => Some(entry.bytes(budget)?.into()),
            Kind::Symlink(_) => return Err("this level has no symbolic links".into()),
            Kind::Device(kind) => {
                return Err(format!("this level has nothing of type {kind}").into());
            }
        };
        for (at, _) in path.match_indices('/') {
            if tree.entry(path[..at].into()).or_insert(None).is_some() {
                return Err("it is below a file".into());
            }
        }
        if let (Some(_), Some(None)) = (&file, tree.get(&path)) {
            return Err("there is a folder of that name".into());
        }
        tree.insert(path, file);
        Ok(())
    });
    read.map_err(|e| e.to_string())?;
    Ok(tree)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn packed_trees_are_unpacked(
            files in proptest::collection::btree_map(
                "[a-s]{1,3}(\\.[a-z])?",
                proptest::collection::vec(any::<u8>(), 0..200),
                0..8,
            ),
        ) {
            let mut tree: Tree = files
                .into_iter()
                .map(|(p, f)| (format!("folder/{p}"), Some(f.into())))
                .collect();
            tree.insert("folder".into(), None);
            let archive = pack(&tree, Vec::new(), 1 << 30).unwrap();
            let again = unpack(archive.as_slice(), 1 << 20).unwrap();
            prop_assert_eq!(&again, &tree);
            prop_assert_eq!(pack(&again, Vec::new(), 1 << 30).unwrap(), archive);
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            if let Ok(tree) = unpack(bytes.as_slice(), 1000) {
                prop_assert!(tree.keys().all(|p| !p.starts_with('/') && !p.contains("..")));
            }
        }
    }

    #[test]
    fn hostile_archives_are_refused() {
        let packed = |path: &str, kind: tar::EntryType, content: &[u8]| {
            let mut header = tar::Header::new_gnu();
            header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(kind);
            header.as_old_mut().linkname[0] = b'x';
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            let mut builder = tar::Builder::new(Vec::new());
            builder.append(&header, content).unwrap();
            builder.into_inner().unwrap()
        };
        let regular = tar::EntryType::Regular;
        for path in ["../x", "/x", "a/../../x", "tmp/x", "a//../x"] {
            assert!(
                unpack(packed(path, regular, b"").as_slice(), 100).is_err(),
                "{path}"
            );
        }
        let link = packed("l", tar::EntryType::Symlink, b"");
        assert!(
            unpack(link.as_slice(), 100)
                .unwrap_err()
                .to_string()
                .contains("symbolic")
        );
        let big = packed("a", regular, &[0; 101]);
        assert!(
            unpack(big.as_slice(), 100)
                .unwrap_err()
                .to_string()
                .contains("more than 100")
        );
    }

    #[test]
    fn endless_names_are_refused_at_once() {
        let mut builder = tar::Builder::new(Vec::new());
        let name = "a/".repeat(1 << 19);
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(0);
        builder
            .append_data(&mut header, &name[..name.len() - 1], &b""[..])
            .unwrap();
        let archive = builder.into_inner().unwrap();
        let told = unpack(archive.as_slice(), 1000).unwrap_err().to_string();
        assert!(
            told.contains("bytes of names and extensions") && told.len() < 200,
            "{}",
            told.len()
        );
    }
}
