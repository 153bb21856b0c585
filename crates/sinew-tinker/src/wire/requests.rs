//! Bodies of all requests but `forward_backward` and `asample`, in JSON.
//!
//! Fields and defaults follow the SDK. A field that is not listed is refused.

use crate::desk::types::{AdamParams, FinishReason, LoraSpec, Metadata};
use crate::error::TinkerError;
use serde::Deserialize;
use serde_json::{Map, Value};

/// `client/config` and `client/dynamic_config`. A later SDK may describe itself by more fields.
#[derive(Debug, Deserialize)]
pub(crate) struct ClientConfig {
    /// Version of the client.
    pub(crate) sdk_version: String,
}

/// `create_session`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateSession {
    #[serde(default)]
    pub(crate) tags: Vec<String>,
    #[serde(default)]
    pub(crate) user_metadata: Option<Metadata>,
    #[serde(default)]
    pub(crate) sdk_version: String,
    #[serde(default)]
    pub(crate) project_id: Option<String>,
    #[serde(default)]
    pub(crate) display_name: Option<String>,
}

/// `session_heartbeat`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Heartbeat {
    pub(crate) session_id: String,
}

/// `sessions/{id}/finish`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Finish {
    pub(crate) reason: FinishKind,
    #[serde(default)]
    pub(crate) detail: Option<String>,
}

/// End of a session, as its client reports it.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum FinishKind {
    Success,
    Errored,
    Interrupted,
}

impl From<FinishKind> for FinishReason {
    fn from(kind: FinishKind) -> Self {
        match kind {
            FinishKind::Success => Self::Success,
            FinishKind::Errored => Self::Errored,
            FinishKind::Interrupted => Self::Interrupted,
        }
    }
}

/// `create_sampling_session`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateSamplingSession {
    pub(crate) session_id: String,
    pub(crate) sampling_session_seq_id: u64,
    #[serde(default)]
    pub(crate) base_model: Option<String>,
    #[serde(default)]
    pub(crate) model_path: Option<String>,
}

/// `join_sampling_session`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct JoinSamplingSession {
    pub(crate) sampling_session_id: String,
}

/// `create_model`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateModel {
    pub(crate) session_id: String,
    pub(crate) model_seq_id: u64,
    pub(crate) base_model: String,
    #[serde(default)]
    pub(crate) user_metadata: Option<Metadata>,
    #[serde(default)]
    pub(crate) lora_config: Option<Lora>,
    #[serde(default)]
    pub(crate) optimizer_config: Option<Map<String, Value>>,
}

/// Adapters to train.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lora {
    rank: u32,
    #[serde(default)]
    seed: Option<u64>,
    #[serde(default = "yes")]
    train_unembed: bool,
    #[serde(default = "yes")]
    train_mlp: bool,
    #[serde(default = "yes")]
    train_attn: bool,
}

fn yes() -> bool {
    true
}

impl From<Lora> for LoraSpec {
    fn from(sent: Lora) -> Self {
        Self {
            rank: sent.rank,
            seed: sent.seed,
            unembed: sent.train_unembed,
            mlp: sent.train_mlp,
            attn: sent.train_attn,
        }
    }
}

/// `get_info` and `unload_model`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OfModel {
    pub(crate) model_id: String,
}

/// `optim_step`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct OptimStep {
    #[serde(default)]
    adam_params: Option<Adam>,
    #[serde(default)]
    optimizer_params: Option<Map<String, Value>>,
    pub(crate) model_id: String,
    pub(crate) seq_id: i64,
}

/// Numbers of an AdamW step, with the SDK's defaults.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Adam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    grad_clip_norm: f64,
}

impl Default for Adam {
    fn default() -> Self {
        let adam = AdamParams::default();
        Self {
            learning_rate: adam.learning_rate,
            beta1: adam.beta1,
            beta2: adam.beta2,
            eps: adam.eps,
            weight_decay: adam.weight_decay,
            grad_clip_norm: adam.grad_clip_norm,
        }
    }
}

impl OptimStep {
    /// Numbers of the step.
    ///
    /// # Errors
    /// If they are another optimizer's, or missing.
    pub(crate) fn adam(&self) -> Result<AdamParams, TinkerError> {
        if let Some(other) = &self.optimizer_params {
            check_optimizer(Some(other), "optimizer_params")?;
        }
        let Some(adam) = &self.adam_params else {
            let hint = "the numbers of an AdamW step";
            return Err(TinkerError::missing("adam_params", hint));
        };
        Ok(AdamParams {
            learning_rate: adam.learning_rate,
            beta1: adam.beta1,
            beta2: adam.beta2,
            eps: adam.eps,
            weight_decay: adam.weight_decay,
            // The SDK documents numbers of 0 and less as no clipping.
            grad_clip_norm: adam.grad_clip_norm.max(0.0),
        })
    }
}

/// Refuses optimizers other than AdamW.
///
/// # Errors
/// Names the type that was sent.
pub(crate) fn check_optimizer(
    sent: Option<&Map<String, Value>>,
    field: &str,
) -> Result<(), TinkerError> {
    let kind = sent.and_then(|sent| sent.get("type"));
    match kind {
        None => Ok(()),
        Some(kind) if kind == "adamw" => Ok(()),
        Some(other) => {
            let feature = format!("{field}.type {other}");
            let hint = "models of this server are trained by AdamW: leave the field out";
            Err(TinkerError::not_served(feature, hint))
        }
    }
}

/// `save_weights`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveWeights {
    pub(crate) model_id: String,
    #[serde(default)]
    pub(crate) path: Option<String>,
    pub(crate) seq_id: i64,
    #[serde(default)]
    pub(crate) ttl_seconds: Option<u64>,
    #[serde(default)]
    pub(crate) overwrite: bool,
    #[serde(default)]
    pub(crate) user_metadata: Option<Metadata>,
}

/// `load_weights`: onto a model, or into a new one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoadWeights {
    #[serde(default)]
    pub(crate) model_id: Option<String>,
    #[serde(default)]
    pub(crate) seq_id: Option<i64>,
    #[serde(default)]
    pub(crate) session_id: Option<String>,
    #[serde(default)]
    pub(crate) model_seq_id: Option<u64>,
    #[serde(default)]
    pub(crate) base_model: Option<String>,
    #[serde(default)]
    pub(crate) user_metadata: Option<Metadata>,
    pub(crate) path: String,
    pub(crate) optimizer: bool,
    #[serde(default)]
    pub(crate) optimizer_config: Option<Map<String, Value>>,
    #[serde(default)]
    pub(crate) weights_access_token: Option<String>,
}

/// `save_weights_for_sampler`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveForSampler {
    pub(crate) model_id: String,
    #[serde(default)]
    pub(crate) path: Option<String>,
    #[serde(default)]
    pub(crate) sampling_session_seq_id: Option<u64>,
    #[serde(default)]
    pub(crate) kind: SamplerKind,
    pub(crate) seq_id: i64,
    #[serde(default)]
    pub(crate) ttl_seconds: Option<u64>,
    #[serde(default)]
    pub(crate) user_metadata: Option<Metadata>,
}

/// Whether a sampler's weights may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SamplerKind {
    /// They stay as they were saved.
    #[default]
    Snapshot,
    /// They are those of the model's newest save.
    Inflight,
}

/// `save_weights_external`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SaveExternal {
    pub(crate) model_id: String,
    pub(crate) path: String,
    pub(crate) seq_id: i64,
    #[serde(default)]
    pub(crate) ttl_seconds: Option<u64>,
    #[serde(default)]
    pub(crate) age_encryption_recipients: Option<Vec<String>>,
}

/// `copy_weights`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CopyWeights {
    #[serde(default)]
    pub(crate) session_id: Option<String>,
    #[serde(default)]
    pub(crate) model_seq_id: Option<u64>,
    #[serde(default)]
    pub(crate) destination_project_id: Option<String>,
    pub(crate) source_path: String,
    #[serde(default)]
    pub(crate) ttl_seconds: Option<u64>,
    #[serde(default)]
    pub(crate) weights_access_token: Option<String>,
}

/// `weights_info`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WeightsInfo {
    pub(crate) tinker_path: String,
}

/// `.../ttl`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ttl {
    #[serde(default)]
    pub(crate) ttl_seconds: Option<u64>,
}

/// `retrieve_future`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetrieveFuture {
    pub(crate) request_id: String,
    #[serde(default)]
    pub(crate) allow_metadata_only: bool,
    /// Sent by older SDKs; the request's id is enough.
    #[serde(default)]
    #[expect(dead_code, reason = "accepted from older SDKs, and not needed")]
    pub(crate) model_id: Option<String>,
}

/// `cancel_future`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CancelFuture {
    pub(crate) request_id: String,
}

/// `retrieve_futures`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RetrieveFutures {
    pub(crate) target: FuturesTarget,
    #[serde(default)]
    pub(crate) prev_cursor: u64,
    #[serde(default)]
    pub(crate) timeout: Option<f64>,
    #[serde(default)]
    pub(crate) retrieved_request_ids: Vec<String>,
}

/// The requests that `retrieve_futures` asks for.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum FuturesTarget {
    /// Those of one client of a sampling session.
    SamplingSession {
        sampling_session_id: String,
        #[serde(default)]
        cloned_sampler_id: u64,
    },
}

/// `sessions/search`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchSessions {
    #[serde(default)]
    pub(crate) session_id: Option<String>,
    #[serde(default)]
    pub(crate) project_ids: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) user_metadata: Metadata,
    #[serde(default)]
    pub(crate) display_name: Option<String>,
    #[serde(default)]
    pub(crate) owner: Option<Map<String, Value>>,
    #[serde(default)]
    pub(crate) statuses: Option<Vec<StatusQuery>>,
    #[serde(default = "page")]
    pub(crate) limit: usize,
    #[serde(default)]
    pub(crate) cursor: Option<SearchCursor>,
}

fn page() -> usize {
    50
}

/// A status that a search asks for.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum StatusQuery {
    /// Still running.
    Active,
    /// Cancelled from a console, which this server does not have.
    Cancelled,
    /// Failed by a request, which sessions here survive.
    Failed,
    /// Ended by the client.
    ClientFinished {
        #[serde(default)]
        reasons: Option<Vec<String>>,
    },
}

/// Place of the next page of a search.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SearchCursor {
    /// Sent back as it was given; the id alone names the place.
    #[expect(dead_code, reason = "the id names the place")]
    pub(crate) last_created_at: String,
    pub(crate) last_session_id: String,
}

/// `telemetry`: events are counted and dropped.
#[derive(Debug, Deserialize)]
pub(crate) struct Telemetry {
    #[serde(default)]
    pub(crate) events: Vec<serde::de::IgnoredAny>,
}
