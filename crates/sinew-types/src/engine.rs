//! The `Engine` port: tokens in, sampled tokens with log-probabilities and versions out.

mod prompt;

pub use prompt::{PromptLogprob, PromptLogprobs};

use crate::adapter::{Adapter, AdapterName};
use crate::format::{Choice, Format, NodeFormat, shared_option};
use crate::ids::{PolicyVersion, RequestId, TokenId};
use crate::routes::RouteSpan;
use crate::weights::TensorSource;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Parameters by which the next token is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Divides the logits; 0 means greedy. Otherwise within [`TEMPERATURES`]. Default: 1.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 keeps all. Default: 1.
    pub top_p: f32,
    /// Number of most likely tokens kept; 0 keeps all. Default: 0.
    pub top_k: u32,
    /// Tokens below `min_p` times the largest probability are dropped; 0 keeps all. Default: 0.
    pub min_p: f32,
    /// Maximum of tokens to sample, at least 1. Default: 256.
    pub max_tokens: u32,
    /// Sampling one of these ends the generation; the token itself is part of the output.
    pub stop_ids: Vec<TokenId>,
    /// The generation ends once the output's text contains one of these.
    pub stop_strings: Vec<String>,
    /// Seed of this request; the same seed and prompt give the same tokens whatever else runs.
    pub seed: u64,
    /// Added to the logits before sampling.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Number of most likely alternatives to report for each token.
    pub top_logprobs: u8,
    /// Position of the first token of the context whose experts are reported, if the engine reports those of
    /// a mixture-of-experts model; 0 to the length of the prompt. `None`: none are reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routes_from: Option<u32>,
    /// Format that the output must have; `None`: any text.
    #[serde(with = "shared_option", skip_serializing_if = "Option::is_none")]
    pub format: Option<Arc<Format>>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            max_tokens: 256,
            stop_ids: Vec::new(),
            stop_strings: Vec::new(),
            seed: 0,
            logit_bias: Vec::new(),
            top_logprobs: 0,
            routes_from: None,
            format: None,
        }
    }
}

/// Temperatures other than 0 that are allowed for sampling and training. Below them, dividing logits loses
/// all precision, and gradients grow as the inverse.
pub const TEMPERATURES: RangeInclusive<f32> = 1e-3..=100.0;

impl SamplingParams {
    /// Temperature of the policy: log-probs of sampled tokens and the training loss use it. Greedy sampling
    /// (0) has no useful probabilities, so the model's own at temperature 1 are used.
    pub fn policy_temperature(&self) -> f32 {
        if self.temperature == 0.0 {
            1.0
        } else {
            self.temperature
        }
    }
}

/// One generation to run.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateRequest {
    /// Unique among the requests of the engine that have not ended.
    pub id: RequestId,
    /// Everything the model sees, exactly. Shared, so that a caller whose context grows from turn to turn
    /// does not copy it for each request. The engine drops its share before the last event, so that the
    /// caller can append in place.
    pub prompt: Arc<Vec<TokenId>>,
    /// Parameters by which its tokens are drawn.
    pub sampling: SamplingParams,
    /// Larger runs first when KV capacity is short.
    pub priority: i32,
    /// Adapter that the request is sampled with; `None`: the engine's own weights.
    pub adapter: Option<AdapterName>,
    /// Log-probabilities of the prompt's tokens that are reported before the first sampled token; `None`:
    /// none.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

impl GenerateRequest {
    /// A request of priority 0, sampled with the engine's own weights, without log-probabilities of its
    /// prompt.
    pub fn new(
        id: RequestId,
        prompt: impl Into<Arc<Vec<TokenId>>>,
        sampling: SamplingParams,
    ) -> Self {
        Self {
            id,
            prompt: prompt.into(),
            sampling,
            priority: 0,
            adapter: None,
            prompt_logprobs: None,
        }
    }
}

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub id: TokenId,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The token.
    pub id: TokenId,
    /// Natural log-probability under the full softmax of `logits / temperature`, with the request's
    /// [`SamplingParams::policy_temperature`], before bias and any truncation of the distribution. A trainer
    /// recomputes this value from the same weights. The same holds for `top`. Under a format, the softmax
    /// covers only the tokens that its mask allows; the value is exactly 0 if it allows only one.
    pub logprob: f32,
    /// The weights that sampled it: the version of the request's adapter, or of the engine's own weights.
    pub version: PolicyVersion,
    /// The most likely alternatives, best first, if requested.
    pub top: Vec<TokenLogprob>,
    /// The tokens that it was chosen from, if the request has a format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
}

impl NodeFormat {
    /// Records `token`'s choice in `format`. The first token sets the format.
    pub fn push(format: &mut Option<Box<Self>>, token: &SampledToken) {
        let Some(choice) = &token.choice else { return };
        let format = format.get_or_insert_with(|| Box::new(Self::new((*choice.law).clone())));
        if format.masked() {
            format.allowed.push(choice.allowed);
            format.masks.push(choice.mask);
            format.log_mass.push(choice.log_mass);
        }
    }
}

/// Reason why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum FinishReason {
    /// A stop id was sampled.
    StopId {
        /// The stop id, which is the last sampled token.
        id: TokenId,
    },
    /// A stop string appeared.
    StopString {
        /// The stop string that appeared.
        text: String,
    },
    /// `max_tokens` were sampled.
    Length,
    /// Prompt and output fill the model's context.
    ContextFull,
    /// The request was aborted.
    Aborted,
}

/// An event of a request. The last one is exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// Log-probabilities of the prompt: exactly one such event before the first `Tokens`, if the request asks
    /// for it. All are of the weights that sample the first token.
    Prompt {
        /// Id of the request.
        request: RequestId,
        /// One for each place that the request asks for, in order.
        logprobs: Vec<PromptLogprob>,
    },
    /// Newly sampled tokens.
    Tokens {
        /// Id of the request.
        request: RequestId,
        /// Tokens in order, after those of earlier events.
        tokens: Vec<SampledToken>,
    },
    /// Regular end, also of an aborted request.
    Finished {
        /// Id of the request.
        request: RequestId,
        /// Reason of the end.
        reason: FinishReason,
        /// Prompt tokens that the prefix cache held.
        cached_prompt_tokens: u32,
        /// Experts of the tokens from [`SamplingParams::routes_from`] on, up to the one before the last
        /// sampled token, which was never an input. `None`: the engine reports none, or not for this request.
        routes: Option<RouteSpan>,
    },
    /// End by an error.
    Failed {
        /// Id of the request.
        request: RequestId,
        /// Reason of the failure.
        error: EngineError,
    },
}

/// Receives a request's events on the engine's thread. Must not block.
pub type EventSink = Box<dyn FnMut(EngineEvent) + Send>;

/// Reason why an engine refused or failed a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    /// Too many requests wait; try again later.
    #[error("engine queue is full: {waiting} requests wait, the limit is {limit}")]
    QueueFull {
        /// Requests in the queue.
        waiting: usize,
        /// Maximum number of requests in the queue.
        limit: usize,
    },
    /// No output would fit after the prompt.
    #[error("prompt of {prompt} tokens does not fit: the context holds {context}")]
    PromptTooLong {
        /// Length of the prompt in tokens.
        prompt: usize,
        /// Length of the context in tokens, prompt and output together.
        context: usize,
    },
    /// An id that the model does not have.
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab}")]
    UnknownToken {
        /// The unknown id.
        id: TokenId,
        /// Index in the prompt, from 0.
        position: usize,
        /// Size of the vocabulary; ids are below it.
        vocab: usize,
    },
    /// A parameter out of its range.
    #[error("invalid sampling parameter {name} = {value}: {allowed}")]
    InvalidSampling {
        /// Name of the parameter.
        name: String,
        /// Value as printed.
        value: String,
        /// Allowed values in words.
        allowed: String,
    },
    /// A format that cannot be enforced, or no longer.
    #[error("output format: {0}")]
    Format(String),
    /// Weights or adapters that do not fit; the old ones stay.
    #[error("weights refused: {0}")]
    Weights(String),
    /// No adapter of this name is loaded, or not any more.
    #[error("adapter {name} is not loaded: load it first, or leave the adapter out")]
    UnknownAdapter {
        /// The name that the request asks for.
        name: AdapterName,
    },
    /// The engine has ended.
    #[error("engine stopped: {0}")]
    Stopped(String),
    /// Any other failure of the request.
    #[error("engine failed: {0}")]
    Failed(String),
}

/// Load and health of an engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// The weights that sample now.
    pub version: PolicyVersion,
    /// Requests that are computed.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Free KV capacity in tokens; 0 if the engine does not report it.
    pub kv_tokens_free: usize,
    /// KV capacity in tokens; 0 if the engine does not report it.
    pub kv_tokens_total: usize,
    /// Sampled tokens since the engine's start.
    pub sampled_tokens: u64,
    /// Computed tokens of prompts since the start.
    pub prefill_tokens: u64,
    /// Prompt tokens that the prefix cache had, since the start.
    pub cached_prompt_tokens: u64,
    /// Times that a running request gave up its KV capacity, since the start.
    pub preemptions: u64,
    /// Seconds of computing since start.
    pub busy_s: f64,
    /// Whether it has given up its memory: requests wait until it wakes.
    #[serde(default)]
    pub asleep: bool,
}

/// Whether an engine's tokens may be trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Fidelity {
    /// Ids, log-probs and versions are the model's own: yes.
    TokenExact,
    /// No, for scores only: ids or log-probs are not those that the model sampled.
    Evaluation {
        /// Reason in words, for messages.
        why: String,
    },
}

/// The error of an engine that cannot sleep.
fn keeps_memory() -> EngineError {
    EngineError::Failed("it keeps its memory: it cannot sleep".to_owned())
}

/// The error of an engine that has only its own weights.
fn no_adapters(name: &AdapterName) -> EngineError {
    EngineError::Weights(format!(
        "adapter {name}: this engine takes no adapters by name"
    ))
}

/// Generates tokens from tokens. It sees no text except stop strings, and no episodes.
pub trait Engine: Send + Sync {
    /// Queues a request. Events arrive through `sink`; after an `Err` none will.
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError>;

    /// Ends a request early; its last event has [`FinishReason::Aborted`]. Unknown ids are ignored.
    fn abort(&self, request: RequestId);

    /// Stops (`true`) or continues (`false`) between two tokens; running requests keep their state.
    fn pause(&self, paused: bool);

    /// Replaces the weights between two tokens. Tokens sampled later carry `version`. Running requests
    /// continue; their KV cache is computed again or kept, as configured in the engine. On `Err` the old
    /// weights stay.
    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError>;

    /// Loads an adapter under a name, or replaces the one of that name between two tokens. Tokens sampled
    /// with it later carry `version`. Requests that use it continue with the new one; their KV cache is
    /// computed again or kept, as for [`Engine::load_weights`]. The engine's own weights and other adapters
    /// stay. On
    /// `Err` the old adapter stays.
    ///
    /// # Errors
    /// If the engine takes no adapters, which is the default, has too many, or this one is not of its model.
    fn load_adapter(
        &self,
        name: &AdapterName,
        _version: PolicyVersion,
        _adapter: Adapter,
    ) -> Result<(), EngineError> {
        Err(no_adapters(name))
    }

    /// Drops an adapter; requests that use it fail with [`EngineError::UnknownAdapter`]. Unknown names are
    /// ignored.
    ///
    /// # Errors
    /// If the engine takes no adapters, which is the default, or has ended.
    fn unload_adapter(&self, name: &AdapterName) -> Result<(), EngineError> {
        Err(no_adapters(name))
    }

    /// Gives up the memory of weights and KV cache, for a trainer that uses the same GPUs in turns. Running
    /// requests keep their state, and all wait until [`Engine::wake`]. New weights may be loaded meanwhile:
    /// they take back only the memory of weights.
    ///
    /// # Errors
    /// If the engine cannot do this, which is the default, or its servers did not all do it.
    fn sleep(&self) -> Result<(), EngineError> {
        Err(keeps_memory())
    }

    /// Takes the memory back and continues.
    ///
    /// # Errors
    /// If the engine cannot sleep, which is the default, or its servers did not all wake.
    fn wake(&self) -> Result<(), EngineError> {
        Err(keeps_memory())
    }

    /// Load and counters at this moment.
    fn status(&self) -> EngineStatus;

    /// Whether its tokens may be trained on.
    fn fidelity(&self) -> Fidelity {
        Fidelity::TokenExact
    }

    /// Whether tokens of a request with a format are sampled from that format's masks. Other engines may
    /// enforce formats by their own means, or refuse them.
    fn holds_formats(&self) -> bool {
        false
    }
}
