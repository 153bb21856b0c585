//! The file with the wanted counts, which outlive an owner.

use crate::error::ControlError;
use crate::role::RoleKind;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// Writes the counts to a file, replaced as a whole.
pub(crate) fn write(path: &Path, counts: &BTreeMap<RoleKind, u32>) -> Result<(), ControlError> {
    let text = serde_json::to_vec(counts).unwrap_or_default();
    let new = path.with_extension("new");
    std::fs::write(&new, text).map_err(ControlError::file("write", &new))?;
    std::fs::rename(&new, path).map_err(ControlError::file("replace", path))
}

/// Reads the counts; `None` without a file.
pub(crate) fn read(path: &Path) -> Result<Option<BTreeMap<RoleKind, u32>>, ControlError> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(ControlError::file("read", path)(e)),
    };
    let counts = serde_json::from_slice(&text);
    counts
        .map(Some)
        .map_err(|e| ControlError::file("read", path)(e.into()))
}
