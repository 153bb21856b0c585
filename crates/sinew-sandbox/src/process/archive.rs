//! Snapshots as archives: a tar file that depends on the content alone.
//!
//! Entries are sorted by name; owners and times are zero; sockets, FIFOs and devices are left
//! out. So the same files give the same bytes, and a hash of them names the content.

use super::files::{make_parents, open_beneath};
use nix::fcntl::{OFlag, readlinkat};
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::{Gid, Uid, fchown, symlinkat};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

/// Deepest folder that is archived; paths stay below what the kernel takes.
const MAX_DEPTH: usize = 64;
/// Most entries of an archive.
const MAX_ENTRIES: usize = 65_536;
/// Longest name of an entry. Longer ones take memory, time and room in the error that refuses them.
const MAX_PATH_BYTES: usize = 17 << 10;

type Outcome<T> = Result<T, String>;

fn at<'a>(path: &'a Path) -> impl Fn(std::io::Error) -> String + 'a {
    move |e| format!("{}: {e}", path.display())
}

fn errno<'a>(path: &'a Path) -> impl Fn(nix::errno::Errno) -> String + 'a {
    move |e| format!("{}: {e}", path.display())
}

/// The folder `dir` as an archive.
pub(crate) fn write(dir: &OwnedFd) -> Outcome<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut entries = 0;
    folder(&mut builder, dir, Path::new(""), 0, &mut entries)?;
    builder.into_inner().map_err(|e| e.to_string())
}

fn names(dir: &OwnedFd, path: &Path) -> Outcome<Vec<std::ffi::OsString>> {
    let again = open_beneath(dir, Path::new("."), OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
    let mut listing = nix::dir::Dir::from_fd(again).map_err(errno(path))?;
    let mut names = Vec::new();
    for entry in listing.iter() {
        let entry = entry.map_err(errno(path))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(std::os::unix::ffi::OsStringExt::from_vec(name.to_vec()));
        }
    }
    names.sort();
    Ok(names)
}

fn folder(
    builder: &mut tar::Builder<Vec<u8>>,
    dir: &OwnedFd,
    path: &Path,
    depth: usize,
    entries: &mut usize,
) -> Outcome<()> {
    if depth > MAX_DEPTH {
        return Err(format!("{}: deeper than {MAX_DEPTH}", path.display()));
    }
    for name in names(dir, path)? {
        *entries += 1;
        if *entries > MAX_ENTRIES {
            return Err(format!("more than {MAX_ENTRIES} files"));
        }
        let inner = path.join(&name);
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let held = open_beneath(dir, Path::new(&name), flags)?;
        let meta = File::from(held).metadata().map_err(at(&inner))?;
        let mut header = tar::Header::new_gnu();
        header.set_mode(meta.permissions().mode() & 0o777);
        if meta.is_dir() {
            header.set_entry_type(tar::EntryType::Directory);
            header.set_size(0);
            append(builder, &mut header, &inner, std::io::empty())?;
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            let below = open_beneath(dir, Path::new(&name), flags)?;
            folder(builder, &below, &inner, depth + 1, entries)?;
        } else if meta.is_symlink() {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            let target = readlinkat(dir.as_fd(), name.as_os_str()).map_err(errno(&inner))?;
            let linked = builder.append_link(&mut header, &inner, Path::new(&target));
            linked.map_err(at(&inner))?;
        } else if meta.is_file() {
            // As the other levels write it: the same files, the same bytes.
            header.set_entry_type(tar::EntryType::Regular);
            header.set_size(meta.size());
            let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
            let file = File::from(open_beneath(dir, Path::new(&name), flags)?);
            append(builder, &mut header, &inner, file.take(meta.size()))?;
        }
    }
    Ok(())
}

fn append(
    builder: &mut tar::Builder<Vec<u8>>,
    header: &mut tar::Header,
    path: &Path,
    content: impl Read,
) -> Outcome<()> {
    builder.append_data(header, path, content).map_err(at(path))
}

/// Puts the files of an archive below `dir`: plain names only, at most `max_bytes` of content.
pub(crate) fn read(archive: &[u8], dir: &OwnedFd, max_bytes: u64, uid: Option<u32>) -> Outcome<()> {
    let (user, group) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
    let mut archive = tar::Archive::new(archive);
    let (mut left, mut entries) = (max_bytes, 0);
    for entry in archive.entries().map_err(|e| format!("archive: {e}"))? {
        let mut entry = entry.map_err(|e| format!("archive: {e}"))?;
        entries += 1;
        let name = entry.path_bytes().len();
        if name > MAX_PATH_BYTES {
            return Err(format!(
                "archive: entry {entries} has a name of {name} bytes, at most {MAX_PATH_BYTES}"
            ));
        }
        let path: PathBuf = entry.path().map_err(|e| format!("archive: {e}"))?.into();
        let plain = path.components().count() <= MAX_DEPTH + 1
            && path.components().all(|c| matches!(c, Component::Normal(_)));
        if !plain || entries > MAX_ENTRIES {
            return Err(format!(
                "archive: entry {entries} ({}) is not allowed",
                path.display()
            ));
        }
        make_parents(dir, &path, uid)?;
        let above = path.parent().filter(|p| !p.as_os_str().is_empty());
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let above = open_beneath(dir, above.unwrap_or(Path::new(".")), flags)?;
        let name = Path::new(path.file_name().unwrap_or_default());
        let mode = entry.header().mode().map_err(at(&path))? & 0o777;
        let mode = Mode::from_bits_truncate(mode);
        match entry.header().entry_type() {
            tar::EntryType::Directory => {
                match mkdirat(above.as_fd(), name, Mode::S_IRWXU) {
                    Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
                    Err(e) => return Err(errno(&path)(e)),
                }
                let made = open_beneath(&above, name, flags)?;
                fchown(made.as_fd(), user, group).map_err(errno(&path))?;
                fchmod(made.as_fd(), mode | Mode::S_IRWXU).map_err(errno(&path))?;
            }
            tar::EntryType::Symlink => {
                let target = entry.link_name().map_err(at(&path))?.unwrap_or_default();
                symlinkat(target.as_ref(), above.as_fd(), name).map_err(errno(&path))?;
            }
            tar::EntryType::Regular | tar::EntryType::Continuous => {
                let size = entry.size();
                if size > left {
                    return Err(format!("archive: more than {max_bytes} bytes of files"));
                }
                left -= size;
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
                let mut file = File::from(open_beneath(&above, name, flags)?);
                std::io::copy(&mut (&mut entry).take(size), &mut file).map_err(at(&path))?;
                fchown(file.as_fd(), user, group).map_err(errno(&path))?;
                fchmod(file.as_fd(), mode).map_err(errno(&path))?;
            }
            other => {
                let path = path.display();
                return Err(format!("archive: {path} has type {other:?}"));
            }
        }
    }
    Ok(())
}
