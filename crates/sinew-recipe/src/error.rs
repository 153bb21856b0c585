//! Errors of recipes.

use crate::messages;
use std::path::PathBuf;

/// Reason why a recipe is refused. Each text names the key, its value, the allowed values, and a remedy.
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
    /// The text is not a valid recipe: invalid TOML, an unknown key, or a value of the wrong type.
    #[error("recipe {}: {message}", path.display())]
    Parse {
        path: PathBuf,
        message: String,
        /// Path of the key with the error, if there is one.
        key: Option<String>,
    },
    /// A value breaks a rule, or its key has no effect in this recipe.
    #[error("recipe {}: {place}{key} = {value}: {reason}", path.display())]
    Value {
        path: PathBuf,
        /// The line of the key with a mark below it; empty if a default breaks the rule.
        place: String,
        /// Path of the key, such as `train.lora.rank`.
        key: String,
        /// The value in TOML.
        value: String,
        /// Allowed values, and a remedy.
        reason: String,
    },
}

impl RecipeError {
    /// Path of the key with the error; `None` if the text is not a recipe at all.
    pub fn key(&self) -> Option<String> {
        match self {
            Self::Read { .. } => None,
            Self::Parse { key, .. } => key.clone(),
            Self::Value { key, .. } => Some(key.clone()),
        }
    }

    /// Line and column of the error, from 1; `None` if a default breaks a rule.
    pub fn at(&self) -> Option<(usize, usize)> {
        match self {
            Self::Read { .. } => None,
            Self::Parse { message, .. } => messages::at(message),
            Self::Value { place, .. } => messages::at(place),
        }
    }

    /// Returns the error with the name of a chain's stage.
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
