//! The root of sandboxes that `sandbox.image` names.

use crate::levels::error::LevelError;
use sinew_image::build::{self, BuildError};
use sinew_image::{Credentials, Image, ImageConfig, ImageError, PullLimits, UnpackLimits};
use sinew_recipe::{Level, SandboxPlan};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Variable with credentials of registries: words `HOST=USER:PASSWORD`.
const AUTH_VARIABLE: &str = "SINEW_REGISTRY_AUTH";

/// Images of registries that this process has asked for, by name and cache. A tag means one image for as long
/// as the process runs, whatever is pushed meanwhile.
static PULLED: Mutex<BTreeMap<(String, String), Image>> = Mutex::new(BTreeMap::new());

/// The root of sandboxes, pulled and unpacked into `sandbox.image_cache` if it is not there yet, with the
/// program that it names. A folder that is a root already is used where it stands.
///
/// `None` without an image; at level `container` also for a tar file of a plain root, and for the name of
/// an image that Docker or Podman has.
///
/// # Errors
/// If the file is not an image, is damaged, or is larger than the limits of unpacking; for a registry, the
/// errors of [`sinew_image::pull`].
pub fn image(section: &SandboxPlan) -> Result<Option<Image>, LevelError> {
    let Some(path) = &section.image else {
        return Ok(None);
    };
    unpacked("sandbox.image", path, section)
}

/// The images of `sandbox.images`, by their names, each as [`image`].
///
/// # Errors
/// Same as [`image`], with the name of the image.
pub fn task_images(section: &SandboxPlan) -> Result<BTreeMap<String, Image>, LevelError> {
    let one = |(name, path): (&String, &String)| {
        let key = format!("sandbox.images.{name}");
        let image = unpacked(&key, path, section)?;
        let image = image.ok_or_else(|| {
            LevelError::input(format!(
                "{key} = {path:?}: no image; allowed: registry:HOST/NAME:TAG, built:TAG, local:NAME, an OCI \
                 layout or a tar file of one, a root"
            ))
        })?;
        Ok((name.clone(), image))
    };
    section.images.iter().map(one).collect()
}

/// Beginning of the name of an image that `sinew sandbox image build` made.
const BUILT: &str = "built:";
/// Beginning of the name of an image that a local engine has.
const LOCAL: &str = "local:";
/// Maximum time of the export of an image of a local engine.
const EXPORT: Duration = Duration::from_secs(600);

/// An image that was built, or that a local engine has; `None` for other names.
fn made_here(key: &str, path: &str, cache: &Path) -> Result<Option<Image>, LevelError> {
    if let Some(name) = path.strip_prefix(BUILT) {
        let found = build::find(cache, name).map_err(|e| failed_build(key, &e))?;
        let image = found.ok_or_else(|| {
            LevelError::input(format!(
                "{key} = {path:?}: the cache {} has no such build\n  hint: sinew sandbox image build DIR --tag \
                 {name}; sinew sandbox image list",
                cache.display()
            ))
        });
        return image.map(Some);
    }
    let Some(name) = path.strip_prefix(LOCAL) else {
        return Ok(None);
    };
    let limits = UnpackLimits::default();
    let image = build::import(name, None, cache, &limits, EXPORT);
    image.map(Some).map_err(|e| failed_build(key, &e))
}

/// The failure of a build or of an import, by the cause of the mistake.
fn failed_build(key: &str, e: &BuildError) -> LevelError {
    let text = format!("{key}: {e}");
    match e {
        BuildError::Request { .. } => LevelError::Input(text),
        BuildError::NoBuilder { .. } | BuildError::NoBase { .. } => LevelError::Outside(text),
        _ => LevelError::System(text),
    }
}

/// The root that the key `key` names.
fn unpacked(key: &str, path: &str, section: &SandboxPlan) -> Result<Option<Image>, LevelError> {
    if sinew_image::is_registry(path) {
        return pulled(key, path, &section.image_cache).map(Some);
    }
    if let Some(image) = made_here(key, path, Path::new(&section.image_cache))? {
        return Ok(Some(image));
    }
    let named = |e: &dyn std::fmt::Display| LevelError::system(format!("{key}: {e}"));
    let path = Path::new(path);
    let container = section.level == Level::Container;
    if container && !path.exists() && !sinew_image::is_packed(path) {
        return Ok(None);
    }
    if path.is_dir() && !sinew_image::is_packed(path) {
        return Ok(Some(Image {
            id: String::new(),
            root: path.canonicalize().map_err(|e| named(&e))?,
            config: ImageConfig::default(),
            bytes: 0,
            fresh: false,
        }));
    }
    let cache = Path::new(&section.image_cache);
    match sinew_image::unpack(path, cache, &UnpackLimits::default()) {
        Err(ImageError::NotAnImage { .. }) if container => Ok(None),
        unpacked => unpacked.map(Some).map_err(|e| named(&e)),
    }
}

/// An image of a registry.
fn pulled(field: &str, name: &str, cache: &str) -> Result<Image, LevelError> {
    let mut all = PULLED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (name.to_owned(), cache.to_owned());
    if let Some(image) = all.get(&key) {
        return Ok(image.clone());
    }
    let credentials = Credentials {
        words: std::env::var(AUTH_VARIABLE).ok(),
        docker: docker_config(),
    };
    let image = sinew_image::pull(name, Path::new(cache), &credentials, &PullLimits::default());
    let image = image.map_err(|e| {
        let text = format!("{field}: {e}");
        match e {
            ImageError::Reference { .. } | ImageError::Missing { .. } => LevelError::Input(text),
            ImageError::Unauthorized { .. } | ImageError::Unreachable { .. } => {
                LevelError::Outside(text)
            }
            _ => LevelError::System(text),
        }
    })?;
    all.insert(key, image.clone());
    Ok(image)
}

/// Docker's configuration, where its own program looks for it.
fn docker_config() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let folder = of("DOCKER_CONFIG").or_else(|| Some(of("HOME")?.join(".docker")))?;
    Some(folder.join("config.json"))
}
