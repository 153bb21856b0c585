//! Application of image layers to a root folder. Archives are untrusted.

use crate::documents::{Layer, hex};
use crate::source::{MAX_HEADER_BYTES, Source};
use crate::{ImageError, UnpackLimits, io_error};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, chownat, fchmod, fchown,
    futimens, linkat, mkdirat, openat2, statat, symlinkat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{Gid, Uid};
use sha2::{Digest, Sha256};
use sinew_jail::archive::reader::{self, Budget, Entry, Kind, ReadError, ReadLimits};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Cursor, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::rc::Rc;

/// Maximum depth of folders.
const MAX_DEPTH: usize = 256;
/// Maximum bytes of a path, the limit of the kernel.
const MAX_PATH: usize = 4095;
/// The compression ratio is checked above this number of bytes.
const RATIO_FROM: u64 = 64 << 20;
/// Maximum attempts to open a folder during concurrent renames.
const MAX_TRIES: u32 = 1000;
/// Prefix of an entry that removes a file of lower layers (OCI image specification, layers).
const WHITEOUT: &[u8] = b".wh.";
/// Entry that removes all files of lower layers in its folder.
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Error text for a compression bomb, transported in `std::io::Error`.
const RATIO: &str = "compressed more than any program would: a bomb";

/// Reader that counts and hashes bytes.
struct Meter<R> {
    inner: R,
    hash: Sha256,
    bytes: u64,
}

impl<R> Meter<R> {
    fn new(inner: R) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
            bytes: 0,
        }
    }
}

impl<R: Read> Read for Meter<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.hash.update(&buffer[..n]);
        self.bytes += n as u64;
        Ok(n)
    }
}

/// Handle to a reader whose counts are read while a decoder owns it.
struct Shared<R>(Rc<RefCell<Meter<R>>>);

impl<R: Read> Read for Shared<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

/// Decompressed content of a layer. Fails for a compression bomb.
struct Content<'a, R> {
    /// Reader of the decompressed content.
    plain: Meter<Box<dyn Read + 'a>>,
    /// Reader of the compressed blob.
    packed: Rc<RefCell<Meter<R>>>,
    /// Maximum decompressed bytes per compressed byte.
    ratio: u64,
}

impl<'a, R: Read + 'a> Content<'a, R> {
    /// The content of a blob, which may be compressed.
    fn of(blob: R, ratio: u64) -> std::io::Result<Self> {
        let packed = Rc::new(RefCell::new(Meter::new(blob)));
        let plain = Meter::new(decoder(Shared(Rc::clone(&packed)))?);
        Ok(Self {
            plain,
            packed,
            ratio,
        })
    }
}

impl<R> Read for Content<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let n = self.plain.read(buffer)?;
        let packed = self.packed.borrow().bytes.max(1);
        if self.plain.bytes > RATIO_FROM && self.plain.bytes / packed > self.ratio {
            return Err(std::io::Error::other(RATIO));
        }
        Ok(n)
    }
}

/// State of a root that is being built.
#[derive(Debug)]
pub(crate) struct Builder<'a> {
    /// The root folder.
    root: OwnedFd,
    /// Limits over all layers.
    limits: &'a UnpackLimits,
    /// Bytes of the files of all layers; entries of the archives, and parent folders without an entry.
    pub(crate) budget: Budget,
    /// Depth of each folder by inode. A short path with links can lead to a deep folder.
    depths: HashMap<u64, usize>,
    /// Files get the owners of the archives, which takes root.
    owners: bool,
}

/// Users and groups that a sandbox has.
const USERS: u64 = 65_536;

/// Names created by the current layer: inode of the folder, and name. Whiteouts do not remove them.
type LayerNames = HashSet<(u64, OsString)>;

/// The error of the current entry.
fn failed(e: impl std::fmt::Display) -> ReadError {
    e.to_string().into()
}

/// Inode number of a file descriptor.
fn inode(fd: impl AsFd) -> Result<u64, ReadError> {
    Ok(rustix::fs::fstat(fd).map_err(failed)?.st_ino)
}

/// Removes a name and everything below it, except names in `made`. Returns true if nothing remains.
fn remove(
    dir: BorrowedFd<'_>,
    name: &OsStr,
    made: Option<&LayerNames>,
    depth: usize,
) -> Result<bool, ReadError> {
    if depth > MAX_DEPTH {
        return Err(format!("deeper than {MAX_DEPTH} folders").into());
    }
    let meta = match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(meta) => meta,
        Err(Errno::NOENT) => return Ok(true),
        Err(e) => return Err(failed(e)),
    };
    let own = match made {
        None => false,
        Some(made) => made.contains(&(inode(dir)?, name.to_owned())),
    };
    if FileType::from_raw_mode(meta.st_mode) != FileType::Directory {
        if !own {
            unlinkat(dir, name, AtFlags::empty()).map_err(failed)?;
        }
        return Ok(!own);
    }
    let empty = empty_folder(dir, name, made, depth + 1)?;
    if empty && !own {
        unlinkat(dir, name, AtFlags::REMOVEDIR).map_err(failed)?;
    }
    Ok(empty && !own)
}

/// Removes the content of a folder like [`remove`].
fn empty_folder(
    dir: BorrowedFd<'_>,
    name: &OsStr,
    made: Option<&LayerNames>,
    depth: usize,
) -> Result<bool, ReadError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let folder = openat2(dir, name, flags, Mode::empty(), resolve).map_err(failed)?;
    let listing = rustix::fs::Dir::read_from(&folder).map_err(failed)?;
    let mut names = Vec::new();
    for entry in listing {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name.to_vec()));
        }
    }
    let mut empty = true;
    for name in names {
        empty &= remove(folder.as_fd(), &name, made, depth)?;
    }
    Ok(empty)
}

impl<'a> Builder<'a> {
    /// Creates a builder for `root`, a new folder.
    pub(crate) fn new(root: &Path, limits: &'a UnpackLimits) -> Result<Self, ImageError> {
        let failed = |e: &dyn std::fmt::Display| io_error(root.display().to_string(), e);
        let folder = File::open(root).map_err(|e| failed(&e))?;
        let stat = rustix::fs::fstat(&folder).map_err(|e| failed(&e))?;
        let depths = HashMap::from([(stat.st_ino, 0)]);
        Ok(Self {
            root: folder.into(),
            limits,
            budget: Budget::new(ReadLimits {
                bytes: limits.bytes,
                entries: limits.entries,
                depth: MAX_DEPTH,
                path_bytes: MAX_PATH,
                header_bytes: MAX_HEADER_BYTES,
            }),
            depths,
            owners: rustix::process::geteuid().is_root(),
        })
    }

    /// Applies an archive without known hashes, compressed or not.
    pub(crate) fn apply_plain(&mut self, archive: File) -> Result<(), ImageError> {
        let content = Content::of(archive, self.limits.ratio);
        let mut content = content.map_err(|e| io_error("read the archive", e))?;
        self.archive(1, &mut content)
    }

    /// Applies a layer and checks the hashes of blob and content.
    pub(crate) fn apply(
        &mut self,
        source: &Source,
        number: usize,
        layer: &Layer,
    ) -> Result<(), ImageError> {
        let (reader, len) = source.reader(&layer.name)?;
        let read_error = |e: std::io::Error| io_error(format!("read layer {number}"), e);
        let mut content = Content::of(reader, self.limits.ratio).map_err(read_error)?;
        let packed = Rc::clone(&content.packed);
        self.archive(number, &mut content)?;
        // Padding after the last entry is part of the content.
        std::io::copy(&mut content, &mut std::io::sink()).map_err(read_error)?;
        let found = format!("sha256:{}", hex(&content.plain.hash.finalize_reset()));
        drop(content);
        std::io::copy(&mut Shared(Rc::clone(&packed)), &mut std::io::sink()).map_err(read_error)?;
        if found != layer.content {
            return Err(ImageError::Digest {
                blob: format!("the content of layer {number}"),
                expected: layer.content.clone(),
                found,
            });
        }
        if let Some((digest, size)) = &layer.blob {
            let mut packed = packed.borrow_mut();
            let found = format!("sha256:{}", hex(&packed.hash.finalize_reset()));
            if (&found, &len) != (digest, size) {
                return Err(ImageError::Digest {
                    blob: layer.name.clone(),
                    expected: format!("{digest} and {size} bytes"),
                    found: format!("{found} and {len} bytes"),
                });
            }
        }
        Ok(())
    }

    /// Applies all entries of an archive.
    fn archive(&mut self, number: usize, content: &mut dyn Read) -> Result<(), ImageError> {
        let mut made = LayerNames::new();
        let mut budget = self.budget;
        let read = reader::read(content, &mut budget, |entry, budget| {
            // Entries of all kinds: a sparse file has more bytes than its archive.
            budget.charge(entry.size)?;
            self.entry(entry, budget, &mut made)
        });
        self.budget = budget;
        read.map_err(|e| match e {
            ReadError::Limit { what, limit } => ImageError::Limit { what, limit },
            ReadError::Broken(e) => ImageError::Document {
                document: format!("layer {number}"),
                reason: e.to_string(),
            },
            ReadError::Entry { path, reason, .. } => ImageError::Entry {
                layer: number,
                entry: path,
                reason,
            },
        })
    }

    /// Applies one entry.
    fn entry(
        &mut self,
        entry: &mut Entry<'_>,
        budget: &mut Budget,
        made: &mut LayerNames,
    ) -> Result<(), ReadError> {
        let path = std::mem::take(&mut entry.path);
        let Some(name) = path.file_name() else {
            // The root has a fixed mode.
            return Ok(());
        };
        let above = path.parent().unwrap_or(Path::new(""));
        if name.as_bytes() == OPAQUE {
            return self.opaque(above, made);
        }
        if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT) {
            if matches!(hidden, b"" | b"." | b"..") || hidden.starts_with(WHITEOUT) {
                return Err("a whiteout of nothing".into());
            }
            let Some(folder) = self.lookup(above)? else {
                return Ok(());
            };
            remove(folder.as_fd(), OsStr::from_bytes(hidden), Some(made), 0)?;
            return Ok(());
        }
        if let Kind::Device(kind) = &entry.kind {
            // Sandboxes create their own /dev.
            return if path.starts_with("dev") {
                Ok(())
            } else {
                Err(format!(
                    "it is a device or pipe ({kind}), which are allowed in dev only, and not created there"
                )
                .into())
            };
        }
        let folder = self.folder(above, budget, made)?;
        let owner = self.owner(entry);
        match &entry.kind {
            Kind::Folder => self.directory(&folder, name, entry.mode, owner)?,
            Kind::File => {
                remove(folder.as_fd(), name, None, 0)?;
                file(&folder, name, entry, owner)?;
            }
            Kind::Symlink(target) => {
                remove(folder.as_fd(), name, None, 0)?;
                symlinkat(target, &folder, name).map_err(failed)?;
                if let Some((user, group)) = owner {
                    let flags = AtFlags::SYMLINK_NOFOLLOW;
                    let given = chownat(&folder, name, Some(user), Some(group), flags);
                    given.map_err(failed)?;
                }
            }
            Kind::HardLink(target) => self.hard_link(target, &folder, name)?,
            Kind::Device(_) => {}
        }
        made.insert((inode(&folder)?, name.to_owned()));
        Ok(())
    }

    /// Owner that a file gets. Numbers that no sandbox has are those of root.
    fn owner(&self, entry: &Entry<'_>) -> Option<(Uid, Gid)> {
        let (user, group) = entry.owner.filter(|_| self.owners)?;
        let within = |id: u64| if id < USERS { id as u32 } else { 0 };
        Some((Uid::from_raw(within(user)), Gid::from_raw(within(group))))
    }

    /// Removes what lower layers have in a folder.
    fn opaque(&self, path: &Path, made: &mut LayerNames) -> Result<(), ReadError> {
        let (Some(name), Some(above)) = (path.file_name(), path.parent()) else {
            return Err("the root cannot be opaque".into());
        };
        let Some(folder) = self.lookup(above)? else {
            return Ok(());
        };
        match empty_folder(folder.as_fd(), name, Some(made), 0) {
            Err(_) if self.lookup(path)?.is_none() => Ok(()),
            done => done.map(|_| ()),
        }
    }

    /// Opens a folder of the root. Links are resolved within the root.
    fn lookup(&self, path: &Path) -> Result<Option<OwnedFd>, ReadError> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let mut tries = 0;
        let opened = loop {
            match openat2(&self.root, path, flags, Mode::empty(), resolve) {
                // A concurrent rename on the host while `..` of a link was resolved.
                Err(Errno::AGAIN) if tries < MAX_TRIES => tries += 1,
                other => break other,
            }
        };
        match opened {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT) => Ok(None),
            Err(Errno::NOTDIR) => Err(format!("{} is no folder", path.display()).into()),
            Err(e) => Err(format!("{}: {e}", path.display()).into()),
        }
    }

    /// Works like [`Self::lookup`], and creates missing folders.
    fn folder(
        &mut self,
        path: &Path,
        budget: &mut Budget,
        made: &mut LayerNames,
    ) -> Result<OwnedFd, ReadError> {
        if let Some(fd) = self.lookup(path)? {
            return Ok(fd);
        }
        let (Some(name), Some(above)) = (path.file_name(), path.parent()) else {
            return Err("the root is gone".into());
        };
        let above = self.folder(above, budget, made)?;
        if statat(&above, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Err(format!("{} is a link to nothing", path.display()).into());
        }
        // A missing folder counts as an entry.
        budget.count_entry()?;
        self.make_folder(&above, name, Mode::from_raw_mode(0o755))?;
        made.insert((inode(&above)?, name.to_owned()));
        let missing = || format!("{} is gone", path.display());
        Ok(self.lookup(path)?.ok_or_else(missing)?)
    }

    /// Creates a folder within the maximum depth. Removing a tree needs a file descriptor per level.
    fn make_folder(&mut self, above: &OwnedFd, name: &OsStr, mode: Mode) -> Result<(), ReadError> {
        let depth = self.depths.get(&inode(above)?).copied();
        let depth = depth.ok_or("its folder was not made here")? + 1;
        if depth > MAX_DEPTH {
            return Err(format!("it is deeper than {MAX_DEPTH} folders").into());
        }
        mkdirat(above, name, mode).map_err(failed)?;
        let made = statat(above, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        self.depths.insert(made.st_ino, depth);
        Ok(())
    }

    /// Creates a folder entry, or updates mode and owner of an existing folder.
    fn directory(
        &mut self,
        folder: &OwnedFd,
        name: &OsStr,
        mode: u32,
        owner: Option<(Uid, Gid)>,
    ) -> Result<(), ReadError> {
        let there = statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
        let kept = there.is_ok_and(|m| FileType::from_raw_mode(m.st_mode) == FileType::Directory);
        if !kept {
            remove(folder.as_fd(), name, None, 0)?;
            self.make_folder(folder, name, Mode::RWXU)?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let made = openat2(folder, name, flags, Mode::empty(), resolve).map_err(failed)?;
        give(&made, owner)?;
        // The owner must be able to read and remove the folder.
        fchmod(&made, Mode::from_raw_mode(mode & 0o1777 | 0o700)).map_err(failed)
    }

    /// Creates a hard link within the root.
    fn hard_link(&self, target: &Path, folder: &OwnedFd, name: &OsStr) -> Result<(), ReadError> {
        let file = target.file_name().ok_or("it links to the root")?;
        let above = self.lookup(target.parent().unwrap_or(Path::new("")))?;
        let above =
            above.ok_or_else(|| format!("it links to {}, which is missing", target.display()))?;
        let meta = statat(&above, file, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| format!("it links to {}: {e}", target.display()))?;
        if !matches!(
            FileType::from_raw_mode(meta.st_mode),
            FileType::RegularFile | FileType::Symlink
        ) {
            return Err(format!("it links to {}, which is no file", target.display()).into());
        }
        if (inode(&above)?, file) == (inode(folder)?, name) {
            return Ok(());
        }
        remove(folder.as_fd(), name, None, 0)?;
        linkat(&above, file, folder, name, AtFlags::empty()).map_err(failed)
    }
}

/// Gives a file or folder to its owner.
fn give(made: impl AsFd, owner: Option<(Uid, Gid)>) -> Result<(), ReadError> {
    match owner {
        Some((user, group)) => fchown(made, Some(user), Some(group)).map_err(failed),
        None => Ok(()),
    }
}

/// Creates a file with its owner, mode and modification time.
fn file(
    folder: &OwnedFd,
    name: &OsStr,
    entry: &mut Entry<'_>,
    owner: Option<(Uid, Gid)>,
) -> Result<(), ReadError> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let private = Mode::RUSR | Mode::WUSR;
    let mut file = File::from(openat2(folder, name, flags, private, resolve).map_err(failed)?);
    let (size, seconds) = (entry.size, entry.seconds.min(i64::MAX as u64) as i64);
    let copied = std::io::copy(&mut entry.content.take(size), &mut file).map_err(failed)?;
    if copied != size {
        return Err(format!("it ends after {copied} of {size} bytes").into());
    }
    give(&file, owner)?;
    fchmod(&file, Mode::from_raw_mode(entry.mode & 0o777 | 0o400)).map_err(failed)?;
    // Python uses a compiled file only if the modification time of its source matches.
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    futimens(&file, &times).map_err(failed)
}

/// Decompresses a blob. Its first bytes show the compression.
fn decoder<'a, R: Read + 'a>(mut blob: Shared<R>) -> std::io::Result<Box<dyn Read + 'a>> {
    let mut head = Vec::new();
    (&mut blob).take(4).read_to_end(&mut head)?;
    let gzip = head.starts_with(&[0x1f, 0x8b]);
    let zstd = head == [0x28, 0xb5, 0x2f, 0xfd];
    let all = Cursor::new(head).chain(blob);
    Ok(if gzip {
        Box::new(flate2::read::MultiGzDecoder::new(all))
    } else if zstd {
        Box::new(zstd::stream::read::Decoder::new(all)?)
    } else {
        Box::new(all)
    })
}
