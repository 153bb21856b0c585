//! Reasons for which a text is not a part of a rule.

/// A text that is not a part of a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("{0:?} is no range of addresses; allowed: 10.0.0.0/8, ::1/128, 192.0.2.1")]
    Range(String),
    #[error("path {0:?}; allowed: /v1/models, or /v1/* for all that begin so")]
    Path(String),
}
