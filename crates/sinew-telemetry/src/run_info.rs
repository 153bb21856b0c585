//! Facts of a run before its first event.

use std::path::PathBuf;

/// A run that is exported.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the run in every export.
    pub name: String,
    /// The source of its model, as its recipe names it.
    pub model: String,
    /// Folder of the run.
    pub folder: PathBuf,
}
