//! Support for tests on a full disk.

use std::path::PathBuf;

/// Size of the disk in bytes.
pub(crate) const SMALL_DISK: usize = 128 << 10;

/// Runs the named test again in a child process with a small tmpfs. Returns the mount point in the child, and
/// `None` in the parent after the child has passed.
pub(crate) fn small_disk(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("SINEW_SMALL_DISK") {
        return Some(folder.into());
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let script = format!(
        "mount -t tmpfs -o size={SMALL_DISK} tmpfs \"$SINEW_SMALL_DISK\" && exec \"$0\" --exact {test}"
    );
    let status = std::process::Command::new("unshare")
        .args(["-Urm", "sh", "-c", &script])
        .arg(std::env::current_exe().expect("the path of this program"))
        .env("SINEW_SMALL_DISK", folder.path())
        .status();
    assert!(
        status.expect("unshare").success(),
        "with a small disk; `unshare -Urm` must work here"
    );
    None
}
