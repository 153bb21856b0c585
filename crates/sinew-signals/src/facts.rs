//! What is known of a run before its first event.

use serde_json::Value;
use std::path::PathBuf;

/// Bytes of a file that goes along.
pub(crate) const MAX_FILE: u64 = 16 << 20;

/// A run that other systems hear of.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Its name, in every signal.
    pub name: String,
    /// `train`, `eval` or `collect`.
    pub command: String,
    /// The source of its model, as its recipe names it.
    pub model: String,
    /// Its folder.
    pub folder: PathBuf,
    /// Its recipe, as it runs.
    pub recipe: Value,
    /// Files that go along at the end, where they are there: recipe and report.
    pub files: Vec<PathBuf>,
}

impl Run {
    /// A name of 64 hexadecimal digits for the session that begins now.
    pub(crate) fn session(&self, now_unix_s: f64) -> String {
        let seed = format!("{}\n{}\n{now_unix_s}", self.name, self.folder.display());
        blake3::hash(seed.as_bytes()).to_hex().to_string()
    }
}
