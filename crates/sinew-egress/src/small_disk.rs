//! Tests on a disk that gets full.

use std::path::PathBuf;

/// Bytes of the disk.
pub(crate) const SMALL_DISK: usize = 128 << 10;

/// The root of a small disk, in a run of the named test that this one starts; `None` in this one,
/// once that has passed.
pub(crate) fn small_disk(test: &str) -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("SINEW_SMALL_DISK") {
        return Some(folder.into());
    }
    let folder = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size={SMALL_DISK} tmpfs \"$SINEW_SMALL_DISK\" && exec \"$0\" --exact {test}"
    );
    let status = std::process::Command::new("unshare")
        .args(["-Urm", "sh", "-c", &script])
        .arg(std::env::current_exe().unwrap())
        .env("SINEW_SMALL_DISK", folder.path())
        .status();
    assert!(
        status.unwrap().success(),
        "with a small disk; `unshare -Urm` must work here"
    );
    None
}
