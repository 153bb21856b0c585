//! Conversion between messages and tokens: tokenizers, chat templates, turn boundaries, tool calls.
//!
//! A [`Renderer`] converts messages to the token ids that an engine reads. It appends ids after a sampled
//! turn. Sampled ids are never decoded and tokenized again.
//!
//! | part | purpose |
//! |---|---|
//! | [`ChatRenderer`] | renderer of a pretrained model: its tokenizer and its chat template |
//! | [`TinyRenderer`], [`byte_renderer`] | renderers without a model's files, for tiny models and fake engines |
//! | [`ChatRenderer::of_template`] | renderer of a template without its model |
//! | [`conformance_check`] | proof that appended turns have the tokens of a full render |
//! | [`check_template`] | report on a template: where a history rebuilt from messages differs |
//! | [`TurnParser`], [`TurnStream`] | text of a turn to reasoning, content and tool calls, piece by piece |
//! | [`write_calls`] | the way back: calls as text, for templates that do not print them |
//!
//! Invariants:
//! - Rendering is a pure function of messages and tools: equal prompts give equal ids, so that
//!   prefixes can be shared.
//! - [`Renderer::extend`] returns ids to append. It never changes the context.
//! - All returned ids are in the vocabulary.
//! - This crate reads no clock, environment variable or network.
//!
//! The templates of published models are in `tests/templates`, each with conversations that must pass the
//! conformance check. The tests feed parsers the same text in every split.

mod bare;
mod bytes_chat;
mod calls;
mod chat;
mod chat_files;
mod conformance;
mod elements;
mod error;
mod format;
mod likeness;
mod marked;
mod notations;
mod python;
mod recipients;
mod region;
mod renderer;
mod size;
mod template;
mod template_check;
mod thoughts;
mod tiny;
mod tokenizer;
mod tool_call;
mod turn;
mod turn_reader;
mod values;
mod write;

pub use bare::control_tokens;
pub use bytes_chat::{byte_conversation, byte_renderer, byte_turn};
pub use chat::{ChatConfig, ChatRenderer, Shows};
pub use conformance::{
    ConformanceReport, ConformanceStep, MockTrajectory, Rewrite, conformance_check,
};
pub use error::{Mismatch, RenderError};
pub use format::{Reasoning, TurnFormat};
pub use likeness::Likeness;
pub use renderer::{Extension, Renderer, text_only};
pub use size::{exceeds, render_after, text_exceeds};
pub use template::ChatTemplate;
pub use template_check::{
    CaseReport, FirstDifference, TemplateCase, Verdict, check_template, template_cases,
};
pub use thoughts::split_thoughts;
pub use tiny::{CharTokenizer, TinyRenderer};
pub use tokenizer::{GgufVocab, StreamDecoder, Tokenizer};
pub use tool_call::{MAX_CALLS, ParsedCall, ToolCallError, ToolCallFormat, UnknownFormat};
pub use turn::{ParsedTurn, TurnDelta, TurnParser, TurnStream, parse_tokens, parse_turn};
pub use turn_reader::{Piece, TurnOptions, TurnReader, call_end, call_marks, forced_opening};
pub use write::{tool_instructions, write_calls};
