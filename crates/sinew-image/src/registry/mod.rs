//! Images of registries, pulled into the cache of unpacked images.
//!
//! An image is pulled once a host: the process that holds the lock `ID-pull.lock` of the cache writes an OCI
//! layout `ID-pull.partial`, unpacks it and removes it, while others wait; ID is that of the image. A layout
//! that a killed process left is continued. A name with a digest whose image is in the cache makes no request
//! at all; one with a tag requests only the manifest.

mod client;
mod credentials;
mod reference;

pub use credentials::Credentials;
pub use reference::is_registry;

use crate::cache::{self, Image};
use crate::documents::{self, Descriptor};
use crate::source::Source;
use crate::{ImageError, UnpackLimits, io_error};
use client::Client;
use reference::Reference;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Limits of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullLimits {
    /// Limits of the image. Its bytes bound the compressed layers together, too.
    pub unpack: UnpackLimits,
    /// Time limit of a pull, including the wait for another process that pulls the same image.
    pub time: Duration,
    /// Time without a byte after which a request is repeated.
    pub stall: Duration,
    /// Number of times that a request is repeated.
    pub retries: u32,
    /// First pause before a request is repeated. Each further one is twice as long, at most 30 s.
    pub pause: Duration,
}

impl Default for PullLimits {
    fn default() -> Self {
        Self {
            unpack: UnpackLimits::default(),
            time: Duration::from_secs(3600),
            stall: Duration::from_secs(60),
            retries: 5,
            pause: Duration::from_millis(500),
        }
    }
}

/// The documents of an image.
struct Documents {
    /// Descriptor of the manifest, for the layout's index.
    manifest: Descriptor,
    /// The manifest.
    bytes: Vec<u8>,
    /// Descriptor of the configuration.
    config: Descriptor,
}

/// Returns the image `registry:HOST/NAME:TAG` (or `@sha256:DIGEST`) of `cache`, and pulls and unpacks it if
/// it is not there. This blocks, and may be called from a thread of an async runtime.
///
/// # Errors
/// [`ImageError::Reference`] for a name that is none, [`ImageError::Missing`], [`ImageError::Unauthorized`]
/// and [`ImageError::Unreachable`] for errors of the registry, [`ImageError::Platform`] if it has none for
/// this machine, [`ImageError::Digest`] if a document or a layer does not match its digest, and those of
/// [`crate::unpack`].
pub fn pull(
    image: &str,
    cache: &Path,
    credentials: &Credentials,
    limits: &PullLimits,
) -> Result<Image, ImageError> {
    let reference = Reference::parse(image)?;
    // A blocking HTTP client must not be used on a thread of a runtime.
    std::thread::scope(|scope| {
        let pulled = scope
            .spawn(|| pull_here(&reference, cache, credentials, limits))
            .join();
        pulled.unwrap_or_else(|_| Err(io_error("pull", "the pull panicked")))
    })
}

/// [`pull`] on a separate thread.
///
/// The lock is that of the image and not of its name: two names of one image wait for each other, and two
/// images under one tag do not. Files that are searched before the lock are searched again under it.
fn pull_here(
    reference: &Reference,
    cache: &Path,
    credentials: &Credentials,
    limits: &PullLimits,
) -> Result<Image, ImageError> {
    let deadline = Instant::now() + limits.time;
    let cache = &cache::prepare(cache)?;
    if let Some(image) = reference
        .digest()
        .and_then(|digest| remembered(cache, digest))
    {
        return Ok(image);
    }
    let login = credentials.login(&reference.host)?;
    let client = Client::new(reference, login, limits, deadline)?;
    let documents = documents(&client, reference)?;
    let id = documents::sha256(&documents.config.digest)?.to_owned();
    let image = match cache::get(cache, &id) {
        Some(image) => image,
        None => {
            let _lock = cache::lock_until(cache, &format!("{id}-pull"), deadline)?;
            match cache::get(cache, &id) {
                Some(image) => image,
                None => download(&client, cache, &id, &documents, limits)?,
            }
        }
    };
    if let Some(digest) = reference.digest() {
        remember(cache, digest, &image.id)?;
    }
    Ok(image)
}

/// File with the image that a digest of a registry names on this kind of machine.
fn memory(cache: &Path, digest: &str) -> Result<std::path::PathBuf, ImageError> {
    Ok(cache.join(format!("{}.pulled", documents::sha256(digest)?)))
}

/// The image of a digest that was pulled before.
fn remembered(cache: &Path, digest: &str) -> Option<Image> {
    let id = fs::read_to_string(memory(cache, digest).ok()?).ok()?;
    documents::sha256(&format!("sha256:{id}")).ok()?;
    cache::get(cache, &id)
}

/// Stores the image id of a digest. Concurrent processes write the same.
fn remember(cache: &Path, digest: &str, id: &str) -> Result<(), ImageError> {
    let path = memory(cache, digest)?;
    let new = path.with_extension(format!("{}.new", std::process::id()));
    let written = fs::write(&new, id).and_then(|()| fs::rename(&new, &path));
    written.map_err(|e| io_error(path.display().to_string(), e))
}

/// Finds the manifest for this machine: the one that is named, or one of the index that is.
///
/// A digest in the name is that of the named document, so it holds for an index, too, and through the digests
/// in it for everything below. A tag is resolved by the registry.
///
/// # Errors
/// If the registry answers with an error, with a document of another digest than requested, or with an index
/// without an image for this machine.
fn documents(client: &Client<'_>, reference: &Reference) -> Result<Documents, ImageError> {
    let (bytes, kind) = client.manifest(&reference.target)?;
    let mut descriptor = documents::describe(&bytes, &kind)?;
    if let Some(wanted) = reference.digest()
        && wanted != descriptor.digest
    {
        return Err(ImageError::Digest {
            blob: format!("the manifest of {reference}"),
            expected: wanted.into(),
            found: descriptor.digest,
        });
    }
    let mut bytes = bytes;
    for _ in 0..documents::MAX_DEPTH {
        if !descriptor.is_index() {
            let config = documents::config_of(&bytes)?;
            return Ok(Documents {
                manifest: descriptor,
                bytes,
                config,
            });
        }
        let next = documents::choose(&bytes)?;
        (bytes, _) = client.manifest(&next.digest)?;
        documents::check(&next, &bytes)?;
        descriptor = next;
    }
    Err(ImageError::Limit {
        what: "indexes within each other",
        limit: documents::MAX_DEPTH as u64,
    })
}

/// Downloads an image as an OCI layout and unpacks it. The caller holds its lock.
///
/// Layers are written to disk before they are unpacked, and not unpacked from the connection: a connection
/// that breaks late in a layer would throw away the whole root, and a forged layer would have been unpacked
/// before its digest is known.
fn download(
    client: &Client<'_>,
    cache: &Path,
    id: &str,
    documents: &Documents,
    limits: &PullLimits,
) -> Result<Image, ImageError> {
    let folder = cache.join(format!("{id}-pull.partial"));
    let image = fill(client, &folder, documents, limits)
        .and_then(|()| crate::unpack(&folder, cache, &limits.unpack));
    // Downloaded parts are kept for the next attempt after an error of the network.
    if !matches!(image, Err(ImageError::Unreachable { .. })) {
        let removed = fs::remove_dir_all(&folder);
        if image.is_ok() {
            removed.map_err(|e| io_error(folder.display().to_string(), e))?;
        }
    }
    image
}

/// Writes the layout: what the manifest names, each blob under its digest.
///
/// # Errors
/// If the registry answers with an error, a blob does not match its digest, or there are more bytes than the
/// limit.
fn fill(
    client: &Client<'_>,
    folder: &Path,
    documents: &Documents,
    limits: &PullLimits,
) -> Result<(), ImageError> {
    let at = |e: std::io::Error| io_error(folder.display().to_string(), e);
    let blobs = folder.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(at)?;
    let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).map_err(at);
    write("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let index = json!({ "schemaVersion": 2, "manifests": [documents.manifest] });
    write("index.json", index.to_string().as_bytes())?;
    write(
        &documents::blob_name(&documents.manifest.digest)?,
        &documents.bytes,
    )?;
    let config = client.document(&documents.config.digest)?;
    documents::check(&documents.config, &config)?;
    write(&documents::blob_name(&documents.config.digest)?, &config)?;
    let parts = documents::parts(&Source::open(folder)?, None, &limits.unpack)?;
    let layers: Vec<_> = parts
        .layers
        .into_iter()
        .filter_map(|l| Some((l.name, l.blob?)))
        .collect();
    let bytes = layers
        .iter()
        .fold(0_u64, |sum, (_, (_, size))| sum.saturating_add(*size));
    if bytes > limits.unpack.bytes {
        return Err(ImageError::Limit {
            what: "bytes in its compressed layers",
            limit: limits.unpack.bytes,
        });
    }
    for (name, (digest, size)) in layers {
        let path = folder.join(name);
        // Files have their names only after their digest was checked; unpacking checks it again.
        if fs::metadata(&path).is_ok_and(|m| m.len() == size) {
            continue;
        }
        client.blob(&digest, size, &path)?;
    }
    Ok(())
}
