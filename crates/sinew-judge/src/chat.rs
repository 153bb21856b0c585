//! The `ChatModel` port: a question in messages, an answer as text.

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sinew_types::Message;

/// One question to a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The conversation, which ends with a user's message.
    pub messages: Vec<Message>,
    /// JSON Schema that the answer should have; `None`: any text. Callers check the answer all the same.
    pub schema: Option<Value>,
    /// Sampling temperature, 0 to 2; 0 is greedy.
    pub temperature: f32,
    /// Maximum tokens of the answer.
    pub max_tokens: u32,
    /// Seed, for models that take one.
    pub seed: u64,
}

/// Tokens of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the question.
    pub input: u64,
    /// Tokens of the answer.
    pub output: u64,
}

/// The answer of a model. Its text is hostile: it may quote what it judges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatAnswer {
    /// The answer's text.
    pub text: String,
    /// Whether the token limit cut the answer.
    pub cut: bool,
    /// Tokens, where the model counts them.
    pub usage: Option<Usage>,
}

/// Reason why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// May be gone soon: no connection, too many requests, a server's own failure.
    #[error("{0}")]
    Passing(String),
    /// Same as [`ChatError::Passing`], but the model may have answered, and its answer was lost: a deadline,
    /// a connection that broke. Such an answer is paid for.
    #[error("{0}")]
    Unheard(String),
    /// Will not go away by asking again: a wrong key, a question that is refused.
    #[error("{0}")]
    Lasting(String),
}

/// A model that answers questions. Many calls run at once.
pub trait ChatModel: Send + Sync {
    /// Identity of the model, part of the key of its answers.
    fn identity(&self) -> String;

    /// Asks once.
    fn ask<'a>(&'a self, request: &'a ChatRequest) -> BoxFuture<'a, Result<ChatAnswer, ChatError>>;
}
