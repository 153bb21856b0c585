//! The forward pass of a real model: packed weights and paged keys and values on the CPU.

use crate::forward::{Batch, BlockCopy, DeviceError, Forward, ForwardLimits};
use sinew_model::{InferBatch, InferModel, InferScratch};
use sinew_tensor::Cpu;
use sinew_tensor::paged::{KvPool, KvPoolError, PANEL_TOKENS, PagedSequence};
use sinew_types::TensorSource;

/// Tokens of a block. Small, since a sequence wastes half a block on average and a branch copies
/// part of one.
const BLOCK_TOKENS: usize = PANEL_TOKENS;

/// A model with its key-value memory and the buffers of its passes.
///
/// Keys and values are stored as the model computes them, in f32: what a later pass reads is what
/// training computes.
#[derive(Debug)]
pub struct ModelForward {
    device: Cpu,
    model: InferModel,
    kv: KvPool,
    scratch: InferScratch,
}

impl ModelForward {
    /// Creates a model with a KV cache for `kv_tokens` tokens, rounded up to blocks. The system allocates the
    /// memory when it is first used.
    ///
    /// # Errors
    /// If that much memory cannot be addressed.
    pub fn new(device: Cpu, model: InferModel, kv_tokens: usize) -> Result<Self, KvPoolError> {
        let blocks = kv_tokens.div_ceil(BLOCK_TOKENS);
        let layers = model.config().layers;
        let kv = KvPool::new(layers, model.attention_shape(), BLOCK_TOKENS, blocks)?;
        Ok(Self {
            device,
            model,
            kv,
            scratch: InferScratch::new(),
        })
    }
}

impl Forward for ModelForward {
    fn limits(&self) -> ForwardLimits {
        ForwardLimits {
            vocab: self.model.config().vocab,
            context: self.model.context(),
            block_tokens: self.kv.block_tokens(),
            blocks: self.kv.blocks(),
        }
    }

    fn copy_block(&mut self, copy: BlockCopy) {
        self.kv.copy_block(copy.from, copy.to);
    }

    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        let sequences = batch.sequences.iter().map(|s| PagedSequence {
            blocks: &batch.block_table[s.blocks.clone()],
            past: s.past,
            rows: s.rows.len(),
        });
        let sequences: Vec<_> = sequences.collect();
        let batch = InferBatch {
            tokens: &batch.tokens,
            sequences: &sequences,
            adapters: &[],
            logit_rows: &batch.logit_rows,
        };
        let (kv, scratch) = (&mut self.kv, &mut self.scratch);
        Ok(self.model.forward(&self.device, kv, &batch, scratch)?)
    }

    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError> {
        Ok(self.model.repack(&self.device, weights)?)
    }

    fn cpu(&self) -> Option<Cpu> {
        Some(self.device.clone())
    }
}
