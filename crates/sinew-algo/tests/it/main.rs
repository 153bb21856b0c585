//! Traces to rows: behaviour, failure and bad input.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod columns;
mod config;
mod curricula;
mod docs;
mod golden;
mod groups;
mod invariants;
mod support;
mod trust;
