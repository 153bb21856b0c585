//! Reasons why a worker, an interpreter, a frame or an archive cannot be used.

use std::io;

/// Failure of the level itself, not of a program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WasmError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A frame is shorter than its header states.
    #[error("a frame was cut")]
    Cut,
    #[error("{0}")]
    Failed(String),
}

impl From<String> for WasmError {
    fn from(text: String) -> Self {
        Self::Failed(text)
    }
}

impl From<&str> for WasmError {
    fn from(text: &str) -> Self {
        Self::Failed(text.to_owned())
    }
}
