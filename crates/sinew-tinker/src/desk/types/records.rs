//! Records that clients read: base models, sessions, models, checkpoints, and lists of them.

use super::{LoraSpec, Metadata, ModelId, ModelSpec, RequestId, SamplerId, SessionId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// A base model that the desk trains or samples.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Name for clients. Several names may stand for the same weights.
    pub name: String,
    /// Longest sequence, prompt and output together, in tokens.
    pub max_context: usize,
    /// Whether models can be trained on it.
    pub trainable: bool,
    /// Whether it is sampled.
    pub sampleable: bool,
    /// Name under which `transformers` finds its tokenizer; `None`: the model's own name.
    pub tokenizer: Option<String>,
    /// Name of the architecture, as its `config.json` has it.
    pub arch: String,
}

/// A session to make.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NewSession {
    /// Labels of the client.
    pub tags: Vec<String>,
    /// Values of the client.
    pub metadata: Metadata,
    /// Name for people.
    pub display_name: Option<String>,
    /// Version of the client's library.
    pub sdk_version: String,
}

/// A client's own word on the end of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// Its work is done.
    Success,
    /// It failed.
    Errored,
    /// Somebody stopped it.
    Interrupted,
}

/// State of a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SessionStatus {
    /// It takes commands, and its client was heard within the limit.
    Active,
    /// It takes commands; its client was not heard for longer than the limit.
    Silent,
    /// Its client ended it.
    Finished {
        /// Its word on the end.
        reason: FinishReason,
        /// Words of the client.
        detail: Option<String>,
    },
}

/// A session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionInfo {
    /// Its id.
    pub session: SessionId,
    /// Milliseconds since 1970 (UTC) at which it was made.
    pub created_ms: u64,
    /// Its state.
    pub status: SessionStatus,
    /// The client's words at its start.
    pub about: NewSession,
    /// Its models.
    pub models: Vec<ModelId>,
    /// Its sampling sessions.
    pub samplers: Vec<SamplerId>,
    /// Checkpoints of its models.
    pub checkpoints: u64,
    /// Bytes of these checkpoints.
    pub checkpoint_bytes: u64,
}

/// Kind of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum CheckpointKind {
    /// Weights and optimizer state: `weights` in paths.
    State,
    /// Weights for sampling: `sampler_weights` in paths.
    Sampler,
    /// Weights for other programs: `external_weights` in paths. Neither loaded nor sampled here.
    External,
}

impl CheckpointKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::State, Self::Sampler, Self::External];

    /// The word in paths.
    pub fn segment(self) -> &'static str {
        match self {
            Self::State => "weights",
            Self::Sampler => "sampler_weights",
            Self::External => "external_weights",
        }
    }
}

/// The place of a checkpoint: `tinker://MODEL_ID/KIND/NAME`, where `KIND` is [`CheckpointKind::segment`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CheckpointPath {
    /// The model that was saved.
    pub model: ModelId,
    /// Kind of the checkpoint.
    pub kind: CheckpointKind,
    /// Its name: 1 to 200 of `[A-Za-z0-9._-]`, not starting with a dot.
    pub name: String,
}

impl fmt::Display for CheckpointPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (model, segment, name) = (&self.model, self.kind.segment(), &self.name);
        write!(f, "tinker://{model}/{segment}/{name}")
    }
}

/// A checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// Its place.
    pub path: CheckpointPath,
    /// Base model of its weights.
    pub base_model: String,
    /// Its adapters; `None`: all weights.
    pub lora: Option<LoraSpec>,
    /// Milliseconds since 1970 (UTC) at which it was written.
    pub created_ms: u64,
    /// Size on disk.
    pub bytes: u64,
    /// Milliseconds since 1970 (UTC) at which it is deleted; `None`: never.
    pub expires_ms: Option<u64>,
    /// Values of the client.
    pub metadata: Metadata,
}

/// A file of external weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalFile {
    /// Name without a folder.
    pub name: String,
    /// Its place on this host. It is removed with its checkpoint.
    pub file: PathBuf,
    /// Its length.
    pub bytes: u64,
}

/// A model in training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Its id.
    pub model: ModelId,
    /// Name of its tenant.
    pub owner: String,
    /// The weights that were asked for.
    pub spec: ModelSpec,
    /// Milliseconds since 1970 (UTC) of the last command.
    pub last_request_ms: u64,
    /// Optimizer steps that it took.
    pub steps: u64,
    /// The reason for which it takes no further commands, if so.
    pub ended: Option<String>,
    /// Whether `ended` is a failure of the server.
    pub corrupted: bool,
    /// Newest checkpoint of weights and optimizer state.
    pub last_state: Option<CheckpointInfo>,
    /// Newest checkpoint for sampling.
    pub last_sampler: Option<CheckpointInfo>,
}

/// A sampling session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerInfo {
    /// Its id.
    pub sampler: SamplerId,
    /// Base model.
    pub base_model: String,
    /// Checkpoint, if it is not the base model itself.
    pub path: Option<String>,
}

/// Part of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Entries that are left out before the first.
    pub offset: u64,
    /// Most entries.
    pub limit: u64,
}

/// Entries of a list, newest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Listing<T> {
    /// The entries of the page.
    pub items: Vec<T>,
    /// Entries of all pages.
    pub total: u64,
}

/// Checkpoints that a tenant keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageUse {
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Their bytes on disk.
    pub bytes: u64,
}

/// A checkpoint to copy into a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyRequest {
    /// Checkpoint, `tinker://...`.
    pub source: String,
    /// Session that owns the copy.
    pub session: SessionId,
    /// Number of the model in that session under which the copy is kept.
    pub seq: u64,
    /// Seconds after which the copy is deleted; `None`: never.
    pub ttl_s: Option<u64>,
}

/// State of the desk at this moment, for health pages and metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeskStatus {
    /// Models that take commands.
    pub models: u64,
    /// Models in the trainer's memory.
    pub resident: u64,
    /// Commands that wait or run.
    pub queued: u64,
    /// Sample requests at the engine.
    pub sampling: u64,
    /// Bytes of the trainer's memory: base, adapters, moments, gradients, buffers.
    pub trainer_bytes: u64,
    /// Bytes of the state folder, as last counted.
    pub disk_bytes: u64,
    /// Commands that ended since the start.
    pub done: u64,
    /// Whether the desk takes no new commands.
    pub draining: bool,
}

/// A sample request that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request.
    pub request: RequestId,
    /// Whether it failed.
    pub failed: bool,
}

/// Sample requests of a sampling session that ended, in the order of their ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Completions {
    /// Those after the cursor of the call.
    pub items: Vec<Completion>,
    /// Cursor for the next call.
    pub cursor: u64,
}
