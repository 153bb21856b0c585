//! Rows in, better weights out: packing, losses, optimizer, LoRA, checkpoints.
//!
//! | part | purpose |
//! |---|---|
//! | [`pack`] | rows to micro-batches in which every shared prefix is computed once |
//! | [`Policy`] | the port to a model: log-probabilities out, gradients in, one update |
//! | [`loss`] | scores to derivatives, by a [`LossSpec`](sinew_types::LossSpec); pure |
//! | [`Trainer::step`] | one batch to one or several AdamW updates |
//! | [`Comm`] | the port to other processes: data parallelism |
//! | [`checkpoint`] | weights, optimizer, step and trained batches, durable in one commit |
//! | [`conformance`] | the tests of a new [`Policy`] or [`Comm`] |
//!
//! A trainer on another device implements [`Policy`] and [`Comm`] and nothing else; data that cross these
//! ports are per token or per tensor.
//!
//! Invariants: no algorithm is known by name, and no text is seen; no clock, environment or network
//! is read; a token's share in the loss does not depend on how rows are packed or split into
//! micro-batches; equal inputs give equal bits; nothing non-finite reaches the weights.
//!
//! Tests compare losses with formulas written out and with differences, let a tiny model learn, and let every
//! single file operation of a checkpoint fail once.

pub mod checkpoint;
mod comm;
pub mod conformance;
pub mod loss;
mod model;
pub mod optim;
pub mod pack;
mod policy;
mod reference;
mod resume;
#[cfg(test)]
mod testing;
mod trainer;

pub use comm::{Comm, CommError, Link, ProcessComm, SingleProcess};
pub use model::ModelPolicy;
pub use policy::{OutputChoice, Policy, PolicyError, ScoreGrads, Scores, TensorFile};
pub use reference::{score_rows, score_top, score_values};
pub use resume::{Commit, ResumeState};
pub use trainer::{
    NonFiniteGradient, PhaseSeconds, Progress, ProgressSink, StepReport, TrainError, Trainer,
    TrainerConfig,
};
