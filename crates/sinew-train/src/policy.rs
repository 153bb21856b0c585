//! The [`Policy`] port, the trainer's interface to a model. It keeps packing, losses, optimizer and
//! checkpoints independent of how log-probabilities are computed and where the weights are.

use crate::comm::{Comm, CommError};
use crate::optim::{Outcome, Update};
use crate::pack::MicroBatch;
use sinew_types::{TensorSource, TokenLogprob};

/// Reason why a model could not compute, for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model failed: {0}")]
pub struct PolicyError(pub String);

/// Outputs of a forward pass in addition to log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutputChoice {
    /// Entropies of the items' distributions.
    pub entropies: bool,
    /// The critic's values; only if there is one.
    pub values: bool,
    /// Whether a backward pass can follow; otherwise nothing has to be kept.
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
    /// The critic's value before the item's target is chosen.
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

/// A model being trained (or a frozen one that only scores): weights, gradients and optimizer state, wherever
/// they lie. Data that cross this port are per token or per tensor: no logits, no gradients, and weights only
/// for checkpoints, one tensor after the other.
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
    /// Scores of the micro-batch's items at the current weights.
    ///
    /// # Errors
    /// If the model cannot compute, or values are asked for without a critic.
    fn forward(&mut self, batch: &MicroBatch, want: OutputChoice) -> Result<Scores, PolicyError>;

    /// Adds the gradients of the last forward pass, which asked for a backward pass, from the
    /// derivatives of its scores.
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

    /// Whether values can be asked for. Default: no.
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

    /// Takes the trained weights of all files and the optimizer's state (`None`: none yet).
    ///
    /// # Errors
    /// If a tensor is missing, left over or of another shape; then nothing changed.
    fn restore(
        &mut self,
        weights: &dyn TensorSource,
        optimizer: Option<&dyn TensorSource>,
    ) -> Result<(), PolicyError>;

    /// Files in addition to the weights that make them loadable elsewhere (`config.json`), name and bytes.
    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError>;
}
