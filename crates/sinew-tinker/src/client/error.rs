//! Errors of calls to a service.

use crate::error::TinkerError;
use sinew_train::PolicyError;

/// Reasons for which a service did not do what it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The address, the key or a setting cannot be used, or the service has no such model.
    #[error("Tinker service: {0}")]
    Setup(String),
    /// There is no connection. The service may or may not have the request.
    #[error("the Tinker service is not reached for `{call}`: {why}")]
    Connection {
        /// Name of the call.
        call: &'static str,
        /// Reason in words.
        why: String,
    },
    /// There is no result within the limit.
    #[error("the Tinker service did not end `{call}` within {seconds} s: {state}")]
    Deadline {
        /// Name of the call.
        call: &'static str,
        /// Limit in seconds.
        seconds: u64,
        /// The last known state of the request, in words.
        state: String,
    },
    /// The key is not accepted.
    #[error(
        "the Tinker service refuses the key for `{call}`, status {status}: {text}\n  hint: \
         `trainer.api_key_env` names the variable that the key comes from"
    )]
    Key {
        /// Name of the call.
        call: &'static str,
        /// HTTP status, 401 or 403.
        status: u16,
        /// Beginning of the service's text.
        text: String,
    },
    /// The service refuses the request; the same request would be refused again.
    #[error("the Tinker service refuses `{call}`, status {status}: {text}")]
    Refused {
        /// Name of the call.
        call: &'static str,
        /// HTTP status.
        status: u16,
        /// Beginning of the service's text.
        text: String,
    },
    /// A session, a model or a result is not there any more.
    #[error("the Tinker service has lost what `{call}` names, status {status}: {text}")]
    Gone {
        /// Name of the call.
        call: &'static str,
        /// HTTP status, 404 or 410.
        status: u16,
        /// Beginning of the service's text.
        text: String,
    },
    /// The service took the command and could not carry it out.
    #[error("`{call}` failed at the Tinker service: {text}")]
    Failed {
        /// Name of the call.
        call: &'static str,
        /// Whether the service blames the request: then the same request would fail again.
        is_request: bool,
        /// Reason of the service.
        text: String,
    },
    /// An answer is not that of the protocol.
    #[error("the answer of the Tinker service to `{call}` cannot be used: {why}")]
    Answer {
        /// Name of the call.
        call: &'static str,
        /// Reason in words.
        why: String,
    },
    /// The gradients at the service are those of a part of an update, and no request sets them to 0.
    #[error("the Tinker service has computed a part of an update: {0}")]
    Partial(String),
}

impl ClientError {
    /// An answer that cannot be read.
    pub(crate) fn unreadable(call: &'static str, why: impl std::fmt::Display) -> Self {
        let why = why.to_string();
        Self::Answer { call, why }
    }

    /// A request that cannot be written.
    pub(crate) fn unwritable(error: &TinkerError) -> Self {
        Self::Setup(error.to_string())
    }

    /// The error of an answer with a status that is not a success.
    pub(crate) fn of_status(call: &'static str, status: u16, text: String) -> Self {
        match status {
            401 | 403 => Self::Key { call, status, text },
            404 | 410 => Self::Gone { call, status, text },
            _ => Self::Refused { call, status, text },
        }
    }

    /// Whether a new session can do it, from the last checkpoint on.
    fn may_be_repeated(&self) -> bool {
        match self {
            Self::Connection { .. }
            | Self::Deadline { .. }
            | Self::Gone { .. }
            | Self::Partial(_) => true,
            Self::Failed { is_request, .. } => !is_request,
            Self::Setup(_) | Self::Key { .. } | Self::Refused { .. } | Self::Answer { .. } => false,
        }
    }
}

impl From<ClientError> for PolicyError {
    fn from(error: ClientError) -> Self {
        let text = error.to_string();
        if error.may_be_repeated() {
            Self::Lost(text)
        } else {
            Self::Failed(text)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_another_session_can_do_counts_as_lost() {
        let lost = |error: ClientError| matches!(PolicyError::from(error), PolicyError::Lost(_));
        let failed = |is_request| ClientError::Failed {
            call: "forward",
            is_request,
            text: "no memory".into(),
        };
        assert!(lost(failed(false)) && !lost(failed(true)));
        assert!(lost(ClientError::of_status("forward", 410, String::new())));
        assert!(!lost(ClientError::of_status("forward", 422, String::new())));
        let key = ClientError::of_status("create_session", 401, "unknown key".into());
        assert!(key.to_string().contains("trainer.api_key_env"), "{key}");
        assert!(!lost(key));
    }
}
