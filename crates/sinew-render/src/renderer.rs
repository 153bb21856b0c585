//! The `Renderer` port and its errors.

use crate::template::role_name;
use crate::turn::TurnFormat;
use sinew_types::{FinishReason, Message, TokenId, ToolSpec};
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

/// First difference between incremental ids and a full render.
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

/// Tokens that follow a sampled turn.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extension {
    /// Tokens that close a truncated turn: [`sinew_types::TokenKind::Forced`].
    pub forced: Vec<TokenId>,
    /// New messages and the generation prompt: [`sinew_types::TokenKind::Observation`].
    pub observation: Vec<TokenId>,
}

/// Refuses messages with parts other than text, which no renderer supports.
///
/// # Errors
/// [`RenderError::Media`] for the first such part.
pub fn text_only(messages: &[Message]) -> Result<(), RenderError> {
    let media = |(index, message): (usize, &Message)| {
        let (part, media) = message.content.first_media()?;
        Some(RenderError::Media {
            message: index,
            role: role_name(message.role),
            part,
            kind: media.kind(),
        })
    };
    match messages.iter().enumerate().find_map(media) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Conversion of messages to tokens. Sampled tokens stay as they are.
pub trait Renderer: Send + Sync {
    /// Renders a conversation with the generation prompt.
    fn render_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError>;

    /// Renders the last message as the model would sample it after the others, with the stop token if the
    /// template writes one.
    fn render_turn(
        &self,
        messages: &[Message],
        _tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        let mut ids = match messages.last() {
            Some(said) => {
                text_only(messages)?;
                self.encode_text(&said.content.text())?
            }
            None => Vec::new(),
        };
        ids.extend(self.stop_ids().first());
        Ok(ids)
    }

    /// Notation of calls and reasoning.
    fn turn_format(&self) -> TurnFormat {
        TurnFormat::default()
    }

    /// BLAKE3 hash of the chat template's text in hexadecimal digits. `None` without a template.
    fn template_hash(&self) -> Option<String> {
        None
    }

    /// Returns the tokens after a sampled turn. `context` has all tokens so far, `finish` is the end of the
    /// last turn, and `new_messages` are the response of the environment. The result ends with the generation
    /// prompt.
    fn extend(
        &self,
        context: &[TokenId],
        finish: &FinishReason,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Extension, RenderError>;

    /// Ids that end a turn.
    fn stop_ids(&self) -> &[TokenId];

    /// Number of ids. All smaller ids are valid for [`Renderer::token_bytes`].
    fn vocab_size(&self) -> usize;

    /// Bytes of a token. For a special token, its name. `None` outside of the vocabulary. A character may
    /// span several tokens.
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>>;

    /// Maximum bytes of a token. Vocabularies contain runs of 128 spaces.
    fn longest_token_bytes(&self) -> usize {
        256
    }

    /// True for control tokens, which are not part of the text.
    fn is_special(&self, id: TokenId) -> bool;

    /// Text of tokens without control tokens. Invalid UTF-8 becomes the replacement character.
    fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for &id in tokens {
            if !self.is_special(id) {
                bytes.extend(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Text of tokens with the names of control tokens, for display.
    fn decode_with_special(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|&id| {
                self.token_bytes(id)
                    .unwrap_or_else(|| format!("<unknown {id}>").into_bytes())
            })
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Tokenizer files in the Hugging Face layout (name, bytes) that complete a folder of weights. Empty if
    /// the renderer has no such form.
    fn files(&self) -> Result<Vec<(String, Vec<u8>)>, RenderError> {
        Ok(Vec::new())
    }

    /// Ids of plain text inside an assistant's turn.
    fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, RenderError>;
}
