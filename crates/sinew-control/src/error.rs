//! Errors of registry, server and client.

use std::io;
use std::path::{Path, PathBuf};

/// Reasons for which a call between an owner and a role has no result.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The name is that of no kind.
    #[error("role kind {0:?}; allowed: rollout, engine, trainer, sandbox, scorer")]
    Kind(String),
    /// A field has a value that is not allowed.
    #[error("{field} is {value:?}; allowed: {allowed}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// The value, at most 100 characters.
        value: String,
        /// The values that are allowed.
        allowed: String,
    },
    /// The lease ended, or the owner is a newer one.
    #[error("{0}: the lease ended\n  hint: register again")]
    Gone(String),
    /// A newer incarnation has the place of this role, which must end.
    #[error("{0} was replaced by a newer incarnation and must end")]
    Superseded(String),
    /// The call belongs to another generation of owners.
    #[error(
        "the call has fence {given}, the owner has {own}: only calls of the same fence are answered"
    )]
    Fenced {
        /// Fence of the call.
        given: u64,
        /// Fence of the owner.
        own: u64,
    },
    /// The registry is full.
    #[error("{0} roles are registered, which is the limit")]
    Full(usize),
    /// The owner refused the call for another reason.
    #[error("the owner at {url} refused: status {status}: {message}")]
    Refused {
        /// Address of the owner.
        url: String,
        /// Status of the answer.
        status: u16,
        /// Its words.
        message: String,
    },
    /// The owner does not answer.
    #[error(
        "the owner at {url} does not answer: {why}\n  hint: does the run still train, and is the address right?"
    )]
    Unreachable {
        /// Address of the owner.
        url: String,
        /// Reason, in words.
        why: String,
    },
    /// A file cannot be read or written.
    #[error("{verb} {}: {error}", path.display())]
    File {
        /// Failed operation.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: io::Error,
    },
}

impl ControlError {
    /// Makes an error of a file from the system's.
    pub(crate) fn file(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |error| Self::File { verb, path, error }
    }

    /// An error of a field, with its value cut to 100 characters.
    pub(crate) fn field(
        field: &'static str,
        value: impl ToString,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Field {
            field,
            value: value.to_string().chars().take(100).collect(),
            allowed: allowed.into(),
        }
    }
}
