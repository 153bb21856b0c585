//! A model server per rollout that captures every token of the agents that call it.
//!
//! An agent is given a base URL and a key ([`Gateway::open_rollout`]) and speaks the dialect it
//! knows. Its requests are lowered to one model (`dialect`), joined to what was captured before
//! (`session`, pure), rendered, sampled by the engine (`flight`), told back while they are
//! sampled (`turn`), and kept as a [`sinew_types::Trace`]. [`Server`] is the HTTP around it.
//!
//! Invariants:
//! - The engine sees token ids only; what was sampled is never decoded and tokenized again.
//! - Every sampled token is in exactly one node of exactly one trace, whoever reads the answer,
//!   retries it or goes away.
//! - An output is in the journal, if there is one, before its end is told; a finished trace is in
//!   the store before the caller is told.
//! - A rollout's key opens that rollout's model and nothing else; the control API has a secret
//!   of its own.
//! - Fields of requests without effect are counted by name, or refused. Sizes, times, queues and counts are bounded.

mod answers;
mod archive;
mod body;
mod bytes_chat;
mod call;
mod capacity;
mod config;
pub mod dialect;
mod drive;
mod error;
mod gateway;
mod ignored;
mod journal;
mod keys;
mod known_bodies;
mod limits;
mod live;
mod output_format;
mod rollout;
mod rollouts;
mod routes;
mod running;
mod secret;
mod server;
pub mod session;
mod stats;
mod stream;
pub mod turn;

/// Further routes of a [`Server`]: see [`Server::start_with`].
pub use axum::Router;
pub use bytes_chat::byte_renderer;
pub use capacity::{Capacity, CapacityPermit};
pub use config::{GatewayConfig, GatewayParts};
pub use error::{ApiError, ErrorKind};
pub use gateway::{Credentials, Gateway, RolloutView};
pub use journal::{Journal, JournalError, JournalOptions};
pub use limits::{ServerLimits, SessionLimits};
pub use live::{LiveRollout, LiveRollouts, RolloutPhase};
pub use secret::Secret;
pub use server::{ServeError, Server};
pub use session::{FinishRequest, Join, Reward, RolloutSpec, SamplingDefaults, SessionStats};
pub use stats::GatewayStats;
