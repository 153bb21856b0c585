//! Rewards that come from models and servers.
//!
//! A [`Judge`] asks a [`ChatModel`] to grade an answer against a [`Rubric`]. Its verdicts are JSON of a fixed
//! form: [`Frame`] makes the question, [`Frame::read`] checks the answer, [`Asking`] decides whether to ask again.
//! All three are pure. [`Ledger`] counts calls, tokens and cost against the [`Limits`], and keeps verdicts.
//!
//! Invariants:
//! - No score is never 0: an outage, or a verdict that is no verdict, makes a sample
//!   [`Unscored`](sinew_env::Unscored).
//! - A spent budget ends the run. It never becomes a score, and no sample is lost to it.
//! - The judged text is data: whatever it says, the question around it stays the same to the byte but for
//!   its id, and a verdict without that id, which the judged text cannot know, is refused.

mod asking;
mod chat;
mod engine;
mod frame;
mod http;
mod judge;
mod ledger;
mod openai;
mod rubric;
mod view;

pub use asking::{Asking, Heard, Next};
pub use chat::{ChatAnswer, ChatError, ChatModel, ChatRequest, Usage};
pub use engine::EngineChat;
pub use frame::{Frame, Mode};
pub use judge::{Exhausted, Judge, JudgeConfig};
pub use ledger::{Ledger, Limits, Spent};
pub use openai::{AnswerFormat, OpenAiChat, OpenAiConfig};
pub use rubric::{Item, Rubric, RubricError};
pub use view::{MAX_DATA_BYTES, View};
