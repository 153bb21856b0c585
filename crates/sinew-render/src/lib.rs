//! Conversion between messages and tokens: tokenizers, chat templates, turn boundaries, tool calls.
//!
//! A [`Renderer`] converts messages to the token ids that an engine reads. After a sampled turn it appends
//! ids. Sampled ids are never decoded and tokenized again.
//!
//! Invariants:
//! - Rendering is a pure function of messages and tools: equal prompts give equal ids, so that prefixes can
//!   be shared.
//! - [`Renderer::extend`] returns ids to append. It never changes the context.
//! - All returned ids are in the vocabulary.
//! - This crate reads no clock, environment variable or network.

mod bytes_chat;
mod calls;
mod chat;
mod conformance;
mod renderer;
mod size;
mod template;
mod tiny;
mod tokenizer;
mod tool_call;
mod turn;
mod turn_reader;
mod write;

pub use bytes_chat::byte_renderer;
pub use chat::{ChatConfig, ChatRenderer, Shows};
pub use conformance::{
    ConformanceReport, ConformanceStep, MockTrajectory, Rewrite, conformance_check,
};
pub use renderer::{Extension, Mismatch, RenderError, Renderer, text_only};
pub use size::{exceeds, render_after, text_exceeds};
pub use template::ChatTemplate;
pub use tiny::{CharTokenizer, TinyRenderer};
pub use tokenizer::{GgufVocab, StreamDecoder, Tokenizer};
pub use tool_call::{MAX_CALLS, ParsedCall, ToolCallError, ToolCallFormat, UnknownFormat};
pub use turn::{
    ParsedTurn, Reasoning, TurnDelta, TurnFormat, TurnParser, TurnStream, parse_tokens, parse_turn,
};
pub use turn_reader::{Piece, TurnOptions, TurnReader, call_end, call_marks, forced_opening};
pub use write::{tool_instructions, write_calls};
