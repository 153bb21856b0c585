//! Reasons for which a verdict, a row of labels or a reward model cannot be used.

use crate::chat::ChatError;
use sinew_dialect::conversation::StrictError;
use sinew_http::HttpError;
use sinew_model::LoadError;
use sinew_render::RenderError;
use std::io;

/// Reason why a text is not a verdict. It can be shown to the judge: it holds nothing of the text itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct VerdictError(pub(crate) String);

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
    #[error(transparent)]
    Messages(#[from] StrictError),
    /// A field is missing or of another kind, or the grades do not fit the rubric.
    #[error("{0}")]
    Field(String),
}

/// Reasons for which a reward model has no score for a sample.
#[derive(Debug, thiserror::Error)]
pub enum RewardModelError {
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The chat template cannot be parsed, or does not accept the messages.
    #[error(transparent)]
    Render(#[from] RenderError),
    /// The system has no thread for it.
    #[error(transparent)]
    Thread(#[from] io::Error),
}

/// Reason why a reward server cannot be asked, or breaks the protocol.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Its address or key cannot be one.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// It has no answer.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// A sample cannot be sent, or an answer is not one of the protocol.
    #[error("{0}")]
    Wrong(String),
}
