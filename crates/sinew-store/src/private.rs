//! Folders and files that only their user can read, since traces contain texts of agents and users, and
//! journals contain the keys of rollouts.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Creates a folder and its parents, accessible only to the user. An existing folder stays unchanged.
///
/// # Errors
/// An error of the file system.
pub fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Options for creating a file that is accessible only to the user.
pub fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Makes a file private that another library created. SQLite uses its permissions for the log files too.
pub(crate) fn restrict(path: &Path) -> io::Result<()> {
    std::fs::set_permissions(path, Permissions::from_mode(0o600))
}
