//! Reasons for which a verdict, a row of labels or a reward model cannot be used.

use sinew_dialect::conversation::StrictError;
use sinew_model::LoadError;
use sinew_render::RenderError;
use std::io;

/// Reason why a text is not a verdict. It can be shown to the judge: it holds nothing of the text itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerdictError {
    #[error("it is not one JSON object and nothing else")]
    NotObject,
    #[error("a key occurs twice")]
    Twice,
    /// The verdict belongs to another question.
    #[error("\"id\" is not \"{0}\"")]
    OtherId(String),
    #[error("\"reasons\" is no text")]
    NoReasons,
    #[error("it has {0} keys that were not asked for")]
    Unasked(usize),
    #[error("\"{0}\" is missing")]
    Missing(String),
    #[error("\"{name}\" is no whole number from {low} to {high}")]
    NotOnScale { name: String, low: i64, high: i64 },
    #[error("\"{0}\" is neither true nor false")]
    NotBool(String),
    #[error("\"better\" is neither of the labels")]
    NoLabel,
}

/// Reasons for which rows of labels cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LabelsError {
    #[error(
        "labels grade single answers, and mode = \"compare\" compares two; calibrate its rubric with \
         mode = \"each\""
    )]
    Compare,
    #[error("line {line}: {reason}")]
    Row { line: usize, reason: LabelError },
}

/// Fault of one row of labels.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("there is no {0:?}")]
    Missing(&'static str),
    #[error("\"output\" is no text")]
    Output,
    #[error(transparent)]
    Messages(#[from] StrictError),
    #[error("there is neither \"prompt\" nor \"messages\"")]
    NoPrompt,
    #[error("{grades} grades for {items} items of the rubric")]
    Grades { grades: usize, items: usize },
    #[error("a grade is no whole number from {low} to {high}")]
    NotOnScale { low: i64, high: i64 },
    #[error("a grade is neither true nor false")]
    NotBool,
}

/// Reasons for which a reward model has no score for a sample.
#[derive(Debug, thiserror::Error)]
pub enum RewardModelError {
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Its chat template cannot be read, or does not take the messages.
    #[error(transparent)]
    Render(#[from] RenderError),
    /// The system has no thread for it.
    #[error(transparent)]
    Thread(#[from] io::Error),
}
