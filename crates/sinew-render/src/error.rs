//! Errors of rendering and tokenizing. Messages name the file, the message or the token, and what
//! to do.

use sinew_types::TokenId;
use std::path::PathBuf;

/// Reason why messages cannot be converted to tokens, or tokens to text.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    /// A file of the model cannot be read.
    #[error("cannot read {path}: {message}")]
    Read { path: PathBuf, message: String },
    /// The tokenizer is invalid or not supported.
    #[error("tokenizer from {source_name}: {message}")]
    Tokenizer {
        source_name: String,
        message: String,
    },
    /// The chat template is invalid or refuses the messages. Line 0: unknown.
    #[error("chat template line {line}: {message}")]
    Template { line: usize, message: String },
    /// The model has no chat template.
    #[error("the model has no chat template: {hint}")]
    NoTemplate { hint: String },
    /// The renderer does not support a message.
    #[error("cannot render {role} message: {message}")]
    Message { role: String, message: String },
    /// A message has an image or audio part.
    #[error(
        "message {message} ({role}) has {kind} in part {part}: the model reads text alone; send what it \
         shows as text, or use a model that takes {kind}"
    )]
    Media {
        /// Index of the message.
        message: usize,
        role: &'static str,
        part: usize,
        /// `image` or `audio`.
        kind: &'static str,
    },
    /// No token ends a turn.
    #[error("no stop token: neither eos nor a token that closes a turn is known; {hint}")]
    NoStopToken { hint: String },
    /// A character outside of the alphabet of a character tokenizer.
    #[error("character {character:?} is not in the alphabet {alphabet:?}")]
    UnknownCharacter { character: char, alphabet: String },
    /// A token id outside of the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    UnknownToken { id: TokenId, vocab: usize },
    /// The template does not show the text between two turns.
    #[error("the boundary between two turns cannot be found: {0}")]
    Join(String),
    /// Calls that the template writes do not parse to themselves.
    #[error(
        "{trajectory}, message {message}: the model writes its calls as {written:?}, which reads \
         as {read}; set the tool-call format that the model was trained on"
    )]
    Calls {
        trajectory: String,
        message: usize,
        written: String,
        read: String,
    },
    /// Incremental ids differ from a full render.
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
}

/// First difference between incremental ids and a full render. Training on such a renderer would
/// train other contexts than the model has seen in chats.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{trajectory}, message {message}: bridged ids differ from a full render at token {index}: \
     bridged ...{bridged_context:?} [{}], full render ...{full_context:?} [{}]",
    token_shown(.bridged),
    token_shown(.full)
)]
pub struct Mismatch {
    /// Name of the conversation.
    pub trajectory: String,
    /// Index of the assistant message before the boundary.
    pub message: usize,
    /// Index of the first different token.
    pub index: usize,
    /// Text of the incremental token. `None` after the end.
    pub bridged: Option<String>,
    /// Text of the token of the full render. `None` after the end.
    pub full: Option<String>,
    /// Text of up to eight incremental tokens before the difference.
    pub bridged_context: String,
    /// Text of up to eight tokens of the full render before the difference.
    pub full_context: String,
}

/// The different token, or `end`.
fn token_shown(token: &Option<String>) -> String {
    match token {
        Some(text) => format!("{text:?}"),
        None => "end".into(),
    }
}
