//! Install folders of `pip`: models that come as Python packages are found in the active environment.
//!
//! Only names of folders are read. No Python is started, and nothing is installed.

use std::path::{Path, PathBuf};

/// Folders of installed packages: of the active environment, of the one that this program was installed
/// into, of the first `python3` on the path, and the user's own.
pub(crate) fn package_dirs() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].map(std::env::var_os);
    let mut prefixes: Vec<PathBuf> = named.into_iter().flatten().map(PathBuf::from).collect();
    prefixes.extend(std::env::current_exe().ok().and_then(|exe| above(&exe)));
    if let Some(search) = std::env::var_os("PATH") {
        let programs = std::env::split_paths(&search).map(|dir| dir.join("python3"));
        prefixes.extend(
            programs
                .into_iter()
                .find(|p| p.exists())
                .and_then(|p| above(&p)),
        );
    }
    if let Some(home) = std::env::var_os("HOME") {
        prefixes.push(Path::new(&home).join(".local"));
    }
    below(&prefixes)
}

/// `PREFIX` of `PREFIX/bin/program`; Debian's `pip` installs for `/usr` below `/usr/local`.
fn above(program: &Path) -> Option<PathBuf> {
    let prefix = program.parent()?.parent()?;
    if prefix == Path::new("/usr") || prefix == Path::new("/") {
        Some("/usr/local".into())
    } else {
        Some(prefix.to_owned())
    }
}

/// The folders of packages below installation prefixes, each once, in the order of the prefixes: the first
/// package of a name wins.
fn below(prefixes: &[PathBuf]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for prefix in prefixes {
        let Ok(entries) = prefix.join("lib").read_dir() else {
            continue;
        };
        let mut versions: Vec<PathBuf> = entries
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| {
                p.file_name()
                    .is_some_and(|n| n.to_string_lossy().starts_with("python3"))
            })
            .collect();
        versions.sort();
        for version in versions {
            let folders = ["site-packages", "dist-packages"].map(|name| version.join(name));
            found.extend(folders.into_iter().filter(|dir| dir.is_dir()));
        }
    }
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|dir| seen.insert(dir.clone()));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_of_each_prefix_are_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let prefix = |name: &str| dir.path().join(name);
        for folder in [
            "venv/lib/python3.13/site-packages",
            "local/lib/python3.11/dist-packages",
            "local/lib/other/site-packages",
        ] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        let prefixes = [
            prefix("venv"),
            prefix("none"),
            prefix("local"),
            prefix("venv"),
        ];
        let expected = [
            prefix("venv/lib/python3.13/site-packages"),
            prefix("local/lib/python3.11/dist-packages"),
        ];
        assert_eq!(below(&prefixes), expected);
        assert_eq!(
            above(Path::new("/a/venv/bin/sinew")),
            Some("/a/venv".into())
        );
        assert_eq!(
            above(Path::new("/usr/bin/python3")),
            Some("/usr/local".into())
        );
    }
}
