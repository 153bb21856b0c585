//! Keys and values in blocks, and attention over them, for generation.
//!
//! Physical blocks have no owner here: the caller hands out block ids, can let sequences share them, and
//! copies a shared block before it writes to it ([`KvPool::copy_block`]). A row's result depends only on its
//! query and its visible keys, bit for bit: not on the rest of the batch, not on how a prompt was cut into
//! chunks, not on threads.

mod attend;

use thiserror::Error;

use crate::attention::{AttentionScratch, AttentionShape};
use crate::buffer::{Buffer, SharedMut};
use crate::cpu::Cpu;

/// Number of keys that are adjacent in memory; block sizes are multiples of it.
pub const PANEL_TOKENS: usize = 16;

/// Keys of a head, in values, from which on each head is stored by a separate task.
const WRITE_GRAIN: usize = 4 << 10;

/// Reasons why a pool of blocks cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum KvPoolError {
    /// The block size does not fit the memory layout.
    #[error("block_tokens is {0}: it has to be a positive multiple of {PANEL_TOKENS}")]
    BlockTokens(usize),
    /// Slot ids would not fit in 32 bits, or the pool not in memory.
    #[error(
        "{blocks} blocks of {block_tokens} tokens exceed 2^32 slots or the address space: use fewer blocks"
    )]
    TooLarge {
        /// Number of blocks.
        blocks: usize,
        /// Tokens in a block.
        block_tokens: usize,
    },
}

/// Storage of keys and values of all layers, in physical blocks of `block_tokens` tokens.
///
/// The slot of a token is `block * block_tokens + offset`; the same slot is used in every layer.
#[derive(Debug)]
pub struct KvPool {
    layers: usize,
    shape: AttentionShape,
    block_tokens: usize,
    blocks: usize,
    /// `head_dim` rounded up, so that rows of values are whole vectors; the excess stays zero.
    padded_dim: usize,
    /// `[layer][kv_head][block]`, each block `[panel][padded_dim][PANEL_TOKENS]` of keys, then
    /// `[token][padded_dim]` of values.
    data: Buffer,
}

impl KvPool {
    /// A pool of zeros; memory is taken from the system as blocks are first written.
    ///
    /// # Errors
    /// If `block_tokens` is not a positive multiple of [`PANEL_TOKENS`], or the pool is too large.
    pub fn new(
        layers: usize,
        shape: AttentionShape,
        block_tokens: usize,
        blocks: usize,
    ) -> Result<Self, KvPoolError> {
        if block_tokens == 0 || !block_tokens.is_multiple_of(PANEL_TOKENS) {
            return Err(KvPoolError::BlockTokens(block_tokens));
        }
        let padded_dim = shape.head_dim().next_multiple_of(PANEL_TOKENS);
        let too_large = KvPoolError::TooLarge {
            blocks,
            block_tokens,
        };
        let slots = blocks
            .checked_mul(block_tokens)
            .filter(|&slots| slots <= u32::MAX as usize);
        let len = slots
            .and_then(|slots| slots.checked_mul(2 * padded_dim))
            .and_then(|len| len.checked_mul(shape.kv_heads())?.checked_mul(layers))
            .filter(|&len| len <= isize::MAX as usize / size_of::<f32>())
            .ok_or(too_large)?;
        Ok(Self {
            layers,
            shape,
            block_tokens,
            blocks,
            padded_dim,
            data: Buffer::zeros(len),
        })
    }

    /// Number of layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Heads of the model whose keys and values are stored.
    #[must_use]
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Tokens in a block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Number of physical blocks.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn block_len(&self) -> usize {
        2 * self.block_tokens * self.padded_dim
    }

    fn block_at(&self, layer: usize, kv_head: usize, block: usize) -> usize {
        ((layer * self.shape.kv_heads() + kv_head) * self.blocks + block) * self.block_len()
    }

    fn key_at(&self, token: usize, d: usize) -> usize {
        let panel = token / PANEL_TOKENS * self.padded_dim * PANEL_TOKENS;
        panel + d * PANEL_TOKENS + token % PANEL_TOKENS
    }

    fn value_at(&self, token: usize, d: usize) -> usize {
        (self.block_tokens + token) * self.padded_dim + d
    }

    /// Stores the keys and values of `qkv` `[slots.len(), qkv_width]` (rotated) in `layer` at `slots`.
    ///
    /// # Panics
    /// If `layer` or a slot does not exist, or `qkv` has another length.
    pub fn write(&mut self, dev: &Cpu, layer: usize, qkv: &[f32], slots: &[u32]) {
        assert!(
            layer < self.layers,
            "layer {layer} of a pool of {} layers",
            self.layers
        );
        let shape = self.shape;
        assert_eq!(
            qkv.len(),
            slots.len() * shape.qkv_width(),
            "qkv holds one row for each slot"
        );
        for &slot in slots {
            assert!(
                (slot as usize) < self.blocks * self.block_tokens,
                "slot {slot} lies beyond the {} blocks",
                self.blocks
            );
        }
        // Tokens of one block share cache lines, heads do not.
        let few = slots.len() * shape.head_dim() < WRITE_GRAIN;
        let heads = if few { shape.kv_heads() } else { 1 };
        let mut data = std::mem::take(&mut self.data);
        let to = SharedMut::new(&mut data);
        let pool = &*self;
        dev.pool()
            .parallel_ranges(shape.kv_heads(), heads, &|heads| {
                for head in heads {
                    pool.write_head(layer, head, qkv, slots, to);
                }
            });
        self.data = data;
    }

    /// [`KvPool::write`] of one head; `to` are the pool's values, of which no other task touches this head's.
    fn write_head(&self, layer: usize, head: usize, qkv: &[f32], slots: &[u32], to: SharedMut<'_>) {
        let (shape, tokens) = (self.shape, self.block_tokens);
        let panel = self.padded_dim * PANEL_TOKENS;
        for (row, &slot) in slots.iter().enumerate() {
            let (block, token) = (slot as usize / tokens, slot as usize % tokens);
            let base = self.block_at(layer, head, block);
            let key = &qkv[shape.key_at(row, head)..][..shape.head_dim()];
            let at = base + self.key_at(token, 0);
            let end = base + (token / PANEL_TOKENS + 1) * panel;
            // SAFETY: only this task touches the block's part that belongs to this head.
            let column = unsafe { to.range(at..end) };
            for (to, &k) in column.iter_mut().step_by(PANEL_TOKENS).zip(key) {
                *to = k;
            }
            let value = &qkv[shape.value_at(row, head)..][..shape.head_dim()];
            let at = base + self.value_at(token, 0);
            // SAFETY: as above.
            unsafe { to.range(at..at + shape.head_dim()) }.copy_from_slice(value);
        }
    }

    /// Copies block `src` to block `dst` in every layer, for a sequence that continues from a shared block.
    ///
    /// # Panics
    /// If one of the blocks does not exist.
    pub fn copy_block(&mut self, src: u32, dst: u32) {
        let (src, dst) = (src as usize, dst as usize);
        assert!(
            src.max(dst) < self.blocks,
            "block {} of {}",
            src.max(dst),
            self.blocks
        );
        let len = self.block_len();
        for layer in 0..self.layers {
            for kv_head in 0..self.shape.kv_heads() {
                let from = self.block_at(layer, kv_head, src);
                let to = self.block_at(layer, kv_head, dst);
                self.data.copy_within(from..from + len, to);
            }
        }
    }
}

/// The query rows of one sequence in a batch: a chunk of its prompt, or one row when it generates.
#[derive(Clone, Copy, Debug)]
pub struct PagedSequence<'a> {
    /// Physical block of each logical block of the sequence.
    pub blocks: &'a [u32],
    /// Tokens before the first query row.
    pub past: usize,
    /// Query rows, consecutive in the batch; row `i` sees keys `0..past + i + 1`, its own included.
    pub rows: usize,
}

/// A batch for [`paged_attention`], planned once for all layers of a step.
#[derive(Clone, Debug)]
pub struct PagedBatch<'a> {
    sequences: Vec<PagedSequence<'a>>,
    /// Rows of fused query, key and value.
    rows: usize,
    /// The query rows, neighbours by their block tables.
    order: Vec<QueryRow>,
}

/// One query row.
#[derive(Clone, Copy, Debug)]
struct QueryRow {
    row: usize,
    /// Row of its output.
    out: usize,
    sequence: usize,
    /// Keys that it sees.
    visible: usize,
}

impl<'a> PagedBatch<'a> {
    /// Sequences in the order of their query rows.
    #[must_use]
    pub fn new(sequences: Vec<PagedSequence<'a>>) -> Self {
        let mut by_blocks = Vec::with_capacity(sequences.len());
        let mut rows = 0;
        for (sequence, s) in sequences.iter().enumerate() {
            by_blocks.push((s.blocks, sequence, rows));
            rows += s.rows;
        }
        // Sequences that share a prefix of blocks become neighbours, so that its blocks stay in cache.
        by_blocks.sort_unstable();
        let mut order = Vec::with_capacity(rows);
        for (_, sequence, first) in by_blocks {
            let PagedSequence { past, rows, .. } = sequences[sequence];
            let row = |i| QueryRow {
                row: first + i,
                out: first + i,
                sequence,
                visible: past + i + 1,
            };
            order.extend((0..rows).map(row));
        }
        Self {
            sequences,
            rows,
            order,
        }
    }

    /// Returns the batch with only `rows` as queries; output row `i` is that of query `rows[i]`. The last
    /// layer uses it, which needs only keys and values of the other rows.
    ///
    /// # Panics
    /// If a row does not exist.
    #[must_use]
    pub fn only(&self, rows: &[u32]) -> Self {
        let mut outs = vec![Vec::new(); self.rows];
        for (out, &row) in rows.iter().enumerate() {
            outs[row as usize].push(out);
        }
        let order = self.order.iter().flat_map(|query| {
            let outs = outs[query.row].iter();
            outs.map(|&out| QueryRow { out, ..*query })
        });
        Self {
            sequences: self.sequences.clone(),
            rows: self.rows,
            order: order.collect(),
        }
    }

    /// Number of query rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.order.len()
    }

    /// Kernels read blocks through pointers: this is where they are made sure to exist.
    fn check(&self, pool: &KvPool) {
        for (i, s) in self.sequences.iter().enumerate() {
            let needed = (s.past + s.rows).div_ceil(pool.block_tokens);
            let listed = s.blocks.len();
            assert!(
                listed >= needed || s.rows == 0,
                "sequence {i} lists {listed} blocks and needs {needed}"
            );
            for &block in &s.blocks[..needed.min(listed)] {
                assert!(
                    (block as usize) < pool.blocks,
                    "sequence {i} names block {block} of {}",
                    pool.blocks
                );
            }
        }
    }
}

/// `out = softmax(q k^T / sqrt(head_dim)) v` for each query row over its sequence's stored keys.
///
/// `qkv` `[rows of the batch, qkv_width]` holds rotated queries (its keys and values are not read: store them
/// with [`KvPool::write`] first); writes `out` `[query rows, out_width]`.
///
/// # Panics
/// If `layer` or a block does not exist, a block table is too short, or a slice has another length.
pub fn paged_attention(
    dev: &Cpu,
    pool: &KvPool,
    layer: usize,
    batch: &PagedBatch<'_>,
    qkv: &[f32],
    out: &mut [f32],
    scratch: &mut AttentionScratch,
) {
    let shape = pool.shape;
    assert!(
        layer < pool.layers,
        "layer {layer} of a pool of {} layers",
        pool.layers
    );
    assert_eq!(
        qkv.len(),
        batch.rows * shape.qkv_width(),
        "qkv holds one row for each token"
    );
    assert_eq!(
        out.len(),
        batch.rows() * shape.out_width(),
        "out holds one row for each query"
    );
    batch.check(pool);
    let bundles = batch.rows().div_ceil(BUNDLE_ROWS);
    let out = SharedMut::new(out);
    let workspaces = scratch.workspaces();
    dev.pool().parallel_for(bundles * shape.kv_heads(), &|i| {
        let first = i % bundles * BUNDLE_ROWS;
        let bundle = Bundle {
            pool,
            layer,
            kv_head: i / bundles,
            rows: &batch.order[first..(first + BUNDLE_ROWS).min(batch.rows())],
            sequences: &batch.sequences,
            qkv,
        };
        // SAFETY: `check` saw all blocks; tasks write different rows or heads.
        workspaces.with(|memory| unsafe { attend::attend(dev, &bundle, out, memory) });
    });
}

/// Query rows that one task takes through their keys together: blocks that they share are read from
/// the first cache level by all but the first.
const BUNDLE_ROWS: usize = 8;

/// Work of one task: some query rows, with the query heads of one key head.
struct Bundle<'a> {
    pool: &'a KvPool,
    layer: usize,
    kv_head: usize,
    rows: &'a [QueryRow],
    sequences: &'a [PagedSequence<'a>],
    qkv: &'a [f32],
}

#[cfg(test)]
mod tests;
