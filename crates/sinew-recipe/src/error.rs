//! Reasons why a recipe is refused.

use crate::messages;
use std::path::PathBuf;

/// Reason why a recipe is refused. Each text names the key, the value, what is allowed, what to do.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The file cannot be read.
    #[error(
        "recipe {}: {source}\n  hint: recipes that ship are in recipes/, for example \
         recipes/quickstart.toml",
        path.display()
    )]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The text is not a recipe: not TOML, an unknown key, a value of another type.
    #[error("recipe {}: {message}", path.display())]
    Parse {
        path: PathBuf,
        message: String,
        /// Path of the key that is wrong, where there is one.
        key: Option<String>,
    },
    /// A value breaks a rule, or its key has no effect in this recipe.
    #[error("recipe {}: {place}{key} = {value}: {reason}", path.display())]
    Value {
        path: PathBuf,
        /// The line of the key with a mark below it; empty where a default breaks the rule.
        place: String,
        /// Path of the key, such as `train.lora.rank`.
        key: String,
        /// The value, as it is typed in TOML.
        value: String,
        /// Allowed values, and a way out.
        reason: String,
    },
}

impl RecipeError {
    /// Path of the key that is wrong; none if the text is not a recipe at all.
    pub fn key(&self) -> Option<String> {
        match self {
            Self::Read { .. } => None,
            Self::Parse { key, .. } => key.clone(),
            Self::Value { key, .. } => Some(key.clone()),
        }
    }

    /// Line and column of what is wrong, from 1; none where a default breaks a rule.
    pub fn at(&self) -> Option<(usize, usize)> {
        match self {
            Self::Read { .. } => None,
            Self::Parse { message, .. } => messages::at(message),
            Self::Value { place, .. } => messages::at(place),
        }
    }

    /// The same, of a stage of a chain.
    pub(crate) fn in_stage(self, stage: &str) -> Self {
        match self {
            Self::Value {
                path,
                place,
                key,
                value,
                reason,
            } => Self::Value {
                path,
                place: format!("{place}stage {stage}: "),
                key,
                value,
                reason,
            },
            other => other,
        }
    }
}
