//! Work folders as archives and back.
//!
//! Entries are sorted by name; owners and times are zero; sockets, FIFOs and devices are left
//! out. So the same files give the same bytes, and a hash of them names the content. Names of one
//! file stay names of one file.
//!
//! Both directions run in an archiver, a separate process with a bound on memory: the spawner never reads a
//! file whose size a program chose.

use super::openat2::open_beneath;
use crate::archive::reader::{self, Budget, Entry, Kind, ReadError, ReadLimits};
use crate::archive::{Held, Writer, fill};
use crate::error::{Error, Result, call, on};
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{Mode, fchmod, mkdirat};
use nix::unistd::{Gid, Uid, fchown, linkat, symlinkat};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Deepest folder that is archived; paths stay below what the kernel takes.
const MAX_DEPTH: usize = 64;
/// Most entries of an archive.
const MAX_ENTRIES: usize = 65_536;
/// Most folders that are entered for the entries of an archive, one after the other.
const MAX_STEPS: usize = 1 << 20;

fn refused(why: String) -> Error {
    Error::refused("archive", why)
}

/// Writes the folder `dir` as an archive of at most `max_bytes`.
pub(crate) fn write(dir: &OwnedFd, out: impl Write, max_bytes: u64) -> Result<()> {
    let mut walk = Walk {
        writer: Writer::new(out, max_bytes),
        entries: 0,
        linked: HashMap::new(),
    };
    walk.folder(dir, &Rc::from(Path::new("")), 0)?;
    walk.writer.end().map_err(call("archive"))?;
    Ok(())
}

/// Returns the sorted names in a folder; fails if there are more than `most`.
fn names(dir: &OwnedFd, path: &Path, most: usize) -> Result<Vec<OsString>> {
    let again = open_beneath(dir, Path::new("."), OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
    let mut listing = nix::dir::Dir::from_fd(again).map_err(on("list", path))?;
    let mut names = Vec::new();
    for entry in listing.iter() {
        let entry = entry.map_err(on("list", path))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            if names.len() == most {
                return Err(refused(format!("more than {MAX_ENTRIES} files")));
            }
            names.push(std::os::unix::ffi::OsStringExt::from_vec(name.to_vec()));
        }
    }
    names.sort();
    Ok(names)
}

struct Walk<W: Write> {
    writer: Writer<W>,
    /// Entries that were written so far.
    entries: usize,
    /// First place of each file with several names: its folder and name.
    linked: HashMap<(u64, u64), (Rc<Path>, OsString)>,
}

impl<W: Write> Walk<W> {
    fn folder(&mut self, dir: &OwnedFd, path: &Rc<Path>, depth: usize) -> Result<()> {
        if depth > MAX_DEPTH {
            let path = path.display();
            return Err(refused(format!(
                "{path} is deeper than {MAX_DEPTH} folders"
            )));
        }
        for name in names(dir, path, MAX_ENTRIES - self.entries)? {
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(refused(format!("more than {MAX_ENTRIES} files")));
            }
            self.entry(dir, path, name, depth)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        dir: &OwnedFd,
        above: &Rc<Path>,
        name: OsString,
        depth: usize,
    ) -> Result<()> {
        let path = above.join(&name);
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let held = open_beneath(dir, Path::new(&name), flags)?;
        let meta = File::from(held).metadata().map_err(on("archive", &path))?;
        let mode = meta.permissions().mode();
        if meta.is_dir() {
            self.writer
                .folder(&path, mode)
                .map_err(on("archive", &path))?;
            let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
            let below = open_beneath(dir, Path::new(&name), flags)?;
            self.folder(&below, &path.into(), depth + 1)
        } else if meta.is_symlink() {
            let target = readlinkat(dir.as_fd(), name.as_os_str()).map_err(on("archive", &path))?;
            let target = Path::new(&target);
            self.writer
                .link(&path, mode, target)
                .map_err(on("archive", &path))
        } else if meta.is_file() {
            self.file(dir, above, name, &meta)
        } else {
            Ok(())
        }
    }

    fn file(
        &mut self,
        dir: &OwnedFd,
        above: &Rc<Path>,
        name: OsString,
        meta: &Metadata,
    ) -> Result<()> {
        let path = above.join(&name);
        let mode = meta.permissions().mode();
        if meta.nlink() > 1 {
            let inode = (meta.dev(), meta.ino());
            if let Some((folder, first)) = self.linked.get(&inode) {
                let first = folder.join(first);
                return self
                    .writer
                    .hard_link(&path, mode, &first)
                    .map_err(on("archive", &path));
            }
            self.linked.insert(inode, (Rc::clone(above), name.clone()));
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
        let file = File::from(open_beneath(dir, Path::new(&name), flags)?);
        let content = Held(&file, meta.size());
        self.writer
            .file(&path, mode, &content)
            .map_err(on("archive", &path))
    }
}

/// Outcome of one entry; the reader adds its number and path to a broken rule.
type EntryResult = std::result::Result<(), ReadError>;

/// Folder into which an archive is unpacked.
struct Target<'a> {
    root: &'a OwnedFd,
    owner: (Option<Uid>, Option<Gid>),
    /// The folder of the last entry: most entries stand where the one before them does.
    last: (PathBuf, OwnedFd),
    steps: usize,
}

const FOLDER: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW);

impl Target<'_> {
    /// The folder at `path`, made where it is not there; no link on the way is followed.
    fn enter(&mut self, path: &Path) -> Result<&OwnedFd> {
        if self.last.0 != path {
            let mut folder = open_beneath(self.root, Path::new("."), FOLDER)?;
            for part in path.components() {
                self.steps += 1;
                if self.steps > MAX_STEPS {
                    return Err(refused(format!(
                        "its entries jump between folders more than {MAX_STEPS} times; sort them \
                         by name"
                    )));
                }
                let name = Path::new(part.as_os_str());
                self.folder(&folder, name).map_err(on("unpack", path))?;
                folder = open_beneath(&folder, name, FOLDER)?;
            }
            self.last = (path.into(), folder);
        }
        Ok(&self.last.1)
    }

    /// Makes a folder, unless there is something of that name.
    fn folder(&self, above: &OwnedFd, name: &Path) -> nix::Result<()> {
        match mkdirat(above.as_fd(), name, Mode::S_IRWXU) {
            Ok(()) => {}
            Err(nix::errno::Errno::EEXIST) => return Ok(()),
            Err(e) => return Err(e),
        }
        let made = nix::fcntl::openat(
            above.as_fd(),
            name,
            FOLDER | OFlag::O_CLOEXEC,
            Mode::empty(),
        )?;
        fchown(made.as_fd(), self.owner.0, self.owner.1)
    }

    fn put(&mut self, entry: &mut Entry<'_>, budget: &mut Budget) -> EntryResult {
        let path = std::mem::take(&mut entry.path);
        let path = path.as_path();
        let above = path.parent().unwrap_or(Path::new(""));
        let name = Path::new(path.file_name().ok_or("it names the work folder itself")?);
        let mode = Mode::from_bits_truncate(entry.mode & 0o777);
        let (user, group) = self.owner;
        let failed = || on("unpack", path);
        match &entry.kind {
            Kind::Folder => {
                self.enter(above)?;
                self.folder(&self.last.1, name).map_err(failed())?;
                let made = open_beneath(&self.last.1, name, FOLDER)?;
                fchmod(made.as_fd(), mode).map_err(failed())?;
            }
            Kind::Symlink(target) => {
                let above = self.enter(above)?;
                symlinkat(target, above.as_fd(), name).map_err(failed())?;
            }
            Kind::HardLink(first) => self.hard_link(first, path)?,
            Kind::File => {
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
                let mut file = File::from(open_beneath(self.enter(above)?, name, flags)?);
                let filled = fill(entry.content, entry.size, budget.left(), &mut file);
                let data = filled.map_err(on("unpack", path))?;
                budget.charge(data.ok_or_else(|| budget.full())?)?;
                fchown(file.as_fd(), user, group).map_err(failed())?;
                fchmod(file.as_fd(), mode).map_err(failed())?;
            }
            Kind::Device(kind) => return Err(format!("it is a device or pipe ({kind})").into()),
        }
        Ok(())
    }

    /// Another name of a regular file that an entry before this one made.
    fn hard_link(&mut self, first: &Path, path: &Path) -> Result<()> {
        let (from, name) = (first.parent(), first.file_name().unwrap_or(OsStr::new("")));
        self.enter(from.unwrap_or(Path::new("")))?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let held = open_beneath(&self.last.1, Path::new(name), flags)?;
        if !File::from(held)
            .metadata()
            .map_err(on("archive", path))?
            .is_file()
        {
            return Err(refused(format!("{} links to no file", path.display())));
        }
        let from = self.last.1.try_clone().map_err(on("archive", path))?;
        let above = self.enter(path.parent().unwrap_or(Path::new("")))?;
        let own = path.file_name().unwrap_or_default();
        linkat(from.as_fd(), name, above.as_fd(), own, AtFlags::empty()).map_err(on("unpack", path))
    }
}

/// Puts the files of an archive below `dir`: plain names only, at most `max_bytes` of content that
/// is not zeros, and in each file.
pub(crate) fn read(
    archive: impl Read,
    dir: &OwnedFd,
    max_bytes: u64,
    uid: Option<u32>,
) -> Result<()> {
    let mut target = Target {
        root: dir,
        owner: (uid.map(Uid::from_raw), uid.map(Gid::from_raw)),
        last: (PathBuf::new(), open_beneath(dir, Path::new("."), FOLDER)?),
        steps: 0,
    };
    let mut budget = Budget::new(ReadLimits::work_folder(max_bytes));
    let put = |entry: &mut Entry<'_>, budget: &mut Budget| target.put(entry, budget);
    Ok(reader::read(archive, &mut budget, put)?)
}
