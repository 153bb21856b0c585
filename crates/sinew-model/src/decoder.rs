//! Parts that inference and training share: geometry, rotary table, checks of the input.
//!
//! Every input of a pass is checked here or by its caller before a kernel runs: kernels index
//! without further tests.

use crate::config::{ConfigError, ModelConfig};
use sinew_tensor::Cpu;
use sinew_tensor::attention::AttentionShape;
use sinew_tensor::ops::RopeTable;
use sinew_types::{TensorSource, TensorView, TokenId};
use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

/// Reasons for which a pass over a model was refused. Nothing was computed then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForwardError {
    /// A token id at or above the vocabulary.
    #[error("token {token} of row {row} is outside the vocabulary of {vocab}")]
    Token {
        row: usize,
        token: TokenId,
        vocab: usize,
    },
    /// A position at or above the context that the model was built for.
    #[error("row {row} stands at position {position}: the model's context is {context}")]
    Position {
        row: usize,
        position: usize,
        context: usize,
    },
    /// A buffer or list of the wrong length.
    #[error("{what}: {found}, expected {expected}")]
    Length {
        what: &'static str,
        found: usize,
        expected: usize,
    },
    /// A row, block or target that does not exist.
    #[error("{what} {found} does not exist: there are {count}")]
    Index {
        what: &'static str,
        found: usize,
        count: usize,
    },
    /// The last layer left this row out, because [`crate::TrainModel::forward_for`] was not asked
    /// for it.
    #[error(
        "row {row} did not leave the last layer: name it among the rows that the forward pass is asked for"
    )]
    Unfinished { row: usize },
    /// A temperature that cannot divide logits.
    #[error("temperature of item {item} is {found}: it has to be above 0 and finite")]
    Temperature { item: usize, found: String },
    /// A target of probability 0 under its mask: its log-probability would be minus infinity.
    #[error("the mask of item {item} bars its target, token {target}, or is not in the table")]
    Barred { item: usize, target: TokenId },
    /// Keys and values of another model.
    #[error("the key-value memory is for {found}, the model has {expected}")]
    KvShape { found: String, expected: String },
    /// A call that does not fit the calls before it, such as a backward pass without a forward
    /// pass.
    #[error("{0}")]
    State(&'static str),
}

/// Geometry of a decoder and the tables that depend only on it.
#[derive(Debug)]
pub(crate) struct Decoder {
    pub(crate) config: ModelConfig,
    pub(crate) shape: AttentionShape,
    pub(crate) rope: RopeTable,
    /// Positions that the table holds, at most the model's context.
    pub(crate) context: usize,
}

impl Decoder {
    /// Tables for sequences of at most `context` tokens.
    pub(crate) fn new(config: &ModelConfig, context: usize) -> Result<Self, ConfigError> {
        let config = config.clone().checked()?;
        let shape = AttentionShape::new(config.heads, config.kv_heads, config.head_dim)
            .map_err(|error| ConfigError::Shape(error.to_string()))?;
        let context = context.min(config.max_context);
        let rope = RopeTable::from_inv_freq(&config.rope_frequencies(), context);
        Ok(Self {
            config,
            shape,
            rope,
            context,
        })
    }

    /// Refuses ids outside the vocabulary.
    pub(crate) fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), ForwardError> {
        let vocab = self.config.vocab;
        match tokens.iter().position(|&token| token as usize >= vocab) {
            Some(row) => Err(ForwardError::Token {
                row,
                token: tokens[row],
                vocab,
            }),
            None => Ok(()),
        }
    }

    /// Refuses positions outside the rotary table.
    pub(crate) fn check_positions(&self, positions: &[u32]) -> Result<(), ForwardError> {
        match positions
            .iter()
            .position(|&position| position as usize >= self.context)
        {
            Some(row) => Err(ForwardError::Position {
                row,
                position: positions[row] as usize,
                context: self.context,
            }),
            None => Ok(()),
        }
    }
}

/// Refuses a length other than `expected`.
pub(crate) fn check_len(
    what: &'static str,
    found: usize,
    expected: usize,
) -> Result<(), ForwardError> {
    if found == expected {
        Ok(())
    } else {
        Err(ForwardError::Length {
            what,
            found,
            expected,
        })
    }
}

/// Refuses an index that is not below `count`.
pub(crate) fn check_index(
    what: &'static str,
    found: usize,
    count: usize,
) -> Result<(), ForwardError> {
    if found < count {
        Ok(())
    } else {
        Err(ForwardError::Index { what, found, count })
    }
}

/// The values of a tensor of a source that was checked against the layout before.
pub(crate) fn checked_values<'a>(source: &'a dyn TensorSource, name: &str) -> Cow<'a, [f32]> {
    let view = source.tensor(name);
    view.map(TensorView::into_f32).unwrap_or_default()
}

/// Copies on all threads: a single one does not reach the speed of memory.
pub(crate) fn copy(dev: &Cpu, from: &[f32], to: &mut [f32]) {
    const GRAIN: usize = 1 << 16;
    let parts: Vec<_> = to
        .chunks_mut(GRAIN)
        .zip(from.chunks(GRAIN))
        .map(Mutex::new)
        .collect();
    dev.pool().parallel_for(parts.len(), &|part| {
        // Each part is locked once, so that no lock can be poisoned before.
        let mut part = parts[part].lock().unwrap_or_else(PoisonError::into_inner);
        let (to, from) = &mut *part;
        to.copy_from_slice(from);
    });
}
