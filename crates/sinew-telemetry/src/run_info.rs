//! Facts of a run before its first event.

use std::path::PathBuf;

/// A run that is exported.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its name, in every export.
    pub name: String,
    /// The source of its model, as its recipe names it.
    pub model: String,
    /// Its folder.
    pub folder: PathBuf,
}
