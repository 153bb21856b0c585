//! Standard output: text for users, JSON lines for machines.
//!
//! Errors of writing are ignored: the reader of a pipe may close it, as `head` does, and the command still
//! ends with its own exit code. Everything is flushed at once, for readers that wait for a line.

use sinew_view::{json_line, visible};
use std::io::{IsTerminal, Write};

/// Prints text. Control characters in it, from models, environments and data sets, cannot control the
/// terminal.
pub(crate) fn print(text: &str) {
    print_as_it_is(visible(text).as_bytes());
}

/// Prints bytes as they are: painted text whose parts were made visible before, or what a program wrote where
/// standard output is not a terminal.
pub(crate) fn print_as_it_is(bytes: &[u8]) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(bytes).and_then(|()| out.flush());
}

/// Prints text to standard error, as [`print()`] does.
pub(crate) fn say_error(text: &str) {
    let mut out = std::io::stderr().lock();
    let _ = out
        .write_all(visible(text).as_bytes())
        .and_then(|()| out.flush());
}

/// Prints a program's standard error: unchanged, unless the destination is a terminal.
pub(crate) fn print_error(bytes: &[u8]) {
    let mut out = std::io::stderr().lock();
    let text = if out.is_terminal() {
        visible(&String::from_utf8_lossy(bytes)).into_bytes()
    } else {
        bytes.to_vec()
    };
    let _ = out.write_all(&text).and_then(|()| out.flush());
}

/// Prints one JSON line.
pub(crate) fn print_json(value: &serde_json::Value) {
    print_as_it_is((json_line(value) + "\n").as_bytes());
}
