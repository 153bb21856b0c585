//! The file system that sandboxes see, and files that go in and out of it.

use super::jail::BASE;
use super::spawner::root_path;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::mount::{MsFlags, mount};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use nix::unistd::{Gid, Uid, fchown};
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

const NONE: Option<&str> = None;

fn failed<'a>(what: &'a str, path: &'a Path) -> impl Fn(nix::errno::Errno) -> String + 'a {
    move |e| format!("{what} {}: {e}", path.display())
}

fn io<'a>(path: &'a Path) -> impl Fn(std::io::Error) -> String + 'a {
    move |e| format!("{}: {e}", path.display())
}

/// Builds the root: system folders read-only, a handful of devices and files, nothing else.
pub(crate) fn build(binds: &[PathBuf]) -> Result<(), String> {
    let (base, root) = (Path::new(BASE), root_path());
    mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)
        .map_err(failed("make private", Path::new("/")))?;
    // What lies under the base itself is opened before it is covered.
    let mut held = Vec::new();
    for bind in binds {
        held.push((bind.clone(), hold(bind)?));
    }
    tmpfs(base, "size=16m,mode=0755")?;
    fs::create_dir(root).map_err(io(root))?;
    tmpfs(root, "size=4m,mode=0755")?;
    for folder in ["work", "tmp", "proc", "dev", "etc"] {
        let path = root.join(folder);
        fs::create_dir(&path).map_err(io(&path))?;
    }
    for folder in ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64"] {
        system_folder(Path::new(folder), root)?;
    }
    for (path, fd) in held {
        let source = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        bind_read_only(Path::new(&source), &inside(root, &path))?;
    }
    for device in ["null", "zero", "full", "random", "urandom"] {
        let source = Path::new("/dev").join(device);
        let target = root.join("dev").join(device);
        File::create(&target).map_err(io(&target))?;
        mount(Some(&source), &target, NONE, MsFlags::MS_BIND, NONE)
            .map_err(failed("bind", &source))?;
    }
    for (link, target) in [
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        symlink(target, root.join("dev").join(link)).map_err(io(root))?;
    }
    etc(root)?;
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY | MsFlags::MS_NOSUID;
    mount(NONE, root, NONE, flags, NONE).map_err(failed("make read-only", root))
}

fn hold(path: &Path) -> Result<OwnedFd, String> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    nix::fcntl::open(path, flags, Mode::empty()).map_err(failed("open", path))
}

fn tmpfs(path: &Path, options: &str) -> Result<(), String> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    mount(Some("tmpfs"), path, Some("tmpfs"), flags, Some(options))
        .map_err(failed("mount tmpfs on", path))
}

fn inside(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn system_folder(path: &Path, root: &Path) -> Result<(), String> {
    let target = inside(root, path);
    match fs::symlink_metadata(path) {
        Err(_) => Ok(()),
        Ok(meta) if meta.is_symlink() => {
            let link = fs::read_link(path).map_err(io(path))?;
            symlink(link, &target).map_err(io(&target))
        }
        Ok(_) => bind_read_only(path, &target),
    }
}

fn bind_read_only(source: &Path, target: &Path) -> Result<(), String> {
    fs::create_dir_all(target).map_err(io(target))?;
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE).map_err(failed("bind", target))?;
    let flags = MsFlags::MS_REMOUNT
        | MsFlags::MS_BIND
        | MsFlags::MS_RDONLY
        | MsFlags::MS_NOSUID
        | MsFlags::MS_NODEV;
    mount(NONE, target, NONE, flags, NONE).map_err(failed("make read-only", target))
}

/// No account, password, key or host name of the host.
fn etc(root: &Path) -> Result<(), String> {
    let etc = root.join("etc");
    for (file, text) in [
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
    ] {
        let path = etc.join(file);
        fs::write(&path, text).map_err(io(&path))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).map_err(io(&path))?;
    }
    let cache = Path::new("/etc/ld.so.cache");
    if cache.exists() {
        let target = etc.join("ld.so.cache");
        fs::copy(cache, &target).map_err(io(&target))?;
    }
    let alternatives = Path::new("/etc/alternatives");
    if alternatives.is_dir() {
        bind_read_only(alternatives, &etc.join("alternatives"))?;
    }
    Ok(())
}

/// A folder that belongs to a sandbox's user.
pub(crate) fn own_folder(path: &Path, uid: Option<u32>) -> Result<(), String> {
    fs::create_dir(path).map_err(io(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(io(path))?;
    std::os::unix::fs::chown(path, uid, uid).map_err(io(path))
}

/// A path of plain names below the work folder.
fn plain(path: &str) -> Result<PathBuf, String> {
    let path = Path::new(path);
    let parts: Vec<_> = path.components().collect();
    let fine = !parts.is_empty()
        && parts.len() <= 32
        && parts.iter().all(|c| matches!(c, Component::Normal(_)));
    if fine {
        Ok(path.into())
    } else {
        Err("path must be relative, below the work folder, without `..`, at most 32 deep".into())
    }
}

/// Opens below `dir` without following any link on the way (openat2, RESOLVE_BENEATH).
fn open_beneath(dir: &Path, path: &Path, flags: OFlag) -> Result<OwnedFd, String> {
    let dir_fd = hold(dir)?;
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .mode(Mode::from_bits_truncate(
            if flags.contains(OFlag::O_CREAT) {
                0o600
            } else {
                0
            },
        ))
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
    openat2(dir_fd.as_fd(), path, how).map_err(failed("open", path))
}

fn regular(fd: OwnedFd, path: &Path) -> Result<File, String> {
    let file = File::from(fd);
    let meta = file.metadata().map_err(io(path))?;
    if meta.is_file() {
        Ok(file)
    } else {
        Err(format!("{} is not a regular file", path.display()))
    }
}

/// Writes `content` (a memory file) to `path` below `dir`.
pub(crate) fn write_file(
    dir: &Path,
    path: &str,
    content: OwnedFd,
    max_bytes: u64,
    uid: Option<u32>,
) -> Result<(), String> {
    let path = plain(path)?;
    let (user, group) = (uid.map(Uid::from_raw), uid.map(Gid::from_raw));
    let mut folder = PathBuf::new();
    for part in path.parent().into_iter().flat_map(Path::components) {
        folder.push(part);
        let parent = match folder.parent().filter(|p| !p.as_os_str().is_empty()) {
            Some(parent) => open_beneath(dir, parent, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?,
            None => hold(dir)?,
        };
        let name = folder.file_name().unwrap_or_default();
        match nix::sys::stat::mkdirat(parent.as_fd(), Path::new(name), Mode::S_IRWXU) {
            Ok(()) => {
                let made = open_beneath(dir, &folder, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
                fchown(made.as_fd(), user, group).map_err(failed("chown", &folder))?;
            }
            Err(nix::errno::Errno::EEXIST) => {}
            Err(e) => return Err(failed("mkdir", &folder)(e)),
        }
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let mut file = regular(open_beneath(dir, &path, flags)?, &path)?;
    file.set_len(0).map_err(io(&path))?;
    fchown(file.as_fd(), user, group).map_err(failed("chown", &path))?;
    let mut bytes = Vec::new();
    let mut source = File::from(content);
    source.rewind().map_err(io(&path))?;
    source
        .take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(io(&path))?;
    if bytes.len() as u64 > max_bytes {
        return Err(format!(
            "content is larger than the {max_bytes} bytes of the work folder"
        ));
    }
    file.write_all(&bytes).map_err(io(&path))
}

/// Copies a regular file below `dir` into a memory file.
pub(crate) fn read_file(dir: &Path, path: &str, max_bytes: u64) -> Result<OwnedFd, String> {
    let path = plain(path)?;
    // Opening a FIFO without O_NONBLOCK would wait for a writer for ever.
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let file = regular(open_beneath(dir, &path, flags)?, &path)?;
    let mut bytes = Vec::new();
    file.take(max_bytes + 1)
        .read_to_end(&mut bytes)
        .map_err(io(&path))?;
    if bytes.len() as u64 > max_bytes {
        return Err(format!(
            "{} is larger than {max_bytes} bytes",
            path.display()
        ));
    }
    let memory = memfd_create(c"sinew-file", MFdFlags::MFD_CLOEXEC)
        .map_err(failed("memfd_create", &path))?;
    let mut memory = File::from(memory);
    memory.write_all(&bytes).map_err(io(&path))?;
    memory.rewind().map_err(io(&path))?;
    Ok(memory.into())
}
