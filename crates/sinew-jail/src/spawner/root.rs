//! The file system that sandboxes see.
//!
//! The root is built once, before the first sandbox. Each sandbox init starts in it and mounts its `/work`,
//! `/tmp` and `/proc` over the empty folders here.

use crate::error::{Result, on};
use crate::mounts::{DEVICES, STREAMS};
use nix::fcntl::OFlag;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag};
use nix::unistd::{chdir, pivot_root};
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Folder in which the spawner builds the file system that becomes its own root.
const BASE: &str = "/tmp";

/// The read-only root that all sandboxes of a spawner start from, in the spawner's own.
pub(crate) const ROOT: &str = "/root";

const NONE: Option<&str> = None;

/// Builds the root: system folders read-only (the host's, or an image's), a handful of devices and files,
/// nothing else. Then the folder in which it was built becomes the root of this process. With `proc`, a
/// `/proc` of this process's PID namespace is mounted in it: in a user namespace, the kernel mounts another
/// only if one is in sight.
pub(crate) fn build(
    proc: bool,
    binds: &[PathBuf],
    shows: &[(PathBuf, PathBuf)],
    image: Option<&Path>,
) -> Result<()> {
    let base = Path::new(BASE);
    let root = &inside(base, Path::new(ROOT));
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE).map_err(|e| {
        let plain = match e {
            nix::errno::Errno::EINVAL => {
                "; / is no mount, as in a plain chroot: before it is entered, bind the folder to \
                 itself (mount --bind DIR DIR), or use unshare --mount --root"
            }
            _ => "",
        };
        on("make private", "/")(e).hint(plain)
    })?;
    // Folders under the base itself are opened before it is covered.
    let mut held = Vec::new();
    let same = binds.iter().map(|b| (b, b));
    for (source, target) in same.chain(shows.iter().map(|(s, t)| (s, t))) {
        held.push((target.clone(), hold(source)?));
    }
    let (folders, links) = image.map(image_parts).transpose()?.unwrap_or_default();
    for (source, target) in folders {
        held.push((target, hold(&source)?));
    }
    tmpfs(base, "size=16m,mode=0755")?;
    fs::create_dir(root).map_err(on("make", root))?;
    tmpfs(root, "size=4m,mode=0755")?;
    for folder in ["work", "tmp", "proc", "dev"] {
        let path = root.join(folder);
        fs::create_dir(&path).map_err(on("make", &path))?;
    }
    match image {
        None => {
            for folder in ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"] {
                system_folder(Path::new(folder), root)?;
            }
            etc(root)?;
        }
        Some(_) => {
            for (target, link) in links {
                symlink(link, inside(root, &target)).map_err(on("link", &target))?;
            }
        }
    }
    for (path, fd) in held {
        let source = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        bind_read_only(Path::new(&source), &inside(root, &path))?;
    }
    if proc {
        own_proc(root)?;
    }
    devices(root)?;
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
    mount(NONE, root, NONE, flags, NONE).map_err(on("make read-only", root))?;
    pivot(base).map_err(on("leave the host's files for", base))
}

/// A `/proc` of this process's PID namespace.
fn own_proc(root: &Path) -> Result<()> {
    let path = root.join("proc");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    mount(Some("proc"), &path, Some("proc"), flags, NONE).map_err(|e| {
        on("mount", "/proc")(e).hint(
            "; user namespaces can do this only where nothing is mounted over parts of /proc, as \
             container engines do: run as root of the host, or start the container with its /proc \
             unmasked",
        )
    })
}

/// The devices that every program expects (numbers: Linux's `admin-guide/devices.txt`), and the links
/// to its standard streams. Nobody can change their times or rights: their mounts are read-only,
/// which writing to a device does not mind.
fn devices(root: &Path) -> Result<()> {
    let folder = root.join("dev");
    let fixed = MsFlags::MS_REMOUNT
        | MsFlags::MS_BIND
        | MsFlags::MS_RDONLY
        | MsFlags::MS_NOSUID
        | MsFlags::MS_NOEXEC;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    let options = Some("size=64k,mode=0755");
    mount(Some("tmpfs"), &folder, Some("tmpfs"), flags, options)
        .map_err(on("mount tmpfs on", &folder))?;
    for (device, minor) in DEVICES {
        let target = folder.join(device);
        let number = nix::sys::stat::makedev(1, minor);
        let rights = Mode::from_bits_truncate(0o666);
        // The nodes are new if this is root of the host; else they are the host's.
        let made = nix::sys::stat::mknod(&target, SFlag::S_IFCHR, rights, number);
        if made.is_ok() {
            let rights = fs::Permissions::from_mode(0o666);
            fs::set_permissions(&target, rights).map_err(on("chmod", &target))?;
            continue;
        }
        let source = Path::new("/dev").join(device);
        File::create(&target).map_err(on("make", &target))?;
        mount(Some(&source), &target, NONE, MsFlags::MS_BIND, NONE).map_err(on("bind", &source))?;
        mount(NONE, &target, NONE, fixed, NONE).map_err(on("make read-only", &target))?;
    }
    for (link, target) in STREAMS {
        symlink(target, folder.join(link)).map_err(on("link", target))?;
    }
    mount(NONE, &folder, NONE, fixed, NONE).map_err(on("make read-only", &folder))
}

/// A path on the host or a name inside, with its place inside or the target of the link.
type Pairs = Vec<(PathBuf, PathBuf)>;

/// Lists the top entries of an image: folders (on the host, inside) and links such as `/bin` (name inside,
/// target). Links lead inside: the image's root is the only one there is. Folders that each sandbox or its
/// spawner makes are left out.
fn image_parts(image: &Path) -> Result<(Pairs, Pairs)> {
    let own = ["work", "tmp", "proc", "dev", "sys"];
    let (mut folders, mut links) = (Pairs::new(), Pairs::new());
    for entry in fs::read_dir(image).map_err(on("list", image))? {
        let entry = entry.map_err(on("list", image))?;
        let kind = entry.file_type().map_err(on("list", image))?;
        let target = Path::new("/").join(entry.file_name());
        if own.iter().any(|o| entry.file_name() == *o) {
            continue;
        }
        if kind.is_symlink() {
            let link = fs::read_link(entry.path()).map_err(on("read", &target))?;
            links.push((target, link));
        } else if kind.is_dir() {
            folders.push((entry.path(), target));
        }
    }
    Ok((folders, links))
}

/// Makes `folder` the root of this process's mount namespace; what was mounted before is gone for it
/// and its children.
fn pivot(folder: &Path) -> nix::Result<()> {
    chdir(folder)?;
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    chdir("/")
}

/// Makes [`ROOT`] the root of this process.
pub(crate) fn enter() -> nix::Result<()> {
    pivot(Path::new(ROOT))
}

/// Opens what the base will cover.
fn hold(path: &Path) -> Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    nix::fcntl::open(path, flags, Mode::empty()).map_err(on("open", path))
}

fn tmpfs(path: &Path, options: &str) -> Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options))
        .map_err(on("mount tmpfs on", path))
}

/// Returns the path at which a path inside the new root is reached from here.
fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// A folder of the host, or the same link where it is one (`/bin` to `usr/bin`); nothing if it is missing.
fn system_folder(path: &Path, root: &Path) -> Result<()> {
    let target = inside(root, path);
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(meta) if meta.is_symlink() => {
            let link = fs::read_link(path).map_err(on("read", path))?;
            symlink(link, &target).map_err(on("link", &target))
        }
        Ok(_) => bind_read_only(path, &target),
    }
}

/// Two calls: the kernel ignores MS_RDONLY in the call that binds.
fn bind_read_only(source: &Path, target: &Path) -> Result<()> {
    fs::create_dir_all(target).map_err(on("make", target))?;
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE).map_err(on("bind", target))?;
    let flags = MsFlags::MS_REMOUNT
        | MsFlags::MS_BIND
        | MsFlags::MS_RDONLY
        | MsFlags::MS_NOSUID
        | MsFlags::MS_NODEV;
    mount(NONE, target, NONE, flags, NONE).map_err(on("make read-only", target))
}

/// Files in `/etc` in place of the host's, by name: no account, password, key or host name of the host.
pub const ETC_FILES: [(&str, &str); 4] = [
    (
        "passwd",
        "root:x:0:0::/:/bin/false\nsandbox:x:65534:65534::/work:/bin/sh\n",
    ),
    ("group", "root:x:0:\nsandbox:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost sandbox\n"),
    (
        "nsswitch.conf",
        "passwd: files\ngroup: files\nhosts: files\n",
    ),
];

/// Made files, and the two of the host that programs need to find libraries and commands.
fn etc(root: &Path) -> Result<()> {
    let etc = root.join("etc");
    fs::create_dir(&etc).map_err(on("make", &etc))?;
    for (file, text) in ETC_FILES {
        let path = etc.join(file);
        fs::write(&path, text).map_err(on("write", &path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444))
            .map_err(on("chmod", &path))?;
    }
    let cache = Path::new("/etc/ld.so.cache");
    if cache.exists() {
        let target = etc.join("ld.so.cache");
        fs::copy(cache, &target).map_err(on("write", &target))?;
    }
    let alternatives = Path::new("/etc/alternatives");
    if alternatives.is_dir() {
        bind_read_only(alternatives, &etc.join("alternatives"))?;
    }
    Ok(())
}
