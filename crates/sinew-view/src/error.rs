//! Reasons for which records cannot be read, or plots not drawn.

use std::io;
use std::path::PathBuf;

/// Reasons for which a run cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    #[error("{}: {error}", path.display())]
    Read { path: PathBuf, error: io::Error },
    /// A file of records that is larger than can be read.
    #[error("{}: it is larger than {limit} bytes", path.display())]
    TooLarge { path: PathBuf, limit: u64 },
    /// A line is not a record.
    #[error("{}: {error}", path.display())]
    Record {
        path: PathBuf,
        error: serde_json::Error,
    },
    /// The plotter failed.
    #[error("plot {title}: {reason}")]
    Plot { title: String, reason: String },
}

impl ViewError {
    /// The failure of the plotter.
    pub(crate) fn plot(title: &str, reason: &dyn std::error::Error) -> Self {
        Self::Plot {
            title: title.to_owned(),
            reason: reason.to_string(),
        }
    }
}
