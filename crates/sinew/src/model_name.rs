//! The name of a model that is served.

use std::path::Path;

/// The model's name for clients: not where it lies on this host.
pub(crate) fn model_name(model: &str) -> String {
    let path = Path::new(model.split_once(':').map_or(model, |(_, path)| path));
    let name = if path.is_file() {
        path.file_stem()
    } else {
        path.file_name().filter(|_| path.exists())
    };
    match name {
        Some(name) => name.to_string_lossy().into_owned(),
        None => model.to_owned(),
    }
}
