//! The file in a run's folder by which commands find its owner.

use crate::error::ControlError;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file.
pub const CONTROL_FILE: &str = "control.json";

/// The way to the owner of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ControlPlace {
    /// Address of the owner.
    pub url: String,
    /// File with its token.
    pub token_file: PathBuf,
    /// File with the authority of its certificate; `None`: it has no TLS, or a certificate that all trust.
    pub ca_file: Option<PathBuf>,
    /// Generation of the owner.
    pub fence: u64,
}

impl ControlPlace {
    /// Writes the file of a run's folder, replaced as a whole.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, folder: &Path) -> Result<(), ControlError> {
        let path = folder.join(CONTROL_FILE);
        let new = path.with_extension("new");
        let text = serde_json::to_vec(self).unwrap_or_default();
        std::fs::write(&new, text).map_err(ControlError::file("write", &new))?;
        std::fs::rename(&new, &path).map_err(ControlError::file("replace", &path))
    }

    /// Reads the file of a run's folder.
    ///
    /// # Errors
    /// If it is not there, or cannot be read.
    pub fn read(folder: &Path) -> Result<Self, ControlError> {
        let path = folder.join(CONTROL_FILE);
        let text = std::fs::read(&path).map_err(ControlError::file("read", &path))?;
        serde_json::from_slice(&text).map_err(|e| ControlError::file("read", &path)(e.into()))
    }

    /// The token.
    ///
    /// # Errors
    /// If its file cannot be read.
    pub fn token(&self) -> Result<String, ControlError> {
        let text = std::fs::read_to_string(&self.token_file);
        let text = text.map_err(ControlError::file("read", &self.token_file))?;
        Ok(text.trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_an_owner_is_read_as_written() {
        let dir = tempfile::tempdir().unwrap();
        let token_file = dir.path().join("token");
        std::fs::write(&token_file, "0123456789abcdef\n").unwrap();
        let place = ControlPlace {
            url: "http://127.0.0.1:8092".into(),
            token_file,
            ca_file: None,
            fence: 3,
        };
        assert!(ControlPlace::read(dir.path()).is_err());
        place.write(dir.path()).unwrap();
        assert_eq!(ControlPlace::read(dir.path()).unwrap(), place);
        assert_eq!(place.token().unwrap(), "0123456789abcdef");
    }
}
