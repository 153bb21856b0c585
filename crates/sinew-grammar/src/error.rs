//! Errors of compilers and matchers.

use sinew_types::{FormatError, TokenId};

/// Reason why a format has no matcher, or a matcher no mask. Positions count tokens from 0.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CompileError {
    /// The compiler refused it.
    #[error("{0}")]
    Compiler(String),
    #[error(
        "too many patterns, formats and lengths of strings apply together at {at:?} (allOf, or a \
         $ref or anyOf beside other keys): allowed is a product of their branches of {max}; \
         join them into one pattern"
    )]
    Patterns { at: String, max: f64 },
    #[error("{key} has more than {max} patterns")]
    KeyPatterns { key: String, max: usize },
    #[error("allOf inside %json of a Lark grammar: give the schema as a JSON Schema")]
    AllOf,
    #[error(
        "{members} intersections and complements (& and ~) over {branches} branches: allowed is a product of \
         {max}; use fewer of them"
    )]
    Intersections {
        members: f64,
        branches: f64,
        max: f64,
    },
    #[error("it is not JSON: {0}")]
    Json(String),
    #[error("a schema is a JSON object, or true")]
    Schema,
    #[error("{0:?} is not a key of JSON Schema: remove it")]
    Key(&'static str),
    #[error("{0:?} cannot be enforced: remove it, or check the output yourself")]
    Unenforced(&'static str),
    #[error("it has more than {0} levels")]
    Depth(usize),
    #[error("the trigger {0:?} mixes text and control tokens: use one or the other")]
    Trigger(String),
}
