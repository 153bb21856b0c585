//! The [`Renderer`] port: messages to the tokens that a model reads, and sampled tokens to
//! messages.
//!
//! An episode calls [`Renderer::render_prompt`] once. Each sampled turn is followed by a call of
//! [`Renderer::extend`] with the environment's answer, and the result is appended: the context only ever
//! grows.

use crate::error::RenderError;
use crate::format::TurnFormat;
use crate::template::role_name;
use sinew_types::{FinishReason, Message, TokenId, ToolSpec};

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
    /// Renders a conversation with the generation prompt, so that the model continues with its
    /// turn.
    ///
    /// # Errors
    /// If the template refuses the messages, or a message has a part other than text.
    fn render_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError>;

    /// Renders the last message as the model would sample it after the others, with the stop token if the
    /// template writes one. It serves imitation: these tokens are trained, but were not sampled.
    ///
    /// # Errors
    /// Same as [`Renderer::render_prompt`].
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

    /// BLAKE3 hash of the chat template's text and options in hexadecimal digits. `None` without a template.
    fn template_hash(&self) -> Option<String> {
        None
    }

    /// Variables that the chat template was given, such as `enable_thinking`.
    fn template_options(&self) -> serde_json::Map<String, serde_json::Value> {
        serde_json::Map::new()
    }

    /// Returns the tokens after a sampled turn. `context` has all tokens so far, `finish` is the
    /// end of the last turn, and `new_messages` are the response of the environment. The result
    /// ends with the generation prompt.
    ///
    /// # Errors
    /// If the template does not show the text between two turns, or refuses the messages.
    fn extend(
        &self,
        context: &[TokenId],
        finish: &FinishReason,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Extension, RenderError>;

    /// Ids that end a turn.
    fn stop_ids(&self) -> &[TokenId];

    /// Ids that close a turn in the history in place of the one that ended its generation, as in gpt-oss.
    fn closing_ids(&self) -> &[TokenId] {
        &[]
    }

    /// Number of ids. All smaller ids are valid for [`Renderer::token_bytes`].
    fn vocab_size(&self) -> usize;

    /// Bytes of a token. The bytes of a special token are its name. `None` outside of the vocabulary. A
    /// character may span several tokens.
    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>>;

    /// Maximum bytes of a token, 256 by default: vocabularies contain runs of 128 spaces.
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

    /// Decodes like [`Renderer::decode`], with the names of the control tokens that `keep` wants.
    fn decode_keeping(&self, tokens: &[TokenId], keep: fn(&str) -> bool) -> String {
        let mut bytes = Vec::new();
        for &id in tokens {
            let own = self.token_bytes(id).unwrap_or_default();
            if !self.is_special(id) || std::str::from_utf8(&own).is_ok_and(keep) {
                bytes.extend(own);
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
