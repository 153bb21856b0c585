//! One call to one server, and what comes of it.

use sinew_types::{FinishReason, PolicyVersion, SamplingParams, TokenId, TokenLogprob};

/// Number of an attempt, never used twice by one [`crate::RemoteEngine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId(pub u64);

/// One call to one server: a part of a request's output, sampled by one version.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    pub id: AttemptId,
    /// The request's prompt and the ids sampled so far.
    pub prompt: Vec<TokenId>,
    /// With the tokens that are left as `max_tokens`, and a seed of its own.
    pub sampling: SamplingParams,
    pub priority: i32,
    /// The weights that must sample it.
    pub version: PolicyVersion,
}

/// How an attempt ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptEnd {
    /// Never `Aborted`: a server that gives up is an error.
    pub reason: FinishReason,
    /// Prompt tokens found in the server's prefix cache, where it says.
    pub cached_prompt_tokens: u32,
}

/// A sampled token, without its version: that is the attempt's.
#[derive(Clone, Debug, PartialEq)]
pub struct AttemptToken {
    pub id: TokenId,
    /// Natural logarithm, full softmax at the request's policy temperature.
    pub logprob: f32,
    pub top: Vec<TokenLogprob>,
}

/// Why a server says that it stopped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEnd {
    /// A token of the model's or of the request; which one, if the server says it.
    StopId(Option<TokenId>),
    StopString(String),
    /// Out of tokens or of context.
    Length,
    /// It gave up.
    Aborted(String),
}
