//! Standard output: text for users, JSON lines for programs. A closed pipe ends quietly.

use serde::Serialize;
use std::io::Write;

/// Prints text unchanged.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints one JSON line.
pub(crate) fn json(value: &impl Serialize) {
    print(&format!("{}\n", serde_json::json!(value)));
}
