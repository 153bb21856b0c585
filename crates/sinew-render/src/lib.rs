//! Messages to tokens and back: tokenizers, chat templates, joins between turns, tool calls.
//!
//! A [`Renderer`] turns messages into the exact ids that an engine sees. Between two turns it
//! appends; ids that were sampled are never decoded and tokenized again.
//!
//! Invariants: rendering is a pure function of the messages and the tools, so that equal
//! prompts give equal ids and prefixes can be shared; [`Renderer::extend`] never changes or
//! drops a token of the context, it only says what to append; ids returned are always inside
//! the vocabulary. Nothing here reads a clock, the environment or the network.

mod calls;
mod chat;
mod conformance;
mod renderer;
mod template;
mod tiny;
mod tokenizer;
mod tool_call;
mod turn;
mod write;

pub use chat::{ChatConfig, ChatRenderer, Shows};
pub use conformance::{
    ConformanceReport, ConformanceStep, MockTrajectory, Rewrite, conformance_check,
};
pub use renderer::{Extension, Mismatch, RenderError, Renderer, text_only};
pub use template::ChatTemplate;
pub use tiny::{CharTokenizer, TinyRenderer};
pub use tokenizer::{GgufVocab, StreamDecoder, Tokenizer};
pub use tool_call::{MAX_CALLS, ParsedCall, ToolCallError, ToolCallFormat, UnknownFormat};
pub use turn::{
    ParsedTurn, Reasoning, TurnDelta, TurnFormat, TurnParser, TurnStream, parse_tokens, parse_turn,
};
pub use write::{tool_instructions, write_calls};
