//! The HTTP APIs of model providers: request bodies to one common form, and answers back.
//!
//! OpenAI's Chat Completions, Completions and Responses, and Anthropic's Messages are each a [`Dialect`].
//! A model server such as `sinew-gateway` reads a body with it, generates, and writes the answer or its
//! events with it.
//!
//! Invariants:
//! - The crate is pure: no connection, no clock, no model.
//! - A field that would change the sampling is honoured or refused. Fields without effect are counted by
//!   name, or refused.
//! - Sizes and counts of what a client sends are bounded.

mod answers;
mod dialect;
mod error;
mod ignored;
mod prompt;

pub use answers::{Answers, Before, ChainError, StoredAnswer};
pub use dialect::{
    AnswerContext, Choice, Continuation, Delta, Dialect, EventWriter, ModelRequest, ModelResponse,
    SamplingAsk, ToolChoice, TurnEnd, Usage, anthropic, chat, completions, data_event, fields,
    format, openai_error, responses,
};
pub use error::{ApiError, ErrorKind};
pub use ignored::{Ignored, count_ignored};
pub use prompt::{Prompt, message_bytes};
