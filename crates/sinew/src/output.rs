//! Standard output: text for people, JSON lines for machines. A closed pipe ends quietly.

use std::io::Write;

/// Prints text as it is.
pub(crate) fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints what a program wrote to its standard error.
pub(crate) fn print_error(text: &str) {
    let mut out = std::io::stderr().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Prints one JSON line.
pub(crate) fn print_json(value: &serde_json::Value) {
    print(&format!("{value}\n"));
}
