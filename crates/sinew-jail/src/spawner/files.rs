//! The files of a sandbox: a bounded file system in memory, layers of snapshots, and files that
//! go in and out.
//!
//! The file system is mounted nowhere: each sandbox init attaches a copy of the mount. A table of
//! thousands of mounts would be copied with every new mount namespace. Kernels before 6.15 cannot copy a
//! mount that is mounted nowhere; there it is mounted in the spawner.

use super::openat2::{read_file, write_file};
use super::users::User;
use crate::error::{Result, call, on};
use crate::mounts::{self, Context};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat, renameat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat};
use rustix::mount::MountAttrFlags;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Files and folders that one sandbox may make.
pub(crate) const MAX_INODES: u64 = 4096;
/// Layers below a work folder; the next snapshot copies instead.
const MAX_LAYERS: usize = 32;
/// Mount point for file systems, if they must be mounted.
pub(crate) const ATTACHED: &str = "/sb";

/// A file system in memory, with what it is mounted on, if it is.
#[derive(Debug)]
struct Store {
    mount: OwnedFd,
    path: Option<PathBuf>,
    /// Number that no other store has.
    number: u64,
}

impl Store {
    /// Used blocks in bytes, and used inodes.
    fn usage(&self) -> (u64, u64) {
        // SAFETY: fstatfs fills a local struct.
        let stat = unsafe {
            let mut stat = std::mem::zeroed::<libc::statfs>();
            libc::fstatfs(self.mount.as_raw_fd(), &raw mut stat);
            stat
        };
        let used = |all: u64, free: u64| all.saturating_sub(free);
        (
            used(stat.f_blocks, stat.f_bfree) * stat.f_bsize as u64,
            used(stat.f_files, stat.f_ffree),
        )
    }
}

/// Ways in which this kernel and this user mount file systems.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mounting {
    /// Mounts need no place, and can be copied.
    pub(crate) detached: bool,
    /// Overlays keep their marks (of folders that replace others) in attributes of users: those of
    /// the system belong to the host's root. An overlay that looks for the other kind shows what was
    /// deleted.
    pub(crate) user_marks: bool,
}

impl Mounting {
    /// Probes this host; `attached` asks for mounts at a place.
    pub(crate) fn probe(attached: bool) -> Self {
        let probe = Context::new("tmpfs").and_then(|c| c.mount(MountAttrFlags::empty()));
        let copies = |mount: &OwnedFd| mounts::copy(mount, "").is_ok();
        Self {
            detached: !attached && probe.as_ref().is_ok_and(copies),
            user_marks: probe.is_ok_and(|mount| refuses_system_marks(&mount)),
        }
    }
}

/// Whether an attribute of the system cannot be set for want of a right.
fn refuses_system_marks(mount: &OwnedFd) -> bool {
    let Ok(folder) = open_folder(mount, ".") else {
        return false;
    };
    let (name, value) = (c"trusted.overlay.probe", c"y");
    // SAFETY: strings that end in zero; one byte of the value is read.
    let set = unsafe {
        libc::fsetxattr(
            folder.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            1,
            0,
        )
    };
    set == -1 && Errno::last() == Errno::EPERM
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = umount2(path, MntFlags::MNT_DETACH);
            let _ = std::fs::remove_dir(path);
        }
    }
}

/// A frozen folder of a store.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    store: Rc<Store>,
    folder: String,
    /// User who owns its files.
    user: Option<Rc<User>>,
    /// Bytes in its store when it was frozen.
    bytes: u64,
}

/// The stores that layers keep alive, by number, and the bytes of each.
pub(crate) fn held(layers: &[Layer]) -> Vec<(u64, u64)> {
    let mut stores = std::collections::BTreeMap::new();
    for layer in layers {
        let bytes = stores.entry(layer.store.number).or_insert(0);
        *bytes = layer.bytes.max(*bytes);
    }
    stores.into_iter().collect()
}

impl Layer {
    /// The folder that its files stand in.
    pub(crate) fn work(&self) -> Result<OwnedFd> {
        open_folder(&self.store.mount, &self.folder)
    }

    /// A second folder in the same store, for a copy of `/tmp`.
    pub(crate) fn temporary(&self) -> Result<OwnedFd> {
        open_folder(&self.store.mount, "tmp")
    }

    /// Updates the bytes in its store.
    pub(crate) fn measure(&mut self) {
        self.bytes = self.store.usage().0;
    }

    pub(crate) fn user(&self) -> Option<Rc<User>> {
        self.user.clone()
    }
}

/// Source of a mount for a folder of a sandbox.
#[derive(Debug)]
pub(crate) enum Source<'a> {
    /// A folder of a mount, of which a copy can be made.
    Mount(&'a OwnedFd, &'static str),
    /// A folder that can be bound.
    Path(String),
}

/// The files of one sandbox.
#[derive(Debug)]
pub(crate) struct Files {
    store: Rc<Store>,
    /// The top folder within the store, and the layers below it, upmost first.
    top: String,
    layers: Vec<Layer>,
    /// Store and layers as one folder, if there are layers.
    merged: Option<Store>,
    user: Option<Rc<User>>,
    bytes: u64,
    /// Ways in which this host mounts.
    mounting: Mounting,
    serial: u64,
}

/// Removes files that no snapshot holds, even if a snapshot keeps the store.
impl Drop for Files {
    fn drop(&mut self) {
        self.merged = None;
        let own = |layer: &&Layer| Rc::ptr_eq(&layer.store, &self.store);
        let own = 1 + self.layers.iter().filter(own).count();
        if Rc::strong_count(&self.store) == own {
            return;
        }
        for folder in [&self.top, "tmp"] {
            if let Ok(folder) = open_folder(&self.store.mount, folder) {
                empty(&folder);
            }
        }
    }
}

/// Removes what is in a folder. Folders in it are moved up before they are emptied, so that no depth
/// of them is too much.
fn empty(top: &OwnedFd) {
    let mut moved = 0;
    let mut below: Vec<CString> = vec![c".".into()];
    while let Some(name) = below.pop() {
        let Ok(folder) = openat(top.as_fd(), name.as_c_str(), FOLDER, Mode::empty()) else {
            continue;
        };
        for inner in inside(&folder) {
            if unlinkat(folder.as_fd(), inner.as_c_str(), UnlinkatFlags::NoRemoveDir).is_ok() {
                continue;
            }
            while moved < 4 * MAX_INODES {
                moved += 1;
                let up = CString::new(moved.to_string()).unwrap_or_default();
                match renameat(folder.as_fd(), inner.as_c_str(), top.as_fd(), up.as_c_str()) {
                    Ok(()) => below.push(up),
                    // A program had the same idea.
                    Err(Errno::ENOTEMPTY | Errno::EEXIST | Errno::ENOTDIR) => continue,
                    Err(_) => {}
                }
                break;
            }
        }
        if name.as_c_str() != c"." {
            let _ = unlinkat(top.as_fd(), name.as_c_str(), UnlinkatFlags::RemoveDir);
        }
    }
}

/// Names in a folder, as far as it can be listed.
fn inside(folder: &OwnedFd) -> Vec<CString> {
    let again = openat(folder.as_fd(), ".", FOLDER, Mode::empty());
    let listing = again.and_then(nix::dir::Dir::from_fd);
    let entries = listing.into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_owned())
        .filter(|name| name.as_c_str() != c"." && name.as_c_str() != c"..")
        .collect()
}

const FOLDER: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_CLOEXEC)
    .union(OFlag::O_NOFOLLOW);

/// A new file system in memory; what is written to it counts for the control group of the writer.
fn store(number: u64, bytes: u64, inodes: u64, attach_as: Option<PathBuf>) -> Result<Store> {
    let mount = || {
        Context::new("tmpfs")?
            .set("size", &bytes.to_string())?
            .set("nr_inodes", &inodes.to_string())?
            .set("mode", "0755")?
            .mount(MountAttrFlags::empty())
    };
    attached(number, mount().map_err(on("mount", "tmpfs"))?, attach_as)
}

/// Mounts it at a place, if there is one.
fn attached(number: u64, mount: OwnedFd, attach_as: Option<PathBuf>) -> Result<Store> {
    if let Some(path) = &attach_as {
        let target = path.to_string_lossy();
        std::fs::create_dir_all(path).map_err(on("make", path))?;
        mounts::attach(&mount, &target).map_err(on("mount", &*target))?;
    }
    Ok(Store {
        mount,
        path: attach_as,
        number,
    })
}

/// A folder that belongs only to a sandbox's user.
fn own_folder(store: &Store, name: &str, uid: Option<u32>) -> Result<()> {
    mkdirat(store.mount.as_fd(), name, Mode::S_IRWXU).map_err(call("mkdir"))?;
    let folder = open_folder(&store.mount, name)?;
    let (user, group) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
    fchown(folder.as_fd(), user, group).map_err(call("chown"))
}

fn open_folder(dir: &OwnedFd, name: &str) -> Result<OwnedFd> {
    openat(dir.as_fd(), name, FOLDER, Mode::empty()).map_err(call("open"))
}

impl Files {
    /// Empty files, or those of a snapshot.
    pub(crate) fn new(
        serial: u64,
        bytes: u64,
        user: Option<Rc<User>>,
        mounting: Mounting,
        layers: Vec<Layer>,
    ) -> Result<Self> {
        let uid = user.as_ref().map(|u| u.uid);
        let path = (!mounting.detached).then(|| Path::new(ATTACHED).join(format!("{serial}")));
        let store = Rc::new(store(serial, bytes, MAX_INODES, path)?);
        own_folder(&store, "work", uid)?;
        own_folder(&store, "tmp", uid)?;
        let mut files = Self {
            store,
            top: "work".into(),
            layers,
            merged: None,
            user,
            bytes,
            mounting,
            serial,
        };
        if !files.layers.is_empty() {
            files.merge()?;
        }
        Ok(files)
    }

    /// Mounts the top folder over the layers.
    fn merge(&mut self) -> Result<()> {
        self.merged = None;
        let scratch = format!("{}.scratch", self.top);
        // It is there if this is tried again.
        if open_folder(&self.store.mount, &scratch).is_err() {
            own_folder(&self.store, &scratch, None)?;
        }
        self.merged = Some(if self.mounting.detached {
            self.merge_detached(&scratch)?
        } else {
            self.merge_attached(&scratch)?
        });
        Ok(())
    }

    fn merge_detached(&self, scratch: &str) -> Result<Store> {
        let lower: Result<Vec<OwnedFd>> = self.layers.iter().map(Layer::work).collect();
        let (lower, upper) = (lower?, open_folder(&self.store.mount, &self.top)?);
        let scratch = open_folder(&self.store.mount, scratch)?;
        let mount = || {
            let mut context = Context::new("overlay")?;
            for layer in &lower {
                context = context.fd("lowerdir+", layer)?;
            }
            context = context.fd("upperdir", &upper)?.fd("workdir", &scratch)?;
            if self.mounting.user_marks {
                context = context.flag("userxattr")?;
            }
            context.mount(MountAttrFlags::empty())
        };
        attached(self.serial, mount().map_err(on("mount", "overlay"))?, None)
    }

    /// Merges by mount(2), whose options may be as long as a page: those of fsconfig(2) end after 255 bytes,
    /// which is less than the names of many layers take.
    fn merge_attached(&self, scratch: &str) -> Result<Store> {
        let path = |store: &Store, folder: &str| {
            let path = store.path.as_deref().unwrap_or(Path::new(ATTACHED));
            path.join(folder).to_string_lossy().into_owned()
        };
        let lower = self.layers.iter().map(|l| path(&l.store, &l.folder));
        let options = format!(
            "lowerdir={},upperdir={},workdir={}{}",
            lower.collect::<Vec<_>>().join(":"),
            path(&self.store, &self.top),
            path(&self.store, scratch),
            if self.mounting.user_marks {
                ",userxattr"
            } else {
                ""
            },
        );
        let target = Path::new(ATTACHED).join(format!("{}.merged", self.serial));
        std::fs::create_dir_all(&target).map_err(call("mkdir"))?;
        let (kind, flags) = (Some("overlay"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV);
        mount(kind, &target, kind, flags, Some(options.as_str())).map_err(call("mount"))?;
        let mounted = Store {
            mount: openat(AT_FDCWD, &target, FOLDER, Mode::empty()).map_err(call("open"))?,
            path: Some(target),
            number: self.serial,
        };
        Ok(mounted)
    }

    /// Source of the sandbox's `work` or `tmp`.
    pub(crate) fn source(&self, folder: &'static str) -> Source<'_> {
        let merged = self.merged.as_ref().filter(|_| folder == "work");
        let (store, folder) = match merged {
            Some(merged) => (merged, ""),
            None => (self.store.as_ref(), folder),
        };
        match &store.path {
            Some(path) => Source::Path(path.join(folder).to_string_lossy().into_owned()),
            None => Source::Mount(&store.mount, folder),
        }
    }

    pub(crate) fn uid(&self) -> Option<u32> {
        self.user.as_ref().map(|u| u.uid)
    }

    /// Opens the work folder as it appears inside.
    pub(crate) fn work(&self) -> Result<OwnedFd> {
        match &self.merged {
            Some(merged) => open_folder(&merged.mount, "."),
            None => open_folder(&self.store.mount, &self.top),
        }
    }

    /// The folders `work` and `tmp`.
    pub(crate) fn folders(&self) -> Result<(OwnedFd, OwnedFd)> {
        Ok((self.work()?, open_folder(&self.store.mount, "tmp")?))
    }

    /// Whether there are so many layers that the next snapshot should be a copy.
    pub(crate) fn is_deep(&self) -> bool {
        self.layers.len() >= MAX_LAYERS
    }

    /// An empty layer that can hold a copy of all its files.
    pub(crate) fn blank(&self, number: u64) -> Result<Layer> {
        let user = self.user.clone();
        blank(self.bytes.saturating_mul(2), user, self.mounting, number)
    }

    /// Returns the same files on top of a layer that contains a copy of them, in the store of that layer.
    pub(crate) fn over(&self, number: u64, copy: Layer) -> Result<Self> {
        let mut files = Self {
            store: Rc::clone(&copy.store),
            top: "up".into(),
            layers: vec![copy],
            merged: None,
            user: self.user.clone(),
            bytes: self.bytes,
            mounting: self.mounting,
            serial: number,
        };
        own_folder(&files.store, &files.top, files.uid())?;
        files.merge()?;
        Ok(files)
    }

    /// Freezes the work folder; nothing may run in the sandbox meanwhile.
    pub(crate) fn freeze(&mut self) -> Result<Vec<Layer>> {
        let top = format!("up{}", self.layers.len());
        own_folder(&self.store, &top, self.uid())?;
        let frozen = Layer {
            store: Rc::clone(&self.store),
            folder: std::mem::replace(&mut self.top, top),
            user: self.user.clone(),
            bytes: self.store.usage().0,
        };
        self.layers.insert(0, frozen);
        if let Err(e) = self.merge() {
            // The old state is restored: the frozen folder is the top again.
            self.top = self.layers.remove(0).folder;
            if !self.layers.is_empty() {
                self.merge()?;
            }
            return Err(e);
        }
        Ok(self.layers.clone())
    }

    pub(crate) fn layer_count(&self) -> u64 {
        self.layers.len() as u64
    }

    /// Bytes and number of files of the store.
    pub(crate) fn usage(&self) -> (u64, u64) {
        let (bytes, inodes) = self.store.usage();
        // The root, `work` and `tmp` are not the sandbox's doing.
        (bytes, inodes.saturating_sub(3))
    }

    pub(crate) fn write_file(&self, path: &str, content: OwnedFd) -> Result<()> {
        write_file(&self.work()?, path, content, self.bytes, self.uid())
    }

    pub(crate) fn read_file(&self, path: &str, max_bytes: u64) -> Result<OwnedFd> {
        read_file(&self.work()?, path, max_bytes)
    }
}

/// An empty layer in a separate store.
pub(crate) fn blank(
    max_bytes: u64,
    user: Option<Rc<User>>,
    mounting: Mounting,
    number: u64,
) -> Result<Layer> {
    let uid = user.as_ref().map(|u| u.uid);
    let path = Path::new(ATTACHED).join(format!("{number}.layer"));
    let path = (!mounting.detached).then_some(path);
    let store = store(number, max_bytes, 4 * MAX_INODES, path)?;
    own_folder(&store, "work", uid)?;
    own_folder(&store, "tmp", uid)?;
    Ok(Layer {
        store: Rc::new(store),
        folder: "work".into(),
        user,
        bytes: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;

    #[test]
    fn a_folder_is_emptied_whatever_is_in_it() {
        let top = tempfile::tempdir().unwrap();
        let held = OwnedFd::from(File::open(top.path()).unwrap());
        // Deep, with names that it would use itself.
        let mut deep = held.try_clone().unwrap();
        for _ in 0..200 {
            mkdirat(deep.as_fd(), "4", Mode::S_IRWXU).unwrap();
            deep = openat(deep.as_fd(), "4", FOLDER, Mode::empty()).unwrap();
            mkdirat(deep.as_fd(), "x", Mode::S_IRWXU).unwrap();
        }
        for i in 0..20 {
            let folder = top.path().join(format!("{i}"));
            let _ = std::fs::create_dir(&folder);
            std::fs::write(folder.join("file"), "x").unwrap();
            std::os::unix::fs::symlink("/", top.path().join(format!("link{i}"))).unwrap();
        }
        empty(&held);
        assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 0);
    }
}
