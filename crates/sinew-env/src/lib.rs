//! The `Env` port, tasksets and the built-in environments.
//!
//! An environment is the world of one episode. It sees what the model said as text and answers
//! in messages; it knows nothing of tokens, engines or rollouts.
//!
//! Invariants: an environment is used once, for one task, and closed at the end, whatever
//! happened; everything random in it comes from the task's seed; a taskset's train and held-out
//! splits share no problem, by construction; what the model did wrong is an observation, what
//! the system did wrong is an [`EnvError`], and the two are never mixed up.

pub mod math;
mod port;
pub mod registry;
mod rng;
mod taskset;
pub mod tiny;

pub use port::{
    Action, CallError, CallNotation, Capabilities, Env, EnvError, EnvFactory, EnvFuture,
    Observation, ResetResult, StepResult, gold_run, validate,
};
pub use registry::{ENVIRONMENTS, EnvConfig, EnvKind, KeyError, Needs, Sandboxes};
pub use taskset::{Split, Taskset, TasksetError};
