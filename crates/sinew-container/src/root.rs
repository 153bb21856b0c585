//! The file system that containers see when no engine keeps images: read-only binds of the
//! host's system folders or of an unpacked image, on an empty root.

use crate::state::io;
use sinew_sandbox::{ETC_FILES, SandboxError};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Path of the agent inside.
pub(crate) const AGENT: &str = "/.agent";
/// Folder of the agent's socket inside.
pub(crate) const HOST: &str = "/.host";
/// Folders that the agent or the runtime makes inside. Those of the image are not shown.
const OWN: [&str; 5] = ["work", "tmp", "proc", "dev", ".host"];
/// Folders of the host's system, shown read-only where no image is given.
const SYSTEM: [&str; 6] = ["usr", "bin", "sbin", "lib", "lib32", "lib64"];

/// Mounts of an empty root with mount points and links.
#[derive(Clone, Debug, Default)]
pub(crate) struct Root {
    /// Folders and files on the host, and where they stand inside; all read-only.
    pub(crate) binds: Vec<(PathBuf, PathBuf)>,
    /// Path of Python inside.
    pub(crate) python: Option<String>,
    /// Folder on the host that is below a writable root: the image, or the empty root above which the host's
    /// folders are mounted. Empty if only the engine has the image.
    pub(crate) lower: PathBuf,
    /// Number of the first of `binds` that a writable root has, too: the folders of an image are no mounts
    /// there.
    pub(crate) above: usize,
}

type SandboxResult<T> = Result<T, SandboxError>;

/// Adds the path to an I/O error.
fn within<T>(path: &Path, done: std::io::Result<T>) -> SandboxResult<T> {
    done.map_err(|e| io(format!("make {}", path.display()), e))
}

/// Builds the root in `folder` from an unpacked `image`, or else from the host's system with `python`.
/// `shows` are further paths of the host, and their paths inside.
///
/// # Errors
/// [`SandboxError::Io`] with the path. A mount point below a link of the image is refused, because the link
/// would lead out of the root.
pub(crate) fn build(
    folder: &Path,
    image: Option<&Path>,
    python: Option<&Path>,
    shows: &[(PathBuf, PathBuf)],
) -> SandboxResult<Root> {
    let mut root = Root::default();
    within(folder, fs::create_dir_all(folder))?;
    within(
        folder,
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
    )?;
    for name in OWN {
        let path = folder.join(name);
        within(&path, fs::create_dir_all(&path))?;
    }
    for name in ["work", "tmp"] {
        // Podman's mounts take the mode of the folder that they cover, and have no owner.
        let path = folder.join(name);
        let all = fs::Permissions::from_mode(0o1777);
        within(&path, fs::set_permissions(&path, all))?;
    }
    within(folder, fs::write(folder.join(".agent"), ""))?;
    match image {
        Some(image) => {
            from_image(&mut root, folder, image)?;
            root.lower = within(image, image.canonicalize())?;
            root.above = root.binds.len();
        }
        None => {
            from_host(&mut root, folder, python)?;
            root.lower = folder.into();
        }
    }
    for (source, inside) in shows {
        bind(&mut root, folder, source, inside)?;
    }
    Ok(root)
}

/// Adds a read-only mount and makes its mount point.
fn bind(root: &mut Root, folder: &Path, source: &Path, inside: &Path) -> SandboxResult<()> {
    let relative = inside.strip_prefix("/").unwrap_or(inside);
    let target = folder.join(relative);
    // A link of the image leads anywhere on the host as long as this is not a container's root.
    let mut above = target.ancestors().take_while(|p| *p != folder);
    if let Some(link) = above.find(|p| p.is_symlink()) {
        let shown = Path::new("/").join(link.strip_prefix(folder).unwrap_or(link));
        let why = "it is a link in the image, so that nothing can be mounted there";
        return Err(io(format!("mount {}", shown.display()), why));
    }
    // A folder of another bind is itself the place for one below it.
    let below = root.binds.iter().any(|(_, i)| inside.starts_with(i));
    if !below {
        if source.is_dir() {
            within(&target, fs::create_dir_all(&target))?;
        } else {
            let above = target.parent().unwrap_or(folder);
            within(above, fs::create_dir_all(above))?;
            within(&target, fs::write(&target, ""))?;
        }
    }
    root.binds.push((source.into(), inside.into()));
    Ok(())
}

/// Adds the system folders of the host, four files of `/etc`, and the folder of a Python outside of `/usr`.
fn from_host(root: &mut Root, folder: &Path, python: Option<&Path>) -> SandboxResult<()> {
    for name in SYSTEM {
        let path = Path::new("/").join(name);
        match fs::symlink_metadata(&path) {
            Err(_) => {}
            Ok(meta) if meta.is_symlink() => {
                let target = within(&path, fs::read_link(&path))?;
                within(&path, symlink(target, folder.join(name)))?;
            }
            Ok(_) => bind(root, folder, &path, &path)?,
        }
    }
    let etc = folder.join("etc");
    within(&etc, fs::create_dir_all(&etc))?;
    for (file, text) in ETC_FILES {
        let path = etc.join(file);
        within(&path, fs::write(&path, text))?;
    }
    for path in ["/etc/ld.so.cache", "/etc/alternatives"].map(Path::new) {
        if path.exists() {
            bind(root, folder, path, path)?;
        }
    }
    let Some(python) = python.and_then(|p| p.canonicalize().ok()) else {
        return Ok(());
    };
    let prefix = python.parent().and_then(Path::parent);
    let outside = |p: &&Path| !python.starts_with("/usr") && *p != Path::new("/");
    if let Some(prefix) = prefix.filter(outside) {
        bind(root, folder, prefix, prefix)?;
    }
    root.python = Some(python.to_string_lossy().into_owned());
    Ok(())
}

/// Adds every folder of an unpacked image, and copies its links. Files at the top of the image are not shown.
fn from_image(root: &mut Root, folder: &Path, image: &Path) -> SandboxResult<()> {
    let image = &image
        .canonicalize()
        .map_err(|e| io(format!("open image {}", image.display()), e))?;
    for entry in within(image, fs::read_dir(image))? {
        let entry = within(image, entry)?;
        let (name, path) = (entry.file_name(), entry.path());
        // The kernel's own files are not shown.
        if OWN.iter().chain(&["sys", ".agent"]).any(|o| name == *o) {
            continue;
        }
        let kind = within(&path, entry.file_type())?;
        if kind.is_symlink() {
            let target = within(&path, fs::read_link(&path))?;
            within(&path, symlink(target, folder.join(&name)))?;
        } else if kind.is_dir() {
            bind(root, folder, &path, &Path::new("/").join(&name))?;
        }
    }
    let candidates = ["usr/bin/python3", "usr/local/bin/python3", "bin/python3"];
    let found = candidates
        .iter()
        .find(|p| image.join(p).symlink_metadata().is_ok());
    root.python = found.map(|p| format!("/{p}"));
    Ok(())
}

/// The root without its mounts as a tar file, for engines with images. Equal roots give equal bytes, so that
/// an engine keeps each once.
pub(crate) fn archive(folder: &Path) -> SandboxResult<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    add(&mut builder, folder, Path::new(""), false)
        .and_then(|()| builder.into_inner())
        .map_err(|e| io("pack a root", e))
}

/// An unpacked image as a tar file, for engines that need it whole. Owners and times are kept: compiled
/// Python is valid only with the time of its source.
pub(crate) fn archive_image<W: Write>(image: &Path, out: W) -> SandboxResult<W> {
    let mut builder = tar::Builder::new(out);
    add(&mut builder, image, Path::new(""), true)
        .and_then(|()| builder.into_inner())
        .map_err(|e| io(format!("pack {}", image.display()), e))
}

/// Adds a folder in the order of names, without owners and times unless they are kept.
fn add<W: Write>(
    builder: &mut tar::Builder<W>,
    folder: &Path,
    inside: &Path,
    kept: bool,
) -> std::io::Result<()> {
    let names = fs::read_dir(folder)?.map(|e| e.map(|e| e.file_name()));
    let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
    names.sort();
    for name in names {
        let (path, inner) = (folder.join(&name), inside.join(&name));
        let meta = path.symlink_metadata()?;
        let mut header = tar::Header::new_gnu();
        header.set_metadata(&meta);
        let own = rustix::process::geteuid().as_raw();
        if !kept || own != 0 && meta.uid() == own {
            header.set_uid(0);
            header.set_gid(0);
        }
        if !kept {
            header.set_mtime(0);
        }
        if meta.is_symlink() {
            builder.append_link(&mut header, &inner, fs::read_link(&path)?)?;
        } else if meta.is_dir() {
            builder.append_data(&mut header, &inner, std::io::empty())?;
            add(builder, &path, &inner, kept)?;
        } else if meta.is_file() {
            builder.append_data(&mut header, &inner, fs::File::open(&path)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_bound_folder_by_folder() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        fs::create_dir_all(image.join("usr/bin")).unwrap();
        fs::create_dir_all(image.join("work")).unwrap();
        fs::write(image.join("usr/bin/python3"), "").unwrap();
        symlink("usr/bin", image.join("bin")).unwrap();
        let folder = dir.path().join("root");
        let root = build(&folder, Some(&image), None, &[]).unwrap();
        let image = image.canonicalize().unwrap();
        assert_eq!(root.binds, [(image.join("usr"), "/usr".into())]);
        assert_eq!(root.python.as_deref(), Some("/usr/bin/python3"));
        assert_eq!((root.lower.as_path(), root.above), (image.as_path(), 1));
        let whole = archive_image(&image, Vec::new()).unwrap();
        let mut whole = tar::Archive::new(whole.as_slice());
        let held = whole
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().into_owned());
        let held: Vec<_> = held.collect();
        assert!(held.contains(&"usr/bin/python3".into()), "{held:?}");
        assert_eq!(
            fs::read_link(folder.join("bin")).unwrap(),
            Path::new("usr/bin")
        );
        assert!(fs::read_dir(folder.join("work")).unwrap().next().is_none());
        let again = super::archive(&folder).unwrap();
        let archive = archive(&folder).unwrap();
        assert_eq!(again, archive);
        let names = tar::Archive::new(archive.as_slice());
        let mut names = names;
        let names: Vec<_> = names
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().into_owned())
            .collect();
        assert!(
            names.contains(&"./bin".into()) || names.contains(&"bin".into()),
            "{names:?}"
        );
    }

    #[test]
    fn no_mount_point_is_made_through_a_link_of_an_image() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        let image = dir.path().join("image");
        for folder in [&outside, &image] {
            fs::create_dir_all(folder).unwrap();
        }
        symlink(&outside, image.join("opt")).unwrap();
        let certificate = dir.path().join("certificate");
        fs::write(&certificate, "").unwrap();
        for source in [dir.path(), &certificate] {
            let shows = [(source.to_path_buf(), "/opt/sinew/x".into())];
            let refused = build(&dir.path().join("root"), Some(&image), None, &shows).unwrap_err();
            assert!(refused.to_string().contains("mount /opt"), "{refused}");
            assert!(fs::read_dir(&outside).unwrap().next().is_none());
            fs::remove_dir_all(dir.path().join("root")).unwrap();
        }
    }

    #[test]
    fn a_missing_image_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Path::new("/no/such/image");
        let refused = build(&dir.path().join("r"), Some(missing), None, &[]).unwrap_err();
        assert!(refused.to_string().contains("/no/such/image"), "{refused}");
    }
}
