//! Access to files of a sandbox from outside: a path is resolved below a folder, and no link in it is
//! followed, whatever a program made of the folder meanwhile.
//!
//! `openat2` with RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS and RESOLVE_NO_MAGICLINKS does it in the kernel,
//! so that nothing can be exchanged between a check and a use. Files are opened with O_NONBLOCK: a FIFO
//! would hold up the spawner, and with it all sandboxes.

use crate::error::{Error, Result, call, on};
use crate::protocol::memory_file;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, fchown};
use std::fs::File;
use std::io::Read;
use std::io::Seek;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

/// A path of plain names below the work folder.
fn plain(path: &str) -> Result<PathBuf> {
    let path = Path::new(path);
    let parts: Vec<_> = path.components().collect();
    let fine = !parts.is_empty()
        && parts.len() <= 32
        && parts.iter().all(|c| matches!(c, Component::Normal(_)));
    if fine {
        Ok(path.into())
    } else {
        Err(Error::refused(
            "path",
            "must be relative, below the work folder, without `..`, at most 32 deep",
        ))
    }
}

/// Opens below `dir` without following any link on the way (openat2, RESOLVE_BENEATH).
pub(super) fn open_beneath(dir: &OwnedFd, path: &Path, flags: OFlag) -> Result<OwnedFd> {
    let mode = if flags.contains(OFlag::O_CREAT) {
        0o600
    } else {
        0
    };
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .mode(Mode::from_bits_truncate(mode))
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
    openat2(dir.as_fd(), path, how).map_err(on("open", path))
}

/// The file, if it is one that has content: no folder, FIFO, socket or device.
fn regular(fd: OwnedFd, path: &Path) -> Result<File> {
    let file = File::from(fd);
    match file.metadata() {
        Ok(meta) if meta.is_file() => Ok(file),
        Ok(_) => {
            let path = path.display().to_string();
            Err(Error::refused(path, "is not a regular file"))
        }
        Err(e) => Err(on("stat", path)(e)),
    }
}

/// Makes the folders above `path`, for `uid`.
fn make_parents(dir: &OwnedFd, path: &Path, uid: Option<u32>) -> Result<()> {
    let (user, group) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
    let mut folder = PathBuf::new();
    for part in path.parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        let above = folder.parent().filter(|p| !p.as_os_str().is_empty());
        let above = above.unwrap_or(Path::new("."));
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let parent = open_beneath(dir, above, flags)?;
        let name = folder.file_name().unwrap_or_default();
        match mkdirat(parent.as_fd(), Path::new(name), Mode::S_IRWXU) {
            Ok(()) => {
                let made = open_beneath(dir, &folder, flags)?;
                fchown(made.as_fd(), user, group).map_err(on("chown", &folder))?;
            }
            Err(Errno::EEXIST) => {}
            Err(e) => return Err(on("mkdir", &folder)(e)),
        }
    }
    Ok(())
}

/// Writes `content` (a memory file) to `path` below `dir`.
pub(super) fn write_file(
    dir: &OwnedFd,
    path: &str,
    content: OwnedFd,
    max_bytes: u64,
    uid: Option<u32>,
) -> Result<()> {
    let path = plain(path)?;
    let (user, group) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
    make_parents(dir, &path, uid)?;
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut file = regular(open_beneath(dir, &path, flags)?, &path)?;
    file.set_len(0).map_err(on("truncate", &path))?;
    fchown(file.as_fd(), user, group).map_err(on("chown", &path))?;
    let mut source = File::from(content);
    source.rewind().map_err(call("rewind"))?;
    if source.metadata().map_err(call("read"))?.len() > max_bytes {
        let why = format!("is larger than the {max_bytes} bytes of the work folder");
        return Err(Error::refused("content", why));
    }
    std::io::copy(&mut source, &mut file).map_err(on("write", &path))?;
    Ok(())
}

/// Copies a regular file below `dir` into a memory file.
pub(super) fn read_file(dir: &OwnedFd, path: &str, max_bytes: u64) -> Result<OwnedFd> {
    let path = plain(path)?;
    // Opening a FIFO without O_NONBLOCK would wait for a writer for ever.
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = regular(open_beneath(dir, &path, flags)?, &path)?;
    let refused = || {
        let path = path.display().to_string();
        Err(Error::refused(
            path,
            format!("is larger than {max_bytes} bytes"),
        ))
    };
    if file.metadata().map_err(on("stat", &path))?.len() > max_bytes {
        return refused();
    }
    let memory = memory_file(&[])?;
    let mut memory = File::from(memory);
    let copied = std::io::copy(&mut file.take(max_bytes.saturating_add(1)), &mut memory);
    if copied.map_err(on("read", &path))? > max_bytes {
        return refused();
    }
    memory.rewind().map_err(call("rewind"))?;
    Ok(memory.into())
}
