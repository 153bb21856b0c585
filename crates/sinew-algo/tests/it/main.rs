//! Traces to rows: behaviour, failure and bad input.

mod config;
mod groups;
mod invariants;
mod support;
