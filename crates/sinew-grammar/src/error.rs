//! Errors of compilers and matchers.

use sinew_types::{FormatError, TokenId};

/// Reason why a format has no matcher, or a matcher no mask. Positions count tokens from 0.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The format itself is invalid.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The format cannot be compiled.
    #[error("{kind} cannot be compiled: {why}")]
    Compile {
        kind: &'static str,
        why: CompileError,
    },
    /// [`ListGrammars`](crate::ListGrammars) supports fixed texts only.
    #[error("{kind} is not a list of fixed texts: use an engine that compiles grammars")]
    Unsupported { kind: &'static str },
    /// The vocabulary is inconsistent.
    #[error("vocabulary: {0}")]
    Vocabulary(String),
    /// The mask forbids the token.
    #[error("token {token} after {position} tokens is barred by the format")]
    Barred { token: TokenId, position: usize },
    /// The output is incomplete, and no token continues it.
    #[error("after {position} tokens no token of the vocabulary continues the format")]
    DeadEnd { position: usize },
    /// A checked text is a proper prefix of the format's language.
    #[error("after {position} tokens the text ends before it is complete")]
    Incomplete { position: usize },
    /// The end token was already consumed.
    #[error("after {position} tokens: the output has ended")]
    Ended { position: usize },
    /// The compiler reached one of its limits.
    #[error("after {position} tokens: {why}")]
    Limit { position: usize, why: String },
}

/// Reason why a format cannot be compiled, and what to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// The compiler refused it.
    #[error("{0}")]
    Compiler(String),
    /// It could take too long to compile or to match.
    #[error("{0}")]
    Limit(String),
    /// The text is not a schema, or has a part that cannot be enforced.
    #[error("{0}")]
    Unsupported(String),
}
