//! Scheduler, paged key-value memory, prefix cache and sampler: the embedded engine. Sees token ids
//! only.
//!
//! | part | purpose |
//! |---|---|
//! | [`EmbeddedEngine`] | the `Engine` port: a thread (`engine_thread`) around a pure core (`core`) |
//! | `scheduler` | continuous batching: which rows the next pass computes, who is preempted |
//! | `blocks` | numbered blocks of keys and values, found again by their tokens and their weights |
//! | [`Forward`] | the device seam: computes a pass and draws tokens |
//! | `sampler` | the draws on a CPU; random numbers by seed and position |
//! | `prompt_row` | log-probabilities of a prompt's own tokens |
//! | `draft` | speculative decoding: draft tokens that the same pass verifies |
//! | [`Stepper`] | the same core without the thread, for simulation: the caller asks for each pass |
//! | [`FakeEngine`] | answers without a model, for tests and simulation |
//!
//! Invariants:
//! - The tokens of a request, and the log-probabilities of its prompt, depend only on its prompt, its
//!   sampling parameters, its adapter and the weights: not on other requests, on batching, on preemption or
//!   on cache hits.
//! - Every submitted request gets exactly one last event, even if the thread panics.
//! - Each token carries the version of the weights that sampled it, and its log-probability under
//!   the full softmax at the temperature that it was sampled at (greedy: 1).
//! - The log-probability under a format is of the softmax over the tokens that its mask allows. A request
//!   whose mask cannot be made fails, and never continues without one.
//! - Keys and values of replaced weights or of other adapters are never found by new requests.
//! - Everything but `engine_thread` is pure: no clock, no thread, no own randomness.
//!
//! The module [`testing`] has a forward pass without a model that notices every wrong block, and the contract
//! of [`Forward`] as a function.

mod blocks;
mod constraint;
mod core;
mod draft;
mod draw;
mod embedded;
mod engine_thread;
mod fake;
mod forward;
mod model;
mod params;
mod prompt_row;
mod prompt_scores;
mod rng;
mod sampler;
mod scheduler;
mod sequence;
mod softmax;
mod stepper;
mod stop;
pub mod testing;

pub use constraint::Constraint;
pub use draw::{Draw, Drawn};
pub use embedded::EngineConfig;
pub use engine_thread::EmbeddedEngine;
pub use fake::{FakeConfig, FakeEngine, FakeModel, Fault, Script};
pub use forward::{
    AdapterSlot, Batch, BatchSequence, BlockCopy, BlockId, DeviceError, Forward, ForwardLimits,
    PassResult,
};
pub use model::ModelForward;
pub use prompt_row::{PromptRow, Scored};
pub use rng::uniform;
pub use sampler::Sampler;
pub use scheduler::{SchedulerConfig, SwapPolicy};
pub use stepper::Stepper;
pub use stop::TokenBytes;
