//! The seam to the device that computes passes: a model on a CPU or a GPU, or a stand-in for tests.

use crate::constraint::Constraint;
use crate::sampler;
use sinew_tensor::Cpu;
use sinew_types::{Choice, EngineError, SamplingParams, TensorSource, TokenId, TokenLogprob};
use std::ops::Range;
use std::sync::Mutex;

/// Index of a physical block of key-value memory.
pub type BlockId = u32;

/// Sizes that never change while an engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForwardLimits {
    /// Token ids are below it; logits have as many columns.
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

/// How tokens are drawn for one sequence, from consecutive rows of logits.
#[derive(Clone, Copy, Debug)]
pub struct Sampler<'a> {
    /// Index in [`Batch::logit_rows`] of the row after the known tokens. Samplers may share a row.
    pub row: usize,
    /// Draft tokens, which follow the known ones in the batch: a row of logits follows for each.
    pub draft: &'a [TokenId],
    pub params: &'a SamplingParams,
    /// Number of known tokens: the position of the first token drawn.
    pub position: usize,
    /// Of the output format. It stands after the known tokens, and goes on with each token drawn.
    pub constraint: Option<&'a Mutex<Constraint>>,
}

/// A token drawn from a row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    pub id: TokenId,
    /// Natural log-probability under the full softmax at [`SamplingParams::policy_temperature`]; with a
    /// constraint, of the softmax over the tokens that its mask allows.
    pub logprob: f32,
    /// The most likely tokens of the same softmax, best first: [`SamplingParams::top_logprobs`] of them.
    pub top: Vec<TokenLogprob>,
    /// What [`Constraint::accept`] says of the token.
    pub choice: Option<Choice>,
}

/// The tokens of one sampler, at least one: all but the last are draft tokens that were accepted.
pub type Drawn = Result<Vec<Draw>, EngineError>;

/// The device seam of generation: computes passes, keeps keys and values in numbered blocks, and draws
/// tokens.
///
/// Contract:
/// - **Independence.** A row's logits depend on its sequence's tokens alone, not on the rest of the batch,
///   bit for bit. This makes a request's tokens independent of what else runs.
/// - **Draws.** The token at a position is a function of its row of logits, the sampling parameters and the
///   position: the random number is that of (seed, position), Philox4x32-10 with the position as counter and
///   the seed as key, as in this crate's CPU sampler. Bias, temperature, `min_p`, `top_k` and `top_p` apply
///   in this order. Log-probabilities ignore bias and truncation. Where a mask allows one token alone, its
///   log-probability is exactly 0.
/// - **Drafts.** A draw goes on to the next row as long as it drew the draft token, and ends at the latest
///   after the row that follows the last draft token, or when the constraint has ended. Tokens are those of
///   drawing one in each pass. An implementation may stop earlier (at a constraint whose masks it cannot
///   prepare), but not before the first token.
/// - **Order.** Copies and passes take effect in the order of the calls.
///
/// What crosses the seam is per token: a device that overrides [`Forward::step`] never ships logits. It may
/// block until the draws are there. [`crate::testing::conformance`] tests the contract.
pub trait Forward: Send {
    fn limits(&self) -> ForwardLimits;

    /// Copies within the key-value memory.
    fn copy_block(&mut self, copy: BlockCopy);

    /// Stores keys and values of all rows, and draws tokens: the result of each sampler, in order.
    ///
    /// # Errors
    /// What failed; the requests in the batch fail with it. An error of one sampler concerns its request
    /// alone.
    fn step(&mut self, batch: &Batch, samplers: &[Sampler<'_>]) -> Result<Vec<Drawn>, String> {
        let (vocab, cpu) = (self.limits().vocab, self.cpu());
        let logits = self.logits(batch)?;
        Ok(sampler::sample(logits, vocab, samplers, cpu.as_ref()))
    }

    /// Stores keys and values of all rows; returns the logits of `batch.logit_rows`, `[logit_rows, vocab]`,
    /// in host memory. Called by the default [`Forward::step`], and to compare implementations.
    ///
    /// # Errors
    /// As [`Forward::step`].
    fn logits(&mut self, batch: &Batch) -> Result<&[f32], String>;

    /// Replaces the weights. Checks names and shapes first; element types may be any.
    ///
    /// # Errors
    /// What does not fit; then nothing changed.
    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), String>;

    /// The threads that may draw tokens while no pass runs; `None`: the engine's own thread does.
    fn cpu(&self) -> Option<Cpu> {
        None
    }
}
