//! A model server per rollout that captures every token of the agents that call it.
//!
//! An agent gets a base URL and a key ([`Gateway::open_rollout`]) and uses its own dialect. The layers, from
//! the outside in:
//!
//! 1. [`Server`] and `routes`: connections, axum routes, authorization, bodies (`body`), server-sent
//!    events (`stream`).
//! 2. [`Gateway`]: opens, scores, views and finishes rollouts. Its parts are the open rollouts
//!    (`rollouts`), the journal and the store (`archive`), the engine's adapters (`adapters`), and the calls
//!    of the model (`call`).
//! 3. `call`: a body is read by its [dialect](sinew_dialect), joined to the captured tokens ([`session`],
//!    pure), rendered, and begun as a running call (`running`), which `drive` follows to its end.
//! 4. Sessions and calls use hashes of messages (`keys`) and recognized bodies (`known_bodies`). A finished
//!    rollout is a [`sinew_types::Trace`].
//!
//! Invariants:
//! - The engine sees only token ids; sampled tokens are never decoded and tokenized again.
//! - Every sampled token is in exactly one node of exactly one trace, whether its client reads the
//!   answer, repeats the request or goes away.
//! - A journal has an output on disk before its client sees the end; a finished trace is in the store before
//!   finishing is answered.
//! - A rollout's key opens that rollout's model, or its one adapter, and nothing else; the control API has a
//!   separate token.
//! - Fields of requests without effect are counted by name, or refused. Sizes, times, queues and
//!   counts are bounded.
//! - A file uses only files below it: there are no cycles.

mod adapters;
mod archive;
mod body;
mod call;
mod capacity;
mod config;
mod conversations;
mod drive;
mod failures;
mod fixed_key;
mod gateway;
mod hooks;
mod journal;
mod keys;
mod known_bodies;
mod limits;
mod live;
mod output_format;
mod paths;
mod prompts;
mod rollout;
mod rollouts;
mod routes;
mod running;
mod scores;
mod secret;
mod server;
pub mod session;
mod stats;
mod stream;

pub use adapters::{AdapterFolderError, Adapters, LoadedAdapter, read_adapter};
/// Additional routes of a [`Server`]: see [`Server::start_with`].
pub use axum::Router;
pub use capacity::{Capacity, CapacityPermit};
pub use config::{GatewayConfig, GatewayParts};
pub use gateway::{Credentials, Gateway, RolloutView};
pub use hooks::{RolloutHooks, TrainingHooks, refuse_adapter};
pub use journal::{Journal, JournalError, JournalOptions};
pub use limits::{ServerLimits, SessionLimits};
pub use live::{LiveRollout, LiveRollouts, RolloutPhase};
pub use secret::Secret;
pub use server::{ServeError, Server};
pub use session::{FinishRequest, Join, Reward, RolloutSpec, SamplingDefaults, SessionStats};
/// Error of a gateway's calls, as its clients receive it.
pub use sinew_dialect::ApiError;
pub use stats::GatewayStats;
