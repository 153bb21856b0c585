//! Folders and files that only their user can read: traces hold texts of agents and users, and journals hold
//! the keys of rollouts.

use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Makes a folder, and those above it, only for its user. One that is there is left as it is.
///
/// # Errors
/// An error of the file system.
pub fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Options with which a file is made only for its user.
pub fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Makes a file private that another library made: SQLite gives its permissions to its logs.
pub(crate) fn restrict(path: &Path) -> io::Result<()> {
    std::fs::set_permissions(path, Permissions::from_mode(0o600))
}
