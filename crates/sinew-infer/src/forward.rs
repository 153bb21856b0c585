//! The seam to whatever computes logits: a model on a device, or a stand-in for tests.

use sinew_tensor::Device;
use sinew_types::{TensorSource, TokenId};
use std::ops::Range;

/// Index of a physical block of key-value memory.
pub type BlockId = u32;

/// Sizes that never change while an engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Token ids are below it; logits have as many columns.
    pub vocab: usize,
    /// Most tokens of one sequence.
    pub context: usize,
    /// Tokens in a block of key-value memory.
    pub block_tokens: usize,
    /// Physical blocks of key-value memory.
    pub blocks: usize,
}

/// Copies the first `tokens` slots of block `from` to block `to`, in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
    /// Slots that matter; an implementation may copy more of the block.
    pub tokens: usize,
}

/// The rows of one sequence in a [`Batch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSequence {
    /// Its rows in [`Batch::tokens`]; those of one sequence are consecutive.
    pub rows: Range<usize>,
    /// Tokens before the first row whose keys and values are stored already.
    pub past: usize,
    /// Its part of [`Batch::block_table`]: the physical block of each logical block.
    pub blocks: Range<usize>,
}

/// One forward pass over new tokens of many sequences.
///
/// Row `i` of a sequence stands at position `past + i`; its keys and values go to slot
/// `position % block_tokens` of logical block `position / block_tokens`, and it sees the
/// keys of positions `0..=past + i`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// New tokens, `[rows]`.
    pub tokens: Vec<TokenId>,
    pub sequences: Vec<BatchSequence>,
    pub block_table: Vec<BlockId>,
    /// Rows whose logits are wanted, ascending.
    pub logit_rows: Vec<usize>,
}

/// Computes logits and keeps keys and values in numbered blocks.
///
/// A row's logits must depend on its sequence's tokens alone, not on the rest of the batch:
/// that is what makes a request's tokens independent of what else runs.
pub trait Forward: Send {
    fn limits(&self) -> ForwardLimits;

    /// Copies within the key-value memory.
    fn copy_block(&mut self, copy: BlockCopy);

    /// Stores keys and values of all rows; returns the logits of `batch.logit_rows`,
    /// `[logit_rows, vocab]`.
    ///
    /// # Errors
    /// What failed; the requests in the batch fail with it.
    fn forward(&mut self, batch: &Batch) -> Result<&[f32], String>;

    /// Replaces the weights. Checks names and shapes first.
    ///
    /// # Errors
    /// What does not fit; then nothing changed.
    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), String>;

    /// The threads that may sample while no pass runs; `None`: the engine's own thread does.
    fn device(&self) -> Option<Device> {
        None
    }
}
