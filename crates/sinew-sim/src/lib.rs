//! Whole-system tests live in `tests/`; nothing depends on this crate.
