//! Folders of the host that sandboxes see, read-only: `sandbox.volumes`, `--volume` of a server.
//!
//! A volume stands at `/volumes/NAME`, where nothing of an image or of the system is, and only the folder
//! itself is shown: nothing that is mounted below it, and links in it are followed in the sandbox's own root.
//! Files that reach the host through a read-only mount are refused: sockets, on which programs of the host
//! listen, and pipes.

use crate::levels::error::LevelError;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Folder inside below which volumes stand.
const INSIDE: &str = "/volumes";
/// Maximum number of volumes: each is a mount of every sandbox.
const MAX_VOLUMES: usize = 16;
/// Maximum characters of a name.
const MAX_NAME: usize = 64;
/// Maximum entries of all volumes together, which are examined before the first sandbox.
const MAX_ENTRIES: usize = 1_000_000;
/// Folders of which nothing is shown, above or below: kernel, devices, keys and sockets of the host.
const CLOSED: [&str; 7] = [
    "/proc",
    "/sys",
    "/dev",
    "/run",
    "/etc",
    "/boot",
    "/var/lib/docker",
];
/// Folders that are not shown themselves, nor what is above them: homes of users.
const HOMES: [&str; 2] = ["/root", "/home"];

/// Volumes as `--volume NAME=FOLDER` names them.
///
/// # Errors
/// If an argument is none, or two have the same name.
pub fn parse(arguments: &[String]) -> Result<BTreeMap<String, PathBuf>, LevelError> {
    let mut volumes = BTreeMap::new();
    for argument in arguments {
        let wrong = |why: &str| {
            LevelError::input(format!(
                "--volume {argument:?}: {why}; allowed: NAME=FOLDER"
            ))
        };
        let (name, folder) = argument
            .split_once('=')
            .ok_or_else(|| wrong("it has no ="))?;
        if volumes
            .insert(name.to_owned(), PathBuf::from(folder))
            .is_some()
        {
            return Err(wrong("the name is there twice"));
        }
    }
    Ok(volumes)
}

/// Paths of volumes on the host, without links, and their paths inside.
///
/// # Errors
/// If there are too many, a name or a folder is not allowed, or a folder has a socket or a pipe.
pub fn volumes(volumes: &BTreeMap<String, PathBuf>) -> Result<Vec<(PathBuf, PathBuf)>, LevelError> {
    if volumes.len() > MAX_VOLUMES {
        let count = volumes.len();
        return Err(LevelError::input(format!(
            "sandbox.volumes: {count} volumes; allowed: at most {MAX_VOLUMES}"
        )));
    }
    let mut left = MAX_ENTRIES;
    let mut shown = Vec::new();
    for (name, folder) in volumes {
        let wrong =
            |why: String| LevelError::input(format!("sandbox.volumes.{name} = {folder:?}: {why}"));
        let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(plain) {
            let allowed =
                format!("allowed for its name: 1 to {MAX_NAME} of a-z, A-Z, 0-9, - and _");
            return Err(wrong(allowed));
        }
        let source = folder.canonicalize().map_err(|e| wrong(e.to_string()))?;
        if !source.is_dir() {
            return Err(wrong("it is no folder".into()));
        }
        refuse_host(&source).map_err(wrong)?;
        plain_files(&source, &mut left).map_err(wrong)?;
        shown.push((source, Path::new(INSIDE).join(name)));
    }
    Ok(shown)
}

/// Refuses folders of the host's own.
fn refuse_host(source: &Path) -> Result<(), String> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let homes = HOMES.iter().map(PathBuf::from).chain(home);
    let mut closed = CLOSED.iter().map(Path::new);
    if let Some(closed) = closed.find(|c| source.starts_with(c) || c.starts_with(source)) {
        return Err(format!(
            "it is, or has in it, {}, which is the host's; name a folder of data",
            closed.display()
        ));
    }
    match homes
        .filter(|h| h.is_absolute())
        .find(|h| h.starts_with(source))
    {
        None => Ok(()),
        Some(home) => Err(format!(
            "it is, or has in it, the home {}; name a folder of data",
            home.display()
        )),
    }
}

/// Refuses a folder with sockets or pipes. `left` is the number of entries that may come.
fn plain_files(source: &Path, left: &mut usize) -> Result<(), String> {
    let mut folders = vec![source.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let unread = |e: std::io::Error| format!("{}: {e}", folder.display());
        for entry in fs::read_dir(&folder).map_err(unread)? {
            let entry = entry.map_err(unread)?;
            let kind = entry.file_type().map_err(unread)?;
            *left = left.checked_sub(1).ok_or_else(|| {
                format!(
                    "more than {MAX_ENTRIES} files and folders in all volumes; pack them into fewer"
                )
            })?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_socket() || kind.is_fifo() {
                let path = entry.path();
                return Err(format!(
                    "{} is a socket or a pipe, through which code inside would reach programs of the host",
                    path.display()
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(name: &str, folder: &Path) -> Result<Vec<(PathBuf, PathBuf)>, String> {
        let one = BTreeMap::from([(name.to_owned(), folder.to_path_buf())]);
        volumes(&one).map_err(|e| e.to_string())
    }

    #[test]
    fn a_folder_of_data_is_shown_under_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().canonicalize().unwrap();
        fs::create_dir(own.join("data")).unwrap();
        std::os::unix::fs::symlink(own.join("data"), own.join("link")).unwrap();
        let shown = vec![(own.join("data"), PathBuf::from("/volumes/books"))];
        assert_eq!(one("books", &own.join("data")).unwrap(), shown);
        assert_eq!(one("books", &own.join("link")).unwrap(), shown);
        let parsed = parse(&["a=/x".into(), "b=/y=z".into()]).unwrap();
        assert_eq!(parsed["b"], PathBuf::from("/y=z"));
    }

    #[test]
    fn folders_of_the_host_and_ways_out_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path();
        for (path, why) in [
            ("/", "the host's"),
            ("/proc/self", "the host's"),
            ("/etc", "the host's"),
            ("/var/../dev", "the host's"),
            ("/root", "the home"),
            ("/missing", "No such file"),
            ("/bin/sh", "no folder"),
        ] {
            let error = one("x", Path::new(path)).unwrap_err();
            assert!(error.contains(why), "{path}: {error}");
        }
        for name in ["", "a/b", "..", "a b", &"a".repeat(65)] {
            assert!(
                one(name, own).unwrap_err().contains("allowed for its name"),
                "{name}"
            );
        }
        fs::create_dir(own.join("deep")).unwrap();
        let _listening = std::os::unix::net::UnixListener::bind(own.join("deep/s")).unwrap();
        assert!(one("x", own).unwrap_err().contains("deep/s is a socket"));
        let many = (0..17)
            .map(|n| (n.to_string(), own.to_path_buf()))
            .collect();
        assert!(
            volumes(&many)
                .unwrap_err()
                .to_string()
                .contains("at most 16")
        );
        for wrong in [&["a".to_owned()][..], &["a=/x".into(), "a=/y".into()]] {
            assert!(
                parse(wrong)
                    .unwrap_err()
                    .to_string()
                    .contains("NAME=FOLDER")
            );
        }
    }
}
