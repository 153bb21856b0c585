//! Errors of a policy.

/// Reason why a model could not compute, for display.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// It refuses the call, or cannot compute it again either.
    #[error("model failed: {0}")]
    Failed(String),
    /// The processes that hold its weights are gone, or do not answer. What was applied since the last
    /// checkpoint is lost; new processes can compute it again.
    #[error("trainer lost: {0}")]
    Lost(String),
}

impl PolicyError {
    /// A call that is refused or cannot be computed.
    pub fn failed(text: impl std::fmt::Display) -> Self {
        Self::Failed(text.to_string())
    }

    /// The scores of weights under adapters are asked for, and there are no adapters.
    pub fn no_base() -> Self {
        Self::failed("all weights are trained, so there is no frozen base: use a reference model")
    }
}
