//! Images as roots of sandboxes: OCI layouts and what `docker save` writes, unpacked once.
//!
//! An image is a folder with an OCI image layout, a tar file of one, or a tar file of
//! `docker save` (OCI image specification 1.1; Docker image specification 1.2). [`unpack`] puts
//! its layers into a folder of a cache, named by the digest of the image's configuration.
//!
//! Invariants: every blob and every layer's content has the digest that names it; whatever an
//! archive says, nothing outside of the new root is read or changed (`openat2` with
//! `RESOLVE_IN_ROOT` for every folder, no link is followed at the end of a path); devices, set-user
//! bits, owners and extended attributes of archives are not kept; bytes, entries, depth and ratio
//! of compression are bounded; an entry of the cache is there as a whole or not at all, also after
//! `kill -9`.

mod cache;
mod documents;
mod heads;
mod layer;
mod snapshot;
mod source;

pub use cache::{Image, unpack, unpack_root};
pub use documents::ImageConfig;
pub use snapshot::{SnapshotArchive, read_snapshot, snapshot_digest, write_snapshot};

use std::path::{Path, PathBuf};

/// How much an image may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes of all files of all layers together.
    pub bytes: u64,
    /// Entries of all layers together.
    pub entries: u64,
    /// Layers.
    pub layers: usize,
    /// Bytes of a layer for each compressed byte, once it has more than 64 MiB.
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

/// Why there is no root.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Nothing is there, or something else.
    #[error(
        "{path} is no image: {reason}; allowed: a folder with an OCI layout (oci-layout, index.json, blobs), a tar file of one, or a tar file that `docker save` wrote"
    )]
    NotAnImage {
        /// What was given.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// It holds several images, or none of that name.
    #[error("{path} has no image {tag:?}; it has: {tags}; append one of them after a colon")]
    Tag {
        /// What was given.
        path: String,
        /// The tag that was asked for; empty if none.
        tag: String,
        /// Tags that there are.
        tags: String,
    },
    /// It was made for other machines.
    #[error("the image is made for {found}, this machine is {wanted}")]
    Platform {
        /// Operating system and architecture of this machine.
        wanted: String,
        /// What there is.
        found: String,
    },
    /// Something that only other programs can unpack.
    #[error("{what} is not supported: {allowed}")]
    Unsupported {
        /// What the image has.
        what: String,
        /// What is.
        allowed: &'static str,
    },
    /// A blob is not what its name says.
    #[error("{blob} has {found}, its image says {expected}: the image is damaged or forged")]
    Digest {
        /// The blob.
        blob: String,
        /// What the image says.
        expected: String,
        /// What it has.
        found: String,
    },
    /// A layer that cannot be applied.
    #[error("layer {layer}, entry {entry:?}: {reason}")]
    Entry {
        /// Number of the layer, from 1.
        layer: usize,
        /// Name of the entry.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// It is too large.
    #[error("the image has more than {limit} {what}")]
    Limit {
        /// What was counted.
        what: &'static str,
        /// The most that is allowed.
        limit: u64,
    },
    /// A document that cannot be read.
    #[error("{document}: {reason}")]
    Document {
        /// Which one.
        document: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A program that the image does not have.
    #[error("the image has no program {name:?} in {path}")]
    NoProgram {
        /// Its name.
        name: String,
        /// Folders that were looked into.
        path: String,
    },
    /// A system call failed.
    #[error("{operation}: {message}")]
    Io {
        /// What was done.
        operation: String,
        /// What the system said.
        message: String,
    },
}

pub(crate) fn io_error(operation: impl Into<String>, e: impl std::fmt::Display) -> ImageError {
    ImageError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// Whether a path that exists is to be unpacked: a file, or a folder with an OCI layout. Another
/// folder may be a root already.
pub fn is_packed(path: &Path) -> bool {
    split_tag(path).0.is_file() || split_tag(path).0.join("oci-layout").exists()
}

/// `PATH:TAG`, unless something has exactly that name.
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
