//! Answers of an engine of another process, as plain data: its state, and generations as server-sent events.
//!
//! | route | body | answer |
//! |---|---|---|
//! | `GET /engine/state` | | [`ServedState`] |
//! | `POST /engine/generate` | [`ServedCall`] | events with one [`ServedEvent`] each; the last is an end |
//!
//! An answer is of the weights that its call names, by their published manifest: at the first token of others
//! it ends with [`ServedEvent::Weights`].

use serde::{Deserialize, Serialize};
use sinew_types::{
    EngineError, EngineStatus, FinishReason, PromptLogprob, PromptLogprobs, RouteSpan,
    SamplingParams, TokenId, TokenLogprob,
};

/// Path of the state.
pub const STATE_PATH: &str = "/engine/state";
/// Path of generations.
pub const GENERATE_PATH: &str = "/engine/generate";

/// Published weights of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedMark {
    /// Version and lineage, such as `v13-9f3c12ab`; empty: none are loaded.
    pub id: String,
    /// BLAKE3 of their manifest, hexadecimal.
    pub manifest: String,
}

/// The state of an engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedState {
    /// Weights that sample now.
    pub weights: ServedMark,
    /// Maximum tokens of prompt and output together.
    pub context: usize,
    /// Number of token ids.
    pub vocab: usize,
    /// Load and counters.
    pub status: EngineStatus,
}

/// A generation to run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedCall {
    /// Weights that must sample all of its tokens.
    pub weights: ServedMark,
    /// Everything that the model sees.
    pub prompt: Vec<TokenId>,
    /// Parameters by which tokens are drawn.
    pub sampling: SamplingParams,
    /// Larger runs first.
    pub priority: i32,
    /// Log-probabilities of the prompt to report before the first token.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServedToken {
    /// The token.
    pub id: TokenId,
    /// Its log-probability.
    pub logprob: f32,
    /// The most likely alternatives, if asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<TokenLogprob>,
}

/// An event of a generation. All but the first two are the last one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ServedEvent {
    /// Log-probabilities of the prompt.
    Prompt(Vec<PromptLogprob>),
    /// Tokens in order.
    Tokens(Vec<ServedToken>),
    /// The regular end.
    Finished {
        /// Reason of the end.
        reason: FinishReason,
        /// Prompt tokens that the prefix cache held.
        cached_prompt_tokens: u32,
        /// Experts of the tokens, if asked for and known.
        routes: Option<RouteSpan>,
    },
    /// The engine refused or failed.
    Failed(EngineError),
    /// The engine has other weights, these.
    Weights(ServedMark),
}
