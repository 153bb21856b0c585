//! The words of the system as plain data.
//!
//! Everything that two crates exchange is defined here: ids, messages, tasks, the trace
//! graph, per-token training rows, the loss specification and the [`Engine`] port.
//!
//! Invariants: nothing here reads a clock, the environment or a file; every type is plain
//! data that can be serialized; a [`Trace`] that passes [`Trace::validate`] has exactly one
//! log-probability and one policy version for each sampled token and none for any other.

#![warn(missing_docs)]

mod adapter;
mod branch;
mod chat;
mod clock;
mod content;
mod database;
mod debug;
mod engine;
mod fence;
mod format;
mod ids;
mod inputs;
pub mod json;
mod message;
mod origin;
mod routes;
mod seed;
mod signal;
mod task;
mod trace;
mod weights;

pub use adapter::{Adapter, AdapterName, AdapterNameError};
pub use branch::{BranchCause, Thinking};
pub use clock::Clock;
pub use content::{Content, Media, MediaSource, Part};
pub use database::{holds_password, is_database};
pub use engine::{
    Engine, EngineError, EngineEvent, EngineStatus, EventSink, Fidelity, FinishReason,
    GenerateRequest, PromptLogprob, PromptLogprobs, SampledToken, SamplingParams, TEMPERATURES,
    TokenLogprob,
};
pub use fence::{Fence, FenceError, NewestFence};
pub use format::{
    Choice, Enforced, Format, FormatError, FormatLaw, Grammar, MAX_FORMAT_BYTES, NodeFormat,
    ToolGrammar, ToolNeed, ToolTag, Whitespace,
};
pub use ids::{
    EpisodeId, GroupId, Lineage, PolicyVersion, RequestId, TaskId, TokenId, WeightsId,
    WeightsNameError,
};
pub use inputs::{EpisodeInput, Gives, InputPresence};
pub use message::{Message, Role, ToolCall, ToolSpec};
pub use origin::{Component, MAX_EXTERNAL, Origin, Provenance, Sampling};
pub use routes::{MAX_ROUTE_BYTES, RouteSpan};
pub use seed::{GOLDEN_GAMMA, SplitMix64, Spread, SpreadMap, finalize64, mix_hash, mix_seed};
pub use signal::{
    Aggregation, Correction, Divergence, KlEstimator, KlSpec, LossSpec, RejectionLevel,
    RejectionMetric, RowMasks, Surrogate, TeacherSpec, TrainRow, TrainRowError,
};
pub use task::Task;
pub use trace::{
    EpisodeEnd, FailureKind, Limit, MAX_REWARD, NO_PARENT, Node, NodeId, Outcome, PathToken,
    TRACE_FORMAT_VERSION, Timing, TokenKind, Trace, TraceError, VersionSpan, cut, is_reward,
};
pub use weights::{
    DeltaSpan, Dtype, PublishedFolder, TensorInfo, TensorList, TensorSizeError, TensorSource,
    TensorView, WeightsManifest, WeightsManifestTensor,
};
