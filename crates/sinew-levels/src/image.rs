//! The root of sandboxes that `sandbox.image` names.

use crate::error::LevelError;
use sinew_image::{Image, ImageConfig, ImageError, UnpackLimits};
use sinew_recipe::{Level, SandboxPlan};
use std::path::Path;

/// The root of sandboxes, unpacked into `sandbox.image_cache` if it is not there yet, with the program
/// that it names. A folder that is a root already is used where it stands.
///
/// `None` without an image; at level `container` also for a tar file of a plain root, and for the name of
/// an image that Docker or Podman has.
///
/// # Errors
/// If the file is no image, is damaged, or is larger than the limits of unpacking.
pub fn image(section: &SandboxPlan) -> Result<Option<Image>, LevelError> {
    let Some(path) = &section.image else {
        return Ok(None);
    };
    let named = |e: &dyn std::fmt::Display| LevelError::system(format!("sandbox.image: {e}"));
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
