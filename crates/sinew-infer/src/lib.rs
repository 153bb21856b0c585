//! Scheduler, paged key-value memory, prefix cache and sampler: the embedded engine.
//! Sees token ids only.
//!
//! From the outside in: [`EmbeddedEngine`] is a thread (`engine_thread`) around a pure core (`core`),
//! which plans a pass (`scheduler`, `plan`) and lets a [`Forward`] compute it and draw tokens
//! (`sampler`). Keys and values live in numbered blocks, found again by their tokens
//! (`blocks`); speculative decoding verifies draft tokens in the same pass (`draft`). [`FakeEngine`] answers
//! without a model.
//!
//! Invariants:
//! - The tokens of a request depend on its prompt, its sampling parameters and the weights
//!   alone: not on what else runs, on batching, on preemption or on cache hits.
//! - Every submitted request gets exactly one last event, even if the thread panics.
//! - Each token carries the version of the weights that sampled it, and its log-probability
//!   under the full softmax at the temperature that it was sampled at (greedy: 1).
//! - Under a format the log-probability is of the softmax over the tokens that its mask allows; a request
//!   whose mask cannot be made fails, and never goes on without one.
//! - Keys and values of replaced weights are never found by new requests.
//! - Everything but `engine_thread` is pure: no clock, no thread, no randomness of its own.

mod blocks;
mod constraint;
mod core;
mod draft;
mod embedded;
mod engine_thread;
mod fake;
mod forward;
mod model;
mod params;
mod plan;
mod rng;
mod sampler;
mod scheduler;
mod sequence;
mod softmax;
mod stop;
pub mod testing;

pub use constraint::Constraint;
pub use embedded::{EmbeddedEngine, EngineConfig};
pub use fake::{FakeConfig, FakeEngine, FakeModel, Fault, Script};
pub use forward::{
    Batch, BatchSequence, BlockCopy, BlockId, Draw, Drawn, Forward, ForwardLimits, Sampler,
};
pub use model::ModelForward;
pub use rng::uniform;
pub use scheduler::{SchedulerConfig, SwapPolicy};
pub use stop::TokenBytes;
