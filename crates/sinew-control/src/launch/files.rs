//! The ends of log files.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Bytes that are read from the end of a file.
const TAIL_BYTES: u64 = 64 << 10;

/// The last lines of a file; empty without a file.
pub(crate) fn tail(path: &Path, lines: usize) -> io::Result<String> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(e) => return Err(e),
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    Ok(last_lines(&String::from_utf8_lossy(&bytes), lines))
}

/// The last lines of a text that are not empty, without control characters.
pub(crate) fn last_lines(text: &str, lines: usize) -> String {
    let shown = |c: &char| !c.is_control() || *c == '\t';
    let all: Vec<String> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| line.chars().filter(shown).collect())
        .collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_file_is_short_and_harmless() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert_eq!(tail(&path, 3).unwrap(), "");
        let lines: Vec<String> = (0..20_000).map(|n| format!("line \u{1b}{n}\n\n")).collect();
        std::fs::write(&path, lines.concat()).unwrap();
        assert_eq!(tail(&path, 2).unwrap(), "line 19998\nline 19999");
    }
}
