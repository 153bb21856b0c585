//! Errors of sessions and stores, as clients receive them.

use crate::session::SessionError;
use sinew_dialect::ApiError;
use sinew_store::StoreError;

/// Code for a request that was cut too short. The gateway then parses the whole request again; clients never
/// see this code.
pub(crate) const NEEDS_ALL: &str = "needs_all";

/// Status 503: the store failed, and the same request may succeed later.
pub(crate) fn store_failed(error: StoreError) -> ApiError {
    ApiError::overloaded("store_failed", error.to_string())
}

impl From<SessionError> for ApiError {
    fn from(error: SessionError) -> Self {
        let message = error.to_string();
        match error {
            SessionError::Render(e) => e.into(),
            SessionError::ContextFull { .. } => {
                Self::bad_request("context_length_exceeded", message)
            }
            SessionError::Turns { .. } => Self::bad_request("turn_limit_exceeded", message),
            SessionError::Tokens { .. } => Self::bad_request("token_limit_exceeded", message),
            SessionError::Bytes { .. } => Self::bad_request("byte_limit_exceeded", message),
            SessionError::Concurrent { .. } => Self::rate_limit("too_many_requests", message),
            SessionError::Over => Self::gone(message),
            SessionError::Empty => Self::invalid("messages", message),
            SessionError::Prompt(_) => Self::invalid("prompt", message),
            SessionError::NeedsAll => Self::bad_request(NEEDS_ALL, message),
            SessionError::UnknownCall { .. } | SessionError::Broken(_) => {
                Self::server("session_broken", message)
            }
            SessionError::Reward { .. } => Self::invalid("reward", message),
            SessionError::Metrics { .. }
            | SessionError::MetricName { .. }
            | SessionError::RewardBytes { .. } => {
                Self::bad_request("reward_limit_exceeded", message)
            }
            SessionError::Sealed => Self::conflict("rollout_finished", message),
            SessionError::Turn { .. } => Self::invalid("turn", message),
        }
    }
}
