//! One call to one server, and how it ends.
//!
//! An attempt begins with exactly one version of the weights. It ends when others are loaded, unless its
//! server reports which of them sampled which token. A request of the engine port is one attempt if all goes
//! well, and several of them after failures, pauses and loads of weights: each starts from the prompt and all
//! ids that were sampled before it.

use sinew_types::{
    FinishReason, PolicyVersion, PromptLogprobs, RouteSpan, SamplingParams, TokenId, TokenLogprob,
    WeightsId,
};
use std::sync::Arc;

/// Number of an attempt, never used twice by one [`crate::RemoteEngine`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId(pub u64);

/// One call to one server: a part of a request's output, sampled by one version.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attempt {
    /// Unique in one engine; also the key under which the server's own request is aborted.
    pub id: AttemptId,
    /// The request's prompt followed by the ids sampled so far, `[tokens]`. Sent as ids, never as
    /// text.
    pub prompt: Arc<Vec<TokenId>>,
    /// The request's parameters, with the tokens that are left as `max_tokens` and with a separate seed: a
    /// seed that is used twice would draw the same numbers again.
    pub sampling: SamplingParams,
    /// Priority as in the request: larger runs first. Backends translate it to their server's order.
    pub priority: i32,
    /// The weights that must sample it when it begins: those of its adapter, or the server's own. A server
    /// with other weights is an error, not a result.
    pub weights: WeightsId,
    /// Name of the adapter on the server that it asks for; `None`: the server's own weights.
    pub adapter: Option<String>,
    /// The server's own weights, which an adapter is applied to; `None`: those that it was started with.
    /// Without an adapter it has no meaning.
    pub base: Option<WeightsId>,
    /// Log-probabilities of its prompt that are reported before its first token.
    pub prompt_logprobs: Option<Arc<PromptLogprobs>>,
}

impl Attempt {
    /// The weights that the server itself must report; `None`: those that it was started with.
    pub fn served(&self) -> Option<WeightsId> {
        match self.adapter {
            Some(_) => self.base,
            None => Some(self.weights),
        }
    }

    /// A text that no attempt with other weights has: what a server stores under it is of these weights.
    pub(crate) fn cache_salt(&self) -> String {
        match (&self.adapter, self.base) {
            (Some(adapter), Some(base)) => format!("{base}-{adapter}"),
            _ => self.weights.to_string(),
        }
    }
}

/// End of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptEnd {
    /// Never `Aborted`: a server that gives up is an error.
    pub reason: FinishReason,
    /// Prompt tokens found in the server's prefix cache; 0 if the server does not report them.
    pub cached_prompt_tokens: u32,
    /// Experts of its prompt and its output, if they were asked for and the server reports them.
    pub routes: Option<RouteSpan>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct AttemptToken {
    /// Token id, below the vocabulary of the engine if that is known.
    pub id: TokenId,
    /// Natural logarithm, of the full softmax at the request's policy temperature; at most 0.
    pub logprob: f32,
    /// The most likely alternatives, best first; empty unless `top_logprobs` asks for them.
    pub top: Vec<TokenLogprob>,
    /// Version of the weights that sampled it, where it is known by the token; `None`: the attempt's.
    pub version: Option<PolicyVersion>,
}

/// A server's reason for stopping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerEnd {
    /// A stop token; its id, if the server reports it. It must be the last sampled id and one of `stop_ids`.
    StopId(Option<TokenId>),
    /// A stop string; it must be one of `stop_strings`.
    StopString(String),
    /// `max_tokens` is reached, or the context is full.
    Length,
    /// The server gave up, with its reason.
    Aborted(String),
}
