//! Reasons for which records cannot be read, or plots not drawn.

use std::path::PathBuf;

/// Reasons for which a run cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    /// A file of records cannot be read, is too large, or has a line that is not a record.
    #[error("{}: {reason}", path.display())]
    Records { path: PathBuf, reason: String },
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
