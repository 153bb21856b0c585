//! Judges with models that answer by a script, and with servers.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod calibrate;
mod http;
mod judge;
mod reward_model;
mod server;
mod support;
mod user;
