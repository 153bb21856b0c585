//! Training: turns rows into better weights. Contains packing, losses, optimizer, LoRA and checkpoints.
//!
//! | part | purpose |
//! |---|---|
//! | [`pack`] | rows to micro-batches in which every shared prefix is computed once |
//! | [`Policy`] | the port to a model: log-probabilities out, gradients in, one update |
//! | [`loss`] | scores to derivatives, by a [`LossSpec`](sinew_types::LossSpec); pure |
//! | [`run_targets`] | log-probabilities and gradients of tokens that a caller names, by its own derivatives |
//! | [`Trainer::step`] | one batch to one or several AdamW updates |
//! | [`Comm`] | the port to other processes: data parallelism |
//! | [`checkpoint`] | weights, optimizer, step and trained batches, durable in one commit |
//! | [`conformance`] | the tests of a new [`Policy`] or [`Comm`] |
//!
//! A trainer on another device implements only [`Policy`]; data that pass through it are per token. Its own
//! ranks are the lanes of the policy, and write their own files of a checkpoint
//! ([`checkpoint::Draft::adopt`]).
//!
//! Invariants: the code does not depend on the name of an algorithm, and handles no text; it reads no clock,
//! environment or network; a token's share in the loss does not depend on how rows are packed or split into
//! micro-batches; equal inputs give equal bits; nothing non-finite reaches the weights.
//!
//! Tests compare losses with explicit formulas and with finite differences, train a tiny model, and make
//! every single file operation of a checkpoint fail once.

pub mod checkpoint;
mod comm;
pub mod conformance;
mod host_state;
pub mod loss;
mod model;
pub mod optim;
pub mod pack;
mod policy;
mod policy_error;
mod reference;
mod resume;
mod targets;
#[cfg(test)]
mod testing;
mod trainer;

pub use comm::{Comm, CommError, Link, ProcessComm, SingleProcess};
pub use host_state::{HostState, TensorFile};
pub use model::ModelPolicy;
pub use policy::{OutputChoice, Policy, RankUsage, ScoreGrads, Scores, TopTokens};
pub use policy_error::PolicyError;
pub use reference::{score_rows, score_top, score_values};
pub use resume::{Commit, ResumeState};
pub use targets::{TargetError, run_targets};
pub use trainer::{
    NonFiniteGradient, PhaseSeconds, Progress, ProgressSink, StepReport, TrainError, Trainer,
    TrainerConfig,
};
