//! What is known of a run before its first event.

use serde_json::Value;
use std::path::PathBuf;

/// A run that other systems hear of.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its name, in every signal.
    pub name: String,
    /// `train`, `eval` or `collect`.
    pub command: String,
    /// Its folder.
    pub folder: PathBuf,
    /// Its recipe, as it runs.
    pub recipe: Value,
    /// Files that go along at the end, where they are there: recipe and report.
    pub files: Vec<PathBuf>,
}
