//! Attention of packed training batches in which sequences share prefixes.
//!
//! A batch is a forest of segments ([`TreeLayout`]); each shared token is computed once. Scores are
//! never stored for more than a block of keys: forward keeps the log-sum-exp of each row and head,
//! backward recomputes probabilities from it (Dao, FlashAttention-2, 2023, algorithms 1 and 2).
//! Results depend neither on the number of threads nor on their timing.

mod backward;
mod forward;
pub(crate) mod kernel;
mod layout;
mod plan;
#[cfg(test)]
pub(crate) mod reference;
pub(crate) mod tile;

use std::sync::{Mutex, MutexGuard, PoisonError};

use thiserror::Error;

pub use layout::{LayoutError, Segment, TreeLayout};

use crate::buffer::{Scratch, SharedMut};
use crate::cpu::Cpu;
use backward::Partial;
use kernel::{HeadGroup, Task};
use plan::{Chunk, Plan, PlanKey, STRIP_VECTORS};
use tile::lanes;

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
    #[error(
        "heads is {heads} and kv_heads {kv_heads}: heads has to be a positive multiple of kv_heads"
    )]
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
        Ok(Self {
            heads,
            kv_heads,
            head_dim,
        })
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
pub struct AttentionScratch {
    plan: Option<Plan>,
    partials: Scratch,
    workspaces: Workspaces,
}

impl AttentionScratch {
    /// Bytes of all buffers; plans, of some bytes a row, are left out.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.partials.bytes() + self.workspaces.bytes()
    }

    pub(crate) fn workspaces(&self) -> &Workspaces {
        &self.workspaces
    }
}

/// Scratch buffers of tasks. A task takes a free buffer and puts it back when it ends, so that there are at
/// most as many buffers as threads.
#[derive(Debug, Default)]
pub(crate) struct Workspaces(Mutex<Vec<Scratch>>);

impl Workspaces {
    fn free(&self) -> MutexGuard<'_, Vec<Scratch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes(&self) -> usize {
        self.free().iter().map(Scratch::bytes).sum()
    }

    /// Runs `body` with the memory of one task, which keeps its size for the next one.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut Scratch) -> R) -> R {
        let free = self.free().pop();
        let mut scratch = free.unwrap_or_default();
        let result = body(&mut scratch);
        self.free().push(scratch);
        result
    }
}

/// Rows whose key gradients one task sums up.
const REDUCE_ROWS: usize = 128;

/// Groups of query heads that share a key head and fit a strip.
fn head_groups(dev: &Cpu, shape: &AttentionShape) -> Vec<HeadGroup> {
    let most = STRIP_VECTORS * lanes(dev);
    let fits = |count: &usize| shape.group().is_multiple_of(*count);
    let count = (1..=most.min(shape.group())).rev().find(fits).unwrap_or(1);
    (0..shape.heads())
        .step_by(count)
        .map(|first| HeadGroup {
            first,
            count,
            kv_head: shape.group_of(first),
        })
        .collect()
}

/// The plan of a layout: the kept one if it fits, otherwise a new one.
fn plan<'a>(
    slot: &'a mut Option<Plan>,
    dev: &Cpu,
    layout: &TreeLayout,
    groups: &[HeadGroup],
) -> &'a Plan {
    let key = PlanKey {
        heads: groups[0].count,
        lanes: lanes(dev),
        groups: groups.len(),
    };
    let kept = slot.take().filter(|plan| plan.fits(layout, key));
    slot.insert(kept.unwrap_or_else(|| Plan::new(layout, key)))
}

/// The heads and the rows of task `i`: chunks in turn for each group.
fn part<'a>(plan: &'a Plan, groups: &[HeadGroup], i: usize) -> (HeadGroup, &'a Chunk) {
    let chunks = plan.chunks.len();
    (groups[i / chunks], &plan.chunks[i % chunks])
}

/// Panics with the name of a slice of the wrong length.
fn check_len(name: &str, len: usize, expected: usize) {
    assert_eq!(
        len, expected,
        "{name} holds {len} values, the layout and shape ask for {expected}"
    );
}

/// `out = softmax(q k^T / sqrt(head_dim)) v` for each row, over the rows that the layout lets it see.
///
/// `qkv` `[rows, qkv_width]` holds rotated queries and keys; writes `out` `[rows, out_width]` and
/// `lse` `[rows, heads]`, the natural logarithm of each softmax denominator.
///
/// # Panics
/// If the length of a slice differs from what layout and shape ask for.
pub fn tree_attention_forward(
    dev: &Cpu,
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
    let groups = head_groups(dev, shape);
    let plan = plan(&mut scratch.plan, dev, layout, &groups);
    let workspaces = &scratch.workspaces;
    let to = forward::Output {
        out: SharedMut::new(out),
        lse: SharedMut::new(lse),
    };
    dev.pool()
        .parallel_for(groups.len() * plan.chunks.len(), &|i| {
            let (group, chunk) = part(plan, &groups, i);
            let task = Task {
                shape,
                chunk,
                group,
                qkv,
            };
            workspaces.with(|memory| {
                // SAFETY: each row lies in one strip of one chunk and
                // each head in one group, so tasks write disjoint parts.
                unsafe { forward::forward_chunk(dev, &task, to, memory) }
            });
        });
}

/// Input of [`tree_attention_backward`]: results of the forward pass, and the gradient that arrives.
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
    dev: &Cpu,
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
    let groups = head_groups(dev, shape);
    let plan = plan(&mut scratch.plan, dev, layout, &groups);
    let workspaces = &scratch.workspaces;
    // Starts of each task's sums, in the order of tasks: groups, and chunks within a group.
    let mut starts = vec![0];
    for i in 0..groups.len() * plan.chunks.len() {
        starts.push(starts[i] + backward::partial_len(shape, part(plan, &groups, i).1));
    }
    let sums = scratch.partials.take(starts[starts.len() - 1]);
    let shared_sums = SharedMut::new(sums);
    let d_qkv = SharedMut::new(d_qkv);
    dev.pool().parallel_for(starts.len() - 1, &|i| {
        let (group, chunk) = part(plan, &groups, i);
        let task = Task {
            shape,
            chunk,
            group,
            qkv: input.qkv,
        };
        // SAFETY: the ranges of tasks are disjoint.
        let d_keys = SharedMut::new(unsafe { shared_sums.range(starts[i]..starts[i + 1]) });
        let to = backward::Output { d_qkv, d_keys };
        workspaces.with(|memory| {
            // SAFETY: each row lies in one strip of one chunk and
            // each head in one group, so tasks write disjoint parts.
            unsafe { backward::backward_chunk(dev, &task, &input, to, memory) }
        });
    });
    let sums = &*sums;
    let partial = |i: usize| {
        let (group, chunk) = part(plan, &groups, i);
        Partial {
            chunk,
            d_keys: &sums[starts[i]..starts[i + 1]],
            kv_head: group.kv_head,
        }
    };
    let partials: Vec<Partial<'_>> = (0..starts.len() - 1).map(partial).collect();
    dev.pool().parallel_ranges(rows, REDUCE_ROWS, &|range| {
        // SAFETY: ranges of rows are disjoint, and queries are written already.
        unsafe { backward::reduce_rows(shape, &partials, range, d_qkv) };
    });
}

#[cfg(test)]
pub(crate) mod tests;
