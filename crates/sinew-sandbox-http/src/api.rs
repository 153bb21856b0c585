//! Request and response bodies.

use crate::error::{ApiError, bad};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sinew_sandbox::{ExecResult, Limits, Program, TerminalInput, TerminalSize};
use std::collections::BTreeMap;
use std::time::Duration;

/// Maximum typed bytes of one request.
const MAX_TYPED: usize = 64 << 10;

/// Body of `POST /v1/sandboxes`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CreateRequest {
    /// Sandbox level. Default: the server's first level.
    pub level: Option<String>,
    /// Name of an image that the server offers. Default: the root of the server's level.
    pub image: Option<String>,
    /// Limits that differ from the server's defaults.
    pub limits: LimitsRequest,
    /// Environment variables of all executions.
    pub env: BTreeMap<String, String>,
    /// Refuse to create the sandbox if a protection is missing.
    pub strict: bool,
    /// Lease in seconds. Each use renews it. Default: the server's lease.
    pub lease_s: Option<f64>,
    /// Network access through the server's egress proxy.
    pub egress: bool,
    /// Name for recordings and the audit log. Default: the sandbox's id.
    pub episode: Option<String>,
    /// Id of the snapshot to start from.
    pub snapshot: Option<String>,
}

/// Requested limits of a sandbox. Default: the server's limits.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsRequest {
    /// CPU seconds per execution.
    pub cpu_s: Option<f64>,
    /// Memory of all processes, in bytes.
    pub memory_bytes: Option<u64>,
    /// Number of processes and threads.
    pub processes: Option<u64>,
    /// Captured output bytes per stream.
    pub output_bytes: Option<u64>,
    /// Total file bytes.
    pub work_bytes: Option<u64>,
    /// Open files per process.
    pub open_files: Option<u64>,
}

impl LimitsRequest {
    /// Applies the requested limits to `defaults`.
    ///
    /// # Errors
    /// [`ApiError::Request`] for a limit of zero or above `max`.
    pub(crate) fn apply(&self, defaults: &Limits, max: &Limits) -> Result<Limits, ApiError> {
        let whole = |field: &str, requested: Option<u64>, default: u64, max: u64| match requested {
            Some(n) if n == 0 || n > max => {
                Err(bad(format!("limits.{field}"), n, format!("1 to {max}")))
            }
            requested => Ok(requested.unwrap_or(default.min(max))),
        };
        let cpu_s = match self.cpu_s {
            Some(s) if !(s > 0.0 && s <= max.cpu_s) => {
                return Err(bad(
                    "limits.cpu_s",
                    s,
                    format!("above 0, at most {}", max.cpu_s),
                ));
            }
            requested => requested.unwrap_or(defaults.cpu_s.min(max.cpu_s)),
        };
        Ok(Limits {
            cpu_s,
            memory_bytes: whole(
                "memory_bytes",
                self.memory_bytes,
                defaults.memory_bytes,
                max.memory_bytes,
            )?,
            processes: whole(
                "processes",
                self.processes,
                defaults.processes,
                max.processes,
            )?,
            output_bytes: whole(
                "output_bytes",
                self.output_bytes,
                defaults.output_bytes,
                max.output_bytes,
            )?,
            work_bytes: whole(
                "work_bytes",
                self.work_bytes,
                defaults.work_bytes,
                max.work_bytes,
            )?,
            open_files: whole(
                "open_files",
                self.open_files,
                defaults.open_files,
                max.open_files,
            )?,
        })
    }
}

/// Body of `POST /v1/sandboxes/ID/exec`. Exactly one of `argv`, `python` and `shell` is required.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExecBody {
    /// Program and arguments.
    pub argv: Option<Vec<String>>,
    /// Python code.
    pub python: Option<String>,
    /// Shell script.
    pub shell: Option<String>,
    /// Standard input as text.
    pub stdin: Option<String>,
    /// Standard input as Base64.
    pub stdin_base64: Option<String>,
    /// Environment variables of this execution.
    pub env: BTreeMap<String, String>,
    /// Wall seconds until the program is killed. Default: the server's timeout.
    pub timeout_s: Option<f64>,
    /// Stream the output as one JSON object per line.
    pub stream: bool,
    /// Encode the output as Base64, for bytes that are not text.
    pub binary: bool,
    /// Run on a terminal of this size. It needs `stream` and takes neither `python` nor `stdin`.
    pub terminal: Option<TerminalSize>,
}

/// Body of `POST /v1/sandboxes/ID/terminal`. Exactly one of `typed_base64` and `size` is required.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TerminalBody {
    /// Typed bytes as Base64.
    pub typed_base64: Option<String>,
    /// New size.
    pub size: Option<TerminalSize>,
}

impl TerminalBody {
    /// Decodes the event at the terminal.
    pub(crate) fn input(self) -> Result<TerminalInput, ApiError> {
        match (self.typed_base64, self.size) {
            (Some(text), None) => {
                let typed = STANDARD.decode(text);
                let typed =
                    typed.map_err(|e| bad("typed_base64", e, "standard Base64 with padding"))?;
                if typed.len() > MAX_TYPED {
                    return Err(bad(
                        "typed_base64",
                        "too long",
                        format!("at most {MAX_TYPED} bytes"),
                    ));
                }
                Ok(TerminalInput::Typed(typed))
            }
            (None, Some(size)) => Ok(TerminalInput::Resized(size)),
            _ => Err(bad(
                "body",
                "both or nothing",
                "one of typed_base64 and size",
            )),
        }
    }
}

impl ExecBody {
    /// The program to run.
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

    /// The bytes of standard input.
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

/// Body of `POST /v1/sandboxes/ID/fork`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForkRequest {
    /// Number of forks. Default: 1.
    pub count: Option<usize>,
    /// Lease in seconds, as in [`CreateRequest`]. Default: the lease of the source.
    pub lease_s: Option<f64>,
}

/// State of a sandbox in responses.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SandboxView {
    /// Id for all routes.
    pub id: String,
    /// Sandbox level.
    pub level: String,
    /// Lease in seconds. Each use renews it.
    pub lease_s: f64,
    /// Seconds until the lease ends.
    pub expires_in_s: f64,
    /// True while an operation uses the sandbox.
    pub busy: bool,
    /// Limits in effect.
    pub limits: Limits,
}

/// Converts environment variables for the sandbox port and checks their names and values.
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

/// Parses seconds: above 0, at most `max`.
pub(crate) fn seconds(
    field: &str,
    requested: Option<f64>,
    default: Duration,
    max: Duration,
) -> Result<Duration, ApiError> {
    match requested {
        None => Ok(default.min(max)),
        Some(s) if s > 0.0 && s <= max.as_secs_f64() => Ok(Duration::from_secs_f64(s)),
        Some(s) => Err(bad(
            field,
            s,
            format!("above 0, at most {}", max.as_secs_f64()),
        )),
    }
}

/// Output as UTF-8 text (invalid bytes replaced), or as Base64.
pub(crate) fn text(bytes: &[u8], binary: bool) -> Value {
    if binary {
        json!(STANDARD.encode(bytes))
    } else {
        json!(String::from_utf8_lossy(bytes))
    }
}

/// Result of an execution as JSON.
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
