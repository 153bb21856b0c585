//! Folders of the host as entries, for uploads to sandboxes and downloads from them.
//!
//! Entries that come from a sandbox are hostile: [`write_folder`] makes plain files and folders only, and
//! nothing outside of its folder.

use crate::guest::{Entry, EntryKind};
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path};

/// Maximum entries of a folder.
const MAX_ENTRIES: usize = 65_536;
/// Maximum folders in each other.
const MAX_DEPTH: usize = 64;

/// Adds a path to an error.
fn at(path: &Path) -> impl Fn(Error) -> Error + '_ {
    move |e| Error::new(e.kind(), format!("{}: {e}", path.display()))
}

/// Everything below a folder of the host, sorted, folders before what they hold. Links stay links; devices,
/// pipes and sockets are left out.
///
/// # Errors
/// If a file cannot be read, or there are more than `max_bytes` bytes, 65,536 entries or 64 folders in each
/// other.
pub fn read_folder(path: &Path, max_bytes: u64) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut left = max_bytes;
    read_into(path, Path::new(""), 0, &mut left, &mut entries)?;
    Ok(entries)
}

/// Adds what is below one folder.
fn read_into(
    folder: &Path,
    inside: &Path,
    depth: usize,
    left: &mut u64,
    entries: &mut Vec<Entry>,
) -> Result<()> {
    if depth > MAX_DEPTH {
        let why = format!("more than {MAX_DEPTH} folders in each other");
        return Err(at(folder)(Error::other(why)));
    }
    let names = fs::read_dir(folder).map_err(at(folder))?;
    let names = names.map(|e| e.map(|e| e.file_name()));
    let mut names = names.collect::<Result<Vec<_>>>().map_err(at(folder))?;
    names.sort();
    for name in names {
        let (path, inner) = (folder.join(&name), inside.join(&name));
        let meta = path.symlink_metadata().map_err(at(&path))?;
        let kind = if meta.is_dir() {
            EntryKind::Folder
        } else if meta.is_symlink() {
            EntryKind::Link(fs::read_link(&path).map_err(at(&path))?)
        } else if meta.is_file() {
            EntryKind::File(read_file(&path, left).map_err(at(&path))?)
        } else {
            continue;
        };
        let is_folder = kind == EntryKind::Folder;
        entries.push(Entry {
            path: inner.clone(),
            mode: meta.mode() & 0o777,
            kind,
        });
        if entries.len() > MAX_ENTRIES {
            let why = format!("more than {MAX_ENTRIES} entries");
            return Err(at(folder)(Error::other(why)));
        }
        if is_folder {
            read_into(&path, &inner, depth + 1, left, entries)?;
        }
    }
    Ok(())
}

/// Content of a file of at most `left` bytes, which become fewer.
fn read_file(path: &Path, left: &mut u64) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = File::open(path)?;
    file.take(left.saturating_add(1))
        .read_to_end(&mut content)?;
    let rest = left.checked_sub(content.len() as u64);
    *left =
        rest.ok_or_else(|| Error::new(ErrorKind::FileTooLarge, "the folder has too many bytes"))?;
    Ok(content)
}

/// Writes entries below a folder of the host, which is made if it is missing. The folder must be the caller's
/// only: nobody else may change it meanwhile. Links are left out, so that no entry leads out of it. The owner
/// may read and write every file, and nobody else may write one.
///
/// # Errors
/// If a path is not plain, a file is there already, or nothing can be written.
pub fn write_folder(path: &Path, entries: &[Entry]) -> Result<()> {
    let mut make = fs::DirBuilder::new();
    make.recursive(true).mode(0o755);
    make.create(path).map_err(at(path))?;
    for entry in entries {
        let plain = |c: Component<'_>| matches!(c, Component::Normal(_));
        if entry.path.as_os_str().is_empty() || !entry.path.components().all(plain) {
            let why = "a path of plain names is allowed only";
            return Err(at(&entry.path)(Error::new(ErrorKind::InvalidInput, why)));
        }
        let target = path.join(&entry.path);
        match &entry.kind {
            EntryKind::Folder => make.create(&target).map_err(at(&target))?,
            EntryKind::File(content) => {
                let above = target.parent().unwrap_or(path);
                make.create(above).map_err(at(above))?;
                // Only new files, so that nothing is written through a link that was there before.
                let opened = File::options()
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&target);
                let mut file = opened.map_err(at(&target))?;
                file.write_all(content).map_err(at(&target))?;
                let mode = entry.mode & 0o755 | 0o600;
                let rights = fs::Permissions::from_mode(mode);
                file.set_permissions(rights).map_err(at(&target))?;
            }
            EntryKind::Link(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_folder_comes_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("a/b")).unwrap();
        fs::write(from.join("a/b/c.sh"), "echo").unwrap();
        fs::set_permissions(from.join("a/b/c.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("/etc/passwd", from.join("l")).unwrap();
        let entries = read_folder(&from, 4).unwrap();
        let names: Vec<_> = entries.iter().map(|e| e.path.to_str().unwrap()).collect();
        assert_eq!(names, ["a", "a/b", "a/b/c.sh", "l"]);
        assert!(read_folder(&from, 3).is_err());
        let to = dir.path().join("to");
        write_folder(&to, &entries).unwrap();
        let meta = fs::metadata(to.join("a/b/c.sh")).unwrap();
        assert_eq!((meta.len(), meta.mode() & 0o777), (4, 0o755));
        assert!(
            to.join("l").symlink_metadata().is_err(),
            "links are left out"
        );
        // A file is not replaced.
        assert!(write_folder(&to, &entries).is_err());
    }

    #[test]
    fn no_entry_leaves_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        for path in ["../x", "/x", "a/../../x", "", "."] {
            let entry = Entry {
                path: path.into(),
                mode: 0o644,
                kind: EntryKind::File(Vec::new()),
            };
            let to = dir.path().join("to");
            assert!(write_folder(&to, &[entry]).is_err(), "{path:?}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // A link of the entries is not made, so that a file below it lands in a plain folder.
        let link = Entry {
            path: "l".into(),
            mode: 0o777,
            kind: EntryKind::Link(dir.path().into()),
        };
        let below = Entry {
            path: "l/x".into(),
            mode: 0o644,
            kind: EntryKind::File(b"x".to_vec()),
        };
        write_folder(&dir.path().join("to"), &[link, below]).unwrap();
        assert!(!dir.path().join("x").exists());
        assert!(dir.path().join("to/l/x").is_file());
    }
}
