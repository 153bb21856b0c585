//! What can go wrong around a sandbox, as opposed to inside it.

use std::io;

/// A failure of the sandbox itself. What hostile code does to itself is an
/// [`Ending`](crate::Ending), never an error.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The spec asks for something that no level can give.
    #[error("sandbox spec: `{field}` = {value} is not allowed: {allowed}")]
    InvalidSpec {
        field: &'static str,
        value: String,
        allowed: String,
    },
    /// The request is malformed or over a limit.
    #[error("exec request: `{field}` is refused: {reason}")]
    InvalidRequest { field: &'static str, reason: String },
    /// This host cannot run the level at all.
    #[error("level `{level}` cannot run on this host: {reason}")]
    Unsupported { level: &'static str, reason: String },
    /// `strict = true` and a protection is not in force.
    #[error(
        "strict sandbox refused: {missing}; provide it on this host, or set `strict = false` to run without it"
    )]
    NotStrict { missing: String },
    /// A step of the set-up failed; nothing was run.
    #[error("sandbox set-up failed at {step}: {source}")]
    Setup { step: String, source: io::Error },
    /// A path of the file interface is refused or cannot be opened.
    #[error("sandbox file `{path}`: {reason}")]
    File { path: String, reason: String },
    /// The sandbox, or the process that starts sandboxes, is gone. Acquire a new one.
    #[error("sandbox died: {reason}")]
    Died { reason: String },
    /// The helper process sent something that the protocol does not allow.
    #[error("sandbox protocol: {reason}")]
    Protocol { reason: String },
    /// A sandbox was not started within the pool's patience.
    #[error("no sandbox within {waited_s:.1} s: {live} of {max_live} in use, {starting} starting")]
    PoolTimeout {
        waited_s: f64,
        live: usize,
        max_live: usize,
        starting: usize,
    },
    /// A call to the system failed.
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

impl SandboxError {
    pub(crate) fn io(what: impl Into<String>, source: io::Error) -> Self {
        Self::Io {
            what: what.into(),
            source,
        }
    }

    pub(crate) fn died(reason: impl Into<String>) -> Self {
        Self::Died {
            reason: reason.into(),
        }
    }

    pub(crate) fn protocol(reason: impl Into<String>) -> Self {
        Self::Protocol {
            reason: reason.into(),
        }
    }
}
