//! Image of machines: a kernel and a root, made by `scripts/microvm_image.py`, and the
//! guest agent that is added here.

use crate::cpio::{Entry, archive};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A kernel and a root.
#[derive(Clone, Debug)]
pub struct Image {
    /// Folder of its files.
    pub folder: PathBuf,
    /// Version of the kernel's package.
    pub kernel: String,
    /// Version of the interpreter.
    pub python: String,
    /// Names its content and the agent's.
    pub key: String,
    hashes: BTreeMap<String, String>,
}

/// `manifest.json` next to the files.
#[derive(Debug, Deserialize)]
struct Manifest {
    kernel: String,
    python: String,
    sha256: BTreeMap<String, String>,
}

/// Reasons why there is nothing to boot.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// None was made for this machine.
    #[error("no image in {folder}: {problem}; run scripts/microvm_image.py {folder}")]
    Missing {
        /// Folder that was looked into.
        folder: String,
        /// Error of the system.
        problem: String,
    },
    /// A file does not match the manifest.
    #[error(
        "{path} is not what manifest.json says: remove its folder and run scripts/microvm_image.py again"
    )]
    Changed {
        /// The file.
        path: String,
    },
}

/// Runs first inside: modules for the channel to the host, a group that holds what programs use,
/// then the agent, which stays. Nothing of the root can be written from then on.
const INIT: &str = "#!/bin/sh
mount -t devtmpfs none /dev
for module in /lib/boot-modules/*; do insmod $module 2>/dev/null; done
mount -t cgroup2 none /agent/group
echo '+memory +pids' > /agent/group/cgroup.subtree_control
mkdir /agent/group/programs /agent/group/waiting
mount -o remount,ro /
exec /agent/agent machine PORT
";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A short name of content.
pub(crate) fn key_of(parts: &[&[u8]]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize()[..12])
}

impl Image {
    /// Finds the newest image below `folder`.
    ///
    /// # Errors
    /// [`ImageError::Missing`].
    pub fn find(folder: &Path) -> Result<Self, ImageError> {
        let missing = |problem: String| ImageError::Missing {
            folder: folder.display().to_string(),
            problem,
        };
        let entries = std::fs::read_dir(folder).map_err(|e| missing(e.to_string()))?;
        let made = entries.flatten().filter_map(|entry| {
            let path = entry.path().join("manifest.json");
            let at = path.metadata().and_then(|m| m.modified()).ok()?;
            Some((at, path))
        });
        let found = made.max().map(|(_, path)| path);
        let path = found.ok_or_else(|| missing("no manifest.json below it".into()))?;
        let bytes = std::fs::read(&path).map_err(|e| missing(e.to_string()))?;
        let manifest: Manifest = serde_json::from_slice(&bytes)
            .map_err(|e| missing(format!("{}: {e}", path.display())))?;
        let folder = path.parent().unwrap_or(folder);
        let folder = folder.canonicalize().map_err(|e| missing(e.to_string()))?;
        Ok(Self {
            folder,
            kernel: manifest.kernel,
            python: manifest.python,
            key: key_of(&[&bytes, sinew_sandbox::guest::AGENT, INIT.as_bytes()]),
            hashes: manifest.sha256,
        })
    }

    /// One of its files.
    ///
    /// # Errors
    /// [`ImageError`] if it is missing or does not match the manifest.
    pub fn read(&self, name: &str) -> Result<Vec<u8>, ImageError> {
        let path = self.folder.join(name);
        let bytes = std::fs::read(&path).map_err(|e| ImageError::Missing {
            folder: self.folder.display().to_string(),
            problem: format!("{name}: {e}"),
        })?;
        if self.hashes.get(name) != Some(&hex(&Sha256::digest(&bytes))) {
            let path = path.display().to_string();
            return Err(ImageError::Changed { path });
        }
        Ok(bytes)
    }

    /// The root with the agent, which opens this port.
    ///
    /// # Errors
    /// Same as [`Image::read`].
    pub fn root(&self, port: &str) -> Result<Vec<u8>, ImageError> {
        let mut root = self.read("root.cpio")?;
        let init = INIT.replace("PORT", port);
        let folder = |path| Entry {
            path,
            mode: 0o040_700,
            content: b"",
        };
        let program = |path, content| Entry {
            path,
            mode: 0o100_500,
            content,
        };
        root.extend(archive(&[
            folder("agent"),
            folder("agent/group"),
            program("agent/agent", sinew_sandbox::guest::AGENT),
            program("init", init.as_bytes()),
        ]));
        Ok(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_file_is_refused() {
        let folder = tempfile::tempdir().expect("folder");
        let missing = Image::find(folder.path()).expect_err("nothing there");
        assert!(missing.to_string().contains("scripts/microvm_image.py"));
        let inside = folder.path().join("key");
        std::fs::create_dir(&inside).expect("folder");
        std::fs::write(inside.join("root.cpio"), b"root").expect("write");
        let hash = hex(&Sha256::digest(b"root"));
        let manifest =
            format!(r#"{{"kernel":"k","python":"3","sha256":{{"root.cpio":"{hash}"}}}}"#);
        std::fs::write(inside.join("manifest.json"), manifest).expect("write");
        let image = Image::find(folder.path()).expect("an image");
        assert_eq!(image.read("root.cpio").expect("read"), b"root");
        let root = image.root("/dev/vport0p1").expect("root");
        let shown = String::from_utf8_lossy(&root);
        assert!(shown.contains("machine /dev/vport0p1"));
        std::fs::write(inside.join("root.cpio"), b"toor").expect("write");
        assert!(matches!(
            image.read("root.cpio"),
            Err(ImageError::Changed { .. })
        ));
        assert!(matches!(
            image.read("vmlinuz"),
            Err(ImageError::Missing { .. })
        ));
    }
}
