//! Outside engines as implementations of the `Engine` port, and the router in front of several.
//!
//! A request is carried out as one or more **attempts**: calls to one server, each sampled by one version of
//! the weights. Another attempt follows one that fails, is interrupted by new weights or meets a dying
//! server. It runs on any engine that can serve and starts from the ids so far: nothing is tokenized again
//! and no token that arrived is lost.
//!
//! | part | purpose |
//! |---|---|
//! | [`RemoteEngine`] | the `Engine` port: a thread that carries out the router's decisions |
//! | [`route::Router`] | decisions, pure: no clock, no randomness, no I/O |
//! | [`Backend`] | the port of one server: attempts, probes, weights |
//! | [`VllmBackend`], [`SglangBackend`] | token-exact servers that load weights from a [`WeightsFolder`] |
//! | [`OpenaiBackend`] | any server with `/v1/completions`, for evaluation only |
//! | [`ChatBackend`] | any server with `/v1/chat/completions`, for evaluation only |
//! | [`LocalBackend`] | any other engine of this process |
//! | [`EngineSeats`] | engines of the run's registry, which come and go |
//! | [`SharedWeights`], [`WeightsFollower`] | weights from a trainer to engines of other processes |
//!
//! Invariants:
//! - Every submitted request gets exactly one last event.
//! - No attempt starts on an engine that is not healthy, whose weights are not verified to be of the
//!   requested version and lineage, or that does not have the adapter that its request names; a token is
//!   handed on with the version its attempt was given, or with the one that its server reports for this
//!   token.
//! - Ids, log-probabilities and the reason of the end are checked before they are handed on: as many
//!   log-probabilities as ids, all finite, the echoed prompt equal to the sent one.
//! - Every wait has a deadline, every queue, answer and retry a bound.
//!
//! Tests drive the router with histories of events and a clock of numbers. Backends are tested against
//! servers in this process that answer with recorded bytes.

#![warn(missing_docs)]

mod adapter_folders;
mod answer_pieces;
mod asleep;
mod attempt;
mod backend;
mod chat;
mod check;
mod config;
mod connect;
mod engine;
mod error;
mod folder;
mod guided;
mod http;
mod local;
mod metrics;
mod openai;
mod plain;
pub mod route;
mod seats;
mod served;
mod sglang;
mod shared;
mod sse;
mod sums;
mod swap;
mod vllm;

pub use attempt::{Attempt, AttemptEnd, AttemptId, AttemptToken, ServerEnd};
pub use backend::{AttemptSink, Backend, NamedAdapter, Probe, ServedWeights, Weights};
pub use chat::{ChatBackend, ChatCall, ChatCodec, ChatContext, ChatReply, ChatUsage, CountUsage};
pub use check::{LogprobMode, max_new_tokens, refused};
pub use config::{ConfigError, Jitter, RemoteConfig, ServerConfig, Timeouts};
pub use connect::{ConnectError, ConnectOptions, EngineKind, connect, split_url};
pub use engine::RemoteEngine;
pub use error::{AttemptError, Blame, ModeError, Stage, TokenFault};
pub use folder::{FolderDtype, FolderError, WeightsFolder};
pub use guided::FormatMode;
pub use local::LocalBackend;
pub use openai::{OpenaiBackend, TextCodec};
pub use seats::{EngineAddress, EngineSeats, KnownWeights};
pub use served::{
    GENERATE_PATH, STATE_PATH, ServedCall, ServedEvent, ServedMark, ServedState, ServedToken,
};
pub use sglang::{SglangBackend, SglangOptions};
pub use shared::{
    FollowError, FollowEvent, FollowedWeights, PublishObserver, PublishedVersion, Publisher,
    SharedWeights, WeightsFollower, follow,
};
pub use sse::SseParser;
pub use sums::ReplicaSums;
pub use vllm::{VllmApi, VllmBackend, VllmOptions};
