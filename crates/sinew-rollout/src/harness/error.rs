//! Errors of agent programs and of the server for their model.

use sinew_sandbox::SandboxError;
use std::error::Error;

/// Error of an agent program or a service that cannot run or did not run. It is never the model's mistake.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// A setting cannot work on any host.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the setting: `command`, `mounts`, `preload`.
        field: &'static str,
        /// The value, the allowed values, and a remedy.
        reason: String,
    },
    /// The setting is valid, but the host lacks a file that it names, or the program cannot start.
    #[error("{field}: {reason}")]
    Missing {
        /// Name of the setting.
        field: &'static str,
        /// The missing part, and a way to get it.
        reason: String,
    },
    /// The sandbox refused or failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The fork server, the service or the connection to the model failed.
    #[error("{0}")]
    Failed(String),
}

/// Error of a model server: it refused a call, or cannot accept an agent's report.
#[derive(Debug, thiserror::Error)]
pub enum ModelServerError {
    /// The server's own error.
    #[error(transparent)]
    Refused(Box<dyn Error + Send + Sync>),
    #[error("the agent's own reward cannot be read: {0}")]
    Report(#[from] serde_json::Error),
}

impl ModelServerError {
    /// Wraps the error of a server.
    pub fn refused(error: impl Error + Send + Sync + 'static) -> Self {
        Self::Refused(Box::new(error))
    }
}

pub(super) fn invalid(field: &'static str, reason: impl Into<String>) -> ProgramError {
    let reason = reason.into();
    ProgramError::Invalid { field, reason }
}

pub(super) fn missing(field: &'static str, reason: impl Into<String>) -> ProgramError {
    let reason = reason.into();
    ProgramError::Missing { field, reason }
}
