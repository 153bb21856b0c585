//! Standard output: text for people, JSON lines for machines.
//!
//! Errors of writing are ignored: the reader of a pipe may close it, as `head` does, and the command still
//! ends with the exit code of its own work. Everything is flushed at once, for readers that wait for a line.

use std::io::Write;

/// Prints text as it is. Text of models and programs must be made visible before.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints what a program wrote to its standard error.
pub(crate) fn print_error(text: &str) {
    let mut out = std::io::stderr().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints one JSON line. Text in it needs no care: JSON escapes control characters.
pub(crate) fn print_json(value: &serde_json::Value) {
    print(&format!("{value}\n"));
}
