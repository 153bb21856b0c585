//! Programs for tests.

use std::path::Path;
use std::process::Command;

/// Writes a shell script that can be executed. Another process writes it: if this one held the file open
/// while one of its threads starts a program, the script could not be executed at that moment.
pub(crate) fn program(path: &Path, script: &str) {
    let written = Command::new("sh")
        .args([
            "-c",
            "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$2\" && chmod 755 \"$2\"",
            "sh",
        ])
        .arg(script)
        .arg(path)
        .status();
    assert!(written.unwrap().success());
}
