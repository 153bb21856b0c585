//! Snapshots of work folders as OCI images with one layer, so that other tools can copy, store and inspect
//! them.
//!
//! The layer is the tar file that a sandbox exports (sorted names, no owners, no times). Its SHA-256
//! identifies the files. Manifest and configuration depend only on the layer and the architecture. Equal
//! files give equal bytes at all sandbox levels.

use crate::documents::{self, hex};
use crate::source::Source;
use crate::{ImageError, UnpackLimits, io_error};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Media type of the layer.
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Media type of the configuration.
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// Media type of the manifest.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A snapshot read from an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotArchive {
    /// `sha256:` and 64 hexadecimal digits: the hash of `tar`.
    pub digest: String,
    /// Tar file in the format that sandboxes export and import.
    pub tar: Vec<u8>,
}

/// Digest of an exported tar file: `sha256:` and 64 hexadecimal digits.
pub fn snapshot_digest(tar: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(tar)))
}

/// Files of an OCI layout by name (OCI image specification 1.1, image layout).
fn layout(tar: &[u8]) -> Vec<(String, Vec<u8>)> {
    let (os, architecture) = documents::machine();
    let blob = |kind: &str, bytes: &[u8]| {
        let descriptor = json!({
            "mediaType": kind, "digest": snapshot_digest(bytes), "size": bytes.len(),
        });
        let name = format!("blobs/sha256/{}", hex(&Sha256::digest(bytes)));
        (descriptor, name)
    };
    let config = json!({
        "architecture": architecture, "os": os,
        "rootfs": { "type": "layers", "diff_ids": [snapshot_digest(tar)] },
    });
    let config = config.to_string().into_bytes();
    let (layer_descriptor, layer_name) = blob(LAYER, tar);
    let (config_descriptor, config_name) = blob(CONFIG, &config);
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": config_descriptor, "layers": [layer_descriptor],
    });
    let manifest = manifest.to_string().into_bytes();
    let (descriptor, manifest_name) = blob(MANIFEST, &manifest);
    let index = json!({ "schemaVersion": 2, "manifests": [descriptor] });
    let version = json!({ "imageLayoutVersion": "1.0.0" });
    let mut files = vec![
        ("oci-layout".into(), version.to_string().into_bytes()),
        ("index.json".into(), index.to_string().into_bytes()),
        (manifest_name, manifest),
        (config_name, config),
        (layer_name, tar.to_vec()),
    ];
    files.sort();
    files
}

/// Makes temporary files and folders with these rights, minus those of the umask.
fn named(mode: u32) -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.permissions(std::fs::Permissions::from_mode(mode));
    builder
}

/// Writes an exported tar file as an OCI layout: a tar file if `path` ends in `.tar`, which replaces the one
/// before, else a new folder. It is complete or absent. Returns the digest of the files.
///
/// # Errors
/// [`ImageError::Io`] if the path cannot be written, or the folder exists.
pub fn write_snapshot(tar: &[u8], path: &Path) -> Result<String, ImageError> {
    let failed = |e: std::io::Error| io_error(format!("write {}", path.display()), e);
    let files = layout(tar);
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    if path.extension().is_some_and(|e| e == "tar") {
        let new = named(0o666).tempfile_in(parent).map_err(failed)?;
        let mut builder = tar::Builder::new(new);
        for (name, content) in &files {
            let mut header = tar::Header::new_gnu();
            header.set_mode(0o644);
            header.set_size(content.len() as u64);
            let appended = builder.append_data(&mut header, name, content.as_slice());
            appended.map_err(failed)?;
        }
        let new = builder.into_inner().map_err(failed)?;
        new.as_file().sync_all().map_err(failed)?;
        new.persist(path).map_err(|e| failed(e.error))?;
    } else {
        // A rename replaces an empty folder.
        if path.exists() {
            return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
        }
        let new = named(0o777).tempdir_in(parent).map_err(failed)?;
        std::fs::create_dir_all(new.path().join("blobs/sha256")).map_err(failed)?;
        for (name, content) in &files {
            std::fs::write(new.path().join(name), content).map_err(failed)?;
        }
        std::fs::rename(new.path(), path).map_err(failed)?;
    }
    Ok(snapshot_digest(tar))
}

/// Reads a snapshot of at most `max_bytes` from a folder or tar file with an OCI layout. Checks the digest of
/// every blob.
///
/// # Errors
/// Returns an error if the image has not exactly one uncompressed layer, is damaged or too large.
pub fn read_snapshot(path: &Path, max_bytes: u64) -> Result<SnapshotArchive, ImageError> {
    let source = Source::open(path)?;
    let parts = documents::parts(&source, None, &UnpackLimits::default())?;
    let [layer] = parts.layers.as_slice() else {
        return Err(ImageError::Unsupported {
            what: format!("a snapshot of {} layers", parts.layers.len()),
            allowed: "one layer, a plain tar file",
        });
    };
    let (reader, _) = source.reader(&layer.name)?;
    let mut tar = Vec::new();
    let read = reader.take(max_bytes + 1).read_to_end(&mut tar);
    read.map_err(|e| io_error(format!("read {}", layer.name), e))?;
    if tar.len() as u64 > max_bytes {
        return Err(ImageError::Limit {
            what: "bytes",
            limit: max_bytes,
        });
    }
    let digest = snapshot_digest(&tar);
    if digest != layer.content {
        return Err(ImageError::Digest {
            blob: layer.name.clone(),
            expected: layer.content.clone(),
            found: digest,
        });
    }
    Ok(SnapshotArchive { digest, tar })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_can_be_read_from_folder_and_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let tar = b"any bytes are a layer here".as_slice();
        let (dir, file) = (folder.path().join("s"), folder.path().join("s.tar"));
        let digest = write_snapshot(tar, &dir).expect("written");
        assert_eq!(write_snapshot(tar, &file).expect("written"), digest);
        let bytes = std::fs::read(&file).expect("a file");
        write_snapshot(tar, &file).expect("written");
        assert_eq!(std::fs::read(&file).expect("a file"), bytes);
        for path in [&dir, &file] {
            let read = read_snapshot(path, 100).expect("read");
            assert_eq!((read.digest.as_str(), read.tar.as_slice()), (&*digest, tar));
        }
        assert!(matches!(
            read_snapshot(&dir, 5),
            Err(ImageError::Limit { limit: 5, .. })
        ));
        assert!(write_snapshot(tar, &dir).is_err(), "nothing is replaced");
        let hash = digest.trim_start_matches("sha256:");
        std::fs::write(dir.join("blobs/sha256").join(hash), b"other bytes").expect("written");
        assert!(matches!(
            read_snapshot(&dir, 100),
            Err(ImageError::Digest { .. })
        ));
    }
}
