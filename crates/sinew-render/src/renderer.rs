//! The `Renderer` port and its errors.

use crate::template::role_name;
use crate::turn::TurnFormat;
use sinew_types::{FinishReason, Message, TokenId, ToolSpec};
use std::path::PathBuf;

/// Why messages could not become tokens, or tokens text.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("cannot read {path}: {message}")]
    Read { path: PathBuf, message: String },
    #[error("tokenizer from {source_name}: {message}")]
    Tokenizer {
        source_name: String,
        message: String,
    },
    #[error("chat template line {line}: {message}")]
    Template { line: usize, message: String },
    #[error("the model has no chat template: {hint}")]
    NoTemplate { hint: String },
    #[error("cannot render {role} message: {message}")]
    Message { role: String, message: String },
    #[error(
        "message {message} ({role}) has {kind} in part {part}: the model reads text alone; send what it \
         shows as text, or use a model that takes {kind}"
    )]
    Media {
        /// Index of the message, and of the part in it.
        message: usize,
        role: &'static str,
        part: usize,
        /// `image` or `audio`.
        kind: &'static str,
    },
    #[error("no stop token: neither eos nor a token that closes a turn is known; {hint}")]
    NoStopToken { hint: String },
    #[error("character {character:?} is not in the alphabet {alphabet:?}")]
    UnknownCharacter { character: char, alphabet: String },
    #[error("token id {id} is outside the vocabulary of {vocab}")]
    UnknownToken { id: TokenId, vocab: usize },
    #[error("the join between two turns cannot be found: {0}")]
    Join(String),
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
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
}

/// Where bridged ids and a full render part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{trajectory}, message {message}: bridged ids differ from a full render at token {index}: \
     bridged ...{bridged_context:?} [{}], full render ...{full_context:?} [{}]",
    token_shown(.bridged),
    token_shown(.full)
)]
pub struct Mismatch {
    pub trajectory: String,
    /// The assistant message before the join.
    pub message: usize,
    /// First differing token of the whole sequence.
    pub index: usize,
    /// Text of the differing tokens; `None` past the end.
    pub bridged: Option<String>,
    pub full: Option<String>,
    /// Text of up to eight tokens before the difference.
    pub bridged_context: String,
    pub full_context: String,
}

/// The differing token, or that there is none.
fn token_shown(token: &Option<String>) -> String {
    match token {
        Some(text) => format!("{text:?}"),
        None => "end".into(),
    }
}

/// What follows a sampled turn in the context.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extension {
    /// Tokens that close the model's turn where sampling did not: [`sinew_types::TokenKind::Forced`].
    pub forced: Vec<TokenId>,
    /// The rest up to where the model speaks again, joins included:
    /// [`sinew_types::TokenKind::Observation`].
    pub observation: Vec<TokenId>,
}

/// Refuses messages with parts that are not text: no renderer has a place for them yet.
///
/// # Errors
/// The first part that is not text.
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

/// Messages to tokens, token-in-token-out.
pub trait Renderer: Send + Sync {
    /// The ids of a conversation up to and including the generation prompt.
    fn render_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError>;

    /// The ids that the model would sample to say the last message after a prompt of those
    /// before it, with the stop token if the template writes one.
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

    /// How the model writes calls and thoughts.
    fn turn_format(&self) -> TurnFormat {
        TurnFormat::default()
    }

    /// BLAKE3 of the chat template's text, hexadecimal; `None` without a template.
    fn template_hash(&self) -> Option<String> {
        None
    }

    /// What to append after a sampled turn. `context` is everything the model saw and sampled
    /// so far; `finish` tells how the last turn ended; `new_messages` are what the environment
    /// answered. Ends with the generation prompt.
    fn extend(
        &self,
        context: &[TokenId],
        finish: &FinishReason,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Extension, RenderError>;

    /// Ids that end a turn when sampled.
    fn stop_ids(&self) -> &[TokenId];

    /// Number of ids; every id below is valid for [`Renderer::token_bytes`].
    fn vocab_size(&self) -> usize;

    /// Bytes that a token stands for. Special tokens give their name; `None` outside the
    /// vocabulary. A character may be spread over several tokens.
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>>;

    /// No token has more bytes: vocabularies have runs of 128 spaces, and nothing much longer.
    fn longest_token_bytes(&self) -> usize {
        256
    }

    /// Whether the token is a control token, which is no part of what a turn says.
    fn is_special(&self, id: TokenId) -> bool;

    /// Text that a sampled turn says, without control tokens. Bytes that are no UTF-8 become
    /// the replacement character.
    fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for &id in tokens {
            if !self.is_special(id) {
                bytes.extend(self.token_bytes(id).unwrap_or_default());
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Text with control tokens spelled out, for people.
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

    /// Tokenizer files in the Hugging Face layout (name, bytes), to lie beside weights, so that
    /// the folder is a whole model; none for a renderer that has no such form.
    fn files(&self) -> Result<Vec<(String, Vec<u8>)>, RenderError> {
        Ok(Vec::new())
    }

    /// Ids of a plain text as if it stood inside an assistant's turn.
    fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, RenderError>;
}
