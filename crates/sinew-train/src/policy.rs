//! What the trainer needs of a model. The port keeps packing, losses, optimizer and checkpoints
//! independent of how log-probabilities are computed and where the weights live.

use crate::pack::MicroBatch;

/// Why a model could not compute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("model failed: {0}")]
pub struct PolicyError(pub String);

/// What a forward pass says of each of a micro-batch's items, `[items]` each, in nats.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    pub logprobs: Vec<f32>,
    /// Empty if they were not asked for.
    pub entropies: Vec<f32>,
}

/// A trainable tensor with its gradient, f32, row-major.
#[derive(Debug)]
pub struct TrainTensor<'a> {
    /// Name in the exported weights (Hugging Face or PEFT layout).
    pub name: &'a str,
    pub shape: &'a [usize],
    /// Whether weight decay applies: not to norms and biases.
    pub decay: bool,
    pub values: &'a mut [f32],
    pub gradient: &'a [f32],
}

/// A model being trained (or a frozen one that only scores).
pub trait Policy {
    /// Log-probabilities of the micro-batch's items at the current weights. With `for_backward`
    /// the next call may be [`backward`](Self::backward); otherwise nothing has to be kept.
    fn forward(
        &mut self,
        batch: &MicroBatch,
        entropy: bool,
        for_backward: bool,
    ) -> Result<Scores, PolicyError>;

    /// Adds to the gradients what the last forward pass makes of the items' derivatives, `[items]`
    /// each; `d_entropy` is empty if entropies were not asked for.
    fn backward(
        &mut self,
        batch: &MicroBatch,
        d_logprob: &[f32],
        d_entropy: &[f32],
    ) -> Result<(), PolicyError>;

    /// Sets all gradients to 0.
    fn zero_gradients(&mut self);

    /// The trainable tensors, always in the same order.
    fn tensors(&mut self) -> Vec<TrainTensor<'_>>;

    /// Called after values changed, before the next forward pass.
    fn weights_changed(&mut self) -> Result<(), PolicyError>;

    /// Name of the weights file in a checkpoint.
    fn weights_file(&self) -> &'static str;

    /// Files beside the weights that make them loadable elsewhere (`config.json`), name and bytes.
    fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, PolicyError>;
}
