//! A writable layer above an image, for a container whose root is another user outside.
//!
//! [`enter`] runs in the process that becomes the container's runtime. It takes a mount namespace of its own,
//! so that the mounts below are seen by the runtime and the container only, and are gone with the last of
//! both. Nothing of the host's mounts changes.
//!
//! | path below the stage | content |
//! |---|---|
//! | `root` | an overlay of the image and the layer: the root of the container |
//! | `image` | the image, read-only, whose users are mapped to those of the container |
//! | `layer` | a file system in memory with a size, for what is written |
//! | `0`, `1`, ... | the folders and files of the host that the container shows |
//!
//! The mapping needs Linux 5.19 or newer, and a file system below the image that takes it. Without it, root
//! of the container would own no file of the image.

use crate::error::{Error, Result, call, on};
use crate::mounts::{Context, attach};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::CWD;
use rustix::mount::{MountAttrFlags, OpenTreeFlags, open_tree};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};

/// Users and groups of a container.
pub const USERS: u32 = 65_536;
/// Mount points of every container; nothing of the image stands there.
const POINTS: [&str; 3] = ["proc", "dev", ".host"];
/// Folders that everybody may write to.
const OPEN: [&str; 2] = ["work", "tmp"];
/// The agent's mount point, a file.
const AGENT: &str = ".agent";
/// Names of this host for programs of an image without any.
const HOSTS: &str = "127.0.0.1 localhost\n::1 localhost\n";

/// A layer to make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPlan {
    /// Root of the image. It is never written to.
    pub image: PathBuf,
    /// Existing folder below which the mounts are made. The host does not see them.
    pub stage: PathBuf,
    /// Bytes of the layer.
    pub bytes: u64,
    /// Files and folders of the layer.
    pub inodes: u64,
    /// User outside that is root of the container; the users after it are those after root.
    pub first_user: u32,
    /// Files and folders of the host that the container shows.
    pub shows: Vec<PathBuf>,
}

impl LayerPlan {
    /// Root of the container.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.stage.join("root")
    }

    /// Place of a shown file or folder, by its number in `shows`.
    #[must_use]
    pub fn shown(&self, number: usize) -> PathBuf {
        self.stage.join(number.to_string())
    }
}

/// Makes the mounts of a plan in a mount namespace of this process.
///
/// # Errors
/// The first call that failed, with a remedy if there is one.
pub fn enter(plan: &LayerPlan) -> Result<()> {
    const NONE: Option<&str> = None;
    unshare(CloneFlags::CLONE_NEWNS).map_err(call("make a mount namespace"))?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(NONE, "/", NONE, private, NONE).map_err(call("make mounts private"))?;
    // Everything is opened before the stage covers a folder.
    let image = mapped(&plan.image, plan.first_user)?;
    let shows: Vec<OwnedFd> = plan.shows.iter().map(|p| tree(p)).collect::<Result<_>>()?;
    let small = |context: Context| {
        let context = context.set("size", "1m")?.set("mode", "0711")?;
        context.mount(MountAttrFlags::empty())
    };
    let stage = Context::new("tmpfs").and_then(small);
    put(
        stage.map_err(call("make a file system in memory"))?,
        &plan.stage,
    )?;
    for (number, show) in shows.into_iter().enumerate() {
        let place = plan.shown(number);
        if plan.shows[number].is_dir() {
            make_folder(&place, 0o755)?;
        } else {
            fs::write(&place, "").map_err(on("make", &place))?;
        }
        put(show, &place)?;
    }
    let lower = plan.stage.join("image");
    make_folder(&lower, 0o755)?;
    put(image, &lower)?;
    let layer = plan.stage.join("layer");
    make_folder(&layer, 0o700)?;
    let sized = |context: Context| {
        let context = context.set("size", &plan.bytes.to_string())?;
        let context = context.set("nr_inodes", &plan.inodes.to_string())?;
        context.set("mode", "0700")?.mount(MountAttrFlags::empty())
    };
    let memory = Context::new("tmpfs").and_then(sized);
    put(memory.map_err(call("make the layer"))?, &layer)?;
    overlay(plan, &lower, &layer)
}

/// Lays the layer over the image.
fn overlay(plan: &LayerPlan, lower: &Path, layer: &Path) -> Result<()> {
    let (upper, work) = (layer.join("upper"), layer.join("work"));
    make_folder(&work, 0o700)?;
    prepare(&upper, lower, plan.first_user)?;
    let merged = plan.root();
    make_folder(&merged, 0o755)?;
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let options = [
        ("lowerdir", text(lower)),
        ("upperdir", text(&upper)),
        ("workdir", text(&work)),
    ];
    let laid = Context::new("overlay").and_then(|context| {
        let mut context = context;
        for (key, value) in &options {
            context = context.set(key, value)?;
        }
        context.mount(MountAttrFlags::empty())
    });
    let laid = laid
        .map_err(call("lay a writable layer over the image"))
        .map_err(|e| {
            e.hint("; writable roots need overlayfs above mapped images: Linux 5.19 or newer")
        })?;
    put(laid, &merged)
}

/// Makes the top of the layer: mount points, open folders, and names of the host where the image has none.
/// Everything belongs to root of the container.
fn prepare(upper: &Path, lower: &Path, user: u32) -> Result<()> {
    let own = |path: &Path| chown(path, Some(user), Some(user)).map_err(on("chown", path));
    make_folder(upper, 0o755)?;
    own(upper)?;
    for (names, mode) in [(&POINTS[..], 0o755), (&OPEN[..], 0o1777)] {
        for name in names {
            let path = upper.join(name);
            make_folder(&path, mode)?;
            own(&path)?;
        }
    }
    let agent = upper.join(AGENT);
    fs::write(&agent, "").map_err(on("make", &agent))?;
    own(&agent)?;
    let etc = lower.join("etc");
    let is_folder = etc.symlink_metadata().is_ok_and(|m| m.is_dir());
    let there = etc.join("hosts").symlink_metadata();
    if is_folder && there.is_ok_and(|m| !m.is_file() || m.len() > 0) {
        return Ok(());
    }
    if is_folder || etc.symlink_metadata().is_err() {
        let (etc, hosts) = (upper.join("etc"), upper.join("etc/hosts"));
        make_folder(&etc, 0o755)?;
        fs::write(&hosts, HOSTS).map_err(on("write", &hosts))?;
        own(&etc)?;
        own(&hosts)?;
    }
    Ok(())
}

/// A new folder with exactly this mode.
fn make_folder(path: &Path, mode: u32) -> Result<()> {
    fs::create_dir(path).map_err(on("make", path))?;
    let mode = fs::Permissions::from_mode(mode);
    fs::set_permissions(path, mode).map_err(on("make", path))
}

/// Moves a mount that is mounted nowhere to a path.
fn put(mount: OwnedFd, path: &Path) -> Result<()> {
    attach(&mount, &path.to_string_lossy()).map_err(on("mount", path))
}

/// A copy of the mounts at a path.
fn tree(path: &Path) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    open_tree(CWD, path, flags).map_err(on("copy the mount of", path))
}

/// A copy of the mount at a path, read-only, whose files of root belong to `user`, and so on.
fn mapped(path: &Path, user: u32) -> Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = open_tree(CWD, path, flags).map_err(on("copy the mount of", path))?;
    let users = user_namespace(user)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_IDMAP
        | MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    // struct mount_attr: attributes to set, to clear, propagation, descriptor of the namespace.
    let request: [u64; 4] = [attributes.bits().into(), 0, 0, users.as_raw_fd() as u64];
    // SAFETY: an open descriptor, an empty path, and a structure as long as the call is told; all outlive the
    // call.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            copy.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            request.as_ptr(),
            size_of_val(&request),
        )
    };
    if done == 0 {
        return Ok(copy);
    }
    let failed = std::io::Error::last_os_error();
    Err(on("map the users of the image at", path)(failed).hint(
        "; writable roots need Linux 5.19 or newer, and images and state on ext4, xfs, btrfs or tmpfs: set \
         sandbox.image_cache to a folder there",
    ))
}

/// A user namespace whose users are [`USERS`] from `first` on. It lasts as long as its descriptor.
fn user_namespace(first: u32) -> Result<OwnedFd> {
    let (mut said, say) = std::io::pipe().map_err(call("pipe"))?;
    // SAFETY: this process has one thread; the child ends here.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: an option with an integer: this process ends with its parent.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        let made = unshare(CloneFlags::CLONE_NEWUSER).is_ok();
        let mut say = say;
        let _ = say.write_all(&[u8::from(made)]);
        loop {
            // SAFETY: waits for the signal that ends this process.
            unsafe { libc::pause() };
        }
    }
    if pid < 0 {
        return Err(Error::last("fork"));
    }
    drop(say);
    let mut made = [0];
    let there = said.read_exact(&mut made).is_ok() && made == [1];
    let opened = if there {
        open_mapped(pid, first)
    } else {
        Err(Error::refused("a user namespace", "this kernel makes none"))
    };
    // SAFETY: ends and reaps the child of this function.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
    opened
}

/// Maps the users of a process's namespace, and opens the namespace.
fn open_mapped(pid: i32, first: u32) -> Result<OwnedFd> {
    for file in ["uid_map", "gid_map"] {
        let path = format!("/proc/{pid}/{file}");
        let map = format!("0 {first} {USERS}\n");
        fs::write(&path, map).map_err(on("write", &path))?;
    }
    let path = format!("/proc/{pid}/ns/user");
    let file = fs::File::open(&path).map_err(on("open", &path))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_top_of_a_layer_hides_nothing_but_mount_points() {
        let dir = tempfile::tempdir().unwrap();
        let lower = dir.path().join("lower");
        fs::create_dir_all(lower.join("etc")).unwrap();
        fs::write(lower.join("etc/hosts"), "1.2.3.4 x\n").unwrap();
        let user = rustix::process::getuid().as_raw();
        let names = |path: &Path| {
            let mut names: Vec<_> = fs::read_dir(path)
                .unwrap()
                .map(|e| e.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names
        };
        let all = [".agent", ".host", "dev", "proc", "tmp", "work"];
        let upper = dir.path().join("a");
        prepare(&upper, &lower, user).unwrap();
        assert_eq!(names(&upper), all);
        let mode = fs::metadata(upper.join("work"))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o7777, 0o1777);
        // Docker's images have an empty file there.
        fs::write(lower.join("etc/hosts"), "").unwrap();
        let upper = dir.path().join("b");
        prepare(&upper, &lower, user).unwrap();
        assert_eq!(fs::read_to_string(upper.join("etc/hosts")).unwrap(), HOSTS);
        // A link of the image is left as it is.
        fs::remove_dir_all(lower.join("etc")).unwrap();
        std::os::unix::fs::symlink("/usr/etc", lower.join("etc")).unwrap();
        let upper = dir.path().join("c");
        prepare(&upper, &lower, user).unwrap();
        assert_eq!(names(&upper), all);
    }

    #[test]
    fn a_plan_names_its_places() {
        let plan = LayerPlan {
            image: "/image".into(),
            stage: "/mnt".into(),
            bytes: 1 << 20,
            inodes: 10,
            first_user: 1 << 25,
            shows: vec!["/a".into()],
        };
        assert_eq!(plan.root(), Path::new("/mnt/root"));
        assert_eq!(plan.shown(0), Path::new("/mnt/0"));
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<LayerPlan>(&text).unwrap(), plan);
    }
}
