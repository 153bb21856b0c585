//! Prompts of requests, and the cost of a message for a rollout.

use sinew_types::{Message, TokenId};

/// Input that the model continues.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, to be rendered with the model's template.
    Messages(Vec<Message>),
    /// Text that is used unchanged.
    Text(String),
    /// Ids as they are.
    Tokens(Vec<TokenId>),
}

impl Default for Prompt {
    fn default() -> Self {
        Self::Messages(Vec::new())
    }
}

/// Bytes of a message that count against the limits of a rollout.
pub fn message_bytes(message: &Message) -> u64 {
    let calls = message.tool_calls.iter();
    let calls: usize = calls
        .map(|c| c.name.len() + c.arguments.to_string().len())
        .sum();
    let reasoning = message.reasoning.as_ref().map_or(0, String::len);
    (message.content.text_len() + reasoning + calls) as u64
}
