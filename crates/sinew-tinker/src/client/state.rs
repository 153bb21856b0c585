//! The file of a checkpoint that names the state at the service.

use super::error::ClientError;
use super::options::AdapterOptions;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the file.
pub const STATE_FILE: &str = "tinker.json";
/// Version of its form.
const FORMAT: u32 = 1;

/// The place of the weights of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServiceState {
    format: u32,
    /// Name of the base model at the service.
    pub base_model: String,
    /// Adapters; `None`: all weights are trained.
    pub adapters: Option<AdapterOptions>,
    /// Path of weights and optimizer state, `tinker://MODEL_ID/weights/NAME`.
    pub path: String,
    /// Paths of the states of earlier checkpoints that are not deleted, oldest first.
    #[serde(default)]
    pub earlier: Vec<String>,
}

impl ServiceState {
    /// The state at `path`.
    pub(super) fn new(
        base_model: &str,
        adapters: Option<AdapterOptions>,
        path: String,
        earlier: Vec<String>,
    ) -> Self {
        Self {
            format: FORMAT,
            base_model: base_model.to_owned(),
            adapters,
            path,
            earlier,
        }
    }

    /// Reads the file.
    ///
    /// # Errors
    /// If it is not one, or of another form; the text has no name of the file.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, String> {
        let state: Self = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if state.format == FORMAT {
            return Ok(state);
        }
        let found = state.format;
        Err(format!(
            "it has format {found}, this program reads {FORMAT}"
        ))
    }

    /// Reads the file of a checkpoint; `None`: its weights are not at a service.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn of_checkpoint(folder: &Path) -> Result<Option<Self>, ClientError> {
        let path = folder.join(STATE_FILE);
        let wrong =
            |why: &dyn std::fmt::Display| ClientError::Setup(format!("{}: {why}", path.display()));
        match std::fs::read(&path) {
            Ok(bytes) => Self::parse(&bytes).map(Some).map_err(|e| wrong(&e)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(wrong(&e)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(ServiceState::of_checkpoint(dir.path()), Ok(None));
        let state = ServiceState::new("m", None, "tinker://a/weights/b".into(), vec!["c".into()]);
        let file = dir.path().join(STATE_FILE);
        std::fs::write(&file, serde_json::to_vec(&state).unwrap()).unwrap();
        assert_eq!(
            ServiceState::of_checkpoint(dir.path()),
            Ok(Some(state.clone()))
        );
        let later = ServiceState { format: 2, ..state };
        std::fs::write(&file, serde_json::to_vec(&later).unwrap()).unwrap();
        let error = ServiceState::of_checkpoint(dir.path()).unwrap_err();
        assert!(error.to_string().contains("format 2"), "{error}");
    }
}
