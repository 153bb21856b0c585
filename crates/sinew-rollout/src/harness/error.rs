//! Reasons why an agent program cannot be run, or its model not served.

use sinew_sandbox::SandboxError;
use std::error::Error;

/// Reason why a program or a service cannot be run, or did not run; never a mistake of the model.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// A setting that cannot work, whatever the host has.
    #[error("{field}: {reason}")]
    Invalid {
        /// Name of the setting: `command`, `mounts`, `preload`.
        field: &'static str,
        /// The value, what is allowed, and what to do.
        reason: String,
    },
    /// The setting is right, but the host lacks what it names, or the program cannot start there.
    #[error("{field}: {reason}")]
    Missing {
        /// Name of the setting.
        field: &'static str,
        /// Missing part, and how to get it.
        reason: String,
    },
    /// The sandbox refused or failed.
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    /// The fork server, the service or the connection to the model failed.
    #[error("{0}")]
    Failed(String),
}

/// Reasons for which a model server refuses a call, or a report of an agent cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum ModelServerError {
    /// The server's own error.
    #[error(transparent)]
    Refused(Box<dyn Error + Send + Sync>),
    #[error("the agent's own reward cannot be read: {0}")]
    Report(#[from] serde_json::Error),
}

impl ModelServerError {
    /// The error of a server.
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
