//! The [`Policy`] trait, the trainer's interface to a model. It keeps packing, losses, optimizer and
//! checkpoints independent of how log-probabilities are computed and where the weights are.

use crate::comm::{Comm, CommError};
use crate::optim::{Outcome, Update};
use crate::pack::MicroBatch;
use sinew_types::{TensorSource, TokenLogprob};

/// Reason why a model could not compute, for display.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model failed: {0}")]
pub struct PolicyError(pub String);

/// Outputs of a forward pass in addition to log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputChoice {
    /// Entropies of the items' distributions.
    pub entropies: bool,
    /// Values of the critic. Only allowed if the policy has a critic.
    pub values: bool,
    /// Whether a backward pass will follow. If not, activations need not be kept.
    pub backward: bool,
}

/// The outputs of a forward pass for each of a micro-batch's items, `[items]` each (empty if not asked
/// for). Log-probabilities and entropies in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Natural logarithm of each target's probability, at the item's temperature and under its
    /// mask.
    pub logprobs: Vec<f32>,
    /// Entropy of each item's distribution, in nats.
    pub entropies: Vec<f32>,
    /// Value of the critic before each item's target token.
    pub values: Vec<f32>,
}

/// Derivatives of the loss by the last forward pass's scores, `[items]` each; empty for scores that are not
/// part of the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoreGrads {
    /// Derivatives by the log-probabilities.
    pub logprobs: Vec<f32>,
    /// Derivatives by the entropies.
    pub entropies: Vec<f32>,
    /// Derivatives by the values.
    pub values: Vec<f32>,
}

/// A file of a checkpoint with tensors.
#[derive(Debug)]
pub struct TensorFile<'a> {
    /// File name in the checkpoint.
    pub name: &'static str,
    /// Its tensors, read one after the other.
    pub tensors: Box<dyn TensorSource + 'a>,
}

/// A model being trained (or a frozen one that only scores): weights, gradients and optimizer state, on any
/// device. Data that pass through this trait are per token or per tensor: no logits, no gradients, and
/// weights only for checkpoints, one tensor after the other.
///
/// Contract:
/// - Equal calls give equal bits, on the same machine and build.
/// - A score does not depend on the rest of the micro-batch beyond the rounding of `f32`; an implementation
///   that promises token-exactness gives the bits of the engine that it is paired with.
/// - Gradients add up over `backward` calls until [`Policy::zero_gradients`].
/// - [`Policy::apply`] changes nothing when it skips or fails.
/// - [`Policy::restore`] of the results of [`Policy::weights`] and [`Policy::optimizer`] continues to the
///   bit.
///
/// [`crate::conformance::policy`] tests it.
pub trait Policy {
    /// Computes the scores of the micro-batch's items at the current weights.
    ///
    /// # Errors
    /// If the model cannot compute, or values are requested without a critic.
    fn forward(&mut self, batch: &MicroBatch, want: OutputChoice) -> Result<Scores, PolicyError>;

    /// Accumulates the gradients of the last forward pass, from the derivatives of the loss with respect to
    /// its scores. That pass must have announced a backward pass.
    ///
    /// # Errors
    /// If there was no such pass; then the gradients are unchanged.
    fn backward(&mut self, batch: &MicroBatch, grads: &ScoreGrads) -> Result<(), PolicyError>;

    /// The `k` most likely tokens at the position of each item's target, best first.
    fn top(
        &mut self,
        _batch: &MicroBatch,
        _k: usize,
    ) -> Result<Vec<Vec<TokenLogprob>>, PolicyError> {
        Err(PolicyError("this model ranks no tokens".to_owned()))
    }

    /// Whether the critic's values are available. Default: no.
    fn has_critic(&self) -> bool {
        false
    }

    /// Sets all gradients to 0: the start of an update.
    fn zero_gradients(&mut self);

    /// Replaces the gradients of every rank by their sum ([`Comm::all_reduce`]).
    fn reduce_gradients(&mut self, comm: &mut dyn Comm) -> Result<(), CommError>;

    /// Replaces the trained weights of every rank by those of rank 0 ([`Comm::broadcast`]).
    fn broadcast_weights(&mut self, comm: &mut dyn Comm) -> Result<(), CommError>;

    /// Clips the accumulated gradients and applies one AdamW update.
    ///
    /// # Errors
    /// If the model is frozen, or its moments are those of other tensors.
    fn apply(&mut self, update: &Update) -> Result<Outcome, PolicyError>;

    /// The trained weights, as the files of a checkpoint; none for a frozen model.
    fn weights(&self) -> Vec<TensorFile<'_>>;

    /// The optimizer's state: `m.NAME` and `v.NAME` of each trained tensor. None before the first update.
    fn optimizer(&self) -> Box<dyn TensorSource + '_>;

    /// Restores the trained weights from the tensors of all files, and the optimizer's state (`None` before
    /// the first update).
    ///
    /// # Errors
    /// If a tensor is missing, left over or of another shape; nothing is changed in that case.
    fn restore(
        &mut self,
        weights: &dyn TensorSource,
        optimizer: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError>;

    /// Files that make the weights loadable by other programs (`config.json`), as names and bytes.
    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError>;
}
