//! Why there is no mask.

use sinew_types::{FormatError, TokenId};

/// Why a format has no matcher, or a matcher no mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("{kind} cannot be compiled: {why}")]
    Compile { kind: &'static str, why: String },
    #[error(
        "{kind} is not a format that fixed texts can hold to: use an engine that compiles grammars"
    )]
    Unsupported { kind: &'static str },
    #[error("vocabulary: {0}")]
    Vocabulary(String),
    #[error("token {token} after {position} tokens is barred by the format")]
    Barred { token: TokenId, position: usize },
    #[error("after {position} tokens no token of the vocabulary goes on with the format")]
    DeadEnd { position: usize },
    #[error("after {position} tokens the text ends before it is complete")]
    Incomplete { position: usize },
    #[error("after {position} tokens: the output has ended")]
    Ended { position: usize },
    #[error("after {position} tokens: {why}")]
    Limit { position: usize, why: String },
}
