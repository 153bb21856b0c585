//! A forward pass without a model, for tests of the scheduler and of crates that use engines; and
//! the tests of every forward pass.

mod adapters;
mod bench;
mod conformance;

pub use adapters::adapter_conformance;
pub use conformance::conformance;

use crate::forward::{AdapterSlot, Batch, BlockCopy, DeviceError, Forward, ForwardLimits};
use sinew_types::{Adapter, GOLDEN_GAMMA, TensorSource, TensorView, TokenId, finalize64};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The stored value of a token: enough to notice that a slot belongs to another prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Slot {
    token: TokenId,
    /// Number of the weights that computed it.
    weights: u64,
    /// Hash of the slot before it, this token and these weights.
    hash: u64,
}

/// Logits from a hash of the prefix, which is kept in block memory as keys and values would
/// be: a wrong block table, a missing copy or a reused block changes the hash, and panics.
#[derive(Debug)]
pub struct HashForward {
    /// Sizes of the block memory.
    limits: ForwardLimits,
    weights: u64,
    /// Number of the adapter in each slot.
    adapters: BTreeMap<AdapterSlot, u64>,
    slots: Vec<Option<Slot>>,
    logits: Vec<f32>,
    /// Rows computed so far.
    computed: Arc<AtomicU64>,
    /// Number of the pass that fails, from 0.
    fail_at_pass: Option<u64>,
    passes: u64,
}

fn mix(a: u64, b: u64) -> u64 {
    finalize64((a ^ b.wrapping_mul(GOLDEN_GAMMA)).wrapping_add(0x1234_5678_9ABC_DEF1))
}

/// Hash of a prefix and one more token under some weights.
fn extend(before: Option<u64>, token: TokenId, weights: u64) -> u64 {
    mix(
        mix(before.unwrap_or(0x0001_D000), weights),
        u64::from(token),
    )
}

/// Logits between -3 and 3 from a hash.
fn logits_of(hash: u64, vocab: usize) -> impl Iterator<Item = f32> {
    (0..vocab as u64).map(move |i| (mix(hash, i) >> 40) as f32 / (1u64 << 24) as f32 * 6.0 - 3.0)
}

impl HashForward {
    /// Block memory of `limits`, with weights number 0.
    pub fn new(limits: ForwardLimits) -> Self {
        Self {
            limits,
            weights: 0,
            adapters: BTreeMap::new(),
            slots: vec![None; limits.blocks * limits.block_tokens],
            logits: Vec::new(),
            computed: Arc::default(),
            fail_at_pass: None,
            passes: 0,
        }
    }

    /// Makes the pass with this number (from 0) fail.
    #[must_use]
    pub fn failing_at(mut self, pass: u64) -> Self {
        self.fail_at_pass = Some(pass);
        self
    }

    /// Counts the rows that were computed.
    pub fn computed(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.computed)
    }

    /// The logits after `tokens` under weights number `weights`, computed without any stored state.
    pub fn logits_after(vocab: usize, weights: u64, tokens: &[TokenId]) -> Vec<f32> {
        let mut hash = None;
        for &token in tokens {
            hash = Some(extend(hash, token, weights));
        }
        logits_of(hash.unwrap_or(0), vocab).collect()
    }

    /// Number of the weights that an adapter makes of those of number `weights`, for
    /// [`HashForward::logits_after`]. Adapters are [`HashWeights`], too.
    pub fn adapted(weights: u64, adapter: u64) -> u64 {
        mix(weights, adapter ^ 0x00AD_A97E)
    }

    fn slot(&self, table: &[u32], position: usize) -> usize {
        let block = table[position / self.limits.block_tokens] as usize;
        block * self.limits.block_tokens + position % self.limits.block_tokens
    }

    /// The hash of the first `past` tokens, checked slot by slot.
    fn past_hash(&self, table: &[u32], past: usize) -> Option<u64> {
        let mut hash = None;
        for position in 0..past {
            let slot = self.slots[self.slot(table, position)];
            let Some(slot) = slot else {
                panic!("position {position} is read before it is stored");
            };
            let expected = extend(hash, slot.token, slot.weights);
            assert_eq!(
                slot.hash, expected,
                "position {position} is of another prefix"
            );
            hash = Some(expected);
        }
        hash
    }
}

impl Forward for HashForward {
    fn limits(&self) -> ForwardLimits {
        self.limits
    }

    fn copy_block(&mut self, copy: BlockCopy) {
        let size = self.limits.block_tokens;
        let (from, to) = (copy.from as usize * size, copy.to as usize * size);
        assert_ne!(from, to, "a block is copied to another one");
        self.slots.copy_within(from..from + copy.tokens, to);
        self.slots[to + copy.tokens..to + size].fill(None);
    }

    fn logits(&mut self, batch: &Batch) -> Result<&[f32], DeviceError> {
        self.passes += 1;
        if self.fail_at_pass == Some(self.passes - 1) {
            let why = format!("pass {} was to fail", self.passes - 1);
            return Err(DeviceError::Device(why));
        }
        let mut hashes = vec![0; batch.tokens.len()];
        for s in &batch.sequences {
            let table = &batch.block_table[s.blocks.clone()];
            let weights = match s.adapter {
                Some(slot) => Self::adapted(self.weights, self.adapters[&slot]),
                None => self.weights,
            };
            let mut hash = self.past_hash(table, s.past);
            for (i, row) in s.rows.clone().enumerate() {
                let token = batch.tokens[row];
                let extended = extend(hash, token, weights);
                let at = self.slot(table, s.past + i);
                self.slots[at] = Some(Slot {
                    token,
                    weights,
                    hash: extended,
                });
                hash = Some(extended);
                hashes[row] = extended;
            }
        }
        let rows = batch.tokens.len() as u64;
        self.computed.fetch_add(rows, Ordering::Relaxed);
        self.logits.clear();
        for &row in &batch.logit_rows {
            let logits = logits_of(hashes[row], self.limits.vocab);
            self.logits.extend(logits);
        }
        Ok(&self.logits)
    }

    fn load_weights(&mut self, weights: &dyn TensorSource) -> Result<(), DeviceError> {
        self.weights = number(weights)?;
        Ok(())
    }

    fn load_adapter(&mut self, slot: AdapterSlot, adapter: &Adapter) -> Result<(), DeviceError> {
        self.adapters.insert(slot, number(&*adapter.tensors)?);
        Ok(())
    }

    fn unload_adapter(&mut self, slot: AdapterSlot) {
        self.adapters.remove(&slot);
    }
}

/// The number that weights or an adapter consist of.
fn number(tensors: &dyn TensorSource) -> Result<u64, DeviceError> {
    let number = tensors
        .tensor("number")
        .ok_or_else(|| DeviceError::Device("tensor `number` is missing".into()))?;
    if number.shape() != [1] {
        let why = format!("tensor `number` has shape {:?}, not [1]", number.shape());
        return Err(DeviceError::Device(why));
    }
    Ok(number.into_f32()[0] as u64)
}

/// Weights for a [`HashForward`]: one number.
#[derive(Clone, Copy, Debug)]
pub struct HashWeights(pub [f32; 1]);

impl TensorSource for HashWeights {
    fn names(&self) -> Vec<String> {
        vec!["number".to_owned()]
    }

    fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let view = TensorView::f32(&[1], &self.0).ok();
        view.filter(|_| name == "number")
    }
}

impl HashWeights {
    /// The number as an adapter.
    pub fn adapter(number: f32) -> Adapter {
        Adapter {
            alpha: 1.0,
            tensors: Arc::new(Self([number])),
        }
    }
}
