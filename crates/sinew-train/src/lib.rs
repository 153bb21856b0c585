//! Rows in, better weights out: packing, losses, optimizer, LoRA, checkpoints.
//!
//! [`pack`] turns rows into micro-batches in which every shared prefix is computed once; a [`Policy`] gives
//! log-probabilities and takes gradients; [`loss`] derives one from the other by a
//! [`LossSpec`](sinew_types::LossSpec); [`Trainer::step`] puts them together and asks the policy for one
//! AdamW update; [`Comm`] shares the work with other processes; [`checkpoint`] makes weights, optimizer, step
//! and trained batches durable in one commit.
//!
//! Invariants: no algorithm is known by name, and no text is seen; no clock, environment or
//! network is read; a token's share in the loss does not depend on how rows are packed or split
//! into micro-batches; equal inputs give equal bits; nothing non-finite reaches the weights.

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
pub use policy::{Policy, PolicyError, ScoreGrads, Scores, TensorFile, Want};
pub use reference::{score_rows, score_top, score_values};
pub use resume::{Commit, ResumeState};
pub use trainer::{
    NonFiniteGradient, PhaseSeconds, Progress, ProgressSink, StepReport, TrainError, Trainer,
    TrainerConfig,
};
