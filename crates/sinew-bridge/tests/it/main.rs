//! Real workers in sandboxes of the process level.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod env;
mod hostile;
mod http;
mod images;
mod leftovers;
#[cfg(feature = "mcp")]
mod mcp;
mod reward;
mod support;
mod tasks;
mod user;
