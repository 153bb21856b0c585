//! Rewards that come from models and servers.
//!
//! A [`Judge`] asks a [`ChatModel`] to grade an answer against a [`Rubric`]. Its verdicts are JSON of a
//! fixed form: [`Frame`] makes the question, [`Frame::read`] checks the answer, [`Vote`] decides
//! whether to ask again. All three are pure. [`Calibration`] compares a judge with labels.
//! [`RewardServer`] sends samples to a server, and [`check_server`] tries one. [`RewardModel`] is a
//! scalar head on a decoder. [`ModelUser`] plays a user in environments. [`Ledger`] counts calls, tokens and
//! cost against the [`Limits`], and keeps verdicts.
//!
//! Invariants:
//! - A missing score is never 0: an outage, or an answer that is not a verdict, makes a sample
//!   [`Unscored`](sinew_env::Unscored).
//! - A spent budget ends the run. It never becomes a score, and no sample is lost to it.
//! - The judged text is data. Whatever it contains, the question around it stays the same to the byte but for
//!   its id. A verdict without that id, which the judged text cannot contain, is refused.

mod asking;
mod bench;
mod calibrate;
mod chat;
mod conformance;
mod engine;
mod error;
mod frame;
mod http;
mod judge;
mod lazy;
mod ledger;
mod openai;
mod paid;
mod reward_model;
mod rubric;
mod server;
mod user;
mod view;

pub use asking::{JudgeReply, Vote, VoteAction};
pub use bench::{Bench, user_spent};
pub use calibrate::{Calibration, ItemAgreement, LabelledAnswer, read_labels};
pub use chat::{ChatAnswer, ChatError, ChatModel, ChatRequest, Usage};
pub use conformance::{ServerFinding, check_server, samples_of};
pub use engine::EngineChat;
pub use error::{LabelError, LabelsError, RewardModelError, ServerError, VerdictError};
pub use frame::{Frame, Mode};
pub use judge::{Judge, JudgeConfig};
pub use lazy::{LazyChat, LoadChat};
pub use ledger::{JudgeUsage, Ledger, Limits};
pub use openai::{AnswerFormat, OpenAiChat, OpenAiConfig};
pub use paid::BudgetEnd;
pub use reward_model::{LoadScorer, RewardModel, ToTokens};
pub use rubric::{Item, Rubric, RubricError};
pub use server::{RewardServer, ServerConfig};
pub use user::{ModelUser, UserConfig};
pub use view::{MAX_DATA_BYTES, View};
