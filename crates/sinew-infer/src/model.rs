//! The forward pass of a real model: packed weights and paged keys and values on the CPU.

use crate::forward::{AdapterSlot, Batch, BlockCopy, DeviceError, Forward, ForwardLimits};
use sinew_model::{InferBatch, InferModel, InferScratch, Lora};
use sinew_tensor::Cpu;
use sinew_tensor::paged::{KvPool, KvPoolError, PANEL_TOKENS, PagedSequence};
use sinew_types::{Adapter, TensorSource};

/// Tokens of a block. Small, since a sequence wastes half a block on average and a branch copies
/// part of one.
const BLOCK_TOKENS: usize = PANEL_TOKENS;

/// A model with its adapters, its key-value memory and the buffers of its passes.
///
/// Keys and values are stored as the model computes them, in f32: what a later pass reads is what
/// training computes.
#[derive(Debug)]
pub struct ModelForward {
    device: Cpu,
    model: InferModel,
    /// Adapters by slot.
    adapters: Vec<Option<Lora>>,
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
            adapters: Vec::new(),
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
        let loaded = &self.adapters;
        let adapters = batch.sequences.iter().map(|s| match s.adapter {
            Some(slot) => in_slot(loaded, slot).map(Some),
            None => Ok(None),
        });
        let adapters = adapters.collect::<Result<Vec<Option<&Lora>>, DeviceError>>()?;
        let batch = InferBatch {
            tokens: &batch.tokens,
            sequences: &sequences,
            adapters: &adapters,
            logit_rows: &batch.logit_rows,
        };
        let (kv, scratch) = (&mut self.kv, &mut self.scratch);
        Ok(self.model.forward(&self.device, kv, &batch, scratch)?)
    }

    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError> {
        Ok(self.model.repack(&self.device, weights)?)
    }

    fn load_adapter(&mut self, slot: AdapterSlot, adapter: &Adapter) -> Result<(), DeviceError> {
        let lora = Lora::from_adapter(adapter, self.model.config())?;
        let slot = slot as usize;
        if slot >= self.adapters.len() {
            self.adapters.resize_with(slot + 1, || None);
        }
        self.adapters[slot] = Some(lora);
        Ok(())
    }

    fn unload_adapter(&mut self, slot: AdapterSlot) {
        if let Some(adapter) = self.adapters.get_mut(slot as usize) {
            *adapter = None;
        }
    }

    fn cpu(&self) -> Option<Cpu> {
        Some(self.device.clone())
    }
}

/// The adapter that was loaded into a slot.
fn in_slot(adapters: &[Option<Lora>], slot: AdapterSlot) -> Result<&Lora, DeviceError> {
    let adapter = adapters.get(slot as usize).and_then(Option::as_ref);
    adapter.ok_or_else(|| DeviceError::Device(format!("no adapter was loaded into slot {slot}")))
}
