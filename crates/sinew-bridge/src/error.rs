//! Errors of workers and of calls.

use crate::frame::FrameError;
use sinew_env::EnvError;
use sinew_http::HttpError;

/// Workers that could not be started: an error of the user, of the recipe or of the host.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    /// The name of a class or a function is invalid.
    #[error("module {value:?}: {reason}")]
    Target {
        /// The name as it was given.
        value: String,
        /// Reason: the fault, and what is allowed.
        reason: String,
    },
    /// There is no usable Python interpreter.
    #[error("python: {0}")]
    Interpreter(String),
    /// The user's module raised an error while it was loaded, or its class is not an environment.
    #[error("{}", raised(place.as_deref(), kind, message))]
    Load {
        /// Class of the exception.
        kind: String,
        /// Text of the exception.
        message: String,
        /// `file:line` of the user's code, where it is known.
        place: Option<String>,
    },
    /// The worker did not start, or not in time.
    #[error("a Python worker did not start: {0}")]
    Worker(String),
    /// A setting is out of range.
    #[error("{field} is {value}: {allowed}")]
    Config {
        /// The setting.
        field: &'static str,
        /// Its value.
        value: String,
        /// Allowed values.
        allowed: String,
    },
}

/// Reason why a server of environments cannot be made or tried.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The address or the key cannot be one.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// An option is out of range or of another form.
    #[error("{0}")]
    Options(String),
}

/// Reasons for which a class or a function gives no rows.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowsError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the answer of a Python worker is not as expected: {0}")]
    Answer(#[from] serde_json::Error),
    #[error("index {index}: {reason}")]
    Row { index: usize, reason: RowError },
    /// More than the limit. The rows may have no end.
    #[error("it gives {over} for the split {split}; end it, for example with itertools.islice")]
    Over { over: String, split: &'static str },
}

/// Fault of one row.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RowError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The value is not a row, or one of its columns is of another type.
    #[error("{0}")]
    Value(String),
}

/// Reasons for which an MCP server has no session.
#[cfg(feature = "mcp")]
#[derive(Debug, thiserror::Error)]
pub(crate) enum McpError {
    #[error("the MCP server {server:?} did not start: {reason}")]
    Start { server: String, reason: String },
    /// The server ended, violated the protocol, or offers too many tools.
    #[error("the MCP server {server:?}: {reason}")]
    Server { server: String, reason: String },
    #[error("an MCP server did not answer within {0} s")]
    Late(f64),
    #[error("all {0} sessions are in use; raise env.sessions")]
    InUse(usize),
    /// The key of the server, its program or a file of its command is not there.
    #[error("{0}")]
    Missing(String),
    #[error(transparent)]
    Python(#[from] StartError),
}

/// Reasons for which a worker breaks its protocol.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProtocolError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Parse(#[from] tokio::task::JoinError),
    #[error("an answer to call {0}, which does not wait")]
    NotWaiting(u64),
    #[error("too many runs of code at once")]
    TooManyRuns,
}

/// A call without a value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallError {
    /// The user's code raised an exception.
    #[error("{}", raised(place.as_deref(), kind, message))]
    Raised {
        /// Class of the exception.
        kind: String,
        /// Text of the exception, at most 2,000 characters.
        message: String,
        /// `file:line` of the user's code, where it is known.
        place: Option<String>,
    },
    /// The call took too long. Its worker was ended.
    #[error("it took longer than {seconds} s; its worker was ended")]
    Deadline {
        /// The deadline.
        seconds: f64,
    },
    /// The worker ended during the call or before it, by the doing of this or of another session.
    #[error("its Python worker ended: {reason}")]
    Lost {
        /// Reason of its end.
        reason: String,
    },
    /// No worker could take the call.
    #[error("no Python worker is free: {0}")]
    Busy(String),
    /// No worker could be started.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A request or an answer breaks the protocol, as a response that is too long.
    #[error("{0}")]
    Protocol(String),
}

impl CallError {
    /// The error as one of an environment, which fails the episode.
    pub fn into_env(self) -> EnvError {
        EnvError::Worker(self.to_string())
    }
}

/// An exception in one line.
fn raised(place: Option<&str>, kind: &str, message: &str) -> String {
    let first = message.lines().next().unwrap_or_default();
    let place = place.map(|p| format!("{p}: ")).unwrap_or_default();
    match first.is_empty() {
        true => format!("{place}{kind}"),
        // These begin with the place of the function.
        false if matches!(kind, "SchemaError" | "BindError") => first.to_owned(),
        false => format!("{place}{kind}: {first}"),
    }
}
