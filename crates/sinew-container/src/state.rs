//! Files of a run on the host, which the next run finds if this one is killed.

use sinew_jail::cgroup::is_orphan;
use sinew_sandbox::SandboxError;
use std::fs;
use std::path::{Path, PathBuf};

/// True if the process of a tag still runs; names that are not tags are of none.
pub(crate) fn alive(tag: &str) -> bool {
    let numbers = tag.split('-').filter(|part| part.parse::<u64>().is_ok());
    numbers.count() == 2 && !is_orphan(tag)
}

/// Error of a file or a request.
pub(crate) fn io(operation: impl Into<String>, e: impl std::fmt::Display) -> SandboxError {
    SandboxError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// A folder of this process, removed on drop. The next run removes it if that fails.
#[derive(Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Makes the folder, and those above it, readable by only the owner.
    pub(crate) fn new(path: PathBuf) -> Result<Self, SandboxError> {
        use std::os::unix::fs::DirBuilderExt;
        let mut builder = fs::DirBuilder::new();
        let made = builder.mode(0o700).recursive(true).create(&path);
        made.map_err(|e| io(format!("make {}", path.display()), e))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // The next run finds the remains.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Folders of runs below `base` whose processes are gone.
pub(crate) fn orphans(base: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let dead = |e: &fs::DirEntry| {
        let name = e.file_name();
        let tag = name
            .to_str()
            .map(|n| n.rsplit_once('.').map_or(n, |(tag, _)| tag));
        tag.is_some_and(|t| !alive(t))
    };
    entries.filter(dead).map(|e| e.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use sinew_jail::cgroup::run_tag;

    #[test]
    fn a_tag_names_one_process() {
        let own = run_tag(std::process::id());
        assert!(alive(&own));
        assert!(!alive(&format!("{}-1", std::process::id())));
        assert!(!alive("x") && !alive(""));
    }

    #[test]
    fn only_folders_of_the_dead_are_orphans() {
        let dir = tempfile::tempdir().unwrap();
        let own = run_tag(std::process::id());
        for name in [format!("{own}.0"), "1-1.0".into()] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        assert_eq!(orphans(dir.path()), [dir.path().join("1-1.0")]);
    }
}
