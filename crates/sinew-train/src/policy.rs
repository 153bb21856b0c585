//! What the trainer needs of a model. The port keeps packing, losses, optimizer and checkpoints
//! independent of how log-probabilities are computed and where the weights live.

use crate::pack::MicroBatch;
use sinew_types::TokenLogprob;

/// Why a model could not compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model failed: {0}")]
pub struct PolicyError(pub String);

/// What a forward pass is asked for beside log-probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    pub entropies: bool,
    /// The critic's; only where there is one.
    pub values: bool,
    /// A backward pass may follow; otherwise nothing has to be kept.
    pub backward: bool,
}

/// What a forward pass says of each of a micro-batch's items, `[items]` each (empty if not asked
/// for). Log-probabilities and entropies in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    pub logprobs: Vec<f32>,
    pub entropies: Vec<f32>,
    /// The critic's value before the item's target is chosen.
    pub values: Vec<f32>,
}

/// Derivatives of the loss by the last forward pass's scores, `[items]` each; empty for scores
/// that do not enter the loss.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ScoreGrads {
    pub logprobs: Vec<f32>,
    pub entropies: Vec<f32>,
    pub values: Vec<f32>,
}

/// A trainable tensor with its gradient, f32, row-major.
#[derive(Debug)]
pub struct TrainTensor<'a> {
    /// Name in its file (Hugging Face or PEFT layout).
    pub name: &'a str,
    /// File of a checkpoint that holds it.
    pub file: &'static str,
    pub shape: &'a [usize],
    /// Whether weight decay applies: not to norms and biases.
    pub decay: bool,
    /// Factor on the learning rate.
    pub lr_scale: f32,
    pub values: &'a mut [f32],
    pub gradient: &'a [f32],
}

/// A model being trained (or a frozen one that only scores).
pub trait Policy {
    /// Scores of the micro-batch's items at the current weights.
    fn forward(&mut self, batch: &MicroBatch, want: Want) -> Result<Scores, PolicyError>;

    /// Adds to the gradients what the last forward pass makes of the scores' derivatives.
    fn backward(&mut self, batch: &MicroBatch, grads: &ScoreGrads) -> Result<(), PolicyError>;

    /// The `k` most likely tokens in the place of each item's target, best first.
    fn top(
        &mut self,
        _batch: &MicroBatch,
        _k: usize,
    ) -> Result<Vec<Vec<TokenLogprob>>, PolicyError> {
        Err(PolicyError("this model ranks no tokens".to_owned()))
    }

    /// Whether values can be asked for.
    fn has_critic(&self) -> bool {
        false
    }

    /// Sets all gradients to 0.
    fn zero_gradients(&mut self);

    /// The accumulated gradients as a few buffers, always in the same order; none for a frozen
    /// model.
    fn gradients_mut(&mut self) -> Vec<&mut [f32]>;

    /// The trainable tensors, always in the same order; none for a frozen model.
    fn tensors(&mut self) -> Vec<TrainTensor<'_>>;

    /// Called after values changed, before the next forward pass.
    fn weights_changed(&mut self) -> Result<(), PolicyError>;

    /// Files beside the weights that make them loadable elsewhere (`config.json`), name and bytes.
    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError>;
}
