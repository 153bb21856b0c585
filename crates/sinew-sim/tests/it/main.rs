//! Whole-system tests.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod pipeline;
mod plans;
mod published;
mod roles;
mod scaling;
mod schedules;
mod tail;
mod tidy;

use std::path::PathBuf;

/// Root of the workspace.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}
