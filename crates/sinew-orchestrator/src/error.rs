//! Reasons why a part of the loop cannot continue.

/// Each text names the failure, and a way out if there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PipelineError {
    /// A setting or a file that the user can put right.
    #[error("{0}")]
    Input(String),
    /// Anything else.
    #[error("{0}")]
    System(String),
    /// The run was asked to stop; nothing is lost.
    #[error("interrupted")]
    Interrupted,
}

impl PipelineError {
    pub fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    pub fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }

    /// Whether the run was asked to stop.
    pub fn is_interrupt(&self) -> bool {
        matches!(self, Self::Interrupted)
    }
}
