//! Index, manifest and configuration of an image.
//!
//! The crate oci-spec is not used: it brings nine crates (three of procedural macros) for these 60 lines of
//! structs, does not support `manifest.json` of `docker save`, and refuses descriptors without a media type.

use crate::source::Source;
use crate::{ImageError, UnpackLimits};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// Annotation that names an image in an index (OCI image specification, annotations).
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// Maximum nesting depth of indexes.
pub(crate) const MAX_DEPTH: usize = 4;

/// Default program of an image and its environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageConfig {
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// Working folder of programs. Empty: none.
    pub working_dir: String,
    /// First arguments of the program.
    pub entrypoint: Vec<String>,
    /// Default arguments after the entrypoint.
    pub cmd: Vec<String>,
    /// User name or number. Only sandboxes with a writable root have users of their image.
    pub user: String,
}

impl ImageConfig {
    /// Default program with its arguments. Empty if the image has none.
    pub fn argv(&self) -> Vec<String> {
        self.entrypoint.iter().chain(&self.cmd).cloned().collect()
    }
}

/// Platform of a manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// Reference to a blob.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(default)]
    media_type: String,
    pub(crate) digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
    #[serde(skip_serializing_if = "Option::is_none")]
    annotations: Option<BTreeMap<String, String>>,
}

impl Descriptor {
    /// Whether it is an index of manifests, in the format of OCI or Docker.
    pub(crate) fn is_index(&self) -> bool {
        let kind = self.media_type.as_str();
        kind.ends_with("image.index.v1+json") || kind.ends_with("manifest.list.v2+json")
    }
}

/// OCI index, or manifest list of Docker.
#[derive(Debug, Deserialize)]
struct Index {
    manifests: Vec<Descriptor>,
}

/// OCI manifest, or Docker's version 2, schema 2.
#[derive(Debug, Deserialize)]
struct Manifest {
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// Configuration of an image. Its SHA-256 is the image's id.
#[derive(Debug, Deserialize)]
struct Configuration {
    architecture: String,
    os: String,
    config: Option<Execution>,
    rootfs: RootFs,
}

/// `config` of a [`Configuration`].
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Execution {
    env: Option<Vec<String>>,
    entrypoint: Option<Vec<String>>,
    cmd: Option<Vec<String>>,
    working_dir: Option<String>,
    user: Option<String>,
}

/// `rootfs` of a [`Configuration`].
#[derive(Debug, Deserialize)]
struct RootFs {
    /// Digests of the decompressed layers.
    diff_ids: Vec<String>,
}

/// An image in `manifest.json` of `docker save`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    /// Name of the configuration in the archive.
    config: String,
    /// Names with tags, such as `debian:12`.
    repo_tags: Option<Vec<String>>,
    /// Names of the layers in the archive, from the lowest.
    layers: Vec<String>,
}

/// A layer to apply.
#[derive(Debug)]
pub(crate) struct Layer {
    /// Name of the file in the source.
    pub(crate) name: String,
    /// Digest and length in bytes of the blob, if the image has them.
    pub(crate) blob: Option<(String, u64)>,
    /// Digest of the decompressed tar file.
    pub(crate) content: String,
}

/// Configuration and layers of an image.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Hexadecimal SHA-256 of the configuration.
    pub(crate) id: String,
    /// Default program and environment.
    pub(crate) config: ImageConfig,
    /// Layers from the lowest.
    pub(crate) layers: Vec<Layer>,
}

/// Lower-case hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Hexadecimal digits of a SHA-256 digest.
pub(crate) fn sha256(digest: &str) -> Result<&str, ImageError> {
    let digits = digest.strip_prefix("sha256:").filter(|d| {
        d.len() == 64
            && d.bytes()
                .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    });
    digits.ok_or_else(|| ImageError::Unsupported {
        what: format!("digest {digest:?}"),
        allowed: "sha256: and 64 hexadecimal digits",
    })
}

/// Name of the file of a blob.
pub(crate) fn blob_name(digest: &str) -> Result<String, ImageError> {
    Ok(format!("blobs/sha256/{}", sha256(digest)?))
}

/// Parses a JSON document. Errors contain `name`.
fn parse<T: for<'a> Deserialize<'a>>(name: &str, bytes: &[u8]) -> Result<T, ImageError> {
    serde_json::from_slice(bytes).map_err(|e| ImageError::Document {
        document: name.into(),
        reason: e.to_string(),
    })
}

/// Reads a document and checks its digest and length.
fn checked(source: &Source, descriptor: &Descriptor) -> Result<Vec<u8>, ImageError> {
    let bytes = source.document(&blob_name(&descriptor.digest)?)?;
    check(descriptor, &bytes)?;
    Ok(bytes)
}

/// Checks digest and length of a document.
pub(crate) fn check(descriptor: &Descriptor, bytes: &[u8]) -> Result<(), ImageError> {
    let name = blob_name(&descriptor.digest)?;
    let found = format!("sha256:{}", hex(&Sha256::digest(bytes)));
    if found != descriptor.digest || bytes.len() as u64 != descriptor.size {
        return Err(ImageError::Digest {
            blob: name,
            expected: format!("{} and {} bytes", descriptor.digest, descriptor.size),
            found: format!("{found} and {} bytes", bytes.len()),
        });
    }
    Ok(())
}

/// Fields that distinguish a manifest from an index.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    media_type: Option<String>,
    manifests: Option<serde_json::Value>,
}

/// Descriptor of a manifest or an index that came without one. `said` is the type that its sender named,
/// which counts where the document itself names none.
pub(crate) fn describe(bytes: &[u8], said: &str) -> Result<Descriptor, ImageError> {
    let kind: Kind = parse("the image's manifest", bytes)?;
    let shown = if kind.manifests.is_some() {
        "application/vnd.oci.image.index.v1+json"
    } else {
        "application/vnd.oci.image.manifest.v1+json"
    };
    let known = said
        .starts_with("application/vnd.")
        .then(|| said.to_owned());
    Ok(Descriptor {
        media_type: kind.media_type.or(known).unwrap_or_else(|| shown.into()),
        digest: format!("sha256:{}", hex(&Sha256::digest(bytes))),
        size: bytes.len() as u64,
        platform: None,
        annotations: None,
    })
}

/// The entry of an index that is made for this host: the first with its platform, else the first without any.
pub(crate) fn choose(bytes: &[u8]) -> Result<Descriptor, ImageError> {
    let index: Index = parse("the image's index", bytes)?;
    let platforms = || index.manifests.iter().map(|d| (d, d.platform.as_ref()));
    let fitting = platforms().find(|(_, p)| p.is_some_and(|p| fits(&p.os, &p.architecture)));
    let chosen = fitting.or_else(|| platforms().find(|(_, p)| p.is_none()));
    chosen.map(|(d, _)| d.clone()).ok_or_else(|| {
        let all = platforms().filter_map(|(_, p)| p);
        let all = all.map(|p| format!("{}/{}", p.os, p.architecture)).take(32);
        foreign(all.collect::<Vec<_>>().join(", "))
    })
}

/// Descriptor of the configuration that a manifest names.
pub(crate) fn config_of(bytes: &[u8]) -> Result<Descriptor, ImageError> {
    let manifest: Manifest = parse("the image's manifest", bytes)?;
    Ok(manifest.config)
}

/// Operating system and architecture of this host in the spelling of images.
pub(crate) fn machine() -> (&'static str, &'static str) {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    ("linux", architecture)
}

/// True if a platform is that of this host.
fn fits(os: &str, architecture: &str) -> bool {
    (os, architecture) == machine()
}

/// Tag of a manifest.
fn tag_of(descriptor: &Descriptor) -> Option<&str> {
    Some(descriptor.annotations.as_ref()?.get(REF_NAME)?.as_str())
}

/// Finds the image with `tag`, or the only image for this host.
pub(crate) fn parts(
    source: &Source,
    tag: Option<&str>,
    limits: &UnpackLimits,
) -> Result<Parts, ImageError> {
    let parts = if source.has("index.json") {
        layout(source, tag)?
    } else if source.has("manifest.json") {
        saved(source, tag)?
    } else {
        return Err(ImageError::NotAnImage {
            path: source.path(),
            reason: "neither index.json nor manifest.json is in it".into(),
        });
    };
    if parts.layers.len() > limits.layers {
        return Err(ImageError::Limit {
            what: "layers",
            limit: limits.layers as u64,
        });
    }
    Ok(parts)
}

/// Finds an image in an OCI layout.
fn layout(source: &Source, tag: Option<&str>) -> Result<Parts, ImageError> {
    let index: Index = parse("index.json", &source.document("index.json")?)?;
    let of_tag = |d: &&Descriptor| {
        // Some tools write `name:tag`.
        tag.is_none_or(|t| {
            tag_of(d).is_some_and(|found| found == t || found.rsplit(':').next() == Some(t))
        })
    };
    let mut images = Vec::new();
    let chosen: Vec<Descriptor> = index.manifests.iter().filter(of_tag).cloned().collect();
    expand(source, chosen, 0, &mut images)?;
    let known = |d: &Descriptor| {
        d.platform
            .as_ref()
            .is_none_or(|p| fits(&p.os, &p.architecture))
    };
    let fitting: Vec<&Descriptor> = images.iter().filter(|d| known(d)).collect();
    match fitting.as_slice() {
        [one] => image(source, one),
        [] if !images.is_empty() => {
            let all = images.iter().filter_map(|d| d.platform.as_ref());
            let all: Vec<String> = all
                .map(|p| format!("{}/{}", p.os, p.architecture))
                .collect();
            Err(foreign(all.join(", ")))
        }
        several => {
            let tags = index.manifests.iter().filter_map(tag_of);
            let tags: Vec<&str> = tags.collect();
            let untagged = several.len() - several.len().min(tags.len());
            Err(ImageError::Tag {
                path: source.path(),
                tag: tag.unwrap_or_default().into(),
                tags: format!("{} ({untagged} without a name)", tags.join(", ")),
            })
        }
    }
}

/// Error for an image of another platform.
fn foreign(found: String) -> ImageError {
    let (os, architecture) = machine();
    ImageError::Platform {
        wanted: format!("{os}/{architecture}"),
        found,
    }
}

/// Replaces nested indexes by their manifests.
fn expand(
    source: &Source,
    descriptors: Vec<Descriptor>,
    depth: usize,
    images: &mut Vec<Descriptor>,
) -> Result<(), ImageError> {
    for descriptor in descriptors {
        let kind = descriptor.media_type.as_str();
        if descriptor.is_index() {
            if depth == MAX_DEPTH {
                return Err(ImageError::Limit {
                    what: "indexes within each other",
                    limit: MAX_DEPTH as u64,
                });
            }
            let inner: Index = parse("index", &checked(source, &descriptor)?)?;
            expand(source, inner.manifests, depth + 1, images)?;
        } else if kind.ends_with("image.manifest.v1+json")
            || kind.ends_with("distribution.manifest.v2+json")
            || kind.is_empty()
        {
            images.push(descriptor);
        } else {
            return Err(ImageError::Unsupported {
                what: format!("a manifest of type {kind:?}"),
                allowed: "OCI image manifests and indexes, Docker's version 2, schema 2",
            });
        }
        if images.len() > 4096 {
            return Err(ImageError::Limit {
                what: "manifests",
                limit: 4096,
            });
        }
    }
    Ok(())
}

/// Reads the manifest and configuration of an image.
fn image(source: &Source, descriptor: &Descriptor) -> Result<Parts, ImageError> {
    let manifest: Manifest = parse("manifest", &checked(source, descriptor)?)?;
    let config = checked(source, &manifest.config)?;
    let mut blobs = Vec::new();
    for layer in &manifest.layers {
        // The first bytes of a blob show its compression, so the media type is checked only roughly.
        let kind = layer.media_type.as_str();
        let known = ["tar", "tar+gzip", "tar.gzip", "tar+zstd"];
        let known = known.iter().any(|k| kind.ends_with(k)) && !kind.contains("foreign");
        if !known || kind.contains("nondistributable") {
            return Err(ImageError::Unsupported {
                what: format!("a layer of type {kind:?}"),
                allowed: "tar files, plain or compressed with gzip or zstd",
            });
        }
        let blob = (layer.digest.clone(), layer.size);
        blobs.push((blob_name(&layer.digest)?, Some(blob)));
    }
    assemble(&config, blobs)
}

/// Finds an image in an archive of `docker save`.
fn saved(source: &Source, tag: Option<&str>) -> Result<Parts, ImageError> {
    let all: Vec<SavedImage> = parse("manifest.json", &source.document("manifest.json")?)?;
    let tags = |s: &SavedImage| s.repo_tags.clone().unwrap_or_default();
    let of_tag = |s: &&SavedImage| {
        tag.is_none_or(|t| {
            tags(s)
                .iter()
                .any(|r| r == t || r.rsplit(':').next() == Some(t))
        })
    };
    let chosen: Vec<&SavedImage> = all.iter().filter(of_tag).collect();
    let [one] = chosen.as_slice() else {
        return Err(ImageError::Tag {
            path: source.path(),
            tag: tag.unwrap_or_default().into(),
            tags: all.iter().flat_map(tags).collect::<Vec<_>>().join(", "),
        });
    };
    let config = source.document(&one.config)?;
    let blobs = one.layers.iter().map(|l| (l.clone(), None)).collect();
    assemble(&config, blobs)
}

/// Names of blobs with their digests and lengths in bytes.
type Blobs = Vec<(String, Option<(String, u64)>)>;

/// Combines a configuration with its blobs.
fn assemble(config: &[u8], blobs: Blobs) -> Result<Parts, ImageError> {
    let id = hex(&Sha256::digest(config));
    let configuration: Configuration = parse("the image's configuration", config)?;
    if !fits(&configuration.os, &configuration.architecture) {
        let (os, architecture) = (configuration.os, configuration.architecture);
        return Err(foreign(format!("{os}/{architecture}")));
    }
    let contents = configuration.rootfs.diff_ids;
    if contents.len() != blobs.len() {
        return Err(ImageError::Document {
            document: "the image's configuration".into(),
            reason: format!(
                "names {} layers, the manifest {}",
                contents.len(),
                blobs.len()
            ),
        });
    }
    let mut layers = Vec::new();
    for ((name, blob), content) in blobs.into_iter().zip(contents) {
        sha256(&content)?;
        layers.push(Layer {
            name,
            blob,
            content,
        });
    }
    let execution = configuration.config.unwrap_or_default();
    let pair = |text: String| {
        let (name, value) = text.split_once('=').unwrap_or((&text, ""));
        (name.to_string(), value.to_string())
    };
    let env = execution.env.unwrap_or_default().into_iter().map(pair);
    Ok(Parts {
        id,
        config: ImageConfig {
            env: env.filter(|(name, _)| !name.is_empty()).collect(),
            working_dir: execution.working_dir.unwrap_or_default(),
            entrypoint: execution.entrypoint.unwrap_or_default(),
            cmd: execution.cmd.unwrap_or_default(),
            user: execution.user.unwrap_or_default(),
        },
        layers,
    })
}
