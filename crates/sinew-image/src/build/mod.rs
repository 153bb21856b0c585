//! Images from folders with a Dockerfile, and images of local engines, in the cache of unpacked images.
//!
//! [`build`] runs a builder that the host has (Podman, Buildah, Docker) and exports the result once. A build
//! is known by its key, a hash of the folder, of the arguments and of the ids of the base images; a known
//! key runs nothing. [`import`] exports an image that an engine's storage has.
//!
//! | part | files |
//! |---|---|
//! | decisions, pure | `context` (folder and base images), `command` (arguments of the programs) |
//! | programs | `engine` (real builders), `run` (time and output), `plain` (a small builder for tests) |
//! | results | `record` (builds of a cache) |
//!
//! A Dockerfile is run by its builder with the builder's own isolation, which is weaker than that of a
//! sandbox: build only what you would run.

mod command;
mod context;
mod engine;
mod plain;
mod record;
mod run;

pub use command::BuilderKind;
pub use engine::EngineBuilder;
pub use plain::PlainBuilder;
pub use record::{BuildRecord, find, list, remove};

use crate::cache::{self, Image};
use crate::documents::{self, hex};
use crate::{ImageError, UnpackLimits};
use sha2::{Digest, Sha256};
use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Network of the commands of a Dockerfile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BuildNetwork {
    /// None.
    None,
    /// That of this host.
    #[default]
    Host,
}

/// A build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuildRequest {
    /// Folder with the Dockerfile and the files that it copies.
    pub context: PathBuf,
    /// Path of the Dockerfile below the folder.
    pub dockerfile: String,
    /// Name under which the result can be found.
    pub tag: Option<String>,
    /// Build arguments (`ARG`).
    pub args: Vec<(String, String)>,
    /// Network of its commands.
    pub network: BuildNetwork,
    /// Maximum time of the build, and of the export.
    pub timeout: Duration,
    /// Last bytes of the builder's output that are kept.
    pub log_bytes: usize,
    /// Cache of unpacked images.
    pub cache: PathBuf,
    /// Limits of the result.
    pub limits: UnpackLimits,
    /// Whether the builder may fetch base images that its storage does not have.
    pub pull: bool,
}

impl BuildRequest {
    /// A build of `context` into `cache`, with 10 minutes, without arguments and without fetching.
    pub fn new(context: &Path, cache: &Path) -> Self {
        Self {
            context: context.into(),
            dockerfile: "Dockerfile".into(),
            tag: None,
            args: Vec::new(),
            network: BuildNetwork::default(),
            timeout: Duration::from_secs(600),
            log_bytes: 256 << 10,
            cache: cache.into(),
            limits: UnpackLimits::default(),
            pull: false,
        }
    }
}

/// Result of a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuiltImage {
    /// The image in the cache.
    pub image: Image,
    /// Hash that names the build.
    pub key: String,
    /// Name of the result.
    pub tag: Option<String>,
    /// Last output of the builder. Empty if nothing was run.
    pub log: String,
    /// True if the builder was run.
    pub fresh: bool,
}

/// Reason why an image cannot be built or imported.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The request makes no sense.
    #[error("{field} is {value}: {allowed}")]
    Request {
        /// Field at fault.
        field: &'static str,
        /// The value.
        value: String,
        /// Allowed values, and what to do.
        allowed: String,
    },
    /// No builder works here.
    #[error(
        "no builder of images works here: {tried}\n  hint: install podman, buildah or docker (Debian: \
         apt-get install podman)"
    )]
    NoBuilder {
        /// Each builder, and why not.
        tried: String,
    },
    /// A base image is missing, and must not be fetched.
    #[error(
        "{builder} has no base image {image}, and none is fetched\n  hint: load it into {builder} (load, import \
         or pull), or allow fetching (--pull)"
    )]
    NoBase {
        /// The builder.
        builder: String,
        /// Name of the base image.
        image: String,
    },
    /// The builder failed.
    #[error("{builder} {operation}: {reason}; its last output:\n{log}")]
    Failed {
        /// The builder.
        builder: String,
        /// The operation.
        operation: &'static str,
        /// Its end.
        reason: String,
        /// Last output.
        log: String,
    },
    /// The result cannot be unpacked, or the cache cannot be used.
    #[error(transparent)]
    Image(#[from] ImageError),
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
fn io_error(operation: impl Into<String>, e: impl std::fmt::Display) -> BuildError {
    BuildError::Io {
        operation: operation.into(),
        message: e.to_string(),
    }
}

/// A program that builds images from Dockerfiles and keeps them under names.
pub trait ImageBuilder: Send + Sync + Debug {
    /// Name for messages and records.
    fn name(&self) -> &'static str;

    /// Id of an image that its storage has; `None` if it has none of this name.
    ///
    /// # Errors
    /// If the builder cannot be asked.
    fn id(&self, image: &str) -> Result<Option<String>, BuildError>;

    /// Builds `request` under the name `tag`, and returns the last output.
    ///
    /// # Errors
    /// [`BuildError::Failed`] with the last output, also after [`BuildRequest::timeout`].
    fn build(&self, request: &BuildRequest, tag: &str) -> Result<String, BuildError>;

    /// Writes an image to a new file in the format of `docker save`.
    ///
    /// # Errors
    /// [`BuildError::Failed`] with the last output.
    fn save(&self, image: &str, file: &Path, timeout: Duration) -> Result<(), BuildError>;
}

/// Name of a build in the storage of its builder, if the request names none.
fn own_tag(key: &str) -> String {
    format!("localhost/sinew-build:{}", &key[..16])
}

/// Ids of base images, in the order of their names. `None`: one is not in the builder's storage.
fn base_ids(
    builder: &dyn ImageBuilder,
    bases: &[String],
    pull: bool,
) -> Result<Option<Vec<String>>, BuildError> {
    let (mut ids, mut all) = (Vec::new(), true);
    for image in bases {
        match builder.id(image)? {
            Some(id) => ids.push(format!("{image}={id}")),
            None if pull => all = false,
            None => {
                return Err(BuildError::NoBase {
                    builder: builder.name().into(),
                    image: image.clone(),
                });
            }
        }
    }
    Ok(all.then_some(ids))
}

/// Builds an image into the cache, or finds it there. Blocks.
///
/// # Errors
/// [`BuildError`] if the folder, the builder or the result is at fault.
pub fn build(request: &BuildRequest, builder: &dyn ImageBuilder) -> Result<BuiltImage, BuildError> {
    command::check(request)?;
    let begun = Instant::now();
    let context = context::read(request)?;
    let cache = cache::prepare(&request.cache)?;
    // Equal builds wait for the first one, which they then find.
    let name = format!("{}-build", context.hash);
    let _lock = cache::lock_until(&cache, &name, begun + request.timeout)?;
    let ids = base_ids(builder, &context.bases, request.pull)?;
    if let Some(ids) = &ids {
        let key = context.key(ids);
        if let Some(image) = record::known(&cache, &key) {
            if let Some(tag) = &request.tag {
                record::rename(&cache, &key, tag)?;
            }
            return Ok(BuiltImage {
                image,
                key,
                tag: request.tag.clone(),
                log: String::new(),
                fresh: false,
            });
        }
    }
    let tag = request
        .tag
        .clone()
        .unwrap_or_else(|| own_tag(&context.hash));
    let log = builder.build(request, &tag)?;
    let place = (cache.as_path(), name.as_str());
    let image = exported(builder, &tag, place, &request.limits, request.timeout)?;
    // Base images that were fetched have ids now.
    let ids = match ids {
        Some(ids) => ids,
        None => base_ids(builder, &context.bases, true)?.unwrap_or_default(),
    };
    let key = context.key(&ids);
    let record = BuildRecord {
        key: key.clone(),
        tag: request.tag.clone(),
        image_id: image.id.clone(),
        builder: builder.name().into(),
        context: request.context.display().to_string(),
        bytes: image.bytes,
        made_s: record::now_s(),
    };
    record::write(&cache, &record)?;
    Ok(BuiltImage {
        image,
        key,
        tag: request.tag.clone(),
        log,
        fresh: true,
    })
}

/// Exports an image of a builder's storage into the cache, once for each id. Blocks.
///
/// # Errors
/// [`BuildError::NoBase`] if the storage has no such image; it is never fetched.
pub fn import_from(
    builder: &dyn ImageBuilder,
    name: &str,
    cache: &Path,
    limits: &UnpackLimits,
    timeout: Duration,
) -> Result<Image, BuildError> {
    command::check_name("image", name)?;
    let id = builder.id(name)?.ok_or_else(|| BuildError::NoBase {
        builder: builder.name().into(),
        image: name.into(),
    })?;
    let cache = cache::prepare(cache)?;
    // Docker's and Podman's id of an image is the hash of its configuration, as the cache's is.
    let known = || {
        let id = documents::sha256(&id).unwrap_or(&id);
        documents::sha256(&format!("sha256:{id}")).ok()?;
        cache::get(&cache, id)
    };
    if let Some(image) = known() {
        return Ok(image);
    }
    let lock = format!("{}-import", hex(&Sha256::digest(&id)));
    let _lock = cache::lock_until(&cache, &lock, Instant::now() + timeout)?;
    match known() {
        Some(image) => Ok(image),
        None => exported(builder, name, (cache.as_path(), &lock), limits, timeout),
    }
}

/// Same as [`import_from`] with an engine of this host: the one of `kind`, or the first that has the image.
///
/// # Errors
/// Fails as [`import_from`] does, or with [`BuildError::NoBuilder`].
pub fn import(
    name: &str,
    kind: Option<BuilderKind>,
    cache: &Path,
    limits: &UnpackLimits,
    timeout: Duration,
) -> Result<Image, BuildError> {
    let mut last = None;
    for kind in kind.map_or(BuilderKind::ALL.to_vec(), |kind| vec![kind]) {
        let found = EngineBuilder::find(Some(kind));
        match found.and_then(|engine| import_from(&engine, name, cache, limits, timeout)) {
            // The message of an engine that lacks the image says more than that of one that is missing.
            Err(e @ BuildError::NoBase { .. }) => last = Some(e),
            Err(e @ BuildError::NoBuilder { .. }) => last = last.or(Some(e)),
            done => return done,
        }
    }
    Err(last.unwrap_or(BuildError::NoBuilder {
        tried: String::new(),
    }))
}

/// Writes an image to a file in the folder `LOCK.partial` of the cache, and unpacks it. The caller holds the
/// lock of that name; the next unpack removes what a killed process leaves.
fn exported(
    builder: &dyn ImageBuilder,
    name: &str,
    (cache, lock): (&Path, &str),
    limits: &UnpackLimits,
    timeout: Duration,
) -> Result<Image, BuildError> {
    let folder = cache.join(format!("{lock}.partial"));
    if folder.exists() {
        fs::remove_dir_all(&folder).map_err(|e| io_error("remove an old export", e))?;
    }
    fs::create_dir(&folder).map_err(|e| io_error("make a folder in the cache", e))?;
    let file = folder.join("image.tar");
    let image = builder
        .save(name, &file, timeout)
        .and_then(|()| Ok(crate::unpack(&file, cache, limits)?));
    let removed = fs::remove_dir_all(&folder);
    let image = image?;
    removed.map_err(|e| io_error("remove an export", e))?;
    Ok(image)
}
