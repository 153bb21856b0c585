//! The interface to the device that computes passes: a model on a CPU or a GPU, or a stand-in for tests.
//!
//! A new device implements [`Forward`] and nothing else; scheduler, blocks, prefix cache and
//! formats stay as they are.

use crate::draw::Drawn;
use crate::prompt_row::{self, PromptRow, Scored};
use crate::sampler::{self, Sampler};
use sinew_model::{ForwardError, LoraError, TensorMismatch};
use sinew_tensor::Cpu;
use sinew_types::{Adapter, TensorSource, TokenId};
use std::ops::Range;

/// Index of a physical block of key-value memory.
pub type BlockId = u32;

/// Number under which a device keeps an adapter; below
/// [`SchedulerConfig::max_adapters`](crate::SchedulerConfig::max_adapters).
pub type AdapterSlot = u32;

/// Sizes that never change while an engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Number of token ids; logits have as many columns.
    pub vocab: usize,
    /// Maximum number of tokens of one sequence.
    pub context: usize,
    /// Tokens in a block of key-value memory.
    pub block_tokens: usize,
    /// Physical blocks of key-value memory.
    pub blocks: usize,
}

/// Copies the first `tokens` slots of block `from` to block `to`, in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Source.
    pub from: BlockId,
    /// Target, another block.
    pub to: BlockId,
    /// Slots that matter; an implementation may copy more of the block.
    pub tokens: usize,
}

/// The rows of one sequence in a [`Batch`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSequence {
    /// Rows of the sequence in [`Batch::tokens`]; they are consecutive.
    pub rows: Range<usize>,
    /// Number of tokens before the first row; their keys and values are stored already.
    pub past: usize,
    /// Part of [`Batch::block_table`] for the sequence: the physical block of each logical block.
    pub blocks: Range<usize>,
    /// Adapter that its rows are computed with; `None`: only the device's own weights. Sequences of the same
    /// adapter stand side by side.
    pub adapter: Option<AdapterSlot>,
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
    /// The sequences, in the order of their rows.
    pub sequences: Vec<BatchSequence>,
    /// Physical blocks of all sequences, one sequence after the other.
    pub block_table: Vec<BlockId>,
    /// Rows whose logits are needed, to draw tokens or to report log-probabilities of a prompt, ascending.
    pub logit_rows: Vec<usize>,
}

/// The results of a pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassResult {
    /// The result of each sampler, in order.
    pub drawn: Vec<Drawn>,
    /// The result of each row of a prompt, in order.
    pub scored: Vec<Scored>,
}

/// Reasons for which a device computes no pass or takes no weights.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    Pass(#[from] ForwardError),
    /// The tensors are not those of the model.
    #[error(transparent)]
    Weights(#[from] TensorMismatch),
    /// The adapter is not one of the model.
    #[error(transparent)]
    Adapter(#[from] LoraError),
    /// A device outside this crate failed.
    #[error("{0}")]
    Device(String),
}

/// The device seam of generation: computes passes, keeps keys and values in numbered blocks, and draws
/// tokens.
///
/// Contract:
/// - **Independence.** A row's logits depend only on its sequence's tokens and adapter, not on the rest of
///   the batch, bit for bit. This makes a request's tokens independent of what else runs.
/// - **Draws.** The token at a position is a function of its row of logits, the sampling parameters and the
///   position: the random number is that of (seed, position), Philox4x32-10 with the position as counter and
///   the seed as key, as in this crate's CPU sampler. Bias, temperature, `min_p`, `top_k` and `top_p` apply
///   in this order. Log-probabilities ignore bias and truncation. If a mask allows only one token, its
///   log-probability is exactly 0.
/// - **Drafts.** A draw continues to the next row as long as it drew the draft token, and ends at the latest
///   after the row that follows the last draft token, or when the constraint has ended. Tokens are those of
///   drawing one in each pass. An implementation may stop earlier (at a constraint whose masks it cannot
///   prepare), but not before the first token.
/// - **Prompts.** Log-probabilities of a prompt's tokens are those of the full softmax at temperature 1, with
///   the bits that a draw of the token at temperature 1 reports.
/// - **Order.** Copies and passes take effect in the order of the calls.
///
/// Data that cross this interface are per token: a device that overrides [`Forward::step`] never ships
/// logits. It may block until the draws are there. [`crate::testing::conformance`] tests the contract, and
/// [`crate::testing::adapter_conformance`] that of devices with adapters.
pub trait Forward: Send {
    /// Sizes, the same at every call.
    fn limits(&self) -> ForwardLimits;

    /// Copies within the key-value memory. Takes effect before the passes that follow.
    fn copy_block(&mut self, copy: BlockCopy);

    /// Stores keys and values of all rows, draws a token for each sampler, and takes the log-probabilities of
    /// each row of a prompt.
    ///
    /// # Errors
    /// All requests in the batch fail with it. An error of one sampler or row concerns only its request.
    fn step(
        &mut self,
        batch: &Batch,
        samplers: &[Sampler<'_>],
        prompts: &[PromptRow<'_>],
    ) -> Result<PassResult, DeviceError> {
        let (vocab, cpu) = (self.limits().vocab, self.cpu());
        let logits = self.logits(batch)?;
        Ok(PassResult {
            drawn: sampler::sample(logits, vocab, samplers, cpu.as_ref()),
            scored: prompt_row::score(logits, vocab, prompts, cpu.as_ref()),
        })
    }

    /// Stores keys and values of all rows; returns the logits of `batch.logit_rows`, `[logit_rows, vocab]`,
    /// in host memory. Called by the default [`Forward::step`], and to compare implementations.
    ///
    /// # Errors
    /// Same as [`Forward::step`].
    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError>;

    /// Replaces the weights; adapters stay. Checks names and shapes first; element types can be any.
    ///
    /// # Errors
    /// If the tensors are not those of the model; then nothing changed.
    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError>;

    /// Loads an adapter into a slot, or replaces the one there.
    ///
    /// # Errors
    /// If the device has no adapters, which is the default, or the adapter is not one of the model; then
    /// nothing changed.
    fn load_adapter(&mut self, _slot: AdapterSlot, _adapter: &Adapter) -> Result<(), DeviceError> {
        Err(DeviceError::Device(
            "this device computes without adapters".to_owned(),
        ))
    }

    /// Gives up the memory of an adapter; no batch names its slot until it is loaded again.
    fn unload_adapter(&mut self, _slot: AdapterSlot) {}

    /// Threads for drawing tokens while no pass runs; `None`: the engine's own thread draws.
    fn cpu(&self) -> Option<Cpu> {
        None
    }
}
