//! Commands that clients give, their results, and the reasons for which they are refused.

mod records;

pub use crate::Category;
pub use records::{
    CheckpointInfo, CheckpointKind, CheckpointPath, Completion, Completions, CopyRequest,
    DeskStatus, ExternalFile, FinishReason, Listing, ModelInfo, NewSession, Page, SamplerInfo,
    ServedModel, SessionInfo, SessionStatus, StorageUse,
};

use crate::{Datum, FbOutput, LossRequest, Tensor, TinkerError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sinew_types::{TokenId, TokenLogprob};
use std::fmt;
use std::time::Duration;

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }
    };
}

text_id!(
    /// A session of a client, made by the desk.
    SessionId
);
text_id!(
    /// A model in training: `SESSION_ID:train:SEQ`. The SDK calls it a training run.
    ModelId
);
text_id!(
    /// A sampling session: `SESSION_ID:sample:SEQ`.
    SamplerId
);
text_id!(
    /// The future of a command. The desk makes it from model or sampling session and `seq`, so that a
    /// repeated command has the same one.
    RequestId
);

impl ModelId {
    /// The model of a session's `seq`-th creation.
    pub fn of(session: &SessionId, seq: u64) -> Self {
        Self(format!("{session}:train:{seq}"))
    }
}

impl SamplerId {
    /// The sampling session of a session's `seq`-th creation.
    pub fn of(session: &SessionId, seq: u64) -> Self {
        Self(format!("{session}:sample:{seq}"))
    }
}

impl RequestId {
    /// Name of the `index`-th sequence that the request samples.
    pub fn sequence_id(&self, index: usize) -> String {
        format!("{self}:{index}")
    }
}

/// The owner of a request, as its key names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tenant {
    /// Name in the configuration.
    pub name: String,
}

/// Values that a client attaches to sessions, models and checkpoints. The desk only keeps them.
pub type Metadata = Map<String, Value>;

/// Adapters to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoraSpec {
    /// Inner size of the adapters, at least 1.
    pub rank: u32,
    /// Seed of the first values; `None`: made from the model's id.
    pub seed: Option<u64>,
    /// Adapters on the unembedding.
    pub unembed: bool,
    /// Adapters on the projections of the feed-forward layers.
    pub mlp: bool,
    /// Adapters on the projections of the attention layers.
    pub attn: bool,
}

/// A model to train.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name of the base model; one of [`ServedModel::name`].
    pub base_model: String,
    /// Adapters; `None`: all weights are trained.
    pub lora: Option<LoraSpec>,
    /// Values of the client.
    pub metadata: Metadata,
}

/// Numbers of one AdamW update, decided by the client for each step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamParams {
    /// Step size, at least 0.
    pub learning_rate: f64,
    /// Decay of the mean of the gradients, in `[0, 1)`.
    pub beta1: f64,
    /// Decay of the mean of the squared gradients, in `[0, 1)`.
    pub beta2: f64,
    /// Added to the denominator, above 0.
    pub eps: f64,
    /// Decoupled decay of the weights, at least 0.
    pub weight_decay: f64,
    /// Largest norm of the gradients; 0: they are not clipped.
    pub grad_clip_norm: f64,
}

impl Default for AdamParams {
    /// The defaults of the SDK.
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.0,
            grad_clip_norm: 0.0,
        }
    }
}

/// Tokens or texts that end a sequence.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stop {
    /// The model's own tokens of the end.
    #[default]
    Model,
    /// Only `max_tokens` ends a sequence.
    Never,
    /// One of these tokens.
    Tokens(Vec<TokenId>),
    /// One of these texts.
    Texts(Vec<String>),
}

/// Rules by which tokens are drawn. Fields follow the SDK.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleParams {
    /// Most tokens of a sequence; `None`: what the context leaves.
    pub max_tokens: Option<u32>,
    /// Seed; `None`: made from the request's id, so that a repeated request samples the same.
    pub seed: Option<u64>,
    /// Ends of a sequence.
    pub stop: Stop,
    /// Divides the logits; 0: the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens that are kept; -1: all.
    pub top_k: i64,
    /// Nucleus mass in `(0, 1]`.
    pub top_p: f32,
}

impl Default for SampleParams {
    /// The defaults of the SDK.
    fn default() -> Self {
        Self {
            max_tokens: None,
            seed: None,
            stop: Stop::Model,
            temperature: 1.0,
            top_k: -1,
            top_p: 1.0,
        }
    }
}

/// Places of the ids in a sparse `targets`, as its CSR indexes. The desk only hands it back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetLayout {
    /// Index of the first value of each row, and the number of values.
    pub rows: Vec<u64>,
    /// Column of each value.
    pub columns: Vec<u64>,
}

/// A request for samples, and for log-probabilities of its prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleInput {
    /// The prompt, at least one token.
    pub prompt: Vec<TokenId>,
    /// Number of sequences, at least 1.
    pub samples: u32,
    /// Rules by which tokens are drawn.
    pub params: SampleParams,
    /// Whether the prompt's tokens are scored.
    pub prompt_logprobs: bool,
    /// Only the last tokens of the prompt are scored; `None`: all but the first. Needs `prompt_logprobs`.
    pub prompt_last: Option<u32>,
    /// Number of most likely tokens to report at each scored place of the prompt.
    pub top_prompt: u32,
    /// Number of most likely tokens to report with each sampled token.
    pub top_sample: u32,
    /// Token ids `[prompt - 1, K]` that are scored at each place of the prompt after the first; -1: none.
    pub targets: Option<Tensor>,
    /// Layout of the answer to `targets`, if the request is sparse.
    pub target_layout: Option<TargetLayout>,
    /// Number of tokens to draw at each place of the prompt after the first.
    pub alternatives: u32,
}

/// The weights that sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SamplerRef {
    /// Those of a sampling session.
    Session(SamplerId),
    /// The base model of this name.
    Base(String),
    /// Those of a checkpoint: `tinker://...`.
    Path(String),
}

/// A command that becomes a future.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Makes a model with new weights.
    CreateModel {
        /// Session that owns it.
        session: SessionId,
        /// Number of the model in its session.
        seq: u64,
        /// The model.
        spec: ModelSpec,
    },
    /// Makes a model with the weights of a checkpoint. The result is [`Reply::LoadState`].
    CreateFromState {
        /// Session that owns it.
        session: SessionId,
        /// Number of the model in its session.
        seq: u64,
        /// Checkpoint, `tinker://...`.
        path: String,
        /// Whether the optimizer's state is loaded, too.
        with_optimizer: bool,
        /// Name of the base model, if the client names it; it must be the checkpoint's.
        base_model: Option<String>,
        /// Values of the client.
        metadata: Metadata,
    },
    /// Computes a loss and, unless `forward_only`, adds its gradients.
    ForwardBackward {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Sequences with the inputs of the loss.
        data: Vec<Datum>,
        /// The loss.
        loss: LossRequest,
        /// Whether the gradients stay as they are.
        forward_only: bool,
    },
    /// Applies the gradients and sets them to 0.
    OptimStep {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Numbers of the update.
        adam: AdamParams,
    },
    /// Writes weights and optimizer state under a name.
    SaveState {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Name; `None`: made from `seq`.
        name: Option<String>,
        /// Seconds after which it is deleted; `None`: never.
        ttl_s: Option<u64>,
        /// Whether a checkpoint of this name is replaced.
        overwrite: bool,
        /// Values of the client.
        metadata: Metadata,
    },
    /// Replaces weights, and the optimizer's state if asked for, by those of a checkpoint.
    LoadState {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Checkpoint, `tinker://...`.
        path: String,
        /// Whether the optimizer's state is loaded, too; else it starts anew.
        with_optimizer: bool,
    },
    /// Writes weights for sampling: under a name, or for a sampling session.
    SaveForSampler {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Name of the checkpoint; `None`: a sampling session is made.
        name: Option<String>,
        /// Whether the model's shared, mutable sampler is replaced; else the weights never change.
        inflight: bool,
        /// Number of the sampling session in its session; needed without `name`.
        sampling_seq: Option<u64>,
        /// Seconds after which it is deleted; `None`: never, or with the session where it has no name.
        ttl_s: Option<u64>,
        /// Values of the client.
        metadata: Metadata,
    },
    /// Writes weights that other programs load: a folder in the layout of PEFT, or of the whole model.
    SaveExternal {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// Name of the checkpoint.
        name: String,
        /// Seconds after which it is deleted; `None`: never.
        ttl_s: Option<u64>,
    },
    /// A command whose body was wrong: it changes nothing, and fails at its turn. Refused at once, its `seq`
    /// would be a gap that all later commands wait for.
    Refused {
        /// Model.
        model: ModelId,
        /// Place among the commands of the model.
        seq: u64,
        /// The problem, for the client.
        text: String,
    },
    /// Frees the model's memory and state; its checkpoints stay. It takes no further commands.
    Unload {
        /// Model.
        model: ModelId,
    },
    /// Samples sequences.
    Sample {
        /// The weights.
        sampler: SamplerRef,
        /// Number of the request in the sampling session; without a session each request is new.
        seq: Option<u64>,
        /// The request.
        request: SampleInput,
    },
}

/// The reason for which a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StopReason {
    /// By a stop token or text.
    Stop,
    /// By `max_tokens` or the end of the context.
    Length,
}

/// One sampled sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledSequence {
    /// Tokens, with a stop token that was sampled.
    pub tokens: Vec<TokenId>,
    /// Natural log-probability of each token.
    pub logprobs: Vec<f32>,
    /// The reason for its end.
    pub stop: StopReason,
    /// The most likely tokens at each place, best first, if requested.
    pub top: Option<Vec<Vec<TokenLogprob>>>,
}

/// Tokens drawn at each place of the prompt after the first, `[prompt - 1, k]` both.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternatives {
    /// Token ids.
    pub tokens: Tensor,
    /// Natural log-probabilities of the ids.
    pub logprobs: Tensor,
}

/// The result of a [`Command::Sample`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleOutput {
    /// One for each requested sample.
    pub sequences: Vec<SampledSequence>,
    /// For each token of the prompt: its log-probability, `None` where it was not scored.
    pub prompt_logprobs: Option<Vec<Option<f32>>>,
    /// For each token of the prompt: the most likely tokens, `None` where it was not scored.
    pub top_prompt: Option<Vec<Option<Vec<TokenLogprob>>>>,
    /// Log-probabilities of the requested ids, in the same shape; 0 where the request has -1.
    pub targets: Option<Tensor>,
    /// The layout of the request.
    pub target_layout: Option<TargetLayout>,
    /// Tokens drawn at the places of the prompt.
    pub alternatives: Option<Alternatives>,
    /// Tokens of the prompt that the engine had computed before.
    pub cached_prompt_tokens: u32,
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// The result of [`Command::CreateModel`].
    CreateModel {
        /// The model.
        model: ModelId,
    },
    /// The result of [`Command::ForwardBackward`].
    ForwardBackward(FbOutput),
    /// The result of [`Command::OptimStep`].
    OptimStep {
        /// Numbers of the step by name, such as `grad_norm`.
        metrics: std::collections::BTreeMap<String, f64>,
    },
    /// The result of [`Command::SaveState`].
    SaveState {
        /// `tinker://MODEL_ID/weights/NAME`.
        path: String,
    },
    /// The result of [`Command::LoadState`] and [`Command::CreateFromState`].
    LoadState {
        /// The checkpoint that was loaded.
        path: String,
        /// The model that holds it now.
        model: ModelId,
    },
    /// The result of [`Command::SaveForSampler`]; exactly one of the two is set.
    SaveForSampler {
        /// `tinker://MODEL_ID/sampler_weights/NAME`, if a name was given.
        path: Option<String>,
        /// The sampling session, if no name was given.
        sampler: Option<SamplerId>,
    },
    /// The result of [`Command::SaveExternal`].
    SaveExternal {
        /// `tinker://MODEL_ID/external_weights/NAME`.
        path: String,
        /// Bytes of its files.
        bytes: u64,
    },
    /// The result of [`Command::Unload`].
    Unload {
        /// The model.
        model: ModelId,
    },
    /// The result of [`Command::Sample`].
    Sample(Box<SampleOutput>),
}

/// The end of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Outcome {
    /// It was carried out.
    Value(Reply),
    /// It was not, and changed nothing.
    Failed {
        /// The side that has to act.
        category: Category,
        /// Reason in words.
        text: String,
    },
}

impl Outcome {
    pub(crate) fn failed(category: Category, text: impl Into<String>) -> Self {
        let text = text.into();
        Self::Failed { category, text }
    }
}

impl From<&TinkerError> for Outcome {
    fn from(error: &TinkerError) -> Self {
        Self::failed(error.category(), error.to_string())
    }
}

/// The reason for which a command has no result yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// It runs, or others of the same client run before it.
    Active,
    /// Other tenants' commands run before it.
    PausedCapacity {
        /// The cause of the wait, in words.
        reason: String,
    },
}

/// The state of a future.
#[derive(Clone, Debug, PartialEq)]
pub enum Retrieved {
    /// Not ended within the wait.
    Pending {
        /// The reason for which it has no result yet.
        queue: QueueState,
    },
    /// Ended. It stays retrievable until [`Refusal::Gone`].
    Done(Outcome),
}

/// The reason for which the desk does not take a call. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A field with a value that is not allowed.
    #[error("{field} = {value}: {allowed}")]
    Invalid {
        /// Name of the field.
        field: String,
        /// Its value, as printed.
        value: String,
        /// Allowed values, and what to do.
        allowed: String,
    },
    /// Nothing of this name belongs to the tenant.
    #[error("there is no {what} {id:?} of this key")]
    NotFound {
        /// Kind of the thing, such as `model`.
        what: &'static str,
        /// Its name, as given.
        id: String,
    },
    /// Another command has this place already, or the thing exists.
    #[error("{0}")]
    Conflict(String),
    /// It existed, and is gone: a result that expired, a session that ended, an unloaded model.
    #[error("{what} {id:?} is gone: {why}")]
    Gone {
        /// Kind of the thing, such as `result`.
        what: &'static str,
        /// Its name, as given.
        id: String,
        /// Reason, and what to do.
        why: String,
    },
    /// A limit of the tenant.
    #[error("limit {limit} of tenant {tenant:?} is reached: {used} of {allowed}; {advice}")]
    Quota {
        /// Key of the limit in the configuration.
        limit: &'static str,
        /// Name of the tenant.
        tenant: String,
        /// Amount in use, with the request.
        used: u64,
        /// Most that is allowed.
        allowed: u64,
        /// A way out.
        advice: String,
        /// Time after which the same request can succeed by itself; `None`: only after the client frees
        /// something.
        retry_after: Option<Duration>,
    },
    /// This server does not do it.
    #[error("{what} is not served: {why}")]
    Unsupported {
        /// The request or field.
        what: String,
        /// Reason, and what to do instead.
        why: String,
    },
    /// The server is shutting down. The same request succeeds after its restart.
    #[error("the server is shutting down; send the request again")]
    Draining,
    /// The server failed, in words for its operator.
    #[error("the server failed: {0}")]
    Failed(String),
}

impl Refusal {
    pub(crate) fn invalid(
        field: impl Into<String>,
        value: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }

    pub(crate) fn not_found(what: &'static str, id: impl fmt::Display) -> Self {
        let id = id.to_string();
        Self::NotFound { what, id }
    }

    pub(crate) fn gone(what: &'static str, id: impl fmt::Display, why: impl Into<String>) -> Self {
        let (id, why) = (id.to_string(), why.into());
        Self::Gone { what, id, why }
    }

    pub(crate) fn unsupported(what: impl Into<String>, why: impl Into<String>) -> Self {
        let (what, why) = (what.into(), why.into());
        Self::Unsupported { what, why }
    }
}
