//! Reading of untrusted archives, with every limit in one place.
//!
//! [`read`] gives entries with checked paths, one after the other, and stops at the first one that breaks a
//! rule. It bounds entries, headers, and the length and depth of paths; a reader of entries charges the bytes
//! that it keeps to the [`Budget`]. Paths are relative, without `..`, so that they stay below the folder to
//! which they are joined; the targets of symbolic links are not checked, and must not be followed.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::rc::Rc;

/// Maximum bytes of a name in a path, the limit of Linux file systems.
const MAX_NAME: usize = 255;
/// Maximum characters of an entry's path in an error.
const MAX_SHOWN: usize = 200;
/// Headers that every archive may have: long names and extended headers.
const BASE_HEADER_BYTES: u64 = 1 << 20;

/// Limits of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// Bytes of all files together, as the reader of entries counts them, and bytes of one file.
    pub bytes: u64,
    /// Entries of all kinds.
    pub entries: u64,
    /// Names in a path.
    pub depth: usize,
    /// Bytes of a path.
    pub path_bytes: usize,
    /// Bytes between the content of one entry and the content of the next. The `tar` crate holds them in
    /// memory: long names, extended headers and the places of holes.
    pub header_bytes: u64,
}

impl ReadLimits {
    /// Limits of a work folder with at most `bytes` of files: 65,536 entries, 65 names in a path.
    ///
    /// A file whose every second block is a hole has a header of 24 bytes for 8 KiB, so that headers grow
    /// with `bytes`.
    pub fn work_folder(bytes: u64) -> Self {
        Self {
            bytes,
            entries: 65_536,
            depth: 65,
            path_bytes: 17 << 10,
            header_bytes: BASE_HEADER_BYTES + bytes / 256,
        }
    }
}

/// Reason why an archive was refused.
#[derive(Debug)]
pub enum ReadError {
    /// A limit is exceeded.
    Limit {
        /// Name of the limited quantity.
        what: &'static str,
        /// Maximum.
        limit: u64,
    },
    /// The file is not a tar file, or cannot be read.
    Broken(io::Error),
    /// An entry is not allowed.
    Entry {
        /// Number of the entry, from 1.
        number: u64,
        /// Path of the entry, cut to 200 characters.
        path: String,
        /// Broken rule.
        reason: String,
    },
}

impl std::fmt::Display for ReadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Limit { what, limit } => write!(f, "archive: more than {limit} {what}"),
            Self::Broken(e) => write!(f, "archive: {e}"),
            Self::Entry {
                number,
                path,
                reason,
            } => write!(f, "archive: entry {number} ({path}): {reason}"),
        }
    }
}

impl std::error::Error for ReadError {}

/// A broken rule of the current entry. [`read`] adds the entry's number and path.
impl From<String> for ReadError {
    fn from(reason: String) -> Self {
        Self::Entry {
            number: 0,
            path: String::new(),
            reason,
        }
    }
}

/// Same as for a `String`.
impl From<&str> for ReadError {
    fn from(reason: &str) -> Self {
        reason.to_string().into()
    }
}

/// Limits, and how much of them is used. One budget can serve several archives, as the layers of an image.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The limits.
    pub limits: ReadLimits,
    /// Charged bytes.
    bytes: u64,
    /// Counted entries.
    entries: u64,
}

impl Budget {
    /// A budget of which nothing is used.
    pub fn new(limits: ReadLimits) -> Self {
        Self {
            limits,
            bytes: 0,
            entries: 0,
        }
    }

    /// Charged bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Counted entries.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Bytes that can still be charged.
    pub fn left(&self) -> u64 {
        self.limits.bytes.saturating_sub(self.bytes)
    }

    /// Error for more bytes than the limit.
    pub fn full(&self) -> ReadError {
        ReadError::Limit {
            what: "bytes of files",
            limit: self.limits.bytes,
        }
    }

    /// Charges bytes of a file.
    ///
    /// # Errors
    /// [`ReadError::Limit`] beyond [`ReadLimits::bytes`]; nothing is charged then.
    pub fn charge(&mut self, bytes: u64) -> Result<(), ReadError> {
        if bytes <= self.left() {
            self.bytes += bytes;
            Ok(())
        } else {
            Err(self.full())
        }
    }

    /// Counts an entry, or a folder that no entry made.
    ///
    /// # Errors
    /// [`ReadError::Limit`] beyond [`ReadLimits::entries`].
    pub fn count_entry(&mut self) -> Result<(), ReadError> {
        self.entries += 1;
        let limit = self.limits.entries;
        if self.entries > limit {
            Err(ReadError::Limit {
                what: "entries",
                limit,
            })
        } else {
            Ok(())
        }
    }
}

/// Kind of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A folder.
    Folder,
    /// A regular file, with holes or without.
    File,
    /// A symbolic link with its target, which can be any text.
    Symlink(PathBuf),
    /// Another name of an earlier entry, whose path follows the rules for paths.
    HardLink(PathBuf),
    /// A device or FIFO, with the name of its type.
    Device(&'static str),
}

/// One entry.
pub struct Entry<'a> {
    /// Number of the entry, from 1.
    pub number: u64,
    /// Checked path without `.` and empty names. Empty for the root itself.
    pub path: PathBuf,
    /// Kind of the entry.
    pub kind: Kind,
    /// Permissions with set-user-ID, set-group-ID and sticky bit, at most `0o7777`.
    pub mode: u32,
    /// User and group, if the header has both.
    pub owner: Option<(u64, u64)>,
    /// Modification time in seconds since 1970, 0 if the header has none.
    pub seconds: u64,
    /// Bytes of the content, holes included. The content can end earlier, where the archive is cut.
    pub size: u64,
    /// The content. Holes are read as zeros.
    pub content: &'a mut dyn Read,
}

impl std::fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("path", &self.path)
            .field("kind", &self.kind)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Entry<'_> {
    /// Charges and reads the whole content.
    ///
    /// # Errors
    /// [`ReadError::Limit`] before anything is read, or [`ReadError::Broken`] where the archive is cut.
    pub fn bytes(&mut self, budget: &mut Budget) -> Result<Vec<u8>, ReadError> {
        budget.charge(self.size)?;
        // The archive may be cut: memory grows with its bytes, not with the size in the header.
        let mut bytes = Vec::new();
        let read = self.content.take(self.size).read_to_end(&mut bytes);
        read.map_err(ReadError::Broken)?;
        if bytes.len() as u64 == self.size {
            Ok(bytes)
        } else {
            Err(ReadError::Broken(io::ErrorKind::UnexpectedEof.into()))
        }
    }
}

/// Checks a path and removes `.` and empty names. The root is the empty path.
///
/// # Errors
/// The broken rule: an absolute path, `..`, a zero byte, or more than a limit.
pub fn clean(raw: &[u8], limits: &ReadLimits) -> Result<PathBuf, ReadError> {
    let (len, max) = (raw.len(), limits.path_bytes);
    if len > max {
        return Err(format!("its path has {len} bytes, at most {max}").into());
    }
    let parts: Vec<&[u8]> = raw
        .split(|b| *b == b'/')
        .filter(|p| !matches!(*p, b"" | b"."))
        .collect();
    if raw.starts_with(b"/") && !parts.is_empty() {
        return Err("an absolute path is not allowed".into());
    }
    if parts.len() > limits.depth {
        return Err(format!("it is deeper than {} folders", limits.depth).into());
    }
    for part in &parts {
        if *part == b".." {
            return Err("`..` is not allowed in a path".into());
        }
        if part.len() > MAX_NAME || part.contains(&0) {
            return Err(format!("a name has zeros or more than {MAX_NAME} bytes").into());
        }
    }
    Ok(parts.iter().map(|p| OsStr::from_bytes(p)).collect())
}

/// Passes every entry of an archive to `take`. Unread content is skipped; global headers are left out.
///
/// # Errors
/// The first error: of the archive, of a limit, or of `take`.
pub fn read(
    archive: impl Read,
    budget: &mut Budget,
    mut take: impl FnMut(&mut Entry<'_>, &mut Budget) -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    let (headers, bounded) = HeaderLimit::of(archive, budget.limits.header_bytes);
    let mut archive = tar::Archive::new(bounded);
    for entry in archive.entries().map_err(|e| headers.error(e))? {
        let mut entry = entry.map_err(|e| headers.error(e))?;
        headers.content();
        budget.count_entry()?;
        if entry.header().entry_type().is_pax_global_extensions() {
            // Its content is left out, but no archive may hold its reader with an endless one.
            let limit = budget.limits.header_bytes;
            if entry.size() > limit {
                let what = "bytes of names and extensions in one entry";
                return Err(ReadError::Limit { what, limit });
            }
        } else {
            let raw = entry.path_bytes().into_owned();
            let (number, limits) = (budget.entries, budget.limits);
            let taken = checked(&mut entry, &raw, number, &limits)
                .and_then(|mut entry| take(&mut entry, budget));
            taken.map_err(|e| match e {
                ReadError::Entry { reason, .. } => ReadError::Entry {
                    number,
                    path: String::from_utf8_lossy(&raw[..raw.len().min(4 * MAX_SHOWN)])
                        .chars()
                        .take(MAX_SHOWN)
                        .collect(),
                    reason,
                },
                e => e,
            })?;
        }
        io::copy(&mut entry, &mut io::sink()).map_err(ReadError::Broken)?;
        headers.header();
    }
    Ok(())
}

/// Checks the header of an entry.
fn checked<'a, R: Read>(
    entry: &'a mut tar::Entry<'_, R>,
    raw: &[u8],
    number: u64,
    limits: &ReadLimits,
) -> Result<Entry<'a>, ReadError> {
    use tar::EntryType as Type;
    let path = clean(raw, limits)?;
    let target = |entry: &tar::Entry<'_, R>| {
        let target = entry.link_name_bytes().map(|t| t.into_owned());
        target.ok_or_else(|| "it has no target".to_string())
    };
    let kind = match entry.header().entry_type() {
        Type::Directory => Kind::Folder,
        Type::Regular | Type::Continuous | Type::GNUSparse => Kind::File,
        Type::Symlink => Kind::Symlink(OsString::from_vec(target(entry)?).into()),
        Type::Link => Kind::HardLink(clean(&target(entry)?, limits)?),
        Type::Char => Kind::Device("Char"),
        Type::Block => Kind::Device("Block"),
        Type::Fifo => Kind::Device("Fifo"),
        other => return Err(format!("type {other:?} is not allowed").into()),
    };
    let mode = entry.header().mode();
    let size = entry.size();
    if size > limits.bytes {
        return Err(ReadError::Limit {
            what: "bytes of files",
            limit: limits.bytes,
        });
    }
    let header = entry.header();
    let owner = header.uid().ok().zip(header.gid().ok());
    Ok(Entry {
        number,
        path,
        kind,
        mode: mode.map_err(|e| e.to_string())? & 0o7777,
        owner,
        seconds: entry.header().mtime().unwrap_or(0),
        size,
        content: entry,
    })
}

/// Limit for the headers between the contents of an archive. Their sizes come from the archive, and the `tar`
/// crate holds them in memory before it returns the entry that they belong to.
#[derive(Clone, Debug)]
pub struct HeaderLimit {
    /// Remaining bytes of the current headers.
    left: Rc<Cell<u64>>,
    /// Maximum.
    max: u64,
}

impl HeaderLimit {
    /// Wraps a reader of an archive that is positioned at the first header.
    pub fn of<R>(inner: R, max: u64) -> (Self, Headers<R>) {
        let limit = Self {
            left: Rc::new(Cell::new(max)),
            max,
        };
        let headers = Headers {
            inner,
            limit: limit.clone(),
        };
        (limit, headers)
    }

    /// Starts the content of an entry, which is limited elsewhere.
    pub fn content(&self) {
        self.left.set(u64::MAX);
    }

    /// Starts the header of the next entry.
    pub fn header(&self) {
        self.left.set(self.max);
    }

    /// Error of a failed read of a header.
    fn error(&self, e: io::Error) -> ReadError {
        match self.left.get() {
            0 => ReadError::Limit {
                what: "bytes of names and extensions in one entry",
                limit: self.max,
            },
            _ => ReadError::Broken(e),
        }
    }
}

/// Reader that fails if headers are too long.
#[derive(Debug)]
pub struct Headers<R> {
    /// The archive.
    inner: R,
    /// Limit of the current headers.
    limit: HeaderLimit,
}

impl<R: Read> Read for Headers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.limit.left.get();
        if left == 0 && !buffer.is_empty() {
            let max = self.limit.max;
            return Err(io::Error::other(format!(
                "names and extensions of an entry have more than {max} bytes"
            )));
        }
        let max = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let n = self.inner.read(&mut buffer[..max])?;
        self.limit.left.set(left - n as u64);
        Ok(n)
    }
}

impl<R: Seek> Seek for Headers<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::path::Component;

    fn limits(bytes: u64) -> ReadLimits {
        ReadLimits {
            entries: 8,
            ..ReadLimits::work_folder(bytes)
        }
    }

    /// Paths and contents of an archive.
    fn all(archive: &[u8], limits: ReadLimits) -> Result<Vec<(PathBuf, Vec<u8>)>, ReadError> {
        let mut all = Vec::new();
        let mut budget = Budget::new(limits);
        read(archive, &mut budget, |entry, budget| {
            let content = entry.bytes(budget)?;
            all.push((std::mem::take(&mut entry.path), content));
            Ok(())
        })?;
        assert!(budget.bytes() <= limits.bytes && budget.entries() <= limits.entries);
        Ok(all)
    }

    fn packed(path: &[u8], kind: tar::EntryType, size: u64, content: &[u8]) -> Vec<u8> {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..path.len()].copy_from_slice(path);
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_mode(0o644);
        header.set_cksum();
        let mut out = header.as_bytes().to_vec();
        out.extend_from_slice(content);
        out.resize(out.len().next_multiple_of(512), 0);
        out
    }

    #[test]
    fn hostile_entries_are_refused() {
        let regular = tar::EntryType::Regular;
        for (path, why) in [
            (&b"../x"[..], "`..`"),
            (b"/x", "absolute"),
            (b"a/../../x", "`..`"),
        ] {
            let refused = all(&packed(path, regular, 0, b""), limits(9)).unwrap_err();
            assert!(refused.to_string().contains(why), "{refused}");
        }
        let deep = [b"a/".repeat(40), b"a/".repeat(9)].concat();
        let shallow = ReadLimits {
            depth: 48,
            ..limits(9)
        };
        assert!(all(&packed(&deep, regular, 0, b""), shallow).is_err());
        // A size that no file has is refused before anything is read.
        let large = all(&packed(b"x", regular, 1 << 50, b"1"), limits(9)).unwrap_err();
        assert!(
            matches!(large, ReadError::Limit { limit: 9, .. }),
            "{large}"
        );
        // An archive that ends inside of a file must not give a shorter file.
        let cut = all(&packed(b"x", regular, 600, b"1"), limits(999)).unwrap_err();
        assert!(matches!(cut, ReadError::Broken(_)), "{cut}");
        let link = packed(b"l", tar::EntryType::Link, 0, b"");
        assert!(all(&link, limits(9)).is_err());
        let many = packed(b"x", regular, 0, b"").repeat(9);
        let many = all(&many, limits(9)).unwrap_err();
        assert_eq!(many.to_string(), "archive: more than 8 entries");
    }

    #[test]
    fn global_headers_have_a_limit() {
        let kind = tar::EntryType::XGlobalHeader;
        let small = packed(b"g", kind, 3, b"abc");
        assert_eq!(all(&small, limits(9)).unwrap(), []);
        let archive = packed(b"g", kind, 1 << 50, b"");
        let endless = archive.as_slice().chain(io::repeat(b'a'));
        let read = read(endless, &mut Budget::new(limits(9)), |_, _| Ok(()));
        let refused = read.unwrap_err().to_string();
        assert!(refused.contains("names and extensions"), "{refused}");
    }

    #[test]
    fn headers_are_not_held_beyond_their_limit() {
        for kind in [tar::EntryType::GNULongName, tar::EntryType::XHeader] {
            let archive = packed(b"x", kind, 1 << 40, b"");
            let endless = archive.as_slice().chain(io::repeat(b'a'));
            let read = read(endless, &mut Budget::new(limits(9)), |_, _| Ok(()));
            let refused = read.unwrap_err();
            assert!(
                refused.to_string().contains("names and extensions"),
                "{refused}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(
            start in proptest::option::of("[a./]{1,9}"),
            kind in any::<u8>(),
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            let mut archive = start.map_or_else(Vec::new, |path| {
                packed(path.as_bytes(), tar::EntryType::new(kind), 10, b"0123456789")
            });
            archive.extend(bytes);
            if let Ok(entries) = all(&archive, limits(1000)) {
                for (path, _) in entries {
                    prop_assert!(path.components().all(|c| matches!(c, Component::Normal(_))));
                }
            }
        }
    }
}
