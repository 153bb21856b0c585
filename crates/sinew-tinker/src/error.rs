//! Errors of requests, with the side that has to act.

use serde::{Deserialize, Serialize};
use sinew_train::PolicyError;
use std::fmt;

/// The side that caused a failure, as the SDK's `RequestErrorCategory` distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// The request is impossible: the same request fails again.
    User,
    /// The server could not compute it.
    Server,
}

impl Category {
    /// Name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Server => "server",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reasons for which a request is refused or failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TinkerError {
    /// A field with a value that is not allowed.
    #[error("{field} is {value}, allowed: {allowed}")]
    Value {
        /// Path of the field in the request, such as `data[3].loss_fn_inputs.weights`.
        field: String,
        /// The value, or the part of it that is wrong.
        value: String,
        /// Values that are allowed.
        allowed: String,
    },
    /// A field that the request needs is missing.
    #[error("{field} is missing: {hint}")]
    Missing {
        /// Path of the field in the request.
        field: String,
        /// Reason why it is needed, and what to send.
        hint: String,
    },
    /// A part of the protocol that this service does not have.
    #[error("{feature} is not served here: {hint}")]
    NotServed {
        /// The part of the protocol.
        feature: String,
        /// Reason, and what to use in its place.
        hint: String,
    },
    /// More than a limit of this service allows.
    #[error("{what} is {value}, at most {limit} is allowed: {hint}")]
    Limit {
        /// The quantity, with the path of its field.
        what: String,
        /// Its value.
        value: u64,
        /// Largest value that is allowed.
        limit: u64,
        /// A way out: a smaller request, or the key of the server's configuration.
        hint: String,
    },
    /// The model could not compute.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// A failure inside the service, for which the request is not the reason.
    #[error("{0}")]
    Internal(String),
}

impl TinkerError {
    /// A value that is not allowed in a field.
    pub fn value(
        field: impl Into<String>,
        value: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Value {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    /// A field that has to be there.
    pub fn missing(field: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Missing {
            field: field.into(),
            hint: hint.into(),
        }
    }

    /// A part of the protocol that is not served.
    pub fn not_served(feature: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::NotServed {
            feature: feature.into(),
            hint: hint.into(),
        }
    }

    /// The side that has to act.
    pub fn category(&self) -> Category {
        match self {
            Self::Value { .. }
            | Self::Missing { .. }
            | Self::NotServed { .. }
            | Self::Limit { .. } => Category::User,
            Self::Policy(_) | Self::Internal(_) => Category::Server,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_field_is_the_callers_error_and_names_what_is_allowed() {
        let error = TinkerError::value("loss_fn_config.beta", -1.0, "a number > 0");
        assert_eq!(error.category(), Category::User);
        assert_eq!(
            error.to_string(),
            "loss_fn_config.beta is -1, allowed: a number > 0"
        );
    }

    #[test]
    fn a_model_that_cannot_compute_is_the_servers_error() {
        let error = TinkerError::from(PolicyError::failed("no memory"));
        assert_eq!(error.category(), Category::Server);
        assert_eq!(error.to_string(), "model failed: no memory");
    }
}
