//! Whole-system tests.

mod tidy;

use std::path::PathBuf;

/// Root of the workspace.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}
