//! Renderer with one token per character, for models that are trained from scratch.
//!
//! ```text
//! <user> c h a r s <end> <model> c h a r s <end> <tool> c h a r s <end> <model>
//! ```

use crate::error::RenderError;
use crate::renderer::{Extension, Renderer, text_only};
use sinew_types::{FinishReason, Message, Role, TokenId, ToolSpec};

/// End of a message.
const END: TokenId = 0;
/// Names of the control tokens by id.
const SPECIALS: [&str; 5] = ["<end>", "<system>", "<user>", "<model>", "<tool>"];

/// Control token that starts a message of a role.
fn role_id(role: Role) -> TokenId {
    match role {
        Role::System => 1,
        Role::User => 2,
        Role::Assistant => 3,
        Role::Tool => 4,
    }
}

/// Tokenizer with one id per character of an alphabet, after five control tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CharTokenizer {
    /// Characters in order of their ids.
    alphabet: Vec<char>,
}

impl CharTokenizer {
    /// Creates a tokenizer. Ids follow the order of `alphabet`, without repeated characters.
    pub fn new(alphabet: &str) -> Self {
        let mut chars = Vec::new();
        for c in alphabet.chars() {
            if !chars.contains(&c) {
                chars.push(c);
            }
        }
        Self { alphabet: chars }
    }

    /// Number of control tokens and characters.
    pub fn vocab_size(&self) -> usize {
        SPECIALS.len() + self.alphabet.len()
    }

    /// Encodes text. A character outside of the alphabet is an error.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, RenderError> {
        text.chars()
            .map(|character| {
                self.alphabet
                    .iter()
                    .position(|&c| c == character)
                    .map(|i| (SPECIALS.len() + i) as TokenId)
                    .ok_or_else(|| RenderError::UnknownCharacter {
                        character,
                        alphabet: self.alphabet.iter().collect(),
                    })
            })
            .collect()
    }

    /// Text of an id; the name of a control token.
    pub fn token_text(&self, id: TokenId) -> Option<String> {
        let id = id as usize;
        match SPECIALS.get(id) {
            Some(name) => Some((*name).to_owned()),
            None => self.alphabet.get(id - SPECIALS.len()).map(char::to_string),
        }
    }
}

/// Renderer with a [`CharTokenizer`]. It does not support tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TinyRenderer {
    /// Alphabet of the renderer.
    tokenizer: CharTokenizer,
}

impl TinyRenderer {
    /// Creates a renderer for the characters of `alphabet`.
    pub fn new(alphabet: &str) -> Self {
        Self {
            tokenizer: CharTokenizer::new(alphabet),
        }
    }

    /// Appends one message: the role's token, its characters, the end token.
    fn push(&self, message: &Message, out: &mut Vec<TokenId>) -> Result<(), RenderError> {
        out.push(role_id(message.role));
        out.extend(self.tokenizer.encode(&message.content.text())?);
        out.push(END);
        Ok(())
    }

    /// Renders messages without the generation prompt.
    fn messages(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        if let Some(tool) = tools.first() {
            return Err(RenderError::Message {
                role: "system".into(),
                message: format!(
                    "the tiny renderer has no place for tool descriptions, but tool {} was given",
                    tool.name
                ),
            });
        }
        text_only(messages)?;
        let mut out = Vec::new();
        for message in messages {
            self.push(message, &mut out)?;
        }
        Ok(out)
    }
}

impl Renderer for TinyRenderer {
    fn render_prompt(
        &self,
        messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Vec<TokenId>, RenderError> {
        let mut out = self.messages(messages, tools)?;
        out.push(role_id(Role::Assistant));
        Ok(out)
    }

    fn extend(
        &self,
        _context: &[TokenId],
        finish: &FinishReason,
        new_messages: &[Message],
        tools: &[ToolSpec],
    ) -> Result<Extension, RenderError> {
        let forced = match finish {
            FinishReason::StopId { id } if *id == END => Vec::new(),
            _ => vec![END],
        };
        let observation = self.render_prompt(new_messages, tools)?;
        Ok(Extension {
            forced,
            observation,
        })
    }

    fn stop_ids(&self) -> &[TokenId] {
        &[END]
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn token_bytes(&self, id: TokenId) -> Option<Vec<u8>> {
        self.tokenizer.token_text(id).map(String::into_bytes)
    }

    fn is_special(&self, id: TokenId) -> bool {
        (id as usize) < SPECIALS.len()
    }

    fn encode_text(&self, text: &str) -> Result<Vec<TokenId>, RenderError> {
        self.tokenizer.encode(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{MockTrajectory, conformance_check};

    #[test]
    fn bridged_ids_equal_a_full_render() {
        let renderer = TinyRenderer::new("ab.");
        let mocks = MockTrajectory::standard(Some("a."), "ab");
        let report = conformance_check(&renderer, &mocks).unwrap();
        assert_eq!(report.steps.len(), 1 + 2 + 1);
        assert!(report.refused.is_empty());
    }

    #[test]
    fn truncated_turns_are_closed_by_a_forced_token() {
        let renderer = TinyRenderer::new("ab");
        let obs = [Message::new(Role::Tool, "b")];
        let cut = renderer
            .extend(&[2, 5, 0, 3, 6], &FinishReason::Length, &obs, &[])
            .unwrap();
        assert_eq!(cut.forced, [END]);
        assert_eq!(cut.observation, [4, 6, 0, 3]);
        let stopped = renderer
            .extend(&[3, 6, 0], &FinishReason::StopId { id: 0 }, &obs, &[])
            .unwrap();
        assert!(stopped.forced.is_empty());
    }

    #[test]
    fn unknown_characters_and_tools_are_refused() {
        let renderer = TinyRenderer::new("ab");
        let error = renderer.encode_text("ax").unwrap_err();
        assert!(matches!(
            error,
            RenderError::UnknownCharacter { character: 'x', .. }
        ));
        let tool = ToolSpec {
            name: "python".into(),
            description: String::new(),
            parameters: serde_json::json!({}),
        };
        assert!(renderer.render_prompt(&[], &[tool]).is_err());
    }

    #[test]
    fn decoding_leaves_out_control_tokens() {
        let renderer = TinyRenderer::new("ab");
        assert_eq!(renderer.decode(&[5, 6, 0]), "ab");
        assert_eq!(renderer.decode_with_special(&[3, 5, 0]), "<model>a<end>");
        assert_eq!(renderer.token_bytes(7), None);
    }
}
