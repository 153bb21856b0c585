//! The data pool: finished trajectories of outside systems, checked token by token, stored until a
//! trainer has acknowledged them.
//!
//! | part | purpose |
//! |---|---|
//! | [`Pool::push`] | trajectories in the schema of [`schema`] |
//! | [`Pool::push_spans`] | OpenTelemetry's GenAI spans (`otlp`) |
//! | [`Reason`] | why an item is in quarantine instead of the pool |
//! | [`Pool::lease`] | complete groups for trainers, by age or by what there is to learn from them |
//! | [`conversation`] | a conversation of text as a trace, for imitation |
//! | `http` | all of it as requests and answers |
//!
//! Invariants:
//! - An answer is durable before it is given; pushing again changes nothing.
//! - Only tokens that come with the log-probability and the version that sampled them are trained as a
//!   policy's; items of only text are for imitation, as their kind states.
//! - A trajectory is given out to one consumer at a time, and never after it was acknowledged.
//! - Nothing is dropped silently: rows that leave unused are in quarantine, with the reason.
//! - Rows, bytes, groups, bodies and times have limits; time is an argument.
//!
//! Tests use a pool without a folder, which is in memory. Time is a number, so expiry needs no waiting.

mod check;
mod config;
mod genai;
mod hex;
#[cfg(feature = "server")]
pub mod http;
mod index;
#[cfg(feature = "server")]
pub mod otlp;
mod pool;
mod quarantine;
mod quarantine_row;
mod reason;
pub mod schema;
mod span;
mod spot_check;
mod text;
mod typed_queue;

pub use check::{Entry, tokenizer_hash};
pub use config::{ConfigError, PoolConfig, Sampling, SpotCheck, TextSpans, TypeFilter};
pub use pool::{Answer, Folder, LeaseRequest, Loan, PassedOver, Pool, PoolError, Scorer};
pub use quarantine_row::QuarantineRow;
pub use reason::Reason;
pub use span::{Event, Span};
pub use text::conversation;
