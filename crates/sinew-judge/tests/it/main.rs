//! Judges with models that answer by a script, and with servers.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod http;
mod judge;
mod support;
