//! Attacks on sandboxes and their measures, outside of the product.
//!
//! [`attack`] runs hostile programs inside sandboxes of every level and judges them from the host.
//! [`sandbox`] measures sandboxes, and counts the remains of many. The commands
//! `sinew sandbox attack|bench|leaks` run the program `sinew-lab`.
//!
//! Invariants: an attack is `held` only if its effect did not happen, its ending is the precise one, a
//! sibling is unharmed and nothing is left; a row compares programs of the same run on the same machine; a
//! peer that cannot run is a row with the reason, and its target is not met.

pub mod attack;
pub mod cli;
pub mod levels;
mod output;
pub mod sandbox;

/// Reasons why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// An argument or a file that the user can put right. Exit code 2.
    #[error("{0}")]
    Input(String),
    /// Anything else. Exit code 1.
    #[error("{0}")]
    System(String),
}

impl LabError {
    /// An error of what the user asked for.
    pub(crate) fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    /// An error of anything else.
    pub(crate) fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }

    /// Exit code of the process.
    pub fn code(&self) -> u8 {
        match self {
            Self::System(_) => 1,
            Self::Input(_) => 2,
        }
    }
}
