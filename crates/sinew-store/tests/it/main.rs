//! One conformance suite over every store, and tests of the disk store.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod calls;
mod conformance;
mod copy;
mod crash;
mod damage;
mod disk;
mod expire;
mod export;
mod fence;
mod import;
mod model;
mod owners;
mod reader;
mod score_files;
mod scores;
mod support;
mod traces;
