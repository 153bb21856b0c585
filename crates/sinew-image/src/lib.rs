//! Images as root file systems of sandboxes: OCI layouts, archives of `docker save` and images of registries,
//! unpacked once.
//!
//! An image is a folder with an OCI image layout, a tar file of one, or a tar file of `docker save` (OCI
//! image specification 1.1, Docker image specification 1.2). [`unpack`] applies its layers to a folder of a
//! cache, named by the digest of the image's configuration. [`pull`] gets an image from a registry (OCI
//! distribution specification 1.1) and unpacks it likewise.
//!
//! Invariants:
//! - Every blob and every layer's content has the digest that identifies it.
//! - No archive can read or change a file outside of the new root. Folders are opened by `openat2` with
//!   `RESOLVE_IN_ROOT`, and a link at the end of a path is not followed.
//! - Devices, set-user bits and extended attributes of archives are dropped; owners as well, unless root
//!   unpacks.
//! - Bytes, entries, depth and compression ratio are limited.
//! - A password goes to the host that it is for, over HTTPS or on loopback.
//! - An entry of the cache is complete or absent, also after `kill -9`.

pub mod build;
mod cache;
mod documents;
mod layer;
mod registry;
mod snapshot;
mod source;

pub use cache::{Image, unpack, unpack_root};
pub use documents::ImageConfig;
pub use registry::{Credentials, PullLimits, is_registry, pull};
pub use snapshot::{SnapshotArchive, read_snapshot, snapshot_digest, write_snapshot};

use std::path::{Path, PathBuf};

/// Limits of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes of the files of all layers.
    pub bytes: u64,
    /// Entries of all layers.
    pub entries: u64,
    /// Number of layers.
    pub layers: usize,
    /// Decompressed bytes per compressed byte of a layer, checked above 64 MiB.
    pub ratio: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self {
            bytes: 16 << 30,
            entries: 1_000_000,
            layers: 128,
            ratio: 200,
        }
    }
}

/// Reason why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The path is missing or not an image.
    #[error(
        "{path} is no image: {reason}; allowed: a folder with an OCI layout (oci-layout, index.json, blobs), \
         a tar file of one, or a tar file that `docker save` wrote"
    )]
    NotAnImage {
        /// Path of the image.
        path: String,
        /// Description of the problem.
        reason: String,
    },
    /// The tag is missing or ambiguous.
    #[error("{path} has no image {tag:?}; it has: {tags}; append one of them after a colon")]
    Tag {
        /// Path of the image.
        path: String,
        /// Requested tag. Empty: none.
        tag: String,
        /// Available tags.
        tags: String,
    },
    /// The image is for another platform.
    #[error("the image is made for {found}, this machine is {wanted}")]
    Platform {
        /// Operating system and architecture of this machine.
        wanted: String,
        /// Platforms of the image.
        found: String,
    },
    /// The image uses an unsupported feature.
    #[error("{what} is not supported: {allowed}")]
    Unsupported {
        /// The feature.
        what: String,
        /// Supported alternatives.
        allowed: &'static str,
    },
    /// The digest of a blob differs from the image's.
    #[error("{blob} has {found}, its image says {expected}: the image is damaged or forged")]
    Digest {
        /// Name of the blob.
        blob: String,
        /// Digest in the image.
        expected: String,
        /// Digest of the blob.
        found: String,
    },
    /// An entry of a layer is invalid.
    #[error("layer {layer}, entry {entry:?}: {reason}")]
    Entry {
        /// Number of the layer, from 1.
        layer: usize,
        /// Name of the entry.
        entry: String,
        /// Description of the problem.
        reason: String,
    },
    /// The image exceeds a limit.
    #[error("the image has more than {limit} {what}")]
    Limit {
        /// The counted quantity.
        what: &'static str,
        /// The maximum.
        limit: u64,
    },
    /// A document is invalid.
    #[error("{document}: {reason}")]
    Document {
        /// Name of the document.
        document: String,
        /// Description of the problem.
        reason: String,
    },
    /// The image does not contain a program.
    #[error("the image has no program {name:?} in {path}")]
    NoProgram {
        /// Name of the program.
        name: String,
        /// Searched folders.
        path: String,
    },
    /// The name is none of an image in a registry.
    #[error(
        "image {text:?}: {reason}; allowed: registry:HOST/NAME:TAG, or @sha256:DIGEST instead of or after \
         :TAG; registry+http: for a registry that has no HTTPS"
    )]
    Reference {
        /// The name.
        text: String,
        /// The part that is wrong.
        reason: String,
    },
    /// The registry has no such image.
    #[error(
        "the registry has no image {image}, or shows it to other users only; check name, tag and credentials"
    )]
    Missing {
        /// Name of the image.
        image: String,
    },
    /// The registry does not let this user pull.
    #[error(
        "the registry does not let this user pull {image}: {reason}; set SINEW_REGISTRY_AUTH=\"{host}=USER:PASSWORD\", \
         or `docker login {host}`"
    )]
    Unauthorized {
        /// Name of the image.
        image: String,
        /// Host of the registry.
        host: String,
        /// Description of the problem.
        reason: String,
    },
    /// The registry cannot be reached, or is in trouble.
    #[error("registry {registry} cannot be reached: {reason}, after {attempts} attempts")]
    Unreachable {
        /// Host of the registry.
        registry: String,
        /// Description of the last failure.
        reason: String,
        /// Number of attempts.
        attempts: u32,
    },
    /// A system call failed.
    #[error("{operation}: {message}")]
    Io {
        /// The failed operation.
        operation: String,
        /// The error of the system.
        message: String,
    },
}

/// Adds the failed operation to an error.
pub(crate) fn io_error(operation: impl Into<String>, e: impl std::fmt::Display) -> ImageError {
    ImageError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// True if `path` must be unpacked: a file, or a folder with an OCI layout. Another folder may be a root.
pub fn is_packed(path: &Path) -> bool {
    split_tag(path).0.is_file() || split_tag(path).0.join("oci-layout").exists()
}

/// Splits `PATH:TAG`, unless a file has exactly that name.
pub(crate) fn split_tag(path: &Path) -> (PathBuf, Option<String>) {
    if !path.exists()
        && let Some(text) = path.to_str()
        && let Some((before, tag)) = text.rsplit_once(':')
        && Path::new(before).exists()
    {
        return (before.into(), Some(tag.into()));
    }
    (path.into(), None)
}
