//! Errors that stop a part of the training loop.

/// Error of the training loop. Each text names the failure, and a remedy if there is one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PipelineError {
    /// A setting or a file is wrong; the user can correct it.
    #[error("{0}")]
    Input(String),
    /// Any other failure.
    #[error("{0}")]
    System(String),
    /// The trainer's processes are gone. What they computed since the last checkpoint can be computed again
    /// from stored episodes.
    #[error("{0}")]
    TrainerLost(String),
    /// The run was asked to stop, for example by a signal; nothing is lost.
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
