//! One JSON line for each thing that an episode tried, allowed or not.

use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Longest URL in a line; more is cut.
const MAX_URL_CHARS: usize = 2048;

/// A line of the audit log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AuditLine {
    /// Seconds since the session began.
    pub at_s: f64,
    /// `allowed`, `denied`, `replayed` or `failed`.
    pub decision: String,
    /// Kind of denial or failure.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub reason: Option<String>,
    /// What went wrong.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub detail: Option<String>,
    /// Method, `CONNECT` for a tunnel.
    pub method: String,
    /// URL, or host and port of a tunnel.
    pub url: String,
    /// Address that was connected to.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub address: Option<String>,
    /// Name of the credential that was added.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub credential: Option<String>,
    /// Status of the answer.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub status: Option<u16>,
    /// Bytes of bodies to the server.
    pub bytes_up: u64,
    /// Bytes of bodies from the server.
    pub bytes_down: u64,
    /// Seconds that it took.
    pub wall_s: f64,
}

/// The log of a session: in a file, or nowhere.
#[derive(Debug)]
pub(crate) struct Audit {
    file: Option<Mutex<(File, u64)>>,
}

impl Audit {
    /// A new file; at most `lines` lines.
    pub(crate) fn create(path: Option<&Path>, lines: u64) -> std::io::Result<Self> {
        let open = |path: &Path| {
            if let Some(parent) = path.parent() {
                std::fs::create_dir_all(parent)?;
            }
            File::create(path)
        };
        let file = path.map(open).transpose()?;
        Ok(Self {
            file: file.map(|f| Mutex::new((f, lines))),
        })
    }

    /// Writes a line. A log that cannot be written is an error of the request that caused it.
    pub(crate) fn write(&self, mut line: AuditLine) -> std::io::Result<()> {
        let Some(file) = &self.file else {
            return Ok(());
        };
        if let Some((at, _)) = line.url.char_indices().nth(MAX_URL_CHARS) {
            line.url.truncate(at);
        }
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        let mut guard = file.lock().unwrap_or_else(PoisonError::into_inner);
        let (file, left) = &mut *guard;
        // Requests beyond the quota are refused; their flood must not fill the disk.
        if *left == 0 {
            return Ok(());
        }
        *left -= 1;
        file.write_all(&text)
    }
}
