//! Files that others read during a run.

use std::path::Path;

/// Writes a file so that a reader sees the old or the new content, never a part.
///
/// # Errors
/// If the file system fails.
pub(crate) fn replace(path: &Path, content: &str) -> std::io::Result<()> {
    let temporary = path.with_extension("new");
    std::fs::write(&temporary, content)?;
    std::fs::rename(&temporary, path)
}
