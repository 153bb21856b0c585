//! Tokens that a pass has drawn, with their log-probabilities.

use sinew_tensor::Cpu;
use sinew_types::{Choice, EngineError, TokenId, TokenLogprob};
use std::sync::OnceLock;

/// A token drawn from a row of logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// The token.
    pub id: TokenId,
    /// Natural log-probability under the full softmax at the request's
    /// [`policy_temperature`](sinew_types::SamplingParams::policy_temperature); with a constraint,
    /// of the softmax over the tokens that its mask allows.
    pub logprob: f32,
    /// The most likely tokens of the same softmax, best first:
    /// [`top_logprobs`](sinew_types::SamplingParams::top_logprobs) of them.
    pub top: Vec<TokenLogprob>,
    /// Record of the format, from [`crate::Constraint::accept`]; `None` without a format.
    pub choice: Option<Choice>,
}

/// The tokens of one sampler, at least one: all but the last are draft tokens that were accepted.
///
/// An error concerns only this sampler's request, such as a format for which no mask can be made.
pub type Drawn = Result<Vec<Draw>, EngineError>;

/// The tokens drawn for one sequence.
#[derive(Debug)]
pub(crate) struct Draws {
    /// The draws of the pass, then tokens that the format leaves no choice about.
    pub(crate) draws: Vec<Draw>,
    /// Number of accepted draft tokens.
    pub(crate) accepted: usize,
    /// Whether the last token ends an output that has a format.
    pub(crate) ended: bool,
}

/// The result of `make` for each number below `count`, in parallel on the threads of `cpu`.
pub(crate) fn map_indices<T: Send + Sync>(
    count: usize,
    cpu: Option<&Cpu>,
    make: impl Fn(usize) -> T + Sync,
) -> Vec<T> {
    let made: Vec<OnceLock<T>> = (0..count).map(|_| OnceLock::new()).collect();
    let task = |i: usize| {
        // A task runs once, so its cell is empty.
        let _ = made[i].set(make(i));
    };
    match cpu {
        Some(cpu) => cpu.pool().parallel_for(count, &task),
        None => (0..count).for_each(task),
    }
    made.into_iter().filter_map(OnceLock::into_inner).collect()
}
