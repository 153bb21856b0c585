//! Reasons why sandboxes cannot be started.

/// Reasons why sandboxes cannot be started, by the cause of the mistake.
#[derive(Debug, thiserror::Error)]
pub enum LevelError {
    /// A key of the recipe that the user can put right.
    #[error("{0}")]
    Input(String),
    /// The host refused, or cannot enforce the level.
    #[error("{0}")]
    System(String),
    /// The recipe is right, and needs a program with another feature.
    #[error("{0}")]
    Outside(String),
}

impl LevelError {
    pub(crate) fn input(text: impl std::fmt::Display) -> Self {
        Self::Input(text.to_string())
    }

    pub(crate) fn system(text: impl std::fmt::Display) -> Self {
        Self::System(text.to_string())
    }
}

/// The refusal of `what`, which needs a feature that this program was built without.
pub fn missing_feature(what: &str, feature: &str) -> LevelError {
    LevelError::Outside(format!(
        "{what}: this program was built without the feature `{feature}`\n  \
         hint: cargo build -p sinew --features {feature} (all of them: --features full)"
    ))
}
