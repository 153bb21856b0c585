//! File trees as tar archives in the format of the other levels, so that a snapshot of one level can be used
//! at another. Pure.
//!
//! Entries are sorted and have no owners and times, so that equal files give equal bytes. Trees have no
//! permissions and links: files have mode 0600 and folders 0700, like those of programs at the other levels.
//! An archive with a symbolic link is refused. A hard link becomes a separate file.

use crate::fs::resolve;
use crate::wire::Tree;
use sinew_sandbox::archive::Writer;
use std::io::{Read, Write};
use std::path::Path;

/// Maximum entries of an archive.
const MAX_ENTRIES: usize = 4096;
/// Maximum bytes of an entry's name, before it is read into memory.
const MAX_PATH_BYTES: usize = 17 << 10;

/// Writes a tree as an archive of at most `max_bytes`.
///
/// # Errors
/// Returns an error if a name does not fit into an archive, or the archive exceeds `max_bytes`.
pub(crate) fn pack<W: Write>(tree: &Tree, out: W, max_bytes: u64) -> Result<W, String> {
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
    writer.end().map_err(|e| e.to_string())
}

/// Reads an archive with at most `max_bytes` of content.
///
/// # Errors
/// Returns an error if an entry is neither a file nor a folder with a normal path, or a limit is exceeded.
pub(crate) fn unpack(archive: impl Read, max_bytes: u64) -> Result<Tree, String> {
    let failed = |e: std::io::Error| format!("archive: {e}");
    let mut archive = tar::Archive::new(archive);
    let (mut left, mut tree) = (max_bytes, Tree::new());
    for (n, entry) in archive.entries().map_err(failed)?.enumerate() {
        let mut entry = entry.map_err(failed)?;
        let name = entry.path_bytes().len();
        if name > MAX_PATH_BYTES {
            let n = n + 1;
            return Err(format!(
                "archive: entry {n} has a name of {name} bytes, at most {MAX_PATH_BYTES}"
            ));
        }
        let path = entry.path().map_err(failed)?.into_owned();
        let refused = |why: &str| format!("archive: entry {} ({}): {why}", n + 1, path.display());
        let text = path.to_str().map(|p| p.trim_end_matches('/'));
        let named = text.filter(|p| !p.split('/').any(|s| matches!(s, "" | "." | "..")));
        let plain = named.and_then(|p| resolve("", p).ok());
        let plain = plain.filter(|p| p != "tmp" && !p.starts_with("tmp/"));
        let Some(plain) = plain else {
            return Err(refused("its name is not allowed"));
        };
        if n >= MAX_ENTRIES {
            return Err(refused("there are too many"));
        }
        let file = match entry.header().entry_type() {
            tar::EntryType::Directory => None,
            tar::EntryType::Link => {
                // Files are immutable here. A hard link shares the bytes but counts against the limit.
                let first = entry.link_name().map_err(failed)?.unwrap_or_default();
                let first = first.to_str().and_then(|first| tree.get(first)?.clone());
                let Some(content) = first else {
                    return Err(refused("it links to no file before it"));
                };
                let Some(rest) = left.checked_sub(content.len() as u64) else {
                    return Err(format!("archive: more than {max_bytes} bytes of files"));
                };
                left = rest;
                Some(content)
            }
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                let size = entry.size();
                if size > left {
                    return Err(format!("archive: more than {max_bytes} bytes of files"));
                }
                left -= size;
                let mut content = Vec::new();
                let read = (&mut entry).take(size).read_to_end(&mut content);
                read.map_err(failed)?;
                Some(content.into())
            }
            other => {
                return Err(refused(&format!(
                    "this level has nothing of type {other:?}"
                )));
            }
        };
        for (at, _) in plain.match_indices('/') {
            if tree.entry(plain[..at].into()).or_insert(None).is_some() {
                return Err(refused("it is below a file"));
            }
        }
        if let (Some(_), Some(None)) = (&file, tree.get(&plain)) {
            return Err(refused("there is a folder of that name"));
        }
        tree.insert(plain, file);
    }
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
                .contains("Symlink")
        );
        let big = packed("a", regular, &[0; 101]);
        assert!(
            unpack(big.as_slice(), 100)
                .unwrap_err()
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
        let told = unpack(archive.as_slice(), 1000).unwrap_err();
        assert!(
            told.contains("a name of 1048575 bytes") && told.len() < 200,
            "{}",
            told.len()
        );
    }
}
