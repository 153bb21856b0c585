//! Providers of sandboxes: one for each level, and one for each image that a request may name.

use crate::api::CreateRequest;
use crate::error::{ApiError, bad};
use sinew_sandbox::SandboxProvider;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Environment variables by their names.
pub(crate) type Env = BTreeMap<String, String>;

/// An image that sandboxes can be made of.
struct Image {
    /// Makes them.
    provider: Arc<dyn SandboxProvider>,
    /// Variables of the image.
    env: Env,
}

/// Levels and images of a server.
pub(crate) struct Roots {
    /// One provider per level. The first one is the default.
    levels: Vec<Arc<dyn SandboxProvider>>,
    /// Variables of sandboxes that name no image, where a request does not set them.
    env: Env,
    /// Images by the names that requests use.
    images: BTreeMap<String, Image>,
}

impl Roots {
    /// Levels, and no image that a request could name.
    pub(crate) fn new(levels: Vec<Arc<dyn SandboxProvider>>) -> Self {
        Self {
            levels,
            env: Env::new(),
            images: BTreeMap::new(),
        }
    }

    /// Sets the variables of sandboxes that name no image.
    pub(crate) fn set_env(&mut self, env: Env) {
        self.env = env;
    }

    /// Offers an image. An existing name refers to the new image from now on.
    pub(crate) fn add_image(&mut self, name: String, provider: Arc<dyn SandboxProvider>, env: Env) {
        self.images.insert(name, Image { provider, env });
    }

    /// Providers of all levels.
    pub(crate) fn levels(&self) -> impl Iterator<Item = &Arc<dyn SandboxProvider>> {
        self.levels.iter()
    }

    /// Names of images.
    pub(crate) fn images(&self) -> impl Iterator<Item = &str> {
        self.images.keys().map(String::as_str)
    }

    /// All providers, of levels and of images.
    pub(crate) fn providers(&self) -> impl Iterator<Item = &Arc<dyn SandboxProvider>> {
        let images = self.images.values().map(|image| &image.provider);
        self.levels.iter().chain(images)
    }

    /// The provider of an image, of a level, or of the default level.
    ///
    /// # Errors
    /// If there is no such image or level, or the image is of another level.
    pub(crate) fn provider(
        &self,
        level: Option<&str>,
        image: Option<&str>,
    ) -> Result<&Arc<dyn SandboxProvider>, ApiError> {
        if let Some(name) = image {
            return self.of_image(name, level);
        }
        let found = match level {
            None => self.levels.first(),
            Some(name) => self.levels.iter().find(|p| p.level() == name),
        };
        found.ok_or_else(|| {
            let names: Vec<_> = self.levels.iter().map(|p| p.level()).collect();
            bad("level", level.unwrap_or("nothing"), names.join(", "))
        })
    }

    fn of_image(
        &self,
        name: &str,
        level: Option<&str>,
    ) -> Result<&Arc<dyn SandboxProvider>, ApiError> {
        let Some(Image { provider, .. }) = self.images.get(name) else {
            let names: Vec<&str> = self.images().collect();
            let allowed = if names.is_empty() {
                "nothing, as this server offers no images".into()
            } else {
                names.join(", ")
            };
            return Err(bad("image", name, allowed));
        };
        match level {
            Some(level) if level != provider.level() => {
                let allowed = format!("{}, the level of image {name:?}", provider.level());
                Err(bad("level", level, allowed))
            }
            _ => Ok(provider),
        }
    }

    /// The provider of a new sandbox: that of its snapshot, or what the request names.
    ///
    /// # Errors
    /// Fails as [`Roots::provider`] does, and if the request names another level or image than the
    /// snapshot's.
    pub(crate) fn chosen(
        &self,
        request: &CreateRequest,
        snapshot: Option<&Arc<dyn SandboxProvider>>,
    ) -> Result<Arc<dyn SandboxProvider>, ApiError> {
        let (level, image) = (request.level.as_deref(), request.image.as_deref());
        let Some(made) = snapshot else {
            return self.provider(level, image).cloned();
        };
        if let Some(name) = image
            && !Arc::ptr_eq(made, self.of_image(name, level)?)
        {
            return Err(bad("image", name, "the image of the snapshot's sandbox"));
        }
        match level {
            Some(level) if level != made.level() => {
                let allowed = format!("{}, which made the snapshot", made.level());
                Err(bad("level", level, allowed))
            }
            _ => Ok(Arc::clone(made)),
        }
    }

    /// The variables that sandboxes of a provider have where a request does not set them.
    pub(crate) fn env(&self, provider: &Arc<dyn SandboxProvider>) -> &Env {
        let mut images = self.images.values();
        let image = images.find(|image| Arc::ptr_eq(&image.provider, provider));
        image.map_or(&self.env, |image| &image.env)
    }
}
