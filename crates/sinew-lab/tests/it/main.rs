//! The suites for real: every level is attacked, measured and counted through its port, and the commands
//! print what scripts rely on.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod commands;
mod container;
mod microvm;
mod process;
mod wasm;

use sinew_lab::attack::{AttackOutcome, AttackRow};
use std::path::PathBuf;

/// The program, which is also the worker of the wasm level.
pub(crate) fn program() -> PathBuf {
    env!("CARGO_BIN_EXE_sinew-lab").into()
}

pub(crate) fn root() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../..").into()
}

/// Cases of one outcome.
pub(crate) fn of(rows: &[AttackRow], outcome: AttackOutcome) -> Vec<&AttackRow> {
    rows.iter().filter(|r| r.outcome == outcome).collect()
}

/// Fails if one of the rows escaped, or fewer than `least` held.
pub(crate) fn assert_held(rows: &[AttackRow], least: usize) {
    let escaped = of(rows, AttackOutcome::Escaped);
    assert!(escaped.is_empty(), "{escaped:#?}");
    assert!(of(rows, AttackOutcome::Held).len() >= least, "{rows:#?}");
}
