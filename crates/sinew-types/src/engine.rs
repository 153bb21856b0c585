//! The `Engine` port: tokens in, sampled tokens with log-probabilities and versions out.

use crate::format::{Choice, Format, shared_option};
use crate::ids::{PolicyVersion, RequestId, TokenId};
use crate::weights::TensorSource;
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;
use std::sync::Arc;

/// How the next token is drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SamplingParams {
    /// Divides the logits; 0 means greedy.
    pub temperature: f32,
    /// Nucleus mass in (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Number of most likely tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Tokens below `min_p` times the largest probability are dropped; 0 keeps all.
    pub min_p: f32,
    /// Maximum of tokens to sample.
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
    /// What the output must be; `None`: anything.
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
    pub id: RequestId,
    /// Everything the model sees, exactly. Shared, so that a caller whose context grows from turn to turn
    /// does not copy it for each request. The engine drops its share before the last event, so that the
    /// caller can append in place.
    pub prompt: Arc<Vec<TokenId>>,
    pub sampling: SamplingParams,
    /// Larger runs first when KV capacity is short.
    pub priority: i32,
}

/// A token and its log-probability.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub id: TokenId,
    pub logprob: f32,
}

/// One sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    pub id: TokenId,
    /// Natural log-probability under the full softmax of `logits / temperature`, with the request's
    /// [`SamplingParams::policy_temperature`], before bias and any truncation of the distribution: what a
    /// trainer recomputes from the same weights. The same holds for `top`. Under a format, of the softmax
    /// over the tokens that its mask allows; exactly 0 where it allows one alone.
    pub logprob: f32,
    /// The weights that sampled it.
    pub version: PolicyVersion,
    /// The most likely alternatives, best first, if requested.
    pub top: Vec<TokenLogprob>,
    /// What the token was chosen from, if the request has a format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub choice: Option<Choice>,
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum FinishReason {
    /// A stop id was sampled.
    StopId { id: TokenId },
    /// A stop string appeared.
    StopString { text: String },
    /// `max_tokens` were sampled.
    Length,
    /// Prompt and output fill the model's context.
    ContextFull,
    /// The request was aborted.
    Aborted,
}

/// What an engine reports about a request. The last event is exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    Tokens {
        request: RequestId,
        tokens: Vec<SampledToken>,
    },
    Finished {
        request: RequestId,
        reason: FinishReason,
        /// Prompt tokens that the prefix cache held.
        cached_prompt_tokens: u32,
    },
    Failed {
        request: RequestId,
        error: EngineError,
    },
}

/// Receives a request's events on the engine's thread. Must not block.
pub type EventSink = Box<dyn FnMut(EngineEvent) + Send>;

/// Why an engine refused or failed a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum EngineError {
    #[error("engine queue is full: {waiting} requests wait, the limit is {limit}")]
    QueueFull { waiting: usize, limit: usize },
    #[error("prompt of {prompt} tokens does not fit: the context holds {context}")]
    PromptTooLong { prompt: usize, context: usize },
    #[error("token id {id} at position {position} is outside the vocabulary of {vocab}")]
    UnknownToken {
        id: TokenId,
        position: usize,
        vocab: usize,
    },
    #[error("invalid sampling parameter {name} = {value}: {allowed}")]
    InvalidSampling {
        name: String,
        value: String,
        allowed: String,
    },
    #[error("output format: {0}")]
    Format(String),
    #[error("weights refused: {0}")]
    Weights(String),
    #[error("engine stopped: {0}")]
    Stopped(String),
    #[error("engine failed: {0}")]
    Failed(String),
}

/// Load and health of an engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    pub version: PolicyVersion,
    pub running: usize,
    pub waiting: usize,
    /// KV capacity in tokens, free and in total.
    pub kv_tokens_free: usize,
    pub kv_tokens_total: usize,
    /// Counters since start.
    pub sampled_tokens: u64,
    pub prefill_tokens: u64,
    pub cached_prompt_tokens: u64,
    pub preemptions: u64,
    /// Seconds of computing since start.
    pub busy_s: f64,
}

/// Whether an engine's tokens may be trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "type")]
pub enum Fidelity {
    /// Ids, log-probs and versions are the model's own: yes.
    TokenExact,
    /// For scores only: ids or log-probs are not what the model sampled.
    Evaluation { why: String },
}

/// Generates tokens from tokens. It sees no text except stop strings and knows no episode.
pub trait Engine: Send + Sync {
    /// Queues a request. Events arrive through `sink`; after an `Err` none will.
    fn submit(&self, request: GenerateRequest, sink: EventSink) -> Result<(), EngineError>;

    /// Ends a request early; its last event says [`FinishReason::Aborted`]. Unknown ids are ignored.
    fn abort(&self, request: RequestId);

    /// Stops (`true`) or goes on (`false`) between two tokens; running requests keep their state.
    fn pause(&self, paused: bool);

    /// Replaces the weights between two tokens. Tokens sampled later carry `version`. Running
    /// requests go on with keys and values computed anew or kept, as the engine is configured.
    /// On `Err` the old weights stay.
    fn load_weights(
        &self,
        version: PolicyVersion,
        weights: Arc<dyn TensorSource>,
    ) -> Result<(), EngineError>;

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
