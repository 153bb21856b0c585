//! What goes over the wire.

use crate::error::{ApiError, bad};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_sandbox::{ExecResult, Limits, Program};
use std::collections::BTreeMap;
use std::time::Duration;

/// `POST /v1/sandboxes`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CreateRequest {
    /// Level; none: the server's first.
    pub level: Option<String>,
    /// Bounds that differ from the server's.
    pub limits: LimitsRequest,
    /// Environment of all executions.
    pub env: BTreeMap<String, String>,
    /// Refuse if a protection is missing.
    pub strict: bool,
    /// Keep one Python for all its programs; none: as the snapshot's sandbox, else not.
    pub live: Option<bool>,
    /// Seconds until it is destroyed unless it is used; none: the server's.
    pub lease_s: Option<f64>,
    /// Whether it reaches the network through the server's egress proxy.
    pub egress: bool,
    /// Name of what is recorded or replayed, and of the audit log; none: the sandbox's id.
    pub episode: Option<String>,
    /// Snapshot to start from.
    pub snapshot: Option<String>,
}

/// Bounds of a sandbox, each optional.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsRequest {
    /// CPU seconds of one execution.
    pub cpu_s: Option<f64>,
    /// Memory of everything in it.
    pub memory_bytes: Option<u64>,
    /// Processes and threads.
    pub processes: Option<u64>,
    /// Captured output, each stream.
    pub output_bytes: Option<u64>,
    /// Files.
    pub work_bytes: Option<u64>,
    /// Open files of a process.
    pub open_files: Option<u64>,
}

impl LimitsRequest {
    /// The server's defaults with these changes, none above the server's maxima.
    pub(crate) fn apply(&self, defaults: &Limits, most: &Limits) -> Result<Limits, ApiError> {
        let whole = |field: &str, asked: Option<u64>, default: u64, most: u64| match asked {
            Some(n) if n == 0 || n > most => {
                Err(bad(format!("limits.{field}"), n, format!("1 to {most}")))
            }
            asked => Ok(asked.unwrap_or(default.min(most))),
        };
        let cpu_s = match self.cpu_s {
            Some(s) if !(s > 0.0 && s <= most.cpu_s) => {
                return Err(bad(
                    "limits.cpu_s",
                    s,
                    format!("above 0, at most {}", most.cpu_s),
                ));
            }
            asked => asked.unwrap_or(defaults.cpu_s.min(most.cpu_s)),
        };
        Ok(Limits {
            cpu_s,
            memory_bytes: whole(
                "memory_bytes",
                self.memory_bytes,
                defaults.memory_bytes,
                most.memory_bytes,
            )?,
            processes: whole(
                "processes",
                self.processes,
                defaults.processes,
                most.processes,
            )?,
            output_bytes: whole(
                "output_bytes",
                self.output_bytes,
                defaults.output_bytes,
                most.output_bytes,
            )?,
            work_bytes: whole(
                "work_bytes",
                self.work_bytes,
                defaults.work_bytes,
                most.work_bytes,
            )?,
            open_files: whole(
                "open_files",
                self.open_files,
                defaults.open_files,
                most.open_files,
            )?,
        })
    }
}

/// `POST /v1/sandboxes/ID/exec`: exactly one of `argv`, `python` and `shell`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExecBody {
    /// A program and its arguments.
    pub argv: Option<Vec<String>>,
    /// Python code.
    pub python: Option<String>,
    /// A script for the shell.
    pub shell: Option<String>,
    /// Text for standard input.
    pub stdin: Option<String>,
    /// Bytes for standard input, in Base64.
    pub stdin_base64: Option<String>,
    /// Environment of this execution alone.
    pub env: BTreeMap<String, String>,
    /// Wall seconds until it is killed; none: the server's default.
    pub timeout_s: Option<f64>,
    /// Output as it comes, one JSON object a line.
    pub stream: bool,
    /// Output in Base64, for bytes that are no text.
    pub binary: bool,
}

impl ExecBody {
    pub(crate) fn program(&self) -> Result<Program, ApiError> {
        match (&self.argv, &self.python, &self.shell) {
            (Some(argv), None, None) => Ok(Program::Argv(argv.clone())),
            (None, Some(code), None) => Ok(Program::Python(code.clone())),
            (None, None, Some(script)) => Ok(Program::Shell(script.clone())),
            _ => Err(bad(
                "program",
                "missing or given twice",
                "exactly one of argv, python and shell",
            )),
        }
    }

    pub(crate) fn stdin(&self) -> Result<Vec<u8>, ApiError> {
        match (&self.stdin, &self.stdin_base64) {
            (None, None) => Ok(Vec::new()),
            (Some(text), None) => Ok(text.clone().into_bytes()),
            (None, Some(text)) => STANDARD
                .decode(text)
                .map_err(|e| bad("stdin_base64", e, "standard Base64 with padding")),
            _ => Err(bad("stdin", "given twice", "one of stdin and stdin_base64")),
        }
    }
}

/// `POST /v1/sandboxes/ID/fork`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForkRequest {
    /// How many; none: one.
    pub count: Option<usize>,
    /// As in [`CreateRequest`].
    pub lease_s: Option<f64>,
}

/// A sandbox as its owner sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SandboxView {
    /// Name in all routes.
    pub id: String,
    /// Level.
    pub level: String,
    /// Length of its lease; each use begins it anew.
    pub lease_s: f64,
    /// Seconds that are left of it.
    pub expires_in_s: f64,
    /// Whether something runs in it.
    pub busy: bool,
    /// Its bounds.
    pub limits: Limits,
}

/// Environment variables as the port takes them.
pub(crate) fn env(map: &BTreeMap<String, String>) -> Result<Vec<(String, String)>, ApiError> {
    for (name, value) in map {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(bad(
                "env",
                name,
                "names without = and zero bytes, values without zero bytes",
            ));
        }
    }
    Ok(map.iter().map(|(n, v)| (n.clone(), v.clone())).collect())
}

/// Seconds as a duration.
pub(crate) fn seconds(
    field: &str,
    asked: Option<f64>,
    default: Duration,
    most: Duration,
) -> Result<Duration, ApiError> {
    match asked {
        None => Ok(default.min(most)),
        Some(s) if s > 0.0 && s <= most.as_secs_f64() => Ok(Duration::from_secs_f64(s)),
        Some(s) => Err(bad(
            field,
            s,
            format!("above 0, at most {}", most.as_secs_f64()),
        )),
    }
}

/// Output as text, or in Base64.
pub(crate) fn text(bytes: &[u8], binary: bool) -> Value {
    if binary {
        json!(STANDARD.encode(bytes))
    } else {
        json!(String::from_utf8_lossy(bytes))
    }
}

/// A result as it goes over the wire.
pub(crate) fn result(result: &ExecResult, binary: bool) -> Value {
    json!({
        "ending": result.ending,
        "stdout": text(&result.stdout, binary),
        "stderr": text(&result.stderr, binary),
        "truncated": result.truncated,
        "usage": result.usage,
        "protections": *result.protections,
    })
}
