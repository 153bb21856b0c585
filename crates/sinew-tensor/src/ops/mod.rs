//! Fused elementwise and row-wise operators, forward and backward.
//!
//! All run on the threads of the [`Cpu`]; plain counterparts are in the tests (`tests/it/reference.rs`).
//! Results do not depend on the number of threads: each output value, sums over rows included, is computed in
//! an order that only the shape fixes. Shapes that do not fit panic with both shapes.
//!
//! Rows are the first index everywhere: `[m, n]` is `m` rows of `n` values, row-major and dense unless a view
//! has other strides. Gradients that are sums over rows are added to their target; all other outputs are
//! overwritten.

mod activation;
mod adamw;
mod elementwise;
mod embedding;
mod norm;
mod rope;
mod row;

pub use activation::{swiglu, swiglu_backward};
pub use adamw::{AdamW, adamw};
pub use elementwise::{add, bias_add, bias_backward, scale, sum_of_squares};
pub use embedding::{NOWHERE, embedding, embedding_backward, spread};
pub use norm::{rms_norm, rms_norm_backward, rms_norm_in_place};
pub use rope::{RopeTable, rope, rope_backward};
pub use row::{CHUNK, chunk_exp_sums, chunk_maxima, exp_nonpositive};

#[cfg(doc)]
use crate::cpu::Cpu;

/// Minimum values that one task handles: some 5 µs of work, well above the cost of handing it over.
const GRAIN: usize = 16 << 10;

/// Rows of one task, for rows of `width` values.
fn row_grain(width: usize) -> usize {
    (GRAIN / width.max(1)).max(1)
}
