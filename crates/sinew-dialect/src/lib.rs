//! The HTTP APIs of model providers: request bodies to one common form, and answers back.
//!
//! OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages and Google's `generateContent`
//! are each a [`Dialect`]. A model server such as `sinew-gateway` reads a body with it, generates, and writes
//! the answer or its events with it.
//!
//! | dialect | route | conversation |
//! |---|---|---|
//! | [`chat::Chat`] | `/v1/chat/completions` | repeated in each request |
//! | [`completions::Completions`] | `/v1/completions` | text or token ids as they are |
//! | [`responses::Responses`] | `/v1/responses` | repeated, or continued from a stored answer ([`Answers`]) |
//! | [`anthropic::Messages`] | `/v1/messages` | repeated in each request |
//! | [`google::GenerateContent`] | `/v1beta/models/MODEL:generateContent` | repeated in each request |
//!
//! A request goes through [`Dialect::parse`] to a [`ModelRequest`]. Its answer is a [`ModelResponse`], which
//! [`Dialect::response`] writes as one body, or a sequence of [`Delta`]s, which an [`EventWriter`] writes as
//! server-sent events. A refusal is an [`ApiError`]; each dialect writes it in its own form.
//!
//! ```
//! use sinew_dialect::{Dialect, Prompt, chat::Chat, fields::Notes};
//!
//! let body = br#"{"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}], "verbosity": "low"}"#;
//! let request = Chat.parse(body, &Notes::new(false)).unwrap();
//! assert!(matches!(request.prompt, Prompt::Messages(m) if m.len() == 1));
//! // A field without effect is counted, or refused by a strict server.
//! assert_eq!(request.ignored.get("verbosity"), Some(&1));
//! assert!(Chat.parse(body, &Notes::new(true)).is_err());
//! ```
//!
//! The same code reads conversations elsewhere: in data files, environments and exports ([`conversation`]).
//!
//! Invariants:
//! - The crate is pure: no connection, no clock, no model.
//! - A field that would change the sampling is honoured or refused. Fields without effect are counted by
//!   name, or refused.
//! - Sizes and counts of client data are bounded.

mod answers;
pub mod conversation;
mod dialect;
mod error;
mod ignored;
mod prompt;

pub use answers::{Answers, Before, ChainError, StoredAnswer};
pub use dialect::{
    AnswerContext, Choice, Continuation, Delta, Dialect, EventWriter, ModelRequest, ModelResponse,
    SamplingAsk, ToolChoice, TurnEnd, Usage, anthropic, chat, completions, data_event, fields,
    format, google, openai_error, responses,
};
pub use error::{ApiError, ErrorKind};
pub use ignored::{Ignored, count_ignored};
pub use prompt::{Prompt, message_bytes};
