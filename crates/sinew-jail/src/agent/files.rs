//! Files below the work folder, and at any path of a writable root. Nothing of the sandbox runs meanwhile; no
//! link is ever followed.
//!
//! A path is taken apart into plain names (no `.`, `..`, empty names or names above 255 bytes) and
//! followed name by name with `openat2`, which refuses links and other file systems. So whatever a
//! program has made of its folders, nothing outside of them is read or written, and no FIFO or device
//! holds the agent up.

use super::link::Link;
use super::sys;
use crate::wire::{CHUNK, Put, Take, ask, content, file, tell};
use rustix::fs::{CWD, OFlags, ResolveFlags};
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

pub(super) const WORK: &CStr = c"/work";
pub(super) const TMP: &CStr = c"/tmp";
/// Deepest folder of an archive, and most entries.
const MAX_DEPTH: usize = 64;
const MAX_ENTRIES: usize = 65_536;

/// Errors of this file by Linux's numbers: 2 missing, 7 too many, 17 exists, 21 a folder, 22 not allowed, 27
/// too large, 36 name too long, 40 a link, 71 a request that makes no sense.
fn errno(code: i32) -> Error {
    Error::from_raw_os_error(code)
}

/// A folder at an absolute path without links: programs may have put one there.
pub(super) fn top(path: &CStr) -> Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mode = rustix::fs::Mode::empty();
    Ok(rustix::fs::openat2(CWD, path, flags, mode, resolve)?)
}

/// Makes the work folder and the folder of temporary files where an image has none, for everybody.
pub(super) fn make_folders() -> Result<()> {
    for path in [WORK, TMP] {
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path.to_bytes()));
        match std::fs::create_dir(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
            made => {
                made?;
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o1777))?;
            }
        }
    }
    Ok(())
}

/// The folder below which files are put.
pub(super) struct Base {
    /// `None` if it could not be opened: nothing is put then.
    dir: Option<OwnedFd>,
    /// User and group of what is made.
    owner: (u32, u32),
}

impl Base {
    /// A place that takes nothing.
    pub(super) fn nowhere() -> Self {
        Self {
            dir: None,
            owner: (0, 0),
        }
    }

    /// Gives what was made to the owner.
    fn give(&self, made: impl AsFd) -> Result<()> {
        let (user, group) = self.owner;
        std::os::unix::fs::fchown(made, Some(user), Some(group))
    }
}

/// Names of an absolute path.
fn absolute(path: &[u8]) -> Result<Vec<CString>> {
    parts(path.strip_prefix(b"/").ok_or_else(|| errno(22))?)
}

/// Opens the folder at an absolute path, which is made if it is missing. With `replace`, whatever has its
/// name is removed first.
pub(super) fn place(path: &[u8], owner: (u32, u32), replace: bool) -> Result<Base> {
    let mut names = absolute(path)?;
    let last = names.pop().ok_or_else(|| errno(22))?;
    let mut dir = top(c"/")?;
    for name in names {
        make_folder(&dir, &name, 0o755)?;
        dir = sys::open_beneath(&dir, &name, OFlags::DIRECTORY, 0)?;
    }
    if replace {
        remove(&dir, &last)?;
    }
    let made = make_folder(&dir, &last, 0o755)?;
    let dir = sys::open_beneath(&dir, &last, OFlags::DIRECTORY, 0)?;
    let base = Base {
        dir: Some(dir),
        owner,
    };
    if let (true, Some(dir)) = (made, &base.dir) {
        base.give(dir)?;
    }
    Ok(base)
}

/// Makes a folder; false if something has its name already.
fn make_folder(dir: &OwnedFd, name: &CStr, mode: u32) -> Result<bool> {
    match sys::make_folder(dir, name, mode) {
        Err(e) if e.raw_os_error() == Some(17) => Ok(false),
        made => made.map(|()| true),
    }
}

/// Removes whatever has a name, with everything below it.
fn remove(dir: &OwnedFd, name: &CStr) -> Result<()> {
    match sys::remove(dir, name, false) {
        // ENOENT.
        Err(e) if e.raw_os_error() == Some(2) => return Ok(()),
        // EISDIR.
        Err(e) if e.raw_os_error() == Some(21) => {}
        other => return other,
    }
    clear(sys::open_beneath(dir, name, OFlags::DIRECTORY, 0)?)?;
    sys::remove(dir, name, true)
}

/// Removes a name if it is none of a folder.
fn remove_file(dir: &OwnedFd, name: &CStr) -> Result<()> {
    match sys::remove(dir, name, false) {
        Err(e) if matches!(e.raw_os_error(), Some(2 | 21)) => Ok(()),
        other => other,
    }
}

/// Names of plain parts; everything else is refused.
fn parts(path: &[u8]) -> Result<Vec<CString>> {
    let parts: Vec<&[u8]> = path.split(|&b| b == b'/').collect();
    if parts.len() > MAX_DEPTH + 1 || path.len() > 4000 {
        return Err(errno(36));
    }
    let plain = |p: &&[u8]| !p.is_empty() && *p != b"." && *p != b".." && p.len() <= 255;
    if !parts.iter().all(plain) {
        return Err(errno(22));
    }
    parts.into_iter().map(sys::text).collect()
}

/// The folder below `base` that `path` lies in, made on the way if `make`, and the last name. Without a base,
/// it is the work folder.
fn above(base: Option<&Base>, path: &[u8], make: bool) -> Result<(OwnedFd, CString)> {
    let mut names = parts(path)?;
    let last = names.pop().ok_or_else(|| errno(22))?;
    let mut dir = match base {
        None => top(WORK)?,
        Some(base) => base.dir.as_ref().ok_or_else(|| errno(2))?.try_clone()?,
    };
    for name in names {
        let made = make && make_folder(&dir, &name, 0o755)?;
        dir = sys::open_beneath(&dir, &name, OFlags::DIRECTORY, 0)?;
        if let (true, Some(base)) = (made, base) {
            base.give(&dir)?;
        }
    }
    Ok((dir, last))
}

/// PUT: makes a file with the content that follows, a folder or a link.
pub(super) fn put(link: &mut Link, base: Option<&Base>, request: &[u8]) -> Result<()> {
    let mut take = Take(request);
    let parsed = (take.byte(), take.number(), take.bytes(), take.bytes());
    let (Some(kind), Some(mode), Some(path), Some(target)) = parsed else {
        return Err(errno(71));
    };
    let made = make(base, kind, mode as u32 & 0o777, path, target);
    if kind != file::REGULAR {
        return made.map(|_| ());
    }
    let mut made = made;
    loop {
        match link.next()? {
            (ask::END, _) => break,
            (ask::DATA, bytes) => {
                let written = match &mut made {
                    Ok(Some(file)) => file.write_all(&bytes),
                    _ => Ok(()),
                };
                if let Err(e) = written {
                    made = Err(e);
                }
            }
            _ => return Err(errno(71)),
        }
    }
    if let Some(file) = made? {
        if let Some(base) = base {
            base.give(&file)?;
        }
        file.set_permissions(std::fs::Permissions::from_mode(mode as u32 & 0o777))?;
    }
    Ok(())
}

/// Makes a folder or a link, or opens a new file for the content that follows. Below a base, a file or a link
/// of that name is replaced, so that nothing is written to another name of it.
fn make(
    base: Option<&Base>,
    kind: u8,
    mode: u32,
    path: &[u8],
    target: &[u8],
) -> Result<Option<File>> {
    let (dir, name) = above(base, path, true)?;
    let dir = &dir;
    if base.is_some() {
        remove_file(dir, &name)?;
    }
    match kind {
        file::FOLDER => {
            make_folder(dir, &name, 0o700)?;
            let made = sys::open_beneath(dir, &name, OFlags::DIRECTORY, 0)?;
            let made = File::from(made);
            if let Some(base) = base {
                base.give(&made)?;
            }
            made.set_permissions(std::fs::Permissions::from_mode(mode | 0o700))?;
            Ok(None)
        }
        file::LINK => rustix::fs::symlinkat(sys::text(target)?, dir, &name)
            .map(|()| None)
            .map_err(Error::from),
        _ => {
            // O_NONBLOCK: a FIFO of that name must not hold the agent.
            let flags = OFlags::WRONLY
                | OFlags::CREATE
                | OFlags::TRUNC
                | OFlags::NOFOLLOW
                | OFlags::NONBLOCK;
            let file = File::from(sys::open_beneath(dir, &name, flags, 0o600)?);
            if !file.metadata()?.is_file() {
                return Err(errno(22));
            }
            Ok(Some(file))
        }
    }
}

/// READ: returns a regular file of at most the given number of bytes.
pub(super) fn read(link: &mut Link, request: &[u8]) -> Result<()> {
    let mut take = Take(request);
    let (Some(most), Some(path)) = (take.number(), take.bytes()) else {
        return Err(errno(71));
    };
    let (dir, name) = above(None, path, false)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(sys::open_beneath(&dir, &name, flags, 0)?);
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(errno(if meta.is_dir() { 21 } else { 22 }));
    }
    if meta.len() > most {
        return Err(errno(27));
    }
    send(link, file, most)
}

/// FETCH: sends a regular file, or everything below a folder, at an absolute path; false if nothing is there.
pub(super) fn fetch(link: &mut Link, request: &[u8]) -> Result<bool> {
    let mut take = Take(request);
    let (Some(most), Some(path)) = (take.number(), take.bytes()) else {
        return Err(errno(71));
    };
    let mut names = absolute(path)?;
    let last = names.pop().ok_or_else(|| errno(22))?;
    let mut dir = top(c"/")?;
    for name in names {
        match sys::open_beneath(&dir, &name, OFlags::DIRECTORY, 0) {
            Ok(below) => dir = below,
            Err(e) if e.raw_os_error() == Some(2) => return Ok(false),
            Err(e) => return Err(e),
        }
    }
    let held = match sys::open_beneath(&dir, &last, OFlags::PATH | OFlags::NOFOLLOW, 0) {
        Ok(held) => held,
        Err(e) if e.raw_os_error() == Some(2) => return Ok(false),
        Err(e) => return Err(e),
    };
    let meta = File::from(held).metadata()?;
    if meta.is_dir() {
        let below = sys::open_beneath(&dir, &last, OFlags::DIRECTORY, 0)?;
        let mut left = Left {
            entries: MAX_ENTRIES,
            bytes: most,
        };
        folder(link, &below, Vec::new(), 0, &mut left)?;
        return Ok(true);
    }
    if !meta.is_file() {
        return Err(errno(if meta.is_symlink() { 40 } else { 22 }));
    }
    if meta.len() > most {
        return Err(errno(27));
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(sys::open_beneath(&dir, &last, flags, 0)?);
    let (mode, size) = (u64::from(meta.mode() & 0o777), meta.len());
    let entry = Put::of(tell::ENTRY).byte(file::REGULAR).number(mode);
    let entry = entry.number(size).bytes(last.to_bytes()).bytes(b"");
    link.send(&entry.frame())?;
    send(link, file, size)?;
    Ok(true)
}

/// Content in pieces.
fn send(link: &mut Link, file: File, most: u64) -> Result<()> {
    let mut file = file.take(most);
    let mut chunk = vec![0; CHUNK];
    loop {
        let n = file.read(&mut chunk)?;
        if n == 0 {
            return Ok(());
        }
        link.send(&content(tell::DATA, &chunk[..n]))?;
    }
}

/// Sorted names in a folder.
fn names(dir: &OwnedFd) -> Result<Vec<CString>> {
    let path = format!("/proc/self/fd/{}", dir.as_raw_fd());
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path)? {
        names.push(sys::text(&entry?.file_name().into_vec())?);
    }
    names.sort();
    Ok(names)
}

/// ARCHIVE: returns every folder, regular file and link below the work folder, sorted, if the files have at
/// most the given number of bytes, including holes.
pub(super) fn archive(link: &mut Link, request: &[u8]) -> Result<()> {
    let bytes = Take(request).number().ok_or_else(|| errno(71))?;
    let mut left = Left {
        entries: MAX_ENTRIES,
        bytes,
    };
    folder(link, &top(WORK)?, Vec::new(), 0, &mut left)
}

/// Room left for the entries and bytes of an archive.
struct Left {
    entries: usize,
    bytes: u64,
}

/// One folder of an archive: each entry, then what is in it. Modes that keep the agent out are widened
/// first; those of files are set back.
fn folder(
    link: &mut Link,
    dir: &OwnedFd,
    path: Vec<u8>,
    depth: usize,
    left: &mut Left,
) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(errno(36));
    }
    let raw = &dir;
    for name in names(dir)? {
        left.entries = left.entries.checked_sub(1).ok_or_else(|| errno(7))?;
        let mut inner = path.clone();
        inner.extend_from_slice(name.to_bytes());
        let held = sys::open_beneath(raw, &name, OFlags::PATH | OFlags::NOFOLLOW, 0)?;
        let meta = File::from(held).metadata()?;
        let mode = u64::from(meta.mode() & 0o777);
        let entry = |kind: u8, size: u64, target: &[u8]| {
            let put = Put::of(tell::ENTRY).byte(kind).number(mode).number(size);
            put.bytes(&inner).bytes(target).frame()
        };
        if meta.is_dir() {
            link.send(&entry(file::FOLDER, 0, b""))?;
            if mode & 0o500 != 0o500 {
                sys::set_mode(raw, &name, mode as u32 | 0o500)?;
            }
            let below = sys::open_beneath(raw, &name, OFlags::DIRECTORY, 0)?;
            inner.push(b'/');
            folder(link, &below, inner, depth + 1, left)?;
        } else if meta.is_symlink() {
            let target = rustix::fs::readlinkat(raw, &name, Vec::new())?.into_bytes();
            link.send(&entry(file::LINK, 0, &target))?;
        } else if meta.is_file() {
            left.bytes = left
                .bytes
                .checked_sub(meta.len())
                .ok_or_else(|| errno(27))?;
            if mode & 0o400 == 0 {
                sys::set_mode(raw, &name, mode as u32 | 0o400)?;
            }
            let opened = sys::open_beneath(raw, &name, OFlags::RDONLY | OFlags::NOFOLLOW, 0);
            if mode & 0o400 == 0 {
                sys::set_mode(raw, &name, mode as u32)?;
            }
            link.send(&entry(file::REGULAR, meta.len(), b""))?;
            send(link, File::from(opened?), meta.len())?;
        }
    }
    Ok(())
}

/// RESET: an empty work folder, an empty folder for temporary files. Two descriptors suffice,
/// however deep the folders are.
pub(super) fn reset() -> Result<()> {
    for path in [WORK, TMP] {
        clear(top(path)?)?;
    }
    Ok(())
}

/// Removes everything below a folder, which is entered and left by one descriptor at a time: depth takes
/// names, not descriptors or stack.
fn clear(mut dir: OwnedFd) -> Result<()> {
    let mut way: Vec<CString> = Vec::new();
    'again: loop {
        for name in names(&dir)? {
            let raw = &dir;
            match sys::remove(raw, &name, false) {
                // EISDIR.
                Err(e) if e.raw_os_error() == Some(21) => {}
                other => {
                    other?;
                    continue;
                }
            }
            if sys::remove(raw, &name, true).is_ok() {
                continue;
            }
            sys::set_mode(raw, &name, 0o700)?;
            dir = sys::open_beneath(raw, &name, OFlags::DIRECTORY, 0)?;
            way.push(name);
            continue 'again;
        }
        let Some(name) = way.pop() else {
            return Ok(());
        };
        dir = sys::parent(&dir)?;
        sys::remove(&dir, &name, true)?;
    }
}

/// Bytes and number of files in both folders, or in the layer of a writable root.
pub(super) fn count(writable: bool) -> (u64, u64) {
    if writable {
        return sys::in_use(c"/");
    }
    let (a, b) = (sys::in_use(WORK), sys::in_use(TMP));
    (a.0 + b.0, a.1 + b.1)
}
