//! Audit log: one JSON line for each request and tunnel, allowed or not.
//!
//! Lines are written when a request ends, so that they contain its bytes and duration. The number of lines is
//! limited. If a line cannot be written, further requests are refused until the log is writable again.

use crate::policy::Reason;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Maximum characters of URL, detail and method in a line. Longer text is cut.
const MAX_CHARS: usize = 2048;

/// A line of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditLine {
    /// Seconds since the start of the session.
    pub at_s: f64,
    /// `allowed`, `denied`, `replayed` or `failed`.
    pub decision: String,
    /// Kind of the denial or failure.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// Description of the denial or failure.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub detail: Option<String>,
    /// Method. `CONNECT` for a tunnel.
    pub method: String,
    /// URL. Host and port for a tunnel.
    pub url: String,
    /// Address of the server.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub address: Option<String>,
    /// Name of the added credential.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub credential: Option<String>,
    /// Status of the response.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub status: Option<u16>,
    /// Body bytes sent to the server.
    pub bytes_up: u64,
    /// Body bytes received from the server.
    pub bytes_down: u64,
    /// Duration in seconds.
    pub wall_s: f64,
}

/// Audit log of a session. Lines are discarded if there is no file.
#[derive(Debug)]
pub(crate) struct Audit {
    /// Open log. `None` discards all lines.
    log: Option<Mutex<Log>>,
}

/// An open log file.
#[derive(Debug)]
struct Log {
    /// File, positioned at the end.
    file: File,
    /// Bytes of complete lines.
    len: u64,
    /// Lines that may still be written.
    left: u64,
    /// Lines that could not be written.
    lost: u64,
}

impl Log {
    /// Appends a line, completely or not at all.
    fn line(&mut self, line: &AuditLine) -> std::io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        if let Err(e) = self.file.write_all(&text) {
            // Removes an incomplete line.
            self.file.set_len(self.len)?;
            self.file.seek(SeekFrom::Start(self.len))?;
            return Err(e);
        }
        self.len += text.len() as u64;
        Ok(())
    }
}

/// Cuts a text to [`MAX_CHARS`].
fn cut(text: &mut String) {
    if let Some((at, _)) = text.char_indices().nth(MAX_CHARS) {
        text.truncate(at);
    }
}

impl Audit {
    /// Creates the file. It takes at most `lines` lines.
    pub(crate) fn create(path: Option<&Path>, lines: u64) -> std::io::Result<Self> {
        let open = |path: &Path| {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            File::create(path)
        };
        let file = path.map(open).transpose()?;
        let log = |file| {
            Mutex::new(Log {
                file,
                len: 0,
                left: lines,
                lost: 0,
            })
        };
        Ok(Self { log: file.map(log) })
    }

    /// Fails if the log is incomplete and cannot be written. Otherwise first writes how many lines were lost.
    pub(crate) fn check(&self) -> std::io::Result<()> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.lost > 0 {
            let line = AuditLine {
                decision: "failed".into(),
                reason: Some("log".into()),
                detail: Some(format!("{} line(s) could not be written", log.lost)),
                ..AuditLine::default()
            };
            log.line(&line)?;
            log.lost = 0;
        }
        Ok(())
    }

    /// Writes a line. A failure is counted, see [`Audit::check`].
    pub(crate) fn write(&self, mut line: AuditLine) -> std::io::Result<()> {
        let Some(log) = &self.log else {
            return Ok(());
        };
        cut(&mut line.url);
        cut(&mut line.method);
        line.detail.as_mut().into_iter().for_each(cut);
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        // Requests beyond the quota are refused. They must not fill the disk.
        if log.left == 0 {
            return Ok(());
        }
        let written = log.line(&line);
        match &written {
            Ok(()) => log.left -= 1,
            Err(_) => log.lost += 1,
        }
        written
    }
}

/// Bytes that are read of one log: more than a session can write with the default quota.
const MAX_READ: u64 = 1 << 30;

/// Requests of which replays found no answer, by the logs in a folder, in the order of the logs' names:
/// method and URL of each, and the detail of its line. A folder that is not there has none.
///
/// # Errors
/// If a log cannot be read.
pub fn not_recorded(folder: &Path) -> std::io::Result<Vec<(String, String)>> {
    let mut logs = Vec::new();
    match std::fs::read_dir(folder) {
        Ok(entries) => {
            for entry in entries {
                logs.push(entry?.path());
            }
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    logs.sort();
    let mut requests = Vec::new();
    for path in logs {
        let mut text = String::new();
        File::open(&path)?
            .take(MAX_READ)
            .read_to_string(&mut text)?;
        let lines = text.lines().map(serde_json::from_str::<AuditLine>);
        let missed = lines
            .filter_map(Result::ok)
            .filter(|l| l.reason.as_deref() == Some(Reason::NotRecorded.name()));
        requests.extend(missed.map(|line| {
            let request = format!("{} {}", line.method, line.url);
            (request, line.detail.unwrap_or_default())
        }));
    }
    Ok(requests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::small_disk::{SMALL_DISK, small_disk};

    #[test]
    fn full_disk_cuts_no_line_and_lost_lines_are_reported() {
        let name = "audit::tests::full_disk_cuts_no_line_and_lost_lines_are_reported";
        let Some(dir) = small_disk(name) else { return };
        let (ballast, path) = (dir.join("ballast"), dir.join("audit"));
        std::fs::write(&ballast, vec![0; SMALL_DISK / 2]).unwrap();
        let audit = Audit::create(Some(&path), 1000).unwrap();
        let many = |line: fn(usize) -> AuditLine, n| {
            let written = (0..1000).take_while(|_| audit.write(line(n)).is_ok());
            written.count()
        };
        let of = |n| AuditLine {
            url: "x".repeat(n),
            ..AuditLine::default()
        };
        let line = || of(1500);
        // Even a short line does not fit at the end.
        let kept = many(of, 1500) + many(of, 0);
        assert!(audit.check().is_err());
        std::fs::remove_file(&ballast).unwrap();
        audit.check().unwrap();
        audit.write(line()).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<AuditLine> = text
            .lines()
            .map(|l| serde_json::from_str(l).unwrap())
            .collect();
        assert_eq!(lines.len(), kept + 2);
        let detail = lines[kept].detail.as_deref().unwrap_or_default();
        assert!(detail.contains("2 line"), "{detail}");
    }

    #[test]
    fn requests_without_an_answer_are_found_in_the_order_of_logs() {
        let dir = tempfile::tempdir().unwrap();
        assert!(not_recorded(&dir.path().join("none")).unwrap().is_empty());
        let line = |url: &str, reason: Option<&str>| AuditLine {
            method: "GET".into(),
            url: url.into(),
            reason: reason.map(Into::into),
            detail: Some(format!("why {url}")),
            ..AuditLine::default()
        };
        for (log, lines) in [
            (
                "b.jsonl",
                [line("u3", Some("not_recorded")), line("u4", None)],
            ),
            (
                "a.jsonl",
                [
                    line("u1", Some("no_rule")),
                    line("u2", Some("not_recorded")),
                ],
            ),
        ] {
            let audit = Audit::create(Some(&dir.path().join(log)), 10).unwrap();
            lines.into_iter().for_each(|l| audit.write(l).unwrap());
        }
        let found = not_recorded(dir.path()).unwrap();
        let expected = [("GET u2", "why u2"), ("GET u3", "why u3")];
        assert_eq!(found, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }
}
